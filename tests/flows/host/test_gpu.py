import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.host import gpu
from tests import toy_project as toy
from tests.sections import MACHINE

CUDA = MACHINE.model_copy(update={"device": "cuda"})

HOLD = """
import sys
from flows.host import gpu
from params.schema.base import Machine
machine = Machine(threads=1, device="cuda", precision="float32")
with gpu.held("evaluate@toy", machine) as found:
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
    with gpu.held("reinforce@toy", CUDA) as found:
        assert {of_first, found[gpu.VISIBLE]} == {"GPU-a", "GPU-b"}
        third = subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert third.stdout.readline().startswith("waiting: ")
        time.sleep(0.2)
        assert third.poll() is None
        first.kill()
        assert third.stdout.readline().strip() == of_first
        assert third.wait(10) == 0
    first.wait()
    with gpu.held("reinforce@toy", CUDA):
        assert capsys.readouterr().out == "", "a lock of a killed process is none"


@pytest.mark.parametrize(
    ("chosen", "ids"), [("1", ["GPU-b"]), ("GPU-a,MIG-c", ["GPU-a", "MIG-c"]), ("", [])]
)
def test_only_visible_gpus_are_reserved(machine, monkeypatch, chosen, ids):
    monkeypatch.setenv(gpu.VISIBLE, chosen)
    assert gpu.visible() == ids


def test_without_a_gpu_nothing_is_reserved(machine, tmp_path):
    with gpu.held("reinforce@toy", MACHINE) as found:
        assert found == {}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    with gpu.held("reinforce@toy", CUDA) as found:
        assert found == {}
    assert not list(Path(tmp_path).glob("*.lock"))


def test_a_stage_that_learns_waits_for_a_gpu_a_process(machine):
    several = CUDA.model_copy(update={"processes": 2})

    def learning():
        with gpu.held("reinforce@toy", several) as taken:
            return taken[gpu.VISIBLE]

    with ThreadPoolExecutor(1) as pool:
        with gpu.held("evaluate@toy", several) as found:
            assert found == {gpu.VISIBLE: "GPU-a"}
            waiting = pool.submit(learning)
            time.sleep(0.2)
            assert not waiting.done()
        assert waiting.result(10) == "GPU-a,GPU-b"


def test_more_processes_than_gpus_are_refused(machine, monkeypatch):
    several = CUDA.model_copy(update={"processes": 3})
    refused = pytest.raises(ValueError, match=r"'machine\.processes' = 3, .* 2 GPUs")
    with refused, gpu.held("cold_start@toy", several):
        pass
    monkeypatch.setenv("BEAMLINE_LAUNCH", "srun torchrun")
    with gpu.held("cold_start@toy", several) as found:
        assert found == {gpu.VISIBLE: "GPU-a,GPU-b"}
