"""How a process is set up for equal runs."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from params.schema.base import Machine
from tasks.policy.machine import PRECISION, in_precision, use_machine
from tests.sections import MACHINE


@pytest.mark.parametrize(("precision", "kind"), PRECISION.items())
def test_passes_compute_in_the_recipes_precision(policy, precision, kind):
    machine = Machine(threads=1, device="cpu", precision=precision)
    layer = policy.model.layers[0]
    fed = torch.randn(1, 3, policy.config.hidden_size)
    with in_precision(machine):
        assert layer.mlp.up_proj(fed).dtype is kind
        assert layer.input_layernorm(fed).dtype is torch.float32
    assert layer.mlp.up_proj(fed).dtype is torch.float32


@pytest.mark.parametrize(
    ("own", "options"), [({}, {-1, -2, -3, -8}), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, set())]
)
def test_users_own_malloc_settings_win(monkeypatch, own, options):
    """Otherwise freed memory is kept, in one heap: thresholds and top pad are raised."""
    asked = {}

    class Library:
        def __init__(self, name):
            self.mallopt = asked.__setitem__

    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    use_machine(MACHINE)
    assert set(asked) == options
    heaps = asked.pop(-8, 1)
    assert heaps == 1 and all(size >= 2**25 for size in asked.values())


DETERMINISTIC = """
import os, sys, torch
from tasks.policy.machine import use_machine
from tests.sections import MACHINE

use_machine(MACHINE)
print(torch.are_deterministic_algorithms_enabled(), "torch._inductor" in sys.modules)
import torch._inductor.config
print(torch._inductor.config.deterministic)
"""


def test_kernels_are_deterministic_and_so_is_a_compiler_that_comes_later():
    ran = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["True False", "True"]


HOLES = """
import ctypes, resource
from tasks.policy.machine import return_memory, use_machine
from tests.sections import MACHINE

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

use_machine(MACHINE)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
taken = [library.malloc(2**20) for _ in range(200)]
for address in taken:
    ctypes.memset(address, 1, 2**20)
for address in taken[::2]:
    library.free(address)  # holes between what stays
before = resident()
return_memory()
print((before - resident()) >> 20)
"""


def test_free_memory_goes_back_to_the_system_from_holes_too():
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert 80 <= int(ran.stdout) <= 120, "MiB, of a hundred"
