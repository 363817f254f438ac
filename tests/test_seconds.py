"""The plugin that says what the tests took: with workers and without, of children, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys
BURN = "import time\\nwhile time.process_time() < 0.7: pass"

def test_itself():
    exec(BURN, {})

def test_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_quick():
    pass
"""


def run(folder, *options):
    (folder / "test_burning.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.seconds", "-p", "xdist.plugin"]
    given = ["--seconds", str(folder / "seconds.json"), "--rootdir", str(folder), str(folder)]
    ran = subprocess.run(
        [*command, *given, "-c", os.devnull, "-p", "no:cacheprovider", *options],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_what_workers_and_their_children_took_is_recorded(tmp_path):
    said = run(tmp_path, "-n", "2", "--record-seconds")
    took = json.loads((tmp_path / "seconds.json").read_text())
    assert took["tests"] == 3
    assert took["processor"] >= 2, "two workers, or a worker and its child, with 0.7 s and more"
    assert "recorded" not in said


def test_growth_since_it_was_recorded_is_shown(tmp_path):
    recorded = {"tests": 3, "processor": 1, "wall": 1}
    (tmp_path / "seconds.json").write_text(json.dumps(recorded))
    said = run(tmp_path)
    took, before = said.splitlines()[-3:-1] if "passed" in said.splitlines()[-1] else ["", ""]
    assert took.startswith("took      3 tests, ")
    assert before.startswith("recorded  3 tests, 1 s of processors, 1 s by the clock; now +")
    assert json.loads((tmp_path / "seconds.json").read_text()) == recorded
