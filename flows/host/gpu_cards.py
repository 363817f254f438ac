"""Figures of GPUs and of networks between them, and the shares of these that a run reaches."""

from __future__ import annotations

from dataclasses import dataclass

GIB, MIB = 2**30, 2**20
MEMORY_SHARE = 0.95  # of a card; the rest is for CUDA's context, kernels and fragmentation
# The share of a card's operations that an update of 1e9 weights reaches with contexts of 16,384
# tokens, and the powers of both: least squares in logarithms through the ten points of docs/gpu.md,
# which they miss by factors of 0.64 to 1.68.
PEAK_SHARE, BY_WEIGHTS, BY_CONTEXT = 0.20, 0.136, 0.192
MOST_SHARE = 0.4  # no update of a published run reaches more
BANDWIDTH_SHARE = 0.6  # of the card's bandwidth in decoding; an assumption


@dataclass(frozen=True)
class Card:
    """A GPU: bytes, dense operations per second and bytes per second, as in its data sheet."""

    name: str
    memory: float
    operations: dict[str, float]  # by machine.precision
    bandwidth: float

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory


# Memory as nvidia-smi gives it. The rest from NVIDIA's data sheets (RTX 4090: the Ada whitepaper;
# H100 SXM; H200 SXM), without sparsity.
ADA = {"bfloat16": 165.2e12, "float32": 82.6e12}
HOPPER = {"bfloat16": 989e12, "float32": 67e12}
CARDS = {  # by nominal GB
    "24": Card("24 GB (RTX 4090)", 24564 * MIB, ADA, 1.008e12),
    "80": Card("80 GB (H100)", 81559 * MIB, HOPPER, 3.35e12),
    "141": Card("141 GB (H200)", 143771 * MIB, HOPPER, 4.8e12),
}

# Bytes per second that a process sends and receives at once. NVLink: 900 GB/s both ways of an H100
# (NVIDIA's data sheet); the others at their nominal rate, a port for each card.
NETWORKS = {"nvlink": 450e9, "400": 50e9, "100": 12.5e9, "10": 1.25e9}  # else Gb/s


def peak_share(weights: float, context: int) -> float:
    """Return the share of a card's operations that an update should reach.

    ``weights``: those that a token is multiplied by; ``context``: its tokens, at most.
    """
    share = PEAK_SHARE * (weights / 1e9) ** BY_WEIGHTS * (context / 16384) ** BY_CONTEXT
    return min(MOST_SHARE, share)


def card_here() -> Card | None:
    """Return this machine's first GPU, with the speed of the next smaller card, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    alike = [card for card in CARDS.values() if card.memory <= 1.02 * here.total_memory]
    speed = alike[-1] if alike else CARDS["24"]
    return Card(f"here ({here.name})", here.total_memory, speed.operations, speed.bandwidth)
