from pathlib import Path

import pytest

from flows.runs import dvc_command, git, pipeline, transfer
from tests import toy_project as toy


@pytest.fixture
def place(ran):
    """A worktree of a project with a remote and a file that DVC tracks, set up by ``share``."""
    Path("questions").mkdir()
    Path("questions/new.jsonl").write_text('{"id": 1}\n')
    toy.dvc_add(ran, "questions/new.jsonl")
    toy.set_remote(ran, "remote")
    toy.commit(ran)
    folder = ran / ".beamline/runs/one"
    git.add_worktree(folder, git.resolve("HEAD"))
    transfer.share(folder)
    return folder


def test_worktree_shares_cache_remote_and_sources(ran, place):
    transfer.provide_sources(place)
    assert (place / "questions/new.jsonl").read_text() == '{"id": 1}\n'
    assert transfer.default_remote(place) == "store"
    assert pipeline.kept_in_git("toy", place) == [
        "dvc.lock",
        "params/toy.yaml",
        "params/algorithms.yaml",
        "reports/toy/table.md",
    ]
    transfer.push("toy", place)
    pushed = [path.read_text() for path in (ran / "remote/files").rglob("*") if path.is_file()]
    assert sorted(pushed) == ["first\n", "later\n"]

    (place / "questions/new.jsonl").unlink()
    for file in (ran / ".dvc/cache/files").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(RuntimeError, match="dvc pull failed in"):
        transfer.provide_sources(place)
    git.remove_worktree(place)
    assert not place.exists()
    assert toy.git(ran, "worktree", "list").count("\n") == 0


def test_run_cache_is_shared_until_it_is_hidden(ran, place, capfd):
    for name in ("dvc.lock", "first.py"):
        (place / name).unlink()
    toy.write_stage(place, "first", flows=False, before="'another source'")
    toy.repro(place, "first@toy")
    assert "first has run" in capfd.readouterr().out
    (ran / "first.py").write_text((place / "first.py").read_text())
    toy.repro(ran, "first@toy")
    assert "first has run" not in capfd.readouterr().out, "the checkout's DVC remembers it too"

    transfer.forget_runs(place)
    assert transfer.default_remote(place) is None
    (place / "dvc.lock").unlink()
    toy.repro(place, "first@toy")
    assert "first has run" in capfd.readouterr().out
    (place / "data/toy/first").unlink()
    assert dvc_command.dvc_quietly(place, "checkout", "first@toy") == 0
    assert (place / "data/toy/first").read_text() == "first\n"
