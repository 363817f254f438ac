"""Time updates on trees against the same updates on rows, for layers beyond plain attention.

    python -m benchmarks.trees_against_rows                 a Qwen3.5-shaped policy
    python -m benchmarks.trees_against_rows --family lfm2   another family

A tree has eight leaves that share the first four fifths of their context, or nothing. An update is
the project's own: forward and backward passes, clipping and the step of the optimizer, in float32.
Rows are the policy's own forward pass over the same trees, as a policy learns whose layers have no
form on trees. Both are repeated in turn; the ratio is that of medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from params.schema.base import Machine
from tasks.learning import agreement, attention, learner
from tasks.learning.packing import Credited, lay_out
from tasks.policy.lean_transformers import transformers
from tasks.policy.optimizer import AdamW
from tasks.policy.resident import Learner
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

LEAVES = 8
VOCABULARY = 4096
SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 4096},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
STATES = {  # of Qwen3.5: three layers of the gated delta rule, then one of attention
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
SINKS: dict[str, Any] = {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512},
}
LATENTS: dict[str, Any] = {
    **{"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    **{"v_head_dim": 64, "head_dim": 32, "num_key_value_heads": 8, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 256},
}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": STATES,
    "lfm2": {"layer_types": [*["conv"] * 3, "full_attention"]},
    "gpt_oss": SINKS,
    "deepseek_v3": LATENTS,
}
CASES = {  # tokens of a leaf, of which so many are shared, and the trees of an update
    "640 tokens, 512 in common": (640, 512, 1),
    "140 tokens, 112 in common": (140, 112, 4),
    "70 tokens, 56 in common": (70, 56, 8),
    "640 tokens, nothing in common": (640, 0, 1),
}


def policy_of(family: str) -> Learner:
    """Return a policy of four layers with random weights."""
    torch.manual_seed(0)
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config = configs[family](**{**SIZES, **MORE.get(family, {})})
    plain = "eager" if family == "gpt_oss" else "sdpa"  # the first has no other
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=plain)
    optimizer = AdamW(list(model.parameters()), lr=0.0, weight_decay=0.0)
    return Learner(None, model, None, optimizer)  # type: ignore[arg-type]


def tree_of(tokens: int, common: int, seed: int, vocabulary: int = VOCABULARY) -> Credited:
    """Return a tree whose leaves have so many tokens each, the first ones in common."""
    random = np.random.default_rng(seed)
    tree = Tree(Question("q", "kind", "text", ("1",)))

    def add(parent: int, kind: str, length: int, first: int) -> int:
        drawn = random.integers(3, vocabulary, length).astype(np.int32)
        drawn[0] = first
        none = np.zeros(length if kind == TURN else 0, np.float32)
        tree.nodes.append(Node(parent, kind, "", "", drawn, none, none))
        return len(tree.nodes) - 1

    root = add(-1, PROMPT, common, 3) if common else -1
    for leaf in range(LEAVES):
        start = root if common else add(-1, PROMPT, 1, 3 + leaf)
        tree.leaves.append(add(start, TURN, tokens - max(common, 1), 3 + leaf))
    return agreement.credited(tree)


def seconds_of(policy: Learner, trees: Sequence[Credited], form: str, machine: Machine) -> float:
    """Return the processor seconds of an update in a form."""
    with patch.object(learner, "form_of", lambda *_: form):
        began = time.process_time()
        learner.optimize(policy, trees, agreement.LOSS, agreement.STAYING, 1.0, machine, seed=0)
        return time.process_time() - began


def measure(policy: Learner, case: str, repetitions: int, machine: Machine) -> str:
    """Return the row of a case, in Markdown."""
    tokens, common, count = CASES[case]
    trees = [tree_of(tokens, common, seed) for seed in range(count)]
    layout = lay_out([(tree, range(LEAVES)) for tree in trees])
    fewer = sum(layout.row_lengths()) / len(layout.tokens)
    own, plain = both_forms(policy, trees, repetitions, machine)
    return f"| {case} | {fewer:.2f} | {own:.2f} | {plain:.2f} | {plain / own:.2f} |"


def both_forms(
    policy: Learner, trees: Sequence[Credited], repetitions: int, machine: Machine
) -> tuple[float, float]:
    """Return the processor seconds of an update in the policy's own form and as rows, in turn."""
    forms = (attention.form_of(policy.model, machine.device), attention.ROWS)
    for form in forms:
        seconds_of(policy, trees, form, machine)  # the first one is slower
    taken: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(repetitions):
        for form in forms:
            taken[form].append(seconds_of(policy, trees, form, machine))
    own, plain = (median(taken[form]) for form in forms)
    return own, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", default="qwen3_5_text")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine(threads=1, device="cpu", precision="float32")
    policy = policy_of(args.family)
    weights = sum(weight.numel() for weight in policy.model.parameters())
    print(f"{args.family}, {weights / 1e6:.1f} million weights, {LEAVES} leaves a tree\n")
    print("| leaves | times fewer tokens | trees (s) | rows (s) | rows / trees |")
    print("|---|---:|---:|---:|---:|")
    for case in CASES:
        print(measure(policy, case, args.repetitions, machine), flush=True)


if __name__ == "__main__":
    main()
