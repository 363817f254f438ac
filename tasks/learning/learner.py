"""The policy that learns: its log-probabilities, its critic's values, its updates. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from params.schema.base import Machine
from params.schema.reinforce import Update
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
from tasks.policy.machine import in_precision
from tasks.policy.parallel import balanced_parts, lanes, side_by_side
from tasks.policy.resident import Critic, Learner
from tasks.trees.tree import Tree

Batch = Sequence[tuple[Credited, Sequence[int]]]  # trees, and which of their leaves

# Most logits (tokens x vocabulary) that exist at one time, by device. On a GPU each part must be
# large enough to be worth its pass over the gradient of the head.
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}


def states(backbone: Any, forest: Forest) -> Tensor:
    """Hidden states [P, hidden] from which the sampled tokens of a forest are predicted."""
    output = backbone(
        input_ids=forest.tokens, position_ids=forest.positions, use_cache=False, forest=forest
    )
    return output.last_hidden_state[0].index_select(0, forest.predicting)


def token_logprobs(
    model: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [P] of tokens at a temperature, and with ``entropy`` the entropies / ln|V|.

    At most ``LOGITS_AT_ONCE`` logits exist at one time; where that takes several parts, each is
    computed again in the backward pass instead of being kept. So memory grows with the tokens and
    with the vocabulary, not with their product.
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
    """Log-probabilities of the sampled tokens under ``model``, tree by tree and node by node."""

    def compute(forest: Forest) -> Tensor:
        with in_precision(machine):
            hidden = states(model.base_model, forest)
            return token_logprobs(model, hidden, forest.targets, temperature)[0]

    return _by_node(model, trees, compute, settings, machine)


def node_values(
    learner: Learner, trees: Sequence[Credited], settings: Update, machine: Machine
) -> list[ByNode]:
    """The critic's value before each sampled token, tree by tree and node by node."""
    critic = learner.critic
    assert critic, "an algorithm with a critic comes first"
    backbone = critic.backbone or learner.model.base_model

    def compute(forest: Forest) -> Tensor:
        with in_precision(machine):
            hidden = states(backbone, forest)
        return values(critic, hidden)

    return _by_node(backbone, trees, compute, settings, machine)


def values(critic: Critic, states_PH: Tensor) -> Tensor:
    """V(s) [P] from hidden states; in float32, since returns differ by less than bf16 can say."""
    return critic.head(states_PH.float())[:, 0]


def _by_node(
    model: Any,
    trees: Sequence[Credited],
    compute: Callable[[Forest], Tensor],
    settings: Update,
    machine: Machine,
) -> list[ByNode]:
    batch = [(tree, range(len(tree.tree.leaves))) for tree in trees]
    form = form_for(machine.device)
    found: dict[int, list[Floats]] = {id(tree): _blank(tree.tree) for tree in trees}
    training = model.training
    model.eval()

    @torch.no_grad()  # a mode of the thread: each lane enters it
    def lane(pieces: Iterable[Forest]) -> None:
        for forest in pieces:
            for tree, node, numbers in to_nodes(forest, compute(forest)):
                found[id(tree)][node] = numbers

    with attending(model, form):
        cost = _cost(model, form)
        side_by_side(lane, _dealt(batch, settings.micro_batch_tokens, cost, machine))
    model.train(training)
    return [found[id(tree)] for tree in trees]


def _blank(tree: Tree) -> list[Floats]:
    return [np.zeros(0, np.float32)] * len(tree.nodes)


def _cost(model: Any, form: str) -> Cost:
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
) -> dict[str, float]:
    """One batch's optimizer steps: epochs x mini-batches. Returns metrics, averaged over tokens.

    A mini-batch holds whole trees, in an order drawn from ``seed``. With one step a batch, the
    policy that learns is the one that sampled, and no pass is needed for the old log-probabilities;
    with more, they are computed first.
    """
    learner.changed = True
    if settings.epochs * settings.mini_batches > 1:
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
            for part in np.array_split(order.permutation(len(trees)), count):
                chosen = [trees[i] for i in part]
                sums.append(_step(learner, chosen, loss, settings, temperature, machine))
    return _averages(sums or [NOTHING])


@contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Let layers keep only what they are fed, and compute the rest again for the backward pass.

    That is activation checkpointing (arXiv 1604.06174, section 4.1), a layer a segment. As it was
    before, afterwards. Raises ValueError for an architecture that cannot.
    """
    if not wanted:
        yield
        return
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"reinforce.update.recompute is true, and {type(model).__name__} keeps its activations "
            "whatever is asked of it: set it to false, or take another policy"
        )
    training = model.training
    model.train()  # layers recompute in this mode only
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # a need of the other, reentrant, form alone
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
) -> dict[str, float]:
    """One optimizer step; gradients of its micro-batches add up."""
    assert learner.optimizer, "prepare_optimizer comes first"
    denominator = _denominator(trees, loss)
    value_tokens = _sampled_views(trees)
    sums = dict(NOTHING)
    learner.optimizer.zero_grad(set_to_none=True)

    def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
        value, metrics = _objective(
            learner, forest, loss, temperature, denominator, value_tokens, machine
        )
        metrics["trained_tokens"] = len(forest.targets)
        metrics["trained_views"] = float(forest.mask.sum())
        return value, metrics

    pieces = _micro_batches(learner, trees, loss, settings, machine)
    for metrics in _gradients(_weights(learner.optimizer), share, pieces):
        _add_up(sums, metrics)
    if sums["trained_tokens"]:
        sums["gradient_norm"] = _apply(learner, settings)
    if learner.critic and learner.critic.backbone:
        _add_up(sums, _critic_step(learner.critic, trees, settings, machine, value_tokens))
    return sums


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _gradients(
    weights: Sequence[Tensor],
    share: Callable[[Forest], tuple[Tensor, dict[str, float]]],
    pieces: Sequence[Iterable[Forest]],
) -> list[dict[str, float]]:
    """Add the gradients of each forest's share of the loss to the weights'; metrics of each.

    With several pieces each lane adds its own up, and the lanes' are added in their order, so that
    equal runs stay equal.
    """
    if len(pieces) == 1:
        found = []
        for forest in pieces[0]:
            value, metrics = share(forest)
            value.backward()
            found.append({"loss": float(value.detach()), **metrics})
        return found

    def lane(forests: Iterable[Forest]) -> tuple[list[Tensor | None], list[dict[str, float]]]:
        total: list[Tensor | None] = [None] * len(weights)
        said = []
        for forest in forests:
            value, metrics = share(forest)
            own = torch.autograd.grad(value, list(weights), allow_unused=True)
            total = [_plus(one, other) for one, other in zip(total, own, strict=True)]
            said.append({"loss": float(value.detach()), **metrics})
        return total, said

    done = side_by_side(lane, pieces)
    for total, _ in done:
        for weight, gradient in zip(weights, total, strict=True):
            weight.grad = _plus(weight.grad, gradient)
    return [metrics for _, said in done for metrics in said]


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def _dealt(batch: Batch, tokens: int, cost: Cost, machine: Machine) -> list[Iterator[Forest]]:
    """The forests of a batch, for each lane those of its own trees; at least one lane.

    Each is laid out when its turn comes, so that a lane holds one at a time.
    """
    chosen = [(tree, leaves) for tree, leaves in batch if len(leaves)]
    sizes = [sum(len(credit.advantages) for credit in tree.credits) for tree, _ in chosen]
    hands = balanced_parts(sizes, lanes(machine.device, len(chosen)))
    return [forests([chosen[i] for i in hand], tokens, cost, machine.device) for hand in hands]


def _micro_batches(
    learner: Learner, trees: Sequence[Credited], loss: Loss, settings: Update, machine: Machine
) -> list[Iterator[Forest]]:
    """Forests of the leaves that have a gradient, for each lane its own.

    Leaves without any advantage skip the model where no other term of the loss needs them; they
    still count in the denominator.
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
    cost = _cost(learner.model, form_for(machine.device))
    return _dealt(batch, settings.micro_batch_tokens, cost, machine)


def _denominator(trees: Sequence[Credited], loss: Loss) -> float:
    credits = [credit for tree in trees for credit in tree.credits]
    lengths = torch.tensor([len(credit.advantages) for credit in credits])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    segments = torch.zeros(mask.shape, dtype=torch.int64)
    segments[mask] = torch.from_numpy(np.concatenate([credit.segments for credit in credits]))
    return loss.averaging.denominator(lengths, loss.ratio.count(segments, mask))


def _sampled_views(trees: Sequence[Credited]) -> int:
    return sum(len(credit.advantages) for tree in trees for credit in tree.credits)


def _objective(
    learner: Learner,
    forest: Forest,
    loss: Loss,
    temperature: float,
    denominator: float,
    value_tokens: int,
    machine: Machine,
) -> tuple[Tensor, dict[str, float]]:
    """A micro-batch's share of the loss: of the policy, and of a critic on the same backbone."""
    with in_precision(machine):
        hidden = states(learner.model.base_model, forest)
        logprobs, entropies = token_logprobs(
            learner.model, hidden, forest.targets, temperature, loss.entropy_bonus > 0
        )
    value, metrics = policy_loss(_views(forest, logprobs, entropies), loss, denominator)
    critic = learner.critic
    if critic and critic.backbone is None:
        part, more = _value_loss(critic, forest, hidden, value_tokens)
        value, metrics = value + critic.coefficient * part, {**metrics, **more}
    return value, {name: float(entry) for name, entry in metrics.items()}


def _views(forest: Forest, logprobs: Tensor, entropies: Tensor | None) -> Views:
    """Values of unique tokens [P], gathered into leaves [L, S]: autograd adds the shares up."""
    known = forest.known
    reference = known.get("reference_logprobs")
    old = known.get("old_logprobs", logprobs.detach())
    entropies = known["entropies"] if entropies is None else entropies
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
    assert forest.returns is not None and forest.values is not None, "a critic has its returns"
    total, metrics = value_loss(
        values(critic, hidden)[forest.views],
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
    """One optimizer step of a critic on its own backbone, over all leaves."""
    assert critic.optimizer, "prepare_optimizer comes first"
    form = form_for(machine.device)
    batch = [(tree, range(len(tree.credits))) for tree in trees]
    sums: dict[str, float] = {}
    critic.optimizer.zero_grad(set_to_none=True)
    with attending(critic.backbone, form), recomputing(critic.backbone, settings.recompute):
        cost = _cost(critic.backbone, form)

        def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
            with in_precision(machine):
                hidden = states(critic.backbone, forest)
            part, metrics = _value_loss(critic, forest, hidden, value_tokens)
            said = {name: float(entry) for name, entry in metrics.items()}
            return critic.coefficient * part, said

        pieces = _dealt(batch, settings.micro_batch_tokens, cost, machine)
        for metrics in _gradients(critic.weights(), share, pieces):
            del metrics["loss"]
            _add_up(sums, metrics)
    torch.nn.utils.clip_grad_norm_(critic.weights(), settings.gradient_clip)
    critic.optimizer.step()
    return sums


def _apply(learner: Learner, settings: Update) -> float:
    """Clip, warm up, step; the gradient norm before clipping."""
    assert learner.optimizer
    weights = _weights(learner.optimizer)
    norm = float(torch.nn.utils.clip_grad_norm_(weights, settings.gradient_clip))
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


NOTHING = {"loss": 0.0, "trained_tokens": 0.0, "trained_views": 0.0}  # sums of no step at all
COMBINE: dict[str, Callable[[float, float], float]] = {
    "ratio_highest": max,
    "mismatch_highest": max,
    "ratio_lowest": min,
}
OVER_TOKENS = ("clip_low", "clip_high", "clip_dual", "kl", "entropy", "importance_weight")
WHERE_GIVEN = ("kl_reference", "value_loss", "value_clipped", "value_error")  # also over tokens


def _add_up(sums: dict[str, float], new: dict[str, float]) -> None:
    for name, value in new.items():
        combine = COMBINE.get(name, lambda old, value: old + value)
        sums[name] = combine(sums[name], value) if name in sums else value


def _averages(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of all steps of one batch: token sums become means over tokens."""
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
        "clip_fraction": means["clip_low"] + means["clip_high"],
    }
