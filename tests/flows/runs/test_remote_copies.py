"""What a remote lacks of the runs that are here: pushed to real folders, by DVC itself."""

import json
import shutil
from pathlib import Path

import pytest

from flows.runs import remote_copies
from tests import toy_project as toy
from tests.flows.runs.conftest import RUN


def stored(remote):
    """The contents of the files in a remote, without DVC's run-cache and lists of folders."""
    files = sorted(Path(remote, "files").rglob("*"))
    return sorted(file.read_text() for file in files if file.is_file() and not file.suffix)


@pytest.fixture
def tracked(ran):
    """A run whose commit tracks a folder of questions with DVC, too."""
    Path("data/sources/set").mkdir(parents=True)
    for name in "ab":
        Path(f"data/sources/set/{name}.jsonl").write_text(name)
    toy.dvc_add(ran, "data/sources/set")
    toy.commit(ran, "with questions")
    return ran


def test_remote_that_is_added_later_gets_each_run_once(tracked, capfd):
    assert remote_copies.missing() is None, "no remote is no fault"
    remote_copies.push_missing("toy")
    toy.set_remote(tracked, "one")
    lacking = remote_copies.missing()
    assert str(lacking) == f"5 files of {RUN} that the remote 'store' lacks"
    assert lacking.runs == (RUN,)
    remote_copies.push_missing("toy")
    assert capfd.readouterr().out == f"pushing {lacking}\n"
    assert stored("one") == ["a", "b", "first\n", "later\n"]
    assert remote_copies.missing() is None

    lost = Path("one/files/md5/0c/c175b9c0f1b6a831c399e269772661")  # in a folder
    lost.unlink()
    remote_copies.push_missing("toy")
    assert lost.exists(), "the files of the newest run are asked for"
    toy.git(tracked, "checkout", "--quiet", "-b", "runs/toy-20261122-b")
    Path("data/sources/set.dvc").unlink()
    assert toy.commit(tracked, "a run without questions")
    capfd.readouterr()
    lost.unlink()
    remote_copies.push_missing("toy")
    assert capfd.readouterr().out == "", "that the older one was pushed is remembered"
    assert not lost.exists()
    remote_copies.push_missing(ask=True)
    assert stored("one") == ["a", "b", "first\n", "later\n"]

    toy.set_remote(tracked, "two")
    remote_copies.push_missing("toy")
    assert stored("two") == stored("one"), "another remote"


def test_push_that_fails_is_made_up_for(tracked, capfd):
    Path("one").write_text("no folder")
    toy.set_remote(tracked, "one")
    with pytest.raises(RuntimeError, match=r"remote 'store' cannot be used .* beamline doctor"):
        remote_copies.push_missing("toy")
    assert not remote_copies.PUSHED.exists()
    Path("one").unlink()
    remote_copies.push_missing("toy")
    assert stored("one") == ["a", "b", "first\n", "later\n"]
    assert json.loads(remote_copies.PUSHED.read_text())


def test_files_that_are_not_here_are_left_out(tracked, capfd):
    shutil.rmtree(".dvc/cache")
    toy.set_remote(tracked, "one")
    assert remote_copies.missing() is None
    remote_copies.push_missing("toy")
    assert "pushing" not in capfd.readouterr().out


UNUSABLE = {
    "ssh://nosuch.invalid/x": "the name of its host is not known",
    "dvc.yaml": "Not a directory",
    "http://127.0.0.1:9/x": "has not taken 4 of 5 files (nothing answers at its host and port)",
}


@pytest.mark.parametrize("address", UNUSABLE)
def test_remote_that_cannot_be_used(tracked, address, capfd):
    toy.set_remote(tracked, address)
    with pytest.raises(RuntimeError, match="the runs are not pushed") as refused:
        remote_copies.push_missing("toy")
    assert UNUSABLE[address] in str(refused.value)
    assert "Error" not in str(refused.value), "names of classes"
    assert "ERROR" not in capfd.readouterr().err
