import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.runs import dvc_command, git, pipeline, transfer, worktree
from tasks.ledger import artifacts
from tests import toy_project as toy

PURPOSE = {"recipe": "toy", "overrides": [], "commit": "abc"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A toy project with one commit, as the working folder."""
    folder = tmp_path.resolve()
    toy.create(folder, flows=False)
    toy.commit(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    monkeypatch.delenv(dvc_command.PARENT, raising=False)
    return folder


def leave_unfinished(purpose):
    with worktree.held("toy", purpose) as place:
        place.mkdir(exist_ok=True)
    return place


def test_an_unfinished_place_is_taken_up_by_the_same_purpose_alone(project):
    place = leave_unfinished(PURPOSE)
    assert place.parent == project / ".beamline/runs"
    other = leave_unfinished({**PURPOSE, "overrides": ["seed=4"]})
    assert other != place
    assert leave_unfinished(PURPOSE) == place
    with worktree.held("toy", PURPOSE) as held:
        worktree.finish(held)
    assert not place.exists()
    assert not place.with_suffix(".json").exists()
    assert leave_unfinished(PURPOSE) != place


def test_a_place_whose_purpose_is_let_go_stays_and_is_not_taken_up(project):
    with worktree.held("qwen2.5", PURPOSE) as place:
        place.mkdir()
        worktree.release(place)
    assert place.exists()
    assert leave_unfinished(PURPOSE) != place


def sub_step(root, name, text):
    folder = root / artifacts.ROOT / "toy" / name
    folder.mkdir(parents=True)
    (folder / artifacts.RECORD).write_text(text)
    return folder


def test_a_worktree_has_what_the_ledger_has_and_gives_back_what_it_adds(project):
    old = sub_step(project, "reinforce/0000-rollout-a", "old")
    sub_step(project, "reinforce/.0001-rollout-b.partial", "half")
    place = leave_unfinished(PURPOSE)
    worktree.link_ledger("toy", place)
    lent = place / artifacts.ROOT / "toy/reinforce"
    assert [path.name for path in lent.iterdir()] == ["0000-rollout-a"]
    assert (lent / old.name / artifacts.RECORD).samefile(old / artifacts.RECORD), "it takes no room"
    (lent / old.name / artifacts.RECORD).unlink()  # as where a run drops what it need not keep
    (lent / old.name / artifacts.RECORD).write_text("other")
    sub_step(place, "evaluate/trained/0000-rollout-c", "new")
    sub_step(place, "reinforce/.0002-update-d.scratch/1-half", "half")
    worktree.collect_ledger("toy", place)
    assert (old / artifacts.RECORD).read_text() == "old"
    kept = sorted(path.parent.name for path in artifacts.ROOT.rglob(artifacts.RECORD))
    assert kept == [".0001-rollout-b.partial", "0000-rollout-a", "0000-rollout-c"]


def test_two_at_once_have_places_of_their_own(project):
    with worktree.held("toy", PURPOSE) as first, worktree.held("toy", PURPOSE) as second:
        assert first != second
    assert leave_unfinished(PURPOSE) in (first, second)


HOLD = (
    "import json, sys, time; from flows.runs import worktree\n"
    "with worktree.held('toy', json.loads(sys.argv[1])) as place:\n"
    "    print(place, flush=True); time.sleep(60)"
)


def test_a_lock_dies_with_its_process(project):
    command = [sys.executable, "-c", HOLD, json.dumps(PURPOSE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        place = Path(process.stdout.readline().strip())
        assert leave_unfinished(PURPOSE) != place, "a living process holds it"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.1)
    with worktree.held("toy", PURPOSE) as one, worktree.held("toy", PURPOSE) as two:
        assert place in (one, two)


def test_a_record_that_was_removed_while_it_was_opened_is_nobodys(project):
    place = leave_unfinished(PURPOSE)
    with place.with_suffix(".json").open() as record:
        with worktree.held("toy", PURPOSE) as held:
            assert held == place
            assert not worktree._lock(record), "it is held"
            worktree.finish(held)
        assert not worktree._lock(record), "it is gone"


def test_a_record_that_was_half_written_is_nobodys(project):
    worktree.HOME.mkdir(parents=True)
    (worktree.HOME / "toy-20260101-abcdef.json").write_text('{"recipe": "t')
    assert leave_unfinished(PURPOSE).name != "toy-20260101-abcdef"


def test_a_worktree_shares_the_cache_the_remote_and_what_dvc_files_track(project, tmp_path):
    """Paths of the remote are relative in the checkout's settings, and hold in the worktree's."""
    Path("data/sources").mkdir(parents=True)
    Path("data/sources/new.jsonl").write_text('{"id": 1}\n')
    toy.run(project, "dvc", "add", "data/sources/new.jsonl")
    toy.run(project, "dvc", "remote", "add", "--default", "store", "remote")
    toy.commit(project)
    place = project / ".beamline/runs/one"
    git.add_worktree(place, git.resolve("HEAD"))
    transfer.share(place)
    transfer.provide_sources(place)
    assert (place / "data/sources/new.jsonl").read_text() == '{"id": 1}\n'
    assert transfer.default_remote(place) == "store"
    for stage in pipeline.stages("toy", place):
        toy.run(place, "dvc", "repro", "-s", stage.name)
    assert pipeline.kept_in_git("toy", place) == [
        "dvc.lock",
        "params/toy.yaml",
        "reports/toy/table.md",
    ]
    transfer.push("toy", place)
    pushed = [path.read_text() for path in (project / "remote/files").rglob("*") if path.is_file()]
    assert sorted(pushed) == ["first\n", "later\n"]
    by_dvc = toy.run(project, "dvc", "repro", "later@toy")
    assert "has run" not in by_dvc.stdout, "the checkout's DVC remembers it too"

    (place / "data/sources/new.jsonl").unlink()
    for file in (project / ".dvc/cache/files").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(RuntimeError, match="dvc pull failed in"):
        transfer.provide_sources(place)
    git.remove_worktree(place)
    assert not place.exists()
    assert toy.git(project, "worktree", "list").count("\n") == 0


def test_a_worktree_that_forgets_runs_runs_anew_and_still_reaches_the_cache(project):
    toy.run(project, "dvc", "remote", "add", "--default", "store", "remote")
    toy.commit(project)
    toy.run(project, "dvc", "repro", "later@toy")
    place = project / ".beamline/runs/one"
    git.add_worktree(place, "HEAD")
    transfer.share(place)
    assert transfer.default_remote(place) == "store"
    transfer.forget_runs(place)
    assert transfer.default_remote(place) is None
    assert "first has run" in toy.run(place, "dvc", "repro", "first@toy").stdout
    (place / "data/toy/first").unlink()
    assert toy.run(place, "dvc", "checkout", "first@toy").returncode == 0
    assert (place / "data/toy/first").read_text() == "first\n"


def test_commits_are_found_also_where_only_a_remote_has_the_branch(project, tmp_path):
    toy.run(project, "git", "branch", "runs/toy-1")
    clone = tmp_path / "clone"
    toy.run(project, "git", "clone", "--quiet", str(project), str(clone))
    os.chdir(clone)
    assert git.resolve("runs/toy-1") == toy.git(project, "rev-parse", "HEAD")
    with pytest.raises(ValueError, match="'runs/toy-2' names no commit here"):
        git.resolve("runs/toy-2")
