"""Hold the learner's passes over trees against the policy's own plain pass over rows. Torch only.

A row is one context of a trajectory, from its prompt on: what the policy's forward pass takes
without any of the learner's code. The learner must give the same log-probabilities and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning.learner import loss_denominator, optimize
from tasks.learning.losses import AVERAGINGS, RATIOS, Loss
from tasks.learning.packing import ByNode, Credit, Credited, Forest, uncredited
from tasks.learning.passes import NO_VALUES, node_logprobs
from tasks.policy import routed_experts, token_ids
from tasks.policy.machine import in_precision
from tasks.policy.optimizer import AdamW
from tasks.policy.resident import Learner
from tasks.policy.routed_experts import Recording, Replay
from tasks.trees.tree import TURN, Tree, note_experts

Gradients = dict[str, Tensor]  # name of a weight -> its gradient; without those of no effect
# One loss of many: every algorithm's gradient is that of log-probabilities, weighted.
LOSS = Loss(RATIOS["none"], None, AVERAGINGS["token_mean"](1.0))
STAYING = Update.model_construct(  # an update that leaves the weights as they are
    learning_rate=0.0,
    warmup_updates=0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.95),
    gradient_clip=torch.inf,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=2**30,
    critic_learning_rate=0.0,
    recompute=False,
)


def largest(one: ByNode, other: ByNode) -> float:
    """Return the largest difference of log-probabilities; infinity where one is not finite."""
    apart = [np.abs(a - b) for a, b in zip(one, other, strict=True)]
    values = np.concatenate([*apart, NO_VALUES])
    return float(values.max(initial=0.0)) if np.isfinite(values).all() else float("inf")


def by_learner(model: Any, tree: Tree, machine: Machine) -> ByNode:
    """Return the log-probabilities of a tree's sampled tokens as the learner computes them."""
    (values,) = node_logprobs(model, [uncredited(tree)], 1.0, STAYING, machine)
    return values


@torch.no_grad()
def by_rows(model: Any, tree: Tree, machine: Machine) -> ByNode:
    """Return the same by the policy's own forward pass over each row."""
    by_node = [NO_VALUES] * len(tree.nodes)
    for chain in _chains(tree):
        logprobs = _of_row(model, tree, chain, machine).float().cpu().numpy()
        for node in chain:
            if tree.nodes[node].kind == TURN:
                by_node[node], logprobs = np.split(logprobs, [len(tree.nodes[node].tokens)])
    return by_node


def by_sampler(tree: Tree) -> ByNode:
    """Return the same as the engine reported them when it sampled."""
    return [node.logprobs for node in tree.nodes]


def _chains(tree: Tree) -> Iterator[list[int]]:
    """Yield the nodes of each context of each leaf."""
    for leaf in tree.leaves:
        yield from tree.contexts(leaf)


def _of_row(model: Any, tree: Tree, chain: Sequence[int], machine: Machine) -> Tensor:
    """Return the log-probabilities [S] of the sampled tokens of a context, from one plain pass."""
    nodes = [tree.nodes[node] for node in chain]
    tokens = torch.from_numpy(np.concatenate([node.tokens for node in nodes])).long()
    sampled = np.concatenate([np.full(len(node.tokens), node.kind == TURN) for node in nodes])
    if not sampled.any():
        return torch.zeros(0)
    tokens, places = tokens.to(model.device), torch.from_numpy(np.flatnonzero(sampled))
    places = places.to(model.device)
    logits = _pass(model, [node.tokens for node in nodes], machine)
    logprobs = token_ids.of(model).only(logits).float().log_softmax(-1)
    return logprobs[places - 1].gather(-1, tokens[places, None])[:, 0]


def _pass(model: Any, texts: Sequence[NDArray[np.int32]], machine: Machine) -> Tensor:
    """Return the logits of a row, whose tokens are those of its nodes, from one plain pass."""
    tokens = torch.from_numpy(np.concatenate(texts)).long().to(model.device)
    with in_precision(machine):
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


# ---------------------------------------------------------------- experts


def bare(tree: Tree) -> Tree:
    """Return a tree without the sampler's choice of experts: a plain pass chooses for itself."""
    return replace(tree, nodes=[replace(node, experts=None) for node in tree.nodes])


@torch.no_grad()
def routed_by_rows(model: Any, tree: Tree, machine: Machine) -> Tree:
    """Return a tree with the choice of experts of a model's own pass over each row."""
    shape = routed_experts.shape_of(routed_experts.routers_of(model))
    assert shape, "only a mixture of experts chooses"
    chosen = bare(tree)
    for chain in _chains(tree):
        recording = Recording(shape)
        with routed_experts.using(model, recording):
            _pass(model, [tree.nodes[node].tokens for node in chain], machine)
        note_experts(chosen, chain[-1], recording.taken().cpu().numpy())
    return chosen


def experts_apart(model: Any, tree: Tree, machine: Machine) -> float:
    """Return the share of (token, router) pairs that the learner would send to other experts.

    Its routers choose for themselves in all layers; ``tree`` has the choice that this is held
    against.
    """
    seen: list[Replay] = []

    def measuring(forest: Forest) -> Replay:
        assert forest.experts, "the tree has experts"
        seen.append(forest.experts.measuring())
        return seen[-1]

    node_logprobs(model, [uncredited(tree)], 1.0, STAYING, machine, measuring)
    return sum(int(one.differing) for one in seen) / max(1, sum(int(one.pairs) for one in seen))


# ---------------------------------------------------------------- gradients


def credited(tree: Tree) -> Credited:
    """Give each leaf of a tree advantages of both signs that differ from token to token."""
    lengths = [len(credit.advantages) for credit in uncredited(tree).credits]
    return Credited(
        tree,
        [
            Credit(np.cos(1.0 + leaf + np.arange(n, dtype=np.float32)), np.zeros(n, np.int64))
            for leaf, n in enumerate(lengths)
        ],
    )


def gradient_by_learner(model: Any, tree: Tree, machine: Machine) -> Gradients:
    """Return the gradient of an update on a tree, which leaves the weights as they are.

    Raises RuntimeError where it is not finite.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    learner = Learner(None, model, None, AdamW(weights, lr=0.0, weight_decay=0.0))  # type: ignore[arg-type]
    with _as_before(model):
        optimize(learner, [credited(tree)], LOSS, STAYING, 1.0, machine, seed=0)
        return _taken(model)


def gradient_by_rows(model: Any, tree: Tree, machine: Machine) -> Gradients:
    """Return the gradient of the same loss, each row by itself through the plain pass."""
    source = credited(tree)
    denominator = loss_denominator([source], LOSS)
    with _as_before(model):
        model.eval()  # as the learner learns
        for leaf, credit in zip(tree.leaves, source.credits, strict=True):
            advantages = torch.from_numpy(credit.advantages).to(model.device)
            for chain in tree.contexts(leaf):
                logprobs = _of_row(model, tree, chain, machine)
                if len(logprobs):
                    now, advantages = advantages[: len(logprobs)], advantages[len(logprobs) :]
                    (-(now * logprobs).sum() / denominator).backward()
        return _taken(model)


def _taken(model: Any) -> Gradients:
    return {
        name: weight.grad.detach().float().cpu()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Begin without gradients, and leave none; restore the mode of training."""
    training = model.training
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)


def apart(one: Gradients, other: Gradients) -> float:
    """Return the largest difference of two gradients, as a share of the largest of ``other``.

    One that only one of them has counts in full.
    """
    scale = max((float(value.abs().max()) for value in other.values() if value.numel()), default=0)
    differences = [0.0]
    for name in one.keys() | other.keys():
        a, b = one.get(name), other.get(name)
        value = a - b if a is not None and b is not None else b if a is None else a
        if value is not None and value.numel():
            differences.append(float(value.abs().max()))
    worst = max(differences, key=lambda value: value if value == value else float("inf"))
    return worst / scale if scale else (0.0 if worst == 0 else float("inf"))


@contextmanager
def vectors_alone(model: Any) -> Iterator[None]:
    """Let the weights with one dimension (norms, biases) alone have gradients, if there are any.

    They are in every layer, so their gradients pass through everything, and take no memory.
    """
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    if any(weight.ndim < 2 for weight in learning):
        for weight in learning:
            weight.requires_grad_(weight.ndim < 2)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)
