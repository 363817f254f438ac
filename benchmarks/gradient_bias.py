"""Compare the expected gradient of rows with the policy gradient, by exact enumeration.

    python -m benchmarks.gradient_bias

A policy of a table (three actions a step) rolls out trees that branch where a rule says, and every
outcome is enumerated with its probability. Trees, credit, leaf views, loss and denominator are the
project's own, and so is the pass over the policy, whose hidden states are one-hot. Prints for
each row how the first action's logits move in the first case, scaled to the first of them, and in
each case the cosine between the expected gradient and that of E[r]: with one tree and with 16 trees
an optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from params.schema.algorithms import Algorithm, load_algorithms
from params.schema.base import Machine
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.attention import GATHERED
from tasks.learning.credit import credited
from tasks.learning.packing import Credited, Forest, forest, lay_out
from tasks.policy.resident import Learner
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

Actions = tuple[int, int]  # of a trajectory
Outcome = tuple[tuple[int, tuple[int, ...]], ...]  # first action and second ones, path by path
Gradient = NDArray[np.float64]

ASKED, TOLD, FILLER = 3, 4, 5  # tokens beside the actions 0, 1, 2; fillers carry no gradient
STATES, TOKENS = 5, 6  # before the first action, after each of them, before a filler
MACHINE = Machine(threads=1, device="cpu", precision="float32")
BUDGET = 8  # response tokens
FOLDER = Path()  # the policy has none
CERTAIN = 40.0  # logit of what is sampled with probability 1


@dataclass(frozen=True)
class Case:
    """A policy, the worth of its trajectories, and how a rollout of it branches."""

    first: Sequence[float]  # probability of each first action
    second: Sequence[Sequence[float]]  # of each second action, by the first
    worth: Sequence[Sequence[float]]  # reward by first and second action
    initial: int  # paths from the prompt at first
    branch: int  # further paths at a branching point
    wants: Callable[[Actions], bool] = lambda path: path[0] == 2  # whether it branches between them
    leaves: int | None = None  # exactly so many, new paths from the prompt fill up; None: no limit
    fillers: Sequence[int] = (0, 0, 0)  # further tokens of a turn, by its action

    def paths(self) -> dict[Actions, float]:
        """Return the probability of each trajectory."""
        every = product(range(3), range(3))
        return {(a, b): self.first[a] * self.second[a][b] for a, b in every if self.second[a][b]}

    def outcomes(self) -> dict[Outcome, float]:
        """Return the probability of each tree; the order of paths is none of it."""
        found: dict[Outcome, float] = defaultdict(float)
        for paths in product(self.paths().items(), repeat=self.initial):
            left = float("inf") if self.leaves is None else self.leaves - self.initial
            added = []
            for path, _ in paths:  # in their order, while the budget lasts
                added.append(int(min(self.branch, left)) if self.wants(path) else 0)
                left -= added[-1]
            chance = prod(probability for _, probability in paths)
            roots = [self._branched(path, n) for (path, _), n in zip(paths, added, strict=True)]
            roots += [self._filled(int(left))] if self.leaves else []
            for parts in product(*(root.items() for root in roots)):
                outcome = tuple(sorted(path for some, _ in parts for path in some))
                found[outcome] += chance * prod(probability for _, probability in parts)
        return found

    def _branched(self, path: Actions, added: int) -> dict[Outcome, float]:
        """Return what a path becomes with so many others after its first action."""
        found: dict[Outcome, float] = defaultdict(float)
        for others in product(range(3), repeat=added):
            chance = prod(self.second[path[0]][other] for other in others)
            if chance:
                found[((path[0], tuple(sorted((path[1], *others)))),)] += chance
        return found

    def _filled(self, count: int) -> dict[Outcome, float]:
        """Return the new paths from the prompt that fill up a budget."""
        found: dict[Outcome, float] = defaultdict(float)
        for paths in product(self.paths().items(), repeat=count):
            filled = tuple(sorted((a, (b,)) for (a, b), _ in paths))
            found[filled] += prod(probability for _, probability in paths)
        return found

    def table(self) -> torch.Tensor:
        """Return the logits of each token in each state. [TOKENS, STATES]"""
        logits = torch.full((TOKENS, STATES), -CERTAIN)
        for state, probabilities in enumerate([self.first, *self.second]):
            logits[:3, state] = torch.tensor(probabilities).log().clamp(min=-CERTAIN)
        logits[FILLER, 4] = CERTAIN
        return logits

    def policy_gradient(self) -> Gradient:
        """Return the gradient of E[r] by the table."""
        logits = self.table().double().requires_grad_()
        logs = torch.log_softmax(logits, 0)
        total = sum((logs[a, 0] + logs[b, 1 + a]).exp() * self.worth[a][b] for a, b in self.paths())
        assert isinstance(total, torch.Tensor)
        return torch.autograd.grad(total, logits)[0].numpy()

    def tree(self, outcome: Outcome) -> tuple[Tree, list[float]]:
        """Return an outcome as a tree, with the rewards of its leaves."""
        logs = torch.log_softmax(self.table(), 0)
        tree = Tree(Question("q", "toy", "", ("1",)))

        def add(parent: int, kind: str, tokens: Sequence[int], states: Sequence[int] = ()) -> int:
            logprobs = logs[list(tokens[: len(states)]), list(states)].numpy()
            sizes = np.array(tokens, np.int32), logprobs, np.zeros_like(logprobs)
            tree.nodes.append(Node(parent, kind, "", "", *sizes))
            return len(tree.nodes) - 1

        def turn(parent: int, action: int, state: int) -> int:
            more = self.fillers[action]
            return add(parent, TURN, [action] + [FILLER] * more, [state] + [4] * more)

        prompt, rewards = add(-1, PROMPT, [ASKED]), []
        for first, seconds in outcome:
            result = add(turn(prompt, first, 0), RESULT, [TOLD])
            for second in seconds:
                tree.leaves.append(turn(result, second, 1 + first))
                rewards.append(self.worth[first][second])
        return tree, rewards


@dataclass(frozen=True)
class OneHotLayers:
    """The layers of a ``Table``, over forests."""

    states: Callable[..., SimpleNamespace]
    config = SimpleNamespace(_attn_implementation=GATHERED)

    def __call__(self, *arguments: Any, **named: Any) -> SimpleNamespace:
        """Return the states."""
        return self.states(*arguments, **named)


class Table(torch.nn.Module):
    """A policy whose hidden states are one-hot, so that its head's weights are a table of logits.

    What decides is the last action, and whether fillers have to follow it.
    """

    base_model_prefix = "base_model"  # as transformers names the layers of a model

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.head = torch.nn.Linear(STATES, TOKENS, bias=False)
        self.head.weight.data = case.table()
        self.base_model = OneHotLayers(self._states)

    def get_output_embeddings(self) -> torch.nn.Linear:
        """Return the head."""
        return self.head

    def forward(self) -> SimpleNamespace:
        """Return the logits of the states."""
        return SimpleNamespace(logits=self.head(self.base_model().last_hidden_state))

    def _states(self, input_ids: torch.Tensor, forest: Forest, **_: Any) -> SimpleNamespace:
        tokens, states = input_ids[0].tolist(), [0] * input_ids.shape[1]
        for tree in forest.layout.trees:
            for path in tree.paths:
                action = missing = 0
                for slot in path.tolist():
                    if tokens[slot] < 3:
                        action, missing = tokens[slot], self.case.fillers[tokens[slot]]
                    missing -= tokens[slot] == FILLER
                    after = {ASKED: 0, TOLD: 1 + action}.get(tokens[slot], 0)
                    states[slot] = 4 if missing > 0 else after
        one_hot = torch.nn.functional.one_hot(torch.tensor(states), STATES).float()
        return SimpleNamespace(last_hidden_state=one_hot[None])


@dataclass(frozen=True)
class Expected:
    """The expected gradient of a row: minus that of its loss."""

    gradient: Gradient
    exact: Gradient

    @property
    def cosine(self) -> float:
        """Return the cosine between it and the policy gradient."""
        norms = np.linalg.norm(self.gradient) * np.linalg.norm(self.exact)
        return float((self.gradient * self.exact).sum() / norms)

    @property
    def direction(self) -> Gradient:
        """Return its entries for the first action, over the first of them. [3]"""
        return self.gradient[:3, 0] / self.gradient[0, 0]


def expected(case: Case, row: Algorithm, trees: int = 1) -> Expected:
    """Return the expected gradient of an optimizer step over so many trees.

    Loss and denominator are both sums over trees, so E[losses / denominators] follows from the
    distribution of what a tree adds to each. All outcomes are one pass, in which the weight of each
    is multiplied by its probability and by E[1 / the step's denominator].
    """
    loss = assemble(row, BUDGET).loss
    outcomes = case.outcomes()
    trees_grown, rewards = zip(*map(case.tree, outcomes), strict=True)
    batch = credited(trees_grown, rewards, row, BUDGET, [""] * TOKENS)
    sizes = [learner.loss_denominator([own], loss) for own in batch]
    others = _sums(sizes, list(outcomes.values()), trees - 1)
    parts = [
        trees * chance * sum(p / (size + rest) for rest, p in others.items())
        for chance, size in zip(outcomes.values(), sizes, strict=True)
    ]
    weighted = [_times(own, part) for own, part in zip(batch, parts, strict=True)]
    layout = lay_out([(own, range(len(own.credits))) for own in weighted])
    model = Table(case)
    policy = Learner(FOLDER, model, None)
    value, _ = learner.objective(policy, forest(layout, "cpu"), loss, 1.0, 1.0, 1, MACHINE)
    value.backward()
    assert model.head.weight.grad is not None
    return Expected(-model.head.weight.grad.double().numpy(), case.policy_gradient())


def _times(own: Credited, factor: float) -> Credited:
    """Return a tree whose leaves have so many times their weight."""
    credits = [replace(credit, weight=factor * credit.weight) for credit in own.credits]
    return replace(own, credits=credits)


def _sums(sizes: Sequence[float], chances: Sequence[float], count: int) -> Mapping[float, float]:
    """Return the distribution of the sum of so many draws of a size."""
    single: dict[float, float] = defaultdict(float)
    for size, chance in zip(sizes, chances, strict=True):
        single[round(size, 9)] += chance
    found: Mapping[float, float] = {0.0: 1.0}
    for _ in range(count):
        more: dict[float, float] = defaultdict(float)
        for (rest, p), (size, chance) in product(found.items(), single.items()):
            more[round(rest + size, 9)] += p * chance
        found = more
    return found


ONE_CHOICE = (0.5, 0.3, 0.2), ((1.0, 0.0, 0.0),) * 3, ((1.0,) * 3, (0.0,) * 3, (0.3,) * 3)
TWO_CHOICES = (
    (0.5, 0.3, 0.2),
    ((0.7, 0.3, 0.0), (0.4, 0.6, 0.0), (0.5, 0.5, 0.0)),
    ((1.0, 0.2, 0.0), (0.0, 0.6, 0.0), (0.0, 0.9, 0.0)),
)
CASES = {
    "one choice, 3 leaves": Case(*ONE_CHOICE, initial=4, branch=2),
    "one choice, 6 leaves": Case(*ONE_CHOICE, initial=4, branch=5),
    "two choices, 2 leaves": Case(*TWO_CHOICES, initial=4, branch=1),
    "two choices, longer turns": Case(*TWO_CHOICES, initial=4, branch=1, fillers=(0, 0, 3)),
    "one choice, budget of 8": Case(*ONE_CHOICE, initial=4, branch=2, leaves=8),
    "two choices, budget of 6": Case(*TWO_CHOICES, initial=3, branch=2, leaves=6),
    "two choices, judged after": Case(
        *TWO_CHOICES, initial=3, branch=2, wants=lambda path: path == (2, 1)
    ),
}
ROWS = load_algorithms()
BEFORE = {"estimator": "tree_value", "averaging": "sequence_mean", "counts": "leaves"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # a row, and other choices of its
    "arpo": ("arpo", {}),
    "arpo_hard, gpg": ("arpo_hard", {}),
    "arpo without std": ("arpo", {"estimator": {"kind": "group_relative", "std": False}}),
    "tree_value, as it was": ("tree_value", BEFORE),
    "the same with counts: paths": ("tree_value", {**BEFORE, "counts": "paths"}),
    "... and leave_one_out": ("tree_value", {"averaging": "sequence_mean"}),
    "tree_value (and constant_length)": ("tree_value", {}),
}


def variant(name: str) -> Algorithm:
    """Return one of ``VARIANTS``."""
    row, changes = VARIANTS[name]
    return Algorithm.model_validate({**ROWS[row].model_dump(by_alias=True), **changes})


def main() -> None:
    """Print the table, a row a variant: the direction in the first case, and all cosines."""
    print("| row |", " | ".join(["direction", *CASES]), "|")
    print("|---|---|" + "---:|" * len(CASES))
    for name in VARIANTS:
        ones, many = (
            [expected(case, variant(name), trees) for case in CASES.values()] for trees in (1, 16)
        )
        cells = [", ".join(f"{entry:.3f}" for entry in ones[0].direction)]
        cells += [f"{a.cosine:.4f}, {b.cosine:.4f}" for a, b in zip(ones, many, strict=True)]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
