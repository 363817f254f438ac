"""Tokens per second of the update's forward and backward pass on a GPU, as trees and as rows.

    python -m benchmarks.update_on_gpu                     # Qwen2.5-0.5B and 1.5B, random weights
    python -m benchmarks.update_on_gpu --device cpu --tiny --file X.json   # does it run at all?

Trees are synthetic: 16 leaves share a prompt, and half of them branch off the others after a tool
result. ``trees`` computes each token once; ``rows`` computes each leaf on its own, packed end to
end in the same kernels. Weights and activations are bf16, the loss float32. The share of the chip
is the operations of the packing's own tokens (logits that are computed again for the backward pass
count once) over the chip's rate for a large bf16 matrix product, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from params.schema import Machine, load_rows
from tasks import learner
from tasks.algorithm import assemble
from tasks.attention import PAIRS, attending, form_for
from tasks.checkpoint import Learner
from tasks.losses import Loss
from tasks.packing import Cost, Credit, Credited, Forest, forests, lay_out
from tasks.policy import use_machine
from tasks.trajectory import PROMPT, RESULT, TURN, Node, Question, Tree

FILE = Path(__file__).with_name("update_on_gpu.json")
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Architecture:
    """Sizes of a Qwen2 policy with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int


@dataclass(frozen=True)
class Shape:
    """Of a synthetic tree, in tokens: turns of ``turn``, each but the last followed by a result."""

    prompt: int
    turns: int
    turn: int
    result: int
    leaves: int = 16


ARCHITECTURES = {
    "Qwen2.5-0.5B": Architecture(896, 24, 14, 2, 4864, 151_936),
    "Qwen2.5-1.5B": Architecture(1536, 28, 12, 2, 8960, 151_936),
}
SHAPE = Shape(prompt=512, turns=4, turn=200, result=80)
TINY_ARCHITECTURES = {"tiny": Architecture(32, 2, 2, 1, 64, 512)}
TINY_SHAPE = Shape(prompt=16, turns=3, turn=6, result=3)

TOKENS = (32_768, 16_384, 8_192)  # slots of a forward pass: the first that fits into memory
TREES = 4  # a batch
WARM_UP, REPETITIONS = 2, 5
MATRIX = 8192  # rows and columns of the product that measures the chip
PACKINGS = ("trees", "rows")


# ---------------------------------------------------------------- what is trained


def policy(architecture: Architecture, device: str) -> Any:
    """A policy with random weights in bf16."""
    config = Qwen2Config(
        vocab_size=architecture.vocabulary,
        hidden_size=architecture.hidden,
        intermediate_size=architecture.feed_forward,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.key_value_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    return model.to(BF16).train()


def synthetic_tree(seed: int, shape: Shape, vocabulary: int) -> Credited:
    """Half of the leaves start at the prompt; each other one leaves one of them after a result."""
    random = np.random.default_rng(seed)
    tree = Tree(Question(f"q{seed}", "kind", "text", ("1",)))

    def add(parent: int, kind: str, longest: int) -> int:
        length = longest if kind == PROMPT else int(random.integers(longest // 2, 3 * longest // 2))
        tokens = random.integers(0, vocabulary, length).astype(np.int32)
        known = np.zeros(length if kind == TURN else 0, np.float32)
        tree.nodes.append(Node(parent, kind, "", "", tokens, known, known))
        return len(tree.nodes) - 1

    def grow(at: int, turns: int) -> list[int]:
        """Go on from ``at`` to a leaf; the results on the way."""
        results = []
        for _ in range(turns - 1):
            at = add(add(at, TURN, shape.turn), RESULT, shape.result)
            results.append(at)
        tree.leaves.append(add(at, TURN, shape.turn))
        return results

    root = add(-1, PROMPT, shape.prompt)
    trunks = [grow(root, shape.turns) for _ in range(shape.leaves // 2)]
    for number in range(shape.leaves - len(trunks)):
        results = trunks[number % len(trunks)]
        place = int(random.integers(len(results)))
        grow(results[place], shape.turns - 1 - place)
    return _credited(tree, random)


def _credited(tree: Tree, random: np.random.Generator) -> Credited:
    paths = [[tree.nodes[node] for node in tree.path(leaf)] for leaf in tree.leaves]
    lengths = [sum(len(node.tokens) for node in path if node.kind == TURN) for path in paths]
    advantages = random.standard_normal(len(lengths)).astype(np.float32)
    return Credited(
        tree,
        [
            Credit(np.full(length, value, np.float32), np.zeros(length, np.int64))
            for length, value in zip(lengths, advantages, strict=True)
        ],
    )


def micro_batches(
    trees: Sequence[Credited], packing: str, tokens: int, cost: Cost, device: str
) -> list[Forest]:
    """The forests of one update: of whole trees, or of leaves each on their own."""
    if packing == "rows":
        batch = [(tree, [leaf]) for tree in trees for leaf in range(len(tree.credits))]
    else:
        batch = [(tree, list(range(len(tree.credits)))) for tree in trees]
    return list(forests(batch, tokens, cost, device))


# ---------------------------------------------------------------- what it costs


def operations(architecture: Architecture, batch: Sequence[Forest]) -> float:
    """Multiplications and additions of forward and backward that the packing asks for.

    A token goes through the matrices of every layer, a sampled one through the head, a query meets
    the keys of its own path up to itself. The backward pass is twice the forward pass.
    """
    size = architecture
    head_size = size.hidden // size.heads
    matrices = size.hidden * (
        2 * size.hidden + 2 * size.key_value_heads * head_size + 3 * size.feed_forward
    )
    slots = sum(made.tokens.shape[1] for made in batch)
    sampled = sum(len(made.targets) for made in batch)
    pairs = sum(int((made.positions + 1).sum()) for made in batch)
    forward = (
        2 * slots * size.layers * matrices
        + 2 * sampled * size.hidden * size.vocabulary
        + 4 * pairs * size.hidden * size.layers
    )
    return 3.0 * forward


def matrix_rate(device: str, size: int, repetitions: int = 20) -> float:
    """Operations per second of a bf16 matrix product, the fastest of several."""
    one, other = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    seconds = [timed(lambda: one @ other, device) for _ in range(repetitions)]
    return 2 * size**3 / min(seconds)


def timed(work: Callable[[], Any], device: str) -> float:
    """Seconds until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- measuring


def forward_backward(
    learning: Learner, batch: Sequence[Forest], loss: Loss, machine: Machine
) -> None:
    """All gradients of one optimizer step, as ``learner.update`` computes them."""
    learning.model.zero_grad(set_to_none=True)
    views = sum(int(made.mask.sum()) for made in batch)
    for made in batch:
        value, _ = learner._objective(learning, made, loss, 1.0, views, views, machine)
        value.backward()


def measure(
    name: str,
    architecture: Architecture,
    packing: str,
    trees: Sequence[Credited],
    tokens: int,
    device: str,
    rate: float,
) -> dict[str, Any]:
    """One line of the table."""
    learning = Learner(Path(name), policy(architecture, device), None)
    loss = assemble(load_rows()["grpo"], 1).loss
    machine = Machine.model_validate({"threads": 1, "device": device, "precision": "bfloat16"})
    form = form_for(device)
    cost = learner._cost(learning.model, form)
    batch = micro_batches(trees, packing, tokens, cost, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with attending(learning.model, form):
        seconds = [
            timed(lambda: forward_backward(learning, batch, loss, machine), device)
            for _ in range(WARM_UP + REPETITIONS)
        ][WARM_UP:]
    second, counted = median(seconds), sizes(trees)
    performed = operations(architecture, batch)
    return {
        "architecture": name,
        "packing": packing,
        "micro_batch_tokens": tokens,
        "micro_batches": len(batch),
        **counted,
        "computed_tokens": sum(made.tokens.shape[1] for made in batch),
        "seconds": second,
        "seconds_all": seconds,
        "unique_tokens_per_second": counted["unique_tokens"] / second,
        "leaf_tokens_per_second": counted["leaf_tokens"] / second,
        "operations": performed,
        "share_of_matrix_rate": performed / second / rate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "attention_pairs": sum(PAIRS[form](part) for made in batch for part in made.layouts),
    }


def sizes(trees: Sequence[Credited]) -> dict[str, int]:
    """Tokens of the trees, each once, and as often as leaves have them."""
    whole = [lay_out(tree, range(len(tree.credits))) for tree in trees]
    return {
        "unique_tokens": sum(len(layout.tokens) for layout in whole),
        "leaf_tokens": sum(len(path) for layout in whole for path in layout.paths),
        "leaves": sum(len(layout.leaves) for layout in whole),
    }


def measure_what_fits(*where: Any, tokens: Sequence[int], device: str, rate: float) -> Any:
    """``measure`` with the largest micro-batches for which the memory suffices."""
    measuring: Any = measure
    for number, most in enumerate(tokens):
        try:
            return measuring(*where, most, device, rate)
        except torch.OutOfMemoryError:
            if number == len(tokens) - 1:
                raise
        torch.cuda.empty_cache()  # outside the handler, which holds the failed pass's tensors
    raise ValueError("no size of a micro-batch was given")


def run(
    architectures: dict[str, Architecture],
    shape: Shape,
    tokens: Sequence[int],
    matrix: int,
    device: str,
) -> dict[str, Any]:
    """All measurements."""
    machine = {"threads": torch.get_num_threads(), "device": device, "precision": "float32"}
    use_machine(Machine.model_validate(machine))
    rate = matrix_rate(device, matrix)
    rows = []
    for name, architecture in architectures.items():
        trees = [synthetic_tree(seed, shape, architecture.vocabulary) for seed in range(TREES)]
        for packing in PACKINGS:
            place = (name, architecture, packing, trees)
            rows.append(measure_what_fits(*place, tokens=tokens, device=device, rate=rate))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bf16_matrix_operations_per_second": rate,
        "architectures": {name: asdict(one) for name, one in architectures.items()},
        "tree": asdict(shape),
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    """The rows in Markdown."""
    lines = [
        f"{found['device']}: {found['bf16_matrix_operations_per_second'] / 1e12:.1f} T bf16 "
        "operations per second in a matrix product",
        "",
        "| architecture | packing | computed tokens | unique tokens / s | leaf tokens / s "
        "| share of matrix rate (%) | peak (GiB) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        lines.append(
            f"| {row['architecture']} | {row['packing']} | {row['computed_tokens']:,} "
            f"| {row['unique_tokens_per_second']:,.0f} | {row['leaf_tokens_per_second']:,.0f} "
            f"| {100 * row['share_of_matrix_rate']:.1f} | {peak} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a policy and trees for a smoke test")
    parser.add_argument("--file", type=Path, default=FILE, help="where the figures are written")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is at hand; --device cpu --tiny shows whether this runs at all")
    if arguments.tiny:
        found = run(TINY_ARCHITECTURES, TINY_SHAPE, (1024,), 256, arguments.device)
    else:
        found = run(ARCHITECTURES, SHAPE, TOKENS, MATRIX, arguments.device)
    temporary = arguments.file.with_name(f".{arguments.file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(found, indent=2) + "\n")
    temporary.replace(arguments.file)
    print(table(found))


if __name__ == "__main__":
    main()
