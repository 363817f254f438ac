"""Send weights from this machine's GPU to those of a vLLM server, by NCCL and vLLM's own protocol.

The environment variable BEAMLINE_TRANSFER=nccl chooses it, for servers that were started with
``--transfer nccl``. The weights are those in the policy's folder, which only this machine reads: a
server gets them through the network of the GPUs, and writes none to its disk. Each update opens a
group of its own, so that a server may have restarted.

It is written for the interface of vLLM 0.32 and has **not run yet**, because it takes two GPUs. The
tests hold its messages against vLLM's own checks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

HOST = "BEAMLINE_HOST"  # environment variable: an address of this machine that servers reach
Ask = Callable[[str, dict[str, Any]], Any]  # path of the server and body -> its answer


def send(ask: Ask, workers: int, folder: Path) -> None:
    """Send the weights in ``folder`` to all ``workers`` of a server that is paused."""
    here = os.environ.get(HOST, "127.0.0.1")
    opening = NCCLTrainerInitInfo(here, free_port(here), world_size=1 + workers, rank=0)
    sender = NCCLTrainerWeightTransferEngine.trainer_init(
        opening, client=TransferCalls(ask), source=Weights(folder, "cuda")
    )
    try:
        sender.send_weights()
    finally:
        sender.shutdown()
        ask("/shutdown_weight_transfer_engine", {})


class Weights(WeightSource):
    """The weights in a policy's folder, in the order of its files; one is in memory at a time."""

    def __init__(self, folder: Path, device: str) -> None:
        """Raises FileNotFoundError for a folder without weights."""
        self.files, self.device = sorted(folder.glob("*.safetensors")), device
        if not self.files:
            raise FileNotFoundError(f"{folder} has no *.safetensors: is it the folder of a policy?")

    def metadata(self) -> list[ParamMeta]:
        """Return name, type and shape of each weight."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self._read()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its weight on the device."""
        return ((name, weight.to(self.device)) for name, weight in self._read())

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - it is no dict
                    yield name, weights.get_tensor(name)


class TransferCalls:
    """vLLM's calls for weights, by HTTP with the server's token (VLLMWeightSyncClient)."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.ask("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self.ask("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask("/finish_weight_update", {})  # the guard keeps the version


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
