import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flows.host import gpu
from tests import toy_project as toy

HOLD = """
import sys
from flows.host import gpu
with gpu.held("cuda") as found:
    print(found["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two GPUs, as far as nvidia-smi tells, and a folder of its own for locks."""
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\nprintf '0, GPU-a\\n1, GPU-b\\n'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    monkeypatch.setattr(gpu, "AGAIN", 0.05)


def holder():
    """A process that holds a GPU, and the GPU's id."""
    command = [sys.executable, "-c", HOLD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_each_stage_has_its_gpu_and_the_next_one_waits(machine, capsys):
    first, of_first = holder()
    with gpu.held("cuda") as found:
        assert {of_first, found[gpu.VISIBLE]} == {"GPU-a", "GPU-b"}
        third = subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert third.stdout.readline().startswith("waiting: every GPU here has a stage")
        time.sleep(0.2)
        assert third.poll() is None
        first.kill()
        assert third.stdout.readline().strip() == of_first
        assert third.wait(10) == 0
    first.wait()
    with gpu.held("cuda"):
        assert capsys.readouterr().out == "", "a lock of a killed process is none"


@pytest.mark.parametrize(
    ("chosen", "ids"), [("1", ["GPU-b"]), ("GPU-a,MIG-c", ["GPU-a", "MIG-c"]), ("", [])]
)
def test_only_visible_gpus_are_reserved(machine, monkeypatch, chosen, ids):
    monkeypatch.setenv(gpu.VISIBLE, chosen)
    assert gpu.visible() == ids


def test_without_a_gpu_nothing_is_reserved(machine, tmp_path):
    with gpu.held("cpu") as found:
        assert found == {}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with gpu.held("cuda") as found:
        assert found == {}
    assert not list(Path(tmp_path).glob("*.lock"))
