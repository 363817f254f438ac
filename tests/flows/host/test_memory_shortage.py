"""Errors of a lack of memory, most of them made by a limit of this process's addresses."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flows.host import memory_shortage

LIMIT = 2**28 + 2**27  # bytes: enough for Python with numpy, and for nothing large
NEED = "import numpy; import flows.host.memory_shortage as shortage"
HUNGRY = {  # code that needs more than LIMIT -> what its error says
    "bytearray(2**30)": "MemoryError",
    "numpy.ones(2**30)": "Unable to allocate 8.00 GiB",
    "import mmap; mmap.mmap(-1, 2**30)": "Cannot allocate memory",
    "import pyarrow; pyarrow.allocate_buffer(2**31)": "",
    "import torch": "",
    "import threading; [threading.Thread(target=lambda: __import__('time').sleep(9), "
    "daemon=True).start() for _ in range(999)]": "can't start new thread",
}
SHORT = [
    ImportError("libtorch.so: failed to map segment from shared object"),
    ImportError("libx.so.1: cannot allocate memory in static TLS block"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"
    ),
    RuntimeError("std::bad_alloc"),
    RuntimeError("OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 8"),
    ValueError("x.parquet cannot be read as Parquet (malloc of size 4294967296 failed)"),
]
OTHER = [
    ValueError("no room"),
    OSError(errno.ENOSPC, "No space left on device"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ImportError("cannot import name 'a' from 'b'"),
]


@pytest.mark.parametrize("code", HUNGRY)
def test_what_happens_without_memory_is_recognised(code):
    program = f"""
{NEED}
try:
    {code}
except BaseException as error:
    print(shortage.explained(error, "tiny"), flush=True)
    __import__("os")._exit(0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert HUNGRY[code] in ran.stdout
    assert "Memory is short: " in ran.stdout, ran.stdout + ran.stderr
    assert "a process may have 0.4 GiB of addresses (ulimit -v)" in ran.stdout
    assert "make plan RECIPE=tiny" in ran.stdout


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_errors_of_libraries_are_recognised_behind_others(error):
    assert memory_shortage.is_short(error)
    try:
        raise RuntimeError("the stage failed") from error
    except RuntimeError as outer:
        assert memory_shortage.is_short(ExceptionGroup("several", [outer]))


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_other_errors_are_left_alone(error):
    assert memory_shortage.explained(error, "tiny") is None


def test_process_that_cannot_be_started_is_recognised():
    def _fork_exec(*_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with pytest.raises(BlockingIOError) as caught:
        _fork_exec()
    assert memory_shortage.is_short(caught.value)


def test_full_memory_of_a_gpu_has_a_remedy_of_its_own():
    said = memory_shortage.explained(
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "x"
    )
    assert "The GPU's memory is short: make plan RECIPE=x" in said


def test_kill_by_the_kernel_is_told(tmp_path, monkeypatch, capsys):
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 2\n")
    monkeypatch.setattr(memory_shortage, "KILLS", (counter, tmp_path / "missing"))
    before = memory_shortage.kernel_kills()
    memory_shortage.report_kills(before, "tiny")
    assert capsys.readouterr().err == ""
    counter.write_text("oom 1\noom_kill 3\n")
    memory_shortage.report_kills(before, "tiny")
    assert "the kernel has killed a process for lack of memory. Memory" in capsys.readouterr().err


def test_program_whose_imports_fail_says_so_in_its_last_line():
    ran = subprocess.run(
        [sys.executable, "-m", "flows.plan", "tiny"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("Memory is short: "), ran.stderr
