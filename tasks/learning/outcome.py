"""Train the reward model on trajectories with labels, and score trajectories. Torch only.

ARPO (arXiv 2507.19849), Algorithm 1, line 23, names a reward model that is trained at the end of an
iteration, and leaves it open. **Chosen**: a copy of the policy's backbone with a scalar head on the
last token, learned by binary cross-entropy or from pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from params.schema.base import Machine
from params.schema.reward_model import RewardModel
from tasks.learning.attention import attending, form_of
from tasks.learning.gradients import add_gradients
from tasks.learning.packing import Batch, Credited, Forest, last_slots, uncredited
from tasks.learning.passes import forests_of_lanes, states, training_cost
from tasks.learning.replay import Example, draw
from tasks.policy.machine import in_precision
from tasks.policy.optimizer import AdamW
from tasks.policy.outcome_model import OutcomeModel
from tasks.policy.parallel import side_by_side
from tasks.trees.tree import Tree

ADAM_BETAS = (0.9, 0.95)
Leaf = tuple[int, int]  # id of a credited tree, and a leaf of it


def classification(logits: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits [B]: the first half succeeded, the second failed.

    The mean of -log sigmoid(z) over successes and of -log(1 - sigmoid(z)) over failures.
    """
    success, failure = logits.chunk(2)
    return -torch.cat([logsigmoid(success), logsigmoid(-failure)]).mean()


def pairs(logits: Tensor) -> Tensor:
    """Return the Bradley-Terry loss of logits [B]: entry i beat entry B/2 + i.

    The mean of -log sigmoid(z_success - z_failure).
    """
    success, failure = logits.chunk(2)
    return -logsigmoid(success - failure).mean()


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "classification": classification,
    "pairs": pairs,
}


@dataclass
class OutcomeLearner:
    """A reward model that learns, with its optimizer."""

    model: OutcomeModel
    settings: RewardModel
    machine: Machine
    optimizer: torch.optim.Optimizer


def begin(model: OutcomeModel, settings: RewardModel, machine: Machine) -> OutcomeLearner:
    """Return a training with a new optimizer."""
    optimizer = AdamW(
        model.weights(),
        lr=settings.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    return OutcomeLearner(model, settings, machine, optimizer)


def train(
    training: OutcomeLearner,
    trees: Sequence[Tree],
    examples: Sequence[Example],
    steps: range,
    key: Sequence[int],
) -> list[float]:
    """Take the optimizer steps with these numbers; return the loss of each.

    What step n draws from the examples is decided by ``key`` and n. Raises ValueError where they
    have no two kinds of labels.
    """
    batch = [uncredited(tree) for tree in trees]
    training.model.backbone.eval()  # as it scores: without dropout
    return [_step(training, batch, examples, number, [*key, number]) for number in steps]


def _step(
    training: OutcomeLearner,
    trees: Sequence[Credited],
    examples: Sequence[Example],
    number: int,
    key: Sequence[int],
) -> float:
    """Take one optimizer step; return its loss.

    The loss may compare trajectories of different micro-batches. So its gradient by the logits is
    computed first, from a pass without a gradient, and each micro-batch then adds its share.
    """
    settings, model = training.settings, training.model
    indices = draw(examples, settings.loss, settings.batch, key)
    drawn = [examples[index] for index in indices]
    batch = _batch(trees, [(one.tree, one.leaf) for one in drawn])
    scored = _score(model, batch, settings.micro_batch_tokens, training.machine)
    names = [(id(trees[one.tree]), one.leaf) for one in drawn]
    logits = torch.tensor([scored[name] for name in names], requires_grad=True)
    loss = LOSSES[settings.loss](logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    factors: dict[Leaf, float] = {}
    for name, factor in zip(names, gradient.tolist(), strict=True):
        factors[name] = factors.get(name, 0.0) + factor  # one that is drawn twice counts twice
    _add_gradients(training, batch, factors)
    warm = min(1.0, (number + 1) / max(1, settings.warmup_steps))
    for group in training.optimizer.param_groups:
        group["lr"] = settings.learning_rate * warm
    training.optimizer.step()
    return float(loss.detach())


def _add_gradients(training: OutcomeLearner, batch: Batch, factors: Mapping[Leaf, float]) -> None:
    """Set the gradient of the sum of factor times logit over the leaves of a batch, clipped."""
    model, settings, machine = training.model, training.settings, training.machine

    def share(forest: Forest) -> tuple[Tensor, dict[str, float]]:
        logits = _logits(model, forest, machine)
        leaf_factors = torch.tensor(
            [factors[leaf] for leaf in _leaves(forest)], device=logits.device
        )
        return (logits * leaf_factors).sum(), {}

    training.optimizer.zero_grad(set_to_none=True)
    with attending(model.backbone, form_of(model.backbone, machine.device)):
        pieces = _micro_batches(model, batch, settings.micro_batch_tokens, machine)
        add_gradients(model.weights(), share, pieces)
    norm = torch.nn.utils.clip_grad_norm_(model.weights(), settings.gradient_clip)
    if not torch.isfinite(norm):
        raise ValueError(
            f"the gradient of the reward model is {norm:g}: lower reward_model.learning_rate, or "
            "use machine.precision float32"
        )


# ---------------------------------------------------------------- scores


def logits_of(
    model: OutcomeModel,
    trees: Sequence[Tree],
    trajectories: Sequence[tuple[int, int]],
    tokens: int,
    machine: Machine,
) -> NDArray[np.float64]:
    """Return the logits of trajectories of some trees, before calibration: [N].

    ``trajectories``: index of a tree, and a leaf of it. ``tokens``: most tokens of a forward pass;
    a shared token counts once.
    """
    credited = {tree_index: uncredited(trees[tree_index]) for tree_index, _ in trajectories}
    logits = _score(model, _batch(credited, trajectories), tokens, machine)
    return np.array(
        [logits[id(credited[tree_index]), leaf] for tree_index, leaf in trajectories], np.float64
    )


def _batch(
    trees: Sequence[Credited] | Mapping[int, Credited], trajectories: Iterable[tuple[int, int]]
) -> Batch:
    """Return the trees of ``trajectories`` with these leaves, each once."""
    leaves: dict[int, set[int]] = {}
    for tree, leaf in trajectories:
        leaves.setdefault(tree, set()).add(leaf)
    return [(trees[tree], sorted(of_tree)) for tree, of_tree in sorted(leaves.items())]


def _score(model: OutcomeModel, batch: Batch, tokens: int, machine: Machine) -> dict[Leaf, float]:
    """Return the logit of each leaf of a batch, without gradients."""
    logits_by_leaf: dict[Leaf, float] = {}
    training = model.backbone.training
    model.backbone.eval()

    @torch.no_grad()  # applies to the current thread, so each lane enters it
    def lane(pieces: Iterable[Forest]) -> None:
        for forest in pieces:
            logits = _logits(model, forest, machine).cpu().tolist()
            logits_by_leaf.update(zip(_leaves(forest), logits, strict=True))

    with attending(model.backbone, form_of(model.backbone, machine.device)):
        side_by_side(lane, _micro_batches(model, batch, tokens, machine))
    model.backbone.train(training)
    return logits_by_leaf


def _micro_batches(
    model: OutcomeModel, batch: Batch, tokens: int, machine: Machine
) -> list[Iterator[Forest]]:
    cost = training_cost(model.backbone, form_of(model.backbone, machine.device))
    return forests_of_lanes(batch, tokens, cost, machine)


def _logits(model: OutcomeModel, forest: Forest, machine: Machine) -> Tensor:
    """Return the logit of each leaf of a forest [L], in float32, in the order of ``_leaves``."""
    with in_precision(machine):
        hidden = states(model.backbone, forest, last_slots(forest))
    return model.head(hidden.float())[:, 0]


def _leaves(forest: Forest) -> list[Leaf]:
    return [(id(tree.source), leaf) for tree in forest.layout.trees for leaf in tree.leaves]
