import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.host import files
from flows.runs import worktree
from tasks.ledger import artifacts

PURPOSE = {"recipe": "toy", "overrides": [], "commit": "abc"}


def leave_unfinished(purpose):
    with worktree.held("toy", purpose) as place:
        place.mkdir(exist_ok=True)
    return place


def test_one_at_a_time_leaves_no_lock(tmp_path):
    path, inside, most = tmp_path / "restored/toy", [], []

    def hold():
        with worktree.one_at_a_time(path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.005)
            inside.pop()

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    with pytest.raises(ValueError, match="refused"), worktree.one_at_a_time(path):
        raise ValueError("refused")
    assert not list(path.parent.iterdir())


def test_unfinished_worktree_is_for_its_purpose_alone(project):
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


def test_released_worktree_stays_and_is_not_continued(project):
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


def test_ledger_is_linked_and_collected(project):
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


def test_two_at_once_have_two_worktrees(project):
    with worktree.held("toy", PURPOSE) as first, worktree.held("toy", PURPOSE) as second:
        assert first != second
    assert leave_unfinished(PURPOSE) in (first, second)


HOLD = (
    "import json, sys, time; from flows.runs import worktree\n"
    "with worktree.held('toy', json.loads(sys.argv[1])) as place:\n"
    "    print(place, flush=True); time.sleep(60)"
)


def test_lock_ends_with_its_killed_process(project):
    command = [sys.executable, "-c", HOLD, json.dumps(PURPOSE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        place = Path(process.stdout.readline().strip())
        assert leave_unfinished(PURPOSE) != place, "a living process holds it"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.1)
    with worktree.held("toy", PURPOSE) as one, worktree.held("toy", PURPOSE) as two:
        assert place in (one, two)


def test_record_removed_while_it_was_opened_is_ignored(project, monkeypatch):
    place = leave_unfinished(PURPOSE)
    lock = files.lock

    def finished_meanwhile(record):
        monkeypatch.setattr(files, "lock", lock)
        worktree.finish(place)
        return lock(record)

    monkeypatch.setattr(files, "lock", finished_meanwhile)
    assert leave_unfinished(PURPOSE) != place


def test_half_written_record_is_ignored(project):
    worktree.HOME.mkdir(parents=True)
    (worktree.HOME / "toy-20260101-abcdef.json").write_text('{"recipe": "t')
    assert leave_unfinished(PURPOSE).name != "toy-20260101-abcdef"
