"""Figures of GPUs and of networks between them, and the shares of these that a run reaches."""

from __future__ import annotations

from dataclasses import dataclass

GIB, MIB = 2**30, 2**20
MEMORY_SHARE = 0.95  # of a card; the rest is for CUDA's context, kernels and fragmentation
# Of the card's operations per second. Published updates on one H100 reach 9 % (1.7B, 1,600 tokens a
# sequence; TRL's pull request 6092) to 22 % (4B, adapters, 16k tokens; prime-rl's benchmarks).
PEAK_SHARE = 0.2
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


def card_here() -> Card | None:
    """Return this machine's first GPU, with the speed of the next smaller card, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    alike = [card for card in CARDS.values() if card.memory <= 1.02 * here.total_memory]
    speed = alike[-1] if alike else CARDS["24"]
    return Card(f"here ({here.name})", here.total_memory, speed.operations, speed.bandwidth)
