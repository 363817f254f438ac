"""Tests that want a GPU. BEAMLINE_GPU_DEVICE=cpu runs them on what there is, without flex's
backward pass, which only a GPU has."""

import os

import pytest
import torch

DEVICE = os.environ.get("BEAMLINE_GPU_DEVICE", "cuda")


@pytest.fixture(scope="session", autouse=True)
def device():
    """Where the tests run; float32 is float32 there, not TF32."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit(
            "no GPU is at hand: these tests need one, or BEAMLINE_GPU_DEVICE=cpu", returncode=1
        )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield DEVICE
    torch.set_float32_matmul_precision(before)
