"""A run that one worker has begun and another one finishes, by the store that both can reach."""

import subprocess
import sys
import sysconfig

import pytest

from flows.runs import uploads
from tasks.ledger import records
from tests.chaos import runs


@pytest.fixture
def worker(bare, tmp_path):
    """Makes a checkout with a virtual environment of its own; it, and what its run is called by.

    The packages are those of this environment, which the other one finds by a line in its own.
    """

    def make(name):
        folder = runs.copy(bare, tmp_path / name / "main")
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True
        )
        packages = folder / ".venv/lib/python3.11/site-packages/theirs.pth"
        packages.write_text(f"{sysconfig.get_path('purelib')}\n")
        return folder, (str(folder / ".venv/bin/python"), "-m", "flows.retrain", "smoke", "--here")

    return make


def test_what_a_killed_worker_has_begun_another_one_finishes(worker, expected, tmp_path):
    first, theirs = worker("first")
    second, ours = worker("second")
    store = {"BEAMLINE_STORE": str(tmp_path / "store")}
    run = runs.start(first, theirs, **store)
    runs.wait_for(run, lambda: runs.ended(first, "0001-rollout"))
    runs.kill(runs.below(run.pid))
    run.wait()
    had = runs.records(first)
    runs.finish(second, ours, **store)
    assert runs.outcome(second) == expected
    now = runs.records(second)
    sent = {place for place in had if (first / place / records.DELIVERED).exists()}
    done_again = {place for place in had if now[place] != had[place]}
    assert sent and not sent & done_again
    assert len(done_again) <= uploads.MOST + 1, "at most what waited, and what was being sent"
    runs.check_sound(second)
