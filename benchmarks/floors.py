"""The floor of a step: the operations that cannot be left out, at the machine's best rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import BEAMLINE, BRANCHING, TRL
from tasks.learning.packing import lay_out, uncredited
from tasks.policy.machine import PRECISION
from tasks.policy.products import has_onednn, times_transposed
from tasks.trees.tree import Tree

MATRICES = (512, 768, 1024)  # sizes of the multiplications that measure the machine


def matrix_rate(precision: str = "float32") -> float:
    """Measure the floating-point operations a second of the fastest matrix product here."""
    best, kind = 0.0, PRECISION[precision]
    kinds: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    kinds += [times_transposed] if has_onednn() else []
    for size, product in itertools.product(MATRICES, kinds):
        left, right = (torch.randn(size, size, dtype=kind) for _ in range(2))
        for _ in range(12):
            began = time.perf_counter()
            product(left, right)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def forward_operations(config: Any, tokens: int, pairs: int, predicted: int) -> float:
    """Count operations of a forward pass: each token in the layers, each (query, visible
    key) pair in attention, each predicted token in the head; a multiplication and its addition are
    two. Norms, rotations and softmaxes are left out."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = hidden // heads
    attention = 2 * hidden * size * (heads + config.num_key_value_heads)
    layer = 2 * (attention + 3 * hidden * config.intermediate_size)
    head = 2 * hidden * config.vocab_size
    return float(
        config.num_hidden_layers * (tokens * layer + pairs * 4 * heads * size) + predicted * head
    )


def needed_operations(
    config: Any, trees: Sequence[Tree], rewards: Sequence[float]
) -> dict[str, float]:
    """Count operations without which the trees cannot be sampled (each token once), nor the policy
    updated on them (the same of the leaves with a gradient, times three for the backward pass)."""
    rest = iter(rewards)
    with_spread = [tree for tree in trees if len({next(rest) for _ in tree.leaves}) > 1]
    return {
        "floor_sampling_operations": forward_operations(config, *counts(trees)),
        "floor_update_operations": 3 * forward_operations(config, *counts(with_spread)),
    }


def counts(trees: Sequence[Tree]) -> tuple[int, int, int]:
    """Count the different prefixes of a batch's contexts, their (query, visible key) pairs, and the
    prefixes that end with a sampled token. A context begins anew at a fresh prompt."""
    if not trees:
        return 0, 0, 0
    batch = [(uncredited(tree), range(len(tree.leaves))) for tree in trees]
    layout = lay_out(batch)
    return len(layout.tokens), int((layout.positions + 1).sum()), int(layout.sampled.sum())


def add_floors(entry: dict[str, Any], rate: float) -> None:
    """Return seconds at the machine's matrix rate, and the share of it that a side reaches.

    TRL's floor is Beamline's without branching: the same task.
    """
    for name in (BEAMLINE, BRANCHING):
        if name in entry:
            side = entry[name]
            floors = {
                part: side.pop(f"floor_{part}_operations")["median"] / rate
                for part in ("sampling", "update")
            }
            side["floor"] = {**floors, "step": sum(floors.values())}
    entry[TRL]["floor"] = entry[BEAMLINE]["floor"]
    for name in (TRL, BEAMLINE, BRANCHING):
        if name in entry:
            side = entry[name]
            side["share_of_floor"] = {
                part: seconds / side[part]["median"] for part, seconds in side["floor"].items()
            }
