"""Measure an update and a decoding step on a GPU, as shares of the chip's own speed.

    python -m benchmarks.update_on_gpu                     # Qwen2.5-0.5B to 3B, random weights
    python -m benchmarks.update_on_gpu --only Qwen2.5-0.5B  # one of them: a third of the minutes
    python -m benchmarks.update_on_gpu --leaves 8 --prompt 4096 --updates  # no sampling
    python -m benchmarks.update_on_gpu --only Qwen3.5-like --packings trees own --repetitions 3
    python -m benchmarks.update_on_gpu --device cpu --tiny --file X.json   # a trial without a GPU

The update: tokens per second of its forward and backward pass. Trees are synthetic: 16 leaves
(``--leaves``) share a prompt, and half of them branch off the others after a tool result. ``trees``
computes each token once; ``rows`` computes each leaf on its own, packed end to end in the same
kernels; ``own`` is the policy's own pass over padded rows, for families other than Qwen2, and alone
for one that learns as rows. Passes are in bf16; weights, loss and the optimizer's state, which
counts in the peak, in float32. ``recompute`` is the recipe's: activations are computed again for
the backward pass. The share of the chip is the operations of the packing's own tokens (those that
are computed again count once, those inside a recurrent state do not) over the chip's rate for a
large bf16 matrix product, measured in the same run.

Sampling, of Qwen2 alone: decoding steps of the transformers engine with weights in bf16. A step
reads every weight and the keys and values of all rows once; the floor is that many bytes at the
rate at which the chip copies memory, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import gradients, learner, passes
from tasks.learning.algorithm import assemble
from tasks.learning.attention import PAIRS, ROWS, TOKENS, attending, form_of
from tasks.learning.losses import Loss
from tasks.learning.packing import (
    TREES_APART,
    Cost,
    Credit,
    Credited,
    Forest,
    forest,
    forests,
    lay_out,
)
from tasks.policy import checkpoint, layer_kinds, resident
from tasks.policy.lean_transformers import transformers
from tasks.policy.machine import use_machine
from tasks.policy.resident import Learner
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

FILE = Path(__file__).with_name("update_on_gpu.json")
BF16 = torch.bfloat16
QWEN2 = "qwen2"


@dataclass(frozen=True)
class Architecture:
    """Sizes of a policy with tied embeddings, and what else its family's config says."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    family: str = QWEN2
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """Sizes of a synthetic tree in tokens; a result follows each turn but the last."""

    prompt: int
    turns: int
    turn: int
    result: int
    leaves: int = 16


@dataclass(frozen=True)
class Turn:
    """Sizes of sampling in tokens: each row's prompt, and the sampled ones."""

    prompt: int
    sampled: int


@dataclass(frozen=True)
class Plan:
    """The measurements and their sizes."""

    architectures: dict[str, Architecture]
    shape: Shape
    tokens: Sequence[int]  # slots of a forward pass; the first that fits is taken
    matrix: int  # rows and columns of the product that measures the chip
    copied: int  # bytes of the copy that measures its memory
    turn: Turn
    rows: Sequence[int]  # sampled at once


PLAN = Plan(
    architectures={
        "Qwen2.5-0.5B": Architecture(896, 24, 14, 2, 4864, 151_936),
        "Qwen2.5-1.5B": Architecture(1536, 28, 12, 2, 8960, 151_936),
        "Qwen2.5-3B": Architecture(2048, 36, 16, 2, 11_008, 151_936),
        # Half a billion weights each, in the proportions of the family's published policies.
        "Qwen3.5-like": Architecture(
            *(1024, 16, 8, 2, 3584, 151_936),
            family="qwen3_5_text",
            more={"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        ),
        "gpt-oss-like": Architecture(
            *(768, 12, 12, 2, 768, 151_936),
            family="gpt_oss",
            more={"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
        ),
        "DeepSeek-like": Architecture(
            *(768, 16, 12, 12, 2048, 151_936),
            family="deepseek_v3",
            more={"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
        ),
    },
    shape=Shape(prompt=512, turns=4, turn=200, result=80),
    tokens=(32_768, 16_384, 8_192),
    matrix=8192,
    copied=2**32,
    turn=Turn(prompt=512, sampled=128),
    rows=(16, 128),
)
TINY = Plan(
    architectures={
        "tiny": Architecture(32, 2, 2, 1, 64, 512),
        "tiny-Qwen3.5": Architecture(
            *(32, 4, 2, 1, 64, 512),
            family="qwen3_5_text",
            more={
                **{"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
                **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            },
        ),
        "tiny-gpt-oss": Architecture(
            *(32, 2, 2, 1, 64, 512),
            family="gpt_oss",
            more={
                **{"head_dim": 16, "sliding_window": 16},
                **{"num_local_experts": 4, "num_experts_per_tok": 2},
            },
        ),
        "tiny-DeepSeek": Architecture(
            *(32, 2, 2, 2, 64, 512),
            family="deepseek_v3",
            more={
                **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8},
                **{"qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1},
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                **{"n_group": 1, "topk_group": 1},
            },
        ),
    },
    shape=Shape(prompt=16, turns=3, turn=6, result=3),
    tokens=(1024,),
    matrix=256,
    copied=2**20,
    turn=Turn(prompt=8, sampled=4),
    rows=(2,),
)
SETTINGS = Update(
    learning_rate=1e-6,
    warmup_updates=0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.95),
    gradient_clip=1.0,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=1,  # not used: trees are packed here
    critic_learning_rate=1e-6,
    recompute=False,
)

TREES = 4  # a batch
WARM_UP, REPETITIONS = 2, 5
PACKINGS = ("trees", "rows")
OWN = "own"  # no packing of ours
VARIANTS = (("trees", False), ("rows", False), ("trees", True))  # packing, recompute


# ---------------------------------------------------------------- what is trained


def policy(architecture: Architecture, device: str) -> Any:
    """Return a policy with random weights in float32."""
    config = transformers.AutoConfig.for_model(
        architecture.family,
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
        **architecture.more,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def synthetic_tree(seed: int, shape: Shape, vocabulary: int) -> Credited:
    """Return a tree; half of its leaves start at the prompt, the others branch after a result."""
    random = np.random.default_rng(seed)
    tree = Tree(Question(f"q{seed}", "kind", "text", ("1",)))

    def add(parent: int, kind: str, longest: int) -> int:
        length = longest if kind == PROMPT else int(random.integers(longest // 2, 3 * longest // 2))
        tokens = random.integers(0, vocabulary, length).astype(np.int32)
        known = np.zeros(length if kind == TURN else 0, np.float32)
        tree.nodes.append(Node(parent, kind, "", "", tokens, known, known))
        return len(tree.nodes) - 1

    def grow(at: int, turns: int) -> list[int]:
        """Add the nodes from ``at`` to a leaf; return the results on the way."""
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
        index = int(random.integers(len(results)))
        grow(results[index], shape.turns - 1 - index)
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
    """Return the forests of one update: of whole trees, or of leaves that share no token."""
    batch = [(tree, list(range(len(tree.credits)))) for tree in trees]
    if packing != "rows":
        return list(forests(batch, tokens, cost, device))
    parts: list[list[tuple[Credited, list[int]]]] = []
    room = 0
    for leaf in ((tree, [leaf]) for tree, leaves in batch for leaf in leaves):
        size = len(lay_out([leaf]).tokens)
        if not parts or size > room:
            parts.append([])
            room = tokens
        parts[-1].append(leaf)
        room -= size
    return [forest(lay_out(part, TREES_APART), device) for part in parts]


# ---------------------------------------------------------------- what it costs


def operations(model: Any, batch: Sequence[Forest]) -> float:
    """Count the multiplications and additions of forward and backward pass for a packing.

    A token goes through the matrices of every layer, of experts those that it chooses; a sampled
    one goes through the head; in a layer with attention a query meets the keys of its own path up
    to itself, in one with a window the last of them. The backward pass is twice the forward pass.
    """
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    slots = sum(forest.tokens.shape[1] for forest in batch)
    sampled = sum(len(forest.targets) for forest in batch)
    kinds = layer_kinds.kinds_of(layer_kinds.described(config))
    pairs = sum(
        layers * _pairs(batch, config.sliding_window if kind == "sliding_attention" else None)
        for kind, layers in kinds.items()
        if kind in ("full_attention", "sliding_attention")
    )
    forward = 2 * slots * matrices(model) + 2 * sampled * head + 2 * pairs * _widths(config)
    return 3.0 * forward


def matrices(model: Any) -> float:
    """Count the entries of the layers' matrices that a token meets."""
    config = model.config.to_dict()
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 1
    share = config.get("num_experts_per_tok", 1) / experts
    return sum(
        weight.numel() * (share if ".experts." in name else 1)
        for name, weight in model.base_model.layers.named_parameters()
        if name.endswith(("weight", "_proj")) and weight.ndim > 1
    )


def _pairs(batch: Sequence[Forest], window: int | None) -> int:
    """Count the (query, key) pairs of a layer with attention."""
    seen = [forest.positions + 1 for forest in batch]
    return sum(int((each.clamp(max=window) if window else each).sum()) for each in seen)


def _widths(config: Any) -> int:
    """Return the entries of a query and of a value, of all heads."""
    values = config.to_dict()
    size = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    both = values.get("qk_head_dim", size) + values.get("v_head_dim", size)
    return int(config.num_attention_heads * both)


def matrix_rate(device: str, size: int, repetitions: int = 20) -> float:
    """Measure the operations per second of a bf16 matrix product, the fastest of several."""
    one, other = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    seconds = [timed(lambda: one @ other, device) for _ in range(repetitions)]
    return 2 * size**3 / min(seconds)


def copy_rate(device: str, size: int, repetitions: int = 20) -> float:
    """Measure the bytes per second that a copy reads and writes, the fastest of several."""
    one, other = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    return 2 * size / min(timed(lambda: one.copy_(other), device) for _ in range(repetitions))


def timed(work: Callable[[], Any], device: str) -> float:
    """Return the seconds until the device has finished."""
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
    """Compute all gradients of one optimizer step, as ``learner.optimize`` does."""
    learning.model.zero_grad(set_to_none=True)
    views = sum(int(forest.mask.sum()) for forest in batch)
    for made in batch:
        value, _ = learner.objective(learning, made, loss, 1.0, views, views, machine)
        value.backward()


def measure(
    name: str,
    architecture: Architecture,
    packing: str,
    recompute: bool,
    trees: Sequence[Credited],
    tokens: int,
    device: str,
    rate: float,
    repetitions: int,
) -> dict[str, Any]:
    """Measure one line of the table of updates."""
    learning = Learner(Path(name), policy(architecture, device), None)
    checkpoint.prepare_optimizer(learning, SETTINGS)
    loss = assemble(load_algorithms()["grpo"], 1).loss
    machine = machine_of(device)
    form = ROWS if packing == OWN else form_of(learning.model, device)
    cost = passes.training_cost(learning.model, form)
    batch = micro_batches(trees, packing, tokens, cost, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with attending(learning.model, form), passes.recomputing(learning.model, recompute):
        forward_backward(learning, batch, loss, machine)
        gradients.apply_gradients(learning, SETTINGS)  # the optimizer has its state from now on
        seconds = [
            timed(lambda: forward_backward(learning, batch, loss, machine), device)
            for _ in range(WARM_UP + repetitions)
        ][WARM_UP:]
    second, counted = median(seconds), sizes(trees)
    apart = micro_batches(trees, "rows", tokens, cost, device) if packing == OWN else batch
    performed = operations(learning.model, apart)
    return {
        "architecture": name,
        "packing": packing,
        "recompute": recompute,
        "micro_batch_tokens": tokens,
        "micro_batches": len(batch),
        **counted,
        "computed_tokens": sum(TOKENS[form](forest.layout) for forest in batch),
        "seconds": second,
        "seconds_all": seconds,
        "unique_tokens_per_second": counted["unique_tokens"] / second,
        "leaf_tokens_per_second": counted["leaf_tokens"] / second,
        "operations": performed,
        "share_of_matrix_rate": performed / second / rate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "attention_pairs": sum(PAIRS[form](forest.layout) for forest in batch),
    }


def sizes(trees: Sequence[Credited]) -> dict[str, int]:
    """Count the tokens of the trees, each once, and once per leaf that has them."""
    whole = lay_out([(tree, range(len(tree.credits))) for tree in trees])
    return {
        "unique_tokens": len(whole.tokens),
        "leaf_tokens": sum(len(path) for tree in whole.trees for path in tree.paths),
        "leaves": sum(len(tree.leaves) for tree in whole.trees),
    }


def measure_what_fits(
    *where: Any, tokens: Sequence[int], device: str, rate: float, repetitions: int
) -> Any:
    """Call ``measure`` with the largest micro-batches that fit; return None where none fits."""
    measuring: Any = measure
    for most in tokens:
        try:
            return measuring(*where, most, device, rate, repetitions)
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # outside the handler, which holds the failed pass's tensors
    return None


def machine_of(device: str) -> Machine:
    """Return the machine section of a recipe, with passes in bf16."""
    section = {"threads": torch.get_num_threads(), "device": device, "precision": "bfloat16"}
    return Machine.model_validate(section)


class Endless(TransformersEngine):
    """An engine without a tokenizer, whose turns end only at their limit."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, SimpleNamespace(eos_token_id=-1))

    def pieces(self) -> list[str]:
        return [""] * self.model.config.vocab_size


def measure_sampling(
    name: str, architecture: Architecture, rows: int, turn: Turn, device: str, bandwidth: float
) -> dict[str, Any]:
    """Measure one line of the table of sampling. Each row has a prompt of its own."""
    model = resident.to_sample(policy(architecture, device), machine_of(device))
    random = np.random.default_rng(0)
    shape = (rows, turn.prompt)
    prompts = random.integers(0, architecture.vocabulary, shape).astype(np.int32)
    context = turn.prompt + 1 + (WARM_UP + REPETITIONS) * turn.sampled
    with Endless(model).session(rows, context, 1.0, 1.0, ()) as session:
        handles = [session.open() for _ in prompts]
        known = list(prompts)

        def sample(length: int) -> None:
            requests = [
                SamplingRequest(handle, tokens, seed, length)
                for seed, (handle, tokens) in enumerate(zip(handles, known, strict=True))
            ]
            drawn = session.sample(requests)
            known[:] = [
                np.concatenate([before, new.tokens])
                for before, new in zip(known, drawn, strict=True)
            ]

        sample(1)  # with the prompts
        seconds, moved = [], []
        for _ in range(WARM_UP + REPETITIONS):
            moved.append(bytes_of_a_turn(architecture, model, rows, len(known[0]), turn.sampled))
            seconds.append(timed(lambda: sample(turn.sampled), device))
    second, floor = median(seconds[WARM_UP:]), median(moved[WARM_UP:]) / bandwidth
    return {
        "architecture": name,
        "rows": rows,
        "seconds_of_a_step": second / turn.sampled,
        "seconds_all": seconds[WARM_UP:],
        "floor_of_a_step": floor / turn.sampled,
        "tokens_per_second": rows * turn.sampled / second,
        "share_of_copy_rate": floor / second,
    }


def bytes_of_a_turn(
    architecture: Architecture, model: Any, rows: int, before: int, sampled: int
) -> int:
    """Return the bytes that ``sampled`` decoding steps read: weights, keys and values, in bf16.

    The first step has ``before`` tokens to look at.
    """
    size = architecture
    weights = sum(weight.numel() for weight in model.parameters())
    token = 2 * size.layers * size.key_value_heads * (size.hidden // size.heads)
    seen = sum(range(before, before + sampled))
    return 2 * (sampled * weights + rows * seen * token)


def variants_of(architecture: Architecture, device: str) -> Sequence[tuple[str, bool]]:
    """Return what to measure of a policy: packings, each with or without recomputing."""
    with torch.device("meta"):
        model = policy(architecture, "meta")
    if form_of(model, device) == ROWS:
        return ((OWN, False), (OWN, True))
    return VARIANTS if architecture.family == QWEN2 else (*VARIANTS, (OWN, False))


def run(
    plan: Plan,
    device: str,
    packings: Sequence[str],
    repetitions: int,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Make all measurements; ``keep`` is called with those so far after each of them."""
    use_machine(machine_of(device))
    rate, bandwidth = matrix_rate(device, plan.matrix), copy_rate(device, plan.copied)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bf16_matrix_operations_per_second": rate,
        "copied_bytes_per_second": bandwidth,
        "architectures": {name: asdict(one) for name, one in plan.architectures.items()},
        "tree": asdict(plan.shape),
        "turn": asdict(plan.turn),
        "rows": [],
        "sampling": [],
    }
    for name, architecture in plan.architectures.items():
        vocabulary = architecture.vocabulary
        trees = [synthetic_tree(seed, plan.shape, vocabulary) for seed in range(TREES)]
        for variant in variants_of(architecture, device):
            if variant[0] not in packings:
                continue
            case = (name, architecture, *variant, trees)
            row = measure_what_fits(
                *case, tokens=plan.tokens, device=device, rate=rate, repetitions=repetitions
            )
            figures["rows"] += [row] if row else []
            keep(figures)
            show(name, *variant, row and row["seconds"])
        for rows in plan.rows if architecture.family == QWEN2 else ():
            line = measure_sampling(name, architecture, rows, plan.turn, device, bandwidth)
            figures["sampling"].append(line)
            keep(figures)
            show(name, f"{rows} rows", line["seconds_of_a_step"])
    return figures


def show(*parts: object) -> None:
    """Show what has been measured."""
    print(*parts, file=sys.stderr, flush=True)


def write(figures: dict[str, Any], file: Path) -> None:
    """Replace a file of figures."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(figures, indent=2) + "\n")
    temporary.replace(file)


def table(figures: dict[str, Any]) -> str:
    """Return the rows in Markdown."""
    lines = [
        f"{figures['device']}: {figures['bf16_matrix_operations_per_second'] / 1e12:.1f} T bf16 "
        "operations per second in a matrix product, "
        f"{figures['copied_bytes_per_second'] / 1e9:.0f} GB per second in a copy",
        "",
        "| architecture | packing | recompute | micro-batch tokens | computed tokens "
        "| unique tokens / s | leaf tokens / s | share of matrix rate (%) | peak (GiB) |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in figures["rows"]:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        lines.append(
            f"| {row['architecture']} | {row['packing']} | {'yes' if row['recompute'] else 'no'} "
            f"| {row['micro_batch_tokens']:,} | {row['computed_tokens']:,} "
            f"| {row['unique_tokens_per_second']:,.0f} | {row['leaf_tokens_per_second']:,.0f} "
            f"| {100 * row['share_of_matrix_rate']:.1f} | {peak} |"
        )
    return "\n".join(lines + (_sampling(figures["sampling"]) if figures["sampling"] else []))


def _sampling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of sampling."""
    return [
        "",
        "| architecture | rows sampled | tokens / s | a step (ms) | its floor (ms) "
        "| share of copy rate (%) |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {row['architecture']} | {row['rows']} | {row['tokens_per_second']:,.0f} "
            f"| {1000 * row['seconds_of_a_step']:.2f} | {1000 * row['floor_of_a_step']:.2f} "
            f"| {100 * row['share_of_copy_rate']:.1f} |"
            for row in rows
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a policy and trees for a smoke test")
    names = [*PLAN.architectures, *TINY.architectures]
    parser.add_argument("--only", choices=names, help="measure one architecture")
    parser.add_argument("--leaves", type=int, help="of a tree, in place of 16")
    parser.add_argument("--prompt", type=int, help="its tokens, in place of 512")
    parser.add_argument("--updates", action="store_true", help="measure updates, no sampling")
    every = (*PACKINGS, OWN)
    parser.add_argument("--packings", nargs="+", choices=every, default=every)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="of each update")
    parser.add_argument("--file", type=Path, default=FILE, help="where the figures are written")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny shows whether this runs at all")
    plan = TINY if arguments.tiny else PLAN
    if arguments.only:
        if arguments.only not in plan.architectures:
            others = f"those of {'--tiny' if arguments.tiny else 'this run'}"
            parser.error(f"--only {arguments.only}: take one of {others}: {[*plan.architectures]}")
        plan = replace(plan, architectures={arguments.only: plan.architectures[arguments.only]})
    sizes_asked = {"leaves": arguments.leaves, "prompt": arguments.prompt}
    shape = replace(plan.shape, **{name: size for name, size in sizes_asked.items() if size})
    plan = replace(plan, shape=shape, rows=() if arguments.updates else plan.rows)
    keep = partial(write, file=arguments.file)
    print(table(run(plan, arguments.device, arguments.packings, arguments.repetitions, keep)))


if __name__ == "__main__":
    main()
