"""Train a policy and its critic on credited trees. Torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning import token_values
from tasks.learning.attention import attending, form_of
from tasks.learning.gradients import add_gradients, apply_gradients, weights_of
from tasks.learning.losses import Loss, policy_loss, value_loss
from tasks.learning.packing import Credited, Forest
from tasks.learning.passes import (
    forests_of_lanes,
    node_logprobs,
    recomputing,
    states,
    token_logprobs,
    training_cost,
    values,
)
from tasks.learning.token_values import Seen
from tasks.learning.views import Views
from tasks.policy import sharding, world
from tasks.policy.logits import backbone_of
from tasks.policy.machine import in_precision
from tasks.policy.resident import Learner, ValueModel


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
    pass over them. With ``settings.stop_at_kl`` a step whose tokens have moved further than that is
    not taken, nor are those after it; the first one always is. Raises RuntimeError for a gradient
    that is not finite.
    """
    learner.changed = True
    known = all(tree.old_logprobs is not None for tree in trees)
    if settings.epochs * settings.mini_batches > 1 and not known:
        trees = _with_old_logprobs(learner, trees, temperature, settings, machine)
    learner.model.eval()  # what samples has no dropout, nor noise in the choice of experts
    order = np.random.default_rng(seed)
    count = min(settings.mini_batches, len(trees))
    sums: list[dict[str, float]] = []
    planned = settings.epochs * count

    def one_pass(latest: Seen | None) -> bool:
        """Take the steps of an epoch; return whether another one may follow."""
        for part in np.array_split(order.permutation(len(trees)), count):
            mini_batch, most = [trees[i] for i in part], settings.stop_at_kl if sums else None
            made = _step(learner, mini_batch, loss, settings, temperature, machine, latest, most)
            if made is None:
                return False
            sums.append(made)
        return True

    with (
        attending(learner.model, form_of(learner.model, machine.device)),
        recomputing(learner.model, settings.recompute),
    ):
        for _ in range(settings.epochs if count else 0):
            latest: Seen | None = None if seen is None else {}
            goes_on = one_pass(latest)
            if seen is not None:
                seen.update(latest or {})
            if not goes_on:
                break
    if seen is not None:
        for others in world.gathered(dict(seen)):
            seen.update(others)
    metrics = _averages(sums or [NOTHING])
    if settings.stop_at_kl is not None:
        metrics["steps_left_out"] = 1 - len(sums) / planned if planned else 0.0
    return metrics


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
    most: float | None,
) -> dict[str, float] | None:
    """Take one optimizer step over all micro-batches; return sums for metrics.

    Where the policy has moved by more than ``most``, take none and return None.
    """
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
    for metrics in add_gradients(weights_of(learner.optimizer), share, pieces):
        _add_up(sums, metrics)
    if most is not None and _movement(sums) > most:
        learner.optimizer.zero_grad(set_to_none=True)
        return None
    if sums["trained_tokens"]:
        sums["gradient_norm"] = apply_gradients(learner, settings)
        sums["optimizer_steps"] = 1.0
    if learner.critic and learner.critic.backbone:
        _add_up(sums, _critic_step(learner.critic, trees, settings, machine, value_tokens))
    return sums


def _movement(sums: dict[str, float]) -> float:
    """Return the mean k3 over the tokens of a step, of all processes: KL(pi_old || pi)."""
    every = world.gathered((sums.get("kl", 0.0), sums.get("tokens", 0.0)))
    return sum(kl for kl, _ in every) / max(1.0, sum(tokens for _, tokens in every))


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
    cost = training_cost(learner.model, form_of(learner.model, machine.device))
    return forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)


def loss_denominator(trees: Sequence[Credited], loss: Loss) -> float:
    """Return what the loss of an optimizer step over these trees is divided by."""
    credits = [credit for tree in trees for credit in tree.credits]
    lengths = torch.tensor([len(credit.advantages) for credit in credits])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    segments = torch.zeros(mask.shape, dtype=torch.int64)
    segments[mask] = torch.from_numpy(np.concatenate([credit.segments for credit in credits]))
    weights = torch.tensor([credit.weight for credit in credits], dtype=torch.float64)
    return loss.averaging.denominator(lengths, loss.ratio.count(segments, mask), weights)


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
            hidden = states(backbone_of(model), forest, experts=forest.experts)
            bonus = loss.entropy_bonus > 0
            return hidden, *token_logprobs(model, hidden, forest.targets, temperature, bonus)

    hidden, logprobs, entropies = sharding.run(model, passes)
    views = _views(forest, logprobs, entropies)
    value, metrics = policy_loss(views, loss, denominator, forest.weights)
    if seen is not None:
        token_values.add(seen, forest, views, loss)
    critic = learner.critic
    if critic and critic.backbone is None:
        part, more = _value_loss(critic, forest, hidden, value_tokens)
        value, metrics = value + critic.coefficient * part, {**metrics, **more}
    if forest.experts:
        pairs = {"experts_differ": forest.experts.differing, "experts": forest.experts.pairs}
        metrics = {**metrics, **pairs}
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
    critic: ValueModel, forest: Forest, hidden: Tensor, value_tokens: int
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
    critic: ValueModel,
    trees: Sequence[Credited],
    settings: Update,
    machine: Machine,
    value_tokens: int,
) -> dict[str, float]:
    """Take one optimizer step of a critic on its own backbone, over all leaves."""
    assert critic.optimizer, "prepare_optimizer comes first"
    form = form_of(critic.backbone, machine.device)
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

        pieces = forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine)
        for metrics in add_gradients(critic.weights(), share, pieces):
            del metrics["loss"]
            _add_up(sums, metrics)
    torch.nn.utils.clip_grad_norm_(critic.weights(), settings.gradient_clip)
    critic.optimizer.step()
    return sums


NOTHING = {"loss": 0.0, "trained_tokens": 0.0, "trained_views": 0.0}  # sums before any step
COMBINE: dict[str, Callable[[float, float], float]] = {
    "ratio_highest": max,
    "mismatch_highest": max,
    "ratio_lowest": min,
}
OVER_TOKENS = (
    *("clip_low", "clip_high", "clip_dual", "kl", "entropy"),
    *("importance_weight", "importance_masked"),
)
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
    if "experts" in total:
        means["experts_differ"] = total["experts_differ"] / max(1.0, total["experts"])
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
