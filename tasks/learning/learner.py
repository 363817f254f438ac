"""Train a policy: log-probabilities, values of the critic, optimizer steps. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning import shares, token_values
from tasks.learning.attention import PAIRS, attending, form_for
from tasks.learning.losses import Loss, Views, policy_loss, value_loss
from tasks.learning.packing import (
    ByNode,
    Cost,
    Credited,
    Floats,
    Forest,
    cost_of,
    forests,
    to_nodes,
)
from tasks.learning.token_values import Seen
from tasks.policy import sharding, world
from tasks.policy.machine import in_precision
from tasks.policy.parallel import balanced_parts, lanes, side_by_side
from tasks.policy.resident import Critic, Learner

Batch = Sequence[tuple[Credited, Sequence[int]]]  # trees, with indices of their leaves

# Most logits (tokens x vocabulary) that exist at one time, by device. On a GPU each part must be
# large enough to be worth its pass over the gradient of the head.
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
NO_VALUES: Floats = np.zeros(0, np.float32)  # of a node that was not sampled


def states(backbone: Any, forest: Forest) -> Tensor:
    """Return the hidden states that predict the sampled tokens of a forest. [P, H]"""
    output = backbone(
        input_ids=forest.tokens, position_ids=forest.positions, use_cache=False, forest=forest
    )
    return output.last_hidden_state[0].index_select(0, forest.predicting)


def token_logprobs(
    model: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [P] of tokens, and with ``entropy`` entropies [P] over ln|V|.

    ``states_PH`` are hidden states, ``targets_P`` the tokens. At most ``LOGITS_AT_ONCE`` logits
    exist at one time; where that takes several parts, each is computed again in the backward pass
    instead of being kept. So memory grows with the sum of tokens and vocabulary, not with their
    product.
    """
    head = model.get_output_embeddings()
    part = max(1, LOGITS_AT_ONCE[states_PH.device.type] // head.weight.shape[0])
    if len(targets_P) <= part:
        return _logprobs(head, states_PH, targets_P, temperature, entropy)
    parts = [
        checkpoint(_logprobs, head, some, target, temperature, entropy, use_reentrant=False)
        for some, target in zip(states_PH.split(part), targets_P.split(part), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _logprobs(
    head: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [P] and, if wanted, entropies [P] of one part."""
    logits = head(states_PH).float() / temperature
    logprobs = -torch.nn.functional.cross_entropy(logits, targets_P, reduction="none")
    if not entropy:
        return logprobs, None
    every = torch.log_softmax(logits, dim=-1)
    return logprobs, -(every.exp() * every).sum(-1) / math.log(logits.shape[-1])


# ---------------------------------------------------------------- values of tokens, by node


def node_logprobs(
    model: Any, trees: Sequence[Credited], temperature: float, settings: Update, machine: Machine
) -> list[ByNode]:
    """Return log-probabilities of the sampled tokens under ``model``: tree -> node -> tokens."""

    def compute(forest: Forest) -> Tensor:
        return forest_logprobs(model, forest, temperature, machine)

    return _by_node(model, trees, compute, settings, machine)


def forest_logprobs(model: Any, forest: Forest, temperature: float, machine: Machine) -> Tensor:
    """Return the log-probabilities [P] of the sampled tokens of a forest under ``model``."""

    def passes() -> Tensor:
        with in_precision(machine):
            hidden = states(model.base_model, forest)
            return token_logprobs(model, hidden, forest.targets, temperature)[0]

    return sharding.run(model, passes)


def node_values(
    learner: Learner, trees: Sequence[Credited], settings: Update, machine: Machine
) -> list[ByNode]:
    """Return the critic's value before each sampled token: tree -> node -> tokens."""
    critic = learner.critic
    assert critic, "an algorithm with a critic comes first"
    model = critic.backbone or learner.model

    def passes(forest: Forest) -> Tensor:
        with in_precision(machine):
            return states(model.base_model, forest)

    def compute(forest: Forest) -> Tensor:
        return values(critic, sharding.run(model, partial(passes, forest)))

    found = _by_node(model, trees, compute, settings, machine)
    sharding.release(critic.head)
    return found


def values(critic: Critic, states_PH: Tensor) -> Tensor:
    """Return V(s) [P] from hidden states, in float32: bf16 is too coarse for returns."""
    return critic.head(states_PH.float())[:, 0]


def _by_node(
    model: Any,
    trees: Sequence[Credited],
    compute: Callable[[Forest], Tensor],
    settings: Update,
    machine: Machine,
) -> list[ByNode]:
    """Compute [P] for each forest without gradients; return tree -> node -> its values."""
    batch = [(tree, range(len(tree.tree.leaves))) for tree in trees]
    form = form_for(machine.device)
    places = {id(tree): place for place, tree in enumerate(trees)}
    found: dict[tuple[int, int], Floats] = {}  # place of a tree and its node -> values
    training = model.training
    model.eval()

    @torch.no_grad()  # applies to the current thread, so each lane enters it
    def lane(pieces: Iterable[Forest]) -> None:
        for forest in pieces:
            computed = compute(forest)
            if not forest.spare:
                for tree, node, numbers in to_nodes(forest, computed[forest.entries]):
                    found[places[id(tree)], node] = numbers

    with attending(model, form):
        cost = training_cost(model, form)
        side_by_side(lane, _forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine))
    sharding.release(model)
    model.train(training)
    for others in world.gathered(found):
        found.update(others)
    return [
        [found.get((place, node), NO_VALUES) for node in range(len(tree.tree.nodes))]
        for place, tree in enumerate(trees)
    ]


def training_cost(model: Any, form: str) -> Cost:
    """Return the costs of training ``model`` with a form of attention."""
    weights = sum(weight.numel() for weight in model.parameters())
    return cost_of(model.config, weights, PAIRS[form])


# ---------------------------------------------------------------- updates


def optimize(
    learner: Learner,
    trees: Sequence[Credited],
    loss: Loss,
    settings: Update,
    temperature: float,
    machine: Machine,
    seed: int | Sequence[int],
    seen: Seen | None = None,
) -> dict[str, float]:
    """Train on one batch, epochs x mini-batches steps; return metrics averaged over tokens.

    A mini-batch has whole trees, in an order drawn from ``seed``. Trees without old
    log-probabilities were sampled by the policy that learns: with one step a batch they need no
    forward pass, with more they are computed first. ``seen`` gets the values of tokens in the last
    epoch. Raises RuntimeError for a gradient that is not finite.
    """
    learner.changed = True
    known = all(tree.old_logprobs is not None for tree in trees)
    if settings.epochs * settings.mini_batches > 1 and not known:
        trees = _with_old_logprobs(learner, trees, temperature, settings, machine)
    learner.model.train()
    order = np.random.default_rng(seed)
    count = min(settings.mini_batches, len(trees))
    sums: list[dict[str, float]] = []
    with (
        attending(learner.model, form_for(machine.device)),
        recomputing(learner.model, settings.recompute),
    ):
        for _ in range(settings.epochs if count else 0):
            if seen:
                seen.clear()
            for part in np.array_split(order.permutation(len(trees)), count):
                chosen = [trees[i] for i in part]
                sums.append(_step(learner, chosen, loss, settings, temperature, machine, seen))
    if seen is not None:
        for others in world.gathered(dict(seen)):
            seen.update(others)
    return _averages(sums or [NOTHING])


@contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Let layers keep only their inputs, and compute the rest again in the backward pass.

    This is activation checkpointing (arXiv 1604.06174, section 4.1) with one segment a layer. The
    model is restored after. Raises ValueError for an architecture that does not support it.
    """
    if not wanted:
        yield
        return
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"reinforce.update.recompute is true, and {type(model).__name__} does not support "
            "gradient checkpointing: set it to false, or use another policy"
        )
    training = model.training
    model.train()  # layers recompute in this mode only
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # only reentrant checkpointing needs them
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.train(training)


def _with_old_logprobs(
    learner: Learner,
    trees: Sequence[Credited],
    temperature: float,
    settings: Update,
    machine: Machine,
) -> list[Credited]:
    old = node_logprobs(learner.model, trees, temperature, settings, machine)
    return [replace(tree, old_logprobs=logprobs) for tree, logprobs in zip(trees, old, strict=True)]


def _step(
    learner: Learner,
    trees: Sequence[Credited],
    loss: Loss,
    settings: Update,
    temperature: float,
    machine: Machine,
    seen: Seen | None,
) -> dict[str, float]:
    """Take one optimizer step over all micro-batches; return sums for metrics."""
    assert learner.optimizer, "prepare_optimizer comes first"
    denominator = loss_denominator(trees, loss)
    value_tokens = _sampled_views(trees)
    sums = dict(NOTHING)
    learner.optimizer.zero_grad(set_to_none=True)

    def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
        looking = None if forest.spare else seen
        value, metrics = objective(
            learner, forest, loss, temperature, denominator, value_tokens, machine, looking
        )
        metrics["trained_tokens"] = len(forest.entries)
        metrics["trained_views"] = float(forest.mask.sum())
        return value, metrics

    pieces = _micro_batches(learner, trees, loss, settings, machine)
    for metrics in _gradients(_weights(learner.optimizer), share, pieces):
        _add_up(sums, metrics)
    if sums["trained_tokens"]:
        sums["gradient_norm"] = apply_gradients(learner, settings)
        sums["optimizer_steps"] = 1.0
    if learner.critic and learner.critic.backbone:
        _add_up(sums, _critic_step(learner.critic, trees, settings, machine, value_tokens))
    return sums


def accumulate(
    learner: Learner,
    trees: Sequence[Credited],
    share: Callable[[Forest], tuple[Tensor, dict[str, float]]],
    settings: Update,
    machine: Machine,
) -> list[dict[str, float]]:
    """Compute the gradient of a step's loss over all leaves; return the metrics of each forest.

    ``share``: forest -> its share of the loss, and metrics.
    """
    assert learner.optimizer, "prepare_optimizer comes first"
    learner.optimizer.zero_grad(set_to_none=True)
    form = form_for(machine.device)
    batch = [(tree, range(len(tree.credits))) for tree in trees]
    with attending(learner.model, form):
        cost = training_cost(learner.model, form)
        pieces = _forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)
        return _gradients(_weights(learner.optimizer), share, pieces)


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _gradients(
    weights: Sequence[Tensor],
    share: Callable[[Forest], tuple[Tensor, dict[str, float]]],
    pieces: Sequence[Iterable[Forest]],
) -> list[dict[str, float]]:
    """Add the gradients of each forest's share of the loss to the weights; return metrics of each.

    ``share``: forest -> scalar loss and metrics. ``pieces``: lane -> its forests. Several lanes
    each sum their own gradients, which are then added in the order of the lanes, so that equal runs
    stay equal. Processes that learn together have one lane each; all get the metrics of all.
    """
    if len(pieces) == 1:
        found = []
        for forest in pieces[0]:
            value, metrics = share(forest)
            (value * 0 if forest.spare else value).backward()
            if not forest.spare:
                found.append({"loss": float(value.detach()), **metrics})
        return [metrics for of_process in world.gathered(found) for metrics in of_process]

    def lane(forests: Iterable[Forest]) -> tuple[list[Tensor | None], list[dict[str, float]]]:
        total: list[Tensor | None] = [None] * len(weights)
        metrics_of_forests = []
        for forest in forests:
            value, metrics = share(forest)
            own = torch.autograd.grad(value, list(weights), allow_unused=True)
            total = [_plus(one, other) for one, other in zip(total, own, strict=True)]
            metrics_of_forests.append({"loss": float(value.detach()), **metrics})
        return total, metrics_of_forests

    done = side_by_side(lane, pieces)
    for total, _ in done:
        for weight, gradient in zip(weights, total, strict=True):
            weight.grad = _plus(weight.grad, gradient)
    return [metrics for _, of_forests in done for metrics in of_forests]


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients, in place of the first; None is a gradient of zeros."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def _forests_of_lanes(
    batch: Batch, tokens: int, cost: Cost, machine: Machine
) -> list[Iterator[Forest]]:
    """Divide the trees of a batch among lanes, at least one; return lane -> forests of its trees.

    Forests are laid out lazily, so that a lane has only one in memory. Where processes learn
    together, each has one lane with its share of the trees.
    """
    chosen = [(tree, leaves) for tree, leaves in batch if len(leaves)]
    if world.size() > 1:
        return [shares.forests_in_step(chosen, tokens, cost, machine.device)]
    sizes = [sum(len(credit.advantages) for credit in tree.credits) for tree, _ in chosen]
    parts = balanced_parts(sizes, lanes(machine.device, len(chosen)))
    return [forests([chosen[i] for i in part], tokens, cost, machine.device) for part in parts]


def _micro_batches(
    learner: Learner, trees: Sequence[Credited], loss: Loss, settings: Update, machine: Machine
) -> list[Iterator[Forest]]:
    """Return lane -> forests of the leaves that have a gradient.

    Leaves whose advantages are all 0 skip the model unless another term of the loss needs them;
    they still count in the denominator.
    """
    shares = learner.critic is not None and learner.critic.backbone is None
    every = shares or loss.kl is not None or loss.entropy_bonus > 0
    batch = [
        (
            tree,
            [leaf for leaf, credit in enumerate(tree.credits) if every or credit.advantages.any()],
        )
        for tree in trees
    ]
    cost = training_cost(learner.model, form_for(machine.device))
    return _forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)


def loss_denominator(trees: Sequence[Credited], loss: Loss) -> float:
    """Return what the loss of an optimizer step over these trees is divided by."""
    credits = [credit for tree in trees for credit in tree.credits]
    lengths = torch.tensor([len(credit.advantages) for credit in credits])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    segments = torch.zeros(mask.shape, dtype=torch.int64)
    segments[mask] = torch.from_numpy(np.concatenate([credit.segments for credit in credits]))
    return loss.averaging.denominator(lengths, loss.ratio.count(segments, mask))


def _sampled_views(trees: Sequence[Credited]) -> int:
    return sum(len(credit.advantages) for tree in trees for credit in tree.credits)


def objective(
    learner: Learner,
    forest: Forest,
    loss: Loss,
    temperature: float,
    denominator: float,
    value_tokens: int,
    machine: Machine,
    seen: Seen | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return a micro-batch's share of the loss, a scalar, and sums for metrics.

    The loss is that of the policy, plus that of a critic on the same backbone. ``denominator``
    belongs to the policy loss of the whole step, ``value_tokens`` to the value loss. ``seen`` gets
    the values of the tokens.
    """
    model = learner.model

    def passes() -> tuple[Tensor, Tensor, Tensor | None]:
        with in_precision(machine):
            hidden = states(model.base_model, forest)
            bonus = loss.entropy_bonus > 0
            return hidden, *token_logprobs(model, hidden, forest.targets, temperature, bonus)

    hidden, logprobs, entropies = sharding.run(model, passes)
    views = _views(forest, logprobs, entropies)
    value, metrics = policy_loss(views, loss, denominator)
    if seen is not None:
        token_values.add(seen, forest, views, loss)
    critic = learner.critic
    if critic and critic.backbone is None:
        part, more = _value_loss(critic, forest, hidden, value_tokens)
        value, metrics = value + critic.coefficient * part, {**metrics, **more}
    return value, {name: float(entry) for name, entry in metrics.items()}


def _views(forest: Forest, logprobs: Tensor, entropies: Tensor | None) -> Views:
    """Gather values of unique tokens [P] into leaves [L, S]; autograd sums their gradients."""
    known = forest.known
    logprobs = logprobs[forest.entries]
    reference = known.get("reference_logprobs")
    old = known.get("old_logprobs", logprobs.detach())
    entropies = known["entropies"] if entropies is None else entropies[forest.entries]
    return Views(
        logprobs=logprobs[forest.views],
        old_logprobs=old[forest.views],
        advantages=forest.advantages,
        mask=forest.mask,
        segments=forest.segments,
        sampler_logprobs=known["sampler_logprobs"][forest.views],
        entropies=entropies[forest.views],
        reference_logprobs=None if reference is None else reference[forest.views],
    )


def _value_loss(
    critic: Critic, forest: Forest, hidden: Tensor, value_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the value loss, a scalar, and sums for metrics."""
    assert forest.returns is not None and forest.values is not None, "a critic has its returns"
    total, metrics = value_loss(
        values(critic, hidden)[forest.entries][forest.views],
        forest.values,
        forest.returns,
        forest.mask,
        critic.value_clip,
    )
    return total / value_tokens, {"value_loss": total.detach(), **metrics}


def _critic_step(
    critic: Critic,
    trees: Sequence[Credited],
    settings: Update,
    machine: Machine,
    value_tokens: int,
) -> dict[str, float]:
    """Take one optimizer step of a critic on its own backbone, over all leaves."""
    assert critic.optimizer, "prepare_optimizer comes first"
    form = form_for(machine.device)
    batch = [(tree, range(len(tree.credits))) for tree in trees]
    sums: dict[str, float] = {}
    critic.optimizer.zero_grad(set_to_none=True)
    with attending(critic.backbone, form), recomputing(critic.backbone, settings.recompute):
        cost = training_cost(critic.backbone, form)

        def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
            with in_precision(machine):
                hidden = sharding.run(critic.backbone, partial(states, critic.backbone, forest))
            part, metrics = _value_loss(critic, forest, hidden, value_tokens)
            return critic.coefficient * part, {name: float(v) for name, v in metrics.items()}

        pieces = _forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)
        for metrics in _gradients(critic.weights(), share, pieces):
            del metrics["loss"]
            _add_up(sums, metrics)
    torch.nn.utils.clip_grad_norm_(critic.weights(), settings.gradient_clip)
    critic.optimizer.step()
    return sums


def apply_gradients(learner: Learner, settings: Update) -> float:
    """Clip gradients, warm up, step; return the gradient norm before clipping.

    Raises RuntimeError if the norm is not finite.
    """
    assert learner.optimizer
    weights = _weights(learner.optimizer)
    norm = float(sharding.whole(torch.nn.utils.clip_grad_norm_(weights, settings.gradient_clip)))
    if not math.isfinite(norm):
        raise RuntimeError(
            f"the gradient of update {learner.updates + 1} is {norm}: lower "
            "reinforce.update.learning_rate, or look at the newest trees in the ledger"
        )
    learner.updates += 1
    share = min(1.0, learner.updates / max(1, settings.warmup_updates))
    for group in learner.optimizer.param_groups:
        group["lr"] = settings.learning_rate * share
    learner.optimizer.step()
    return norm


NOTHING = {"loss": 0.0, "trained_tokens": 0.0, "trained_views": 0.0}  # sums before any step
COMBINE: dict[str, Callable[[float, float], float]] = {
    "ratio_highest": max,
    "mismatch_highest": max,
    "ratio_lowest": min,
}
OVER_TOKENS = ("clip_low", "clip_high", "clip_dual", "kl", "entropy", "importance_weight")
WHERE_GIVEN = ("kl_reference", "value_loss", "value_clipped", "value_error")  # also over tokens


def _add_up(sums: dict[str, float], new: dict[str, float]) -> None:
    """Combine ``new`` into ``sums`` in place: sums are added, extremes by COMBINE."""
    for name, value in new.items():
        combine = COMBINE.get(name, lambda old, value: old + value)
        sums[name] = combine(sums[name], value) if name in sums else value


def _averages(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of all steps of a batch; turn sums over tokens into means."""
    total: dict[str, float] = {}
    for step in steps:
        _add_up(total, step)
    tokens = max(1.0, total.get("tokens", 0.0))
    names = (*OVER_TOKENS, *(name for name in WHERE_GIVEN if name in total))
    means = {name: total.get(name, 0.0) / tokens for name in names}
    means["trained_entropy"] = means.pop("entropy")
    extremes = {name: total[name] for name in COMBINE if name in total}
    return {
        **means,
        **extremes,
        "loss": total["loss"] / len(steps),
        "gradient_norm": total.get("gradient_norm", 0.0) / len(steps),
        "trained_tokens": total["trained_tokens"],
        "trained_views": total["trained_views"],
        "optimizer_steps": total.get("optimizer_steps", 0.0),
        "clip_fraction": means["clip_low"] + means["clip_high"],
    }
