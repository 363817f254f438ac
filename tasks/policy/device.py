"""Check that torch can compute on the device that a recipe names.

``python -m tasks.policy.device DEVICE`` computes there and prints, as JSON, what is wrong and how
many devices there are. Programs that would not otherwise import torch call it so.
"""

from __future__ import annotations

import json
import os
import sys

import torch

CPU = "or set machine.device: cpu"


def check_device(device: str) -> None:
    """Raise ValueError, with the remedy, where torch cannot compute on a device."""
    if fault := device_fault(device):
        raise ValueError(f"'machine.device' = {device!r}: {fault}")


def device_fault(device: str) -> str | None:
    """Return why torch cannot compute on a device, with the remedy, or None.

    Nothing is computed, so no memory of the device is taken.
    """
    if device != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} of this environment is built without CUDA: install a "
            f"build of torch that has it, {CPU}"
        )
    return f"torch {torch.__version__} can use no GPU here ({_reason()}): {_remedy()}, {CPU}"


def _remedy() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "install the driver of the GPU (nvidia-smi lists it then), run on a machine with one"
    return f"correct the environment variable CUDA_VISIBLE_DEVICES, which is {visible!r}"


def _reason() -> str:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())
    return f"{torch.cuda.device_count()} devices"


def computing_fault(device: str) -> str | None:
    """Add two numbers on a device; return why that failed, with the remedy, or None."""
    if fault := device_fault(device):
        return fault
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:  # a GPU that this build has no code for, or that is full
        reason = " ".join(str(error).split())
        return (
            f"torch {torch.__version__} finds a GPU and cannot compute there ({reason}): free its "
            f"memory if that is full, install a build of torch that supports the GPU, {CPU}"
        )
    return None


if __name__ == "__main__":
    result = {"fault": computing_fault(sys.argv[1]), "devices": torch.cuda.device_count()}
    print(json.dumps(result))
