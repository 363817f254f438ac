"""Credit and weights of trees that branch again, against the gradient of the expected reward."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from params.schema.algorithms import load_algorithms
from tasks.learning.credit import credited
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

ROWS = load_algorithms()
STEPS = 3  # two actions in each
RANDOM = np.random.default_rng(3)
BEFORE = [actions for steps in range(STEPS) for actions in product(range(2), repeat=steps)]
POLICY = {actions: RANDOM.dirichlet([1, 1]) for actions in BEFORE}
WORTH = {actions: RANDOM.random() for actions in product(range(2), repeat=STEPS)}


def paths_after(actions):
    """How many paths go on after these actions, of which the last one decides."""
    return {1: (1, 2), 2: (3, 1)}[len(actions)][actions[-1]]


def grown(actions=()):
    """The probability of what one path becomes: (action, what follows it, path by path)."""
    found = defaultdict(float)
    for action, chance in enumerate(POLICY[actions]):
        after = (*actions, action)
        if len(after) == STEPS:
            found[action, ()] = chance
        else:
            found |= joint(grown(after), paths_after(after), (action,), chance)
    return found


def joint(single, count, begin=(), chance=1.0):
    found = defaultdict(float)
    for parts in product(single.items(), repeat=count):
        key = (*begin, tuple(sorted(part for part, _ in parts)))
        found[key] += chance * np.prod([probability for _, probability in parts])
    return found


def tree_of(outcome):
    """A tree, and the actions of its leaves."""
    tree, leaves = Tree(Question("q", "toy", "", ("1",))), []

    def add(parent, kind, token):
        values = np.zeros(int(kind == TURN), np.float32)
        tree.nodes.append(Node(parent, kind, "", "", np.array([token], np.int32), values, values))
        return len(tree.nodes) - 1

    def grow(parent, paths, actions):
        for action, following in paths:
            turn = add(parent, TURN, action)
            if following:
                grow(add(turn, RESULT, 2), following, (*actions, action))
            else:
                tree.leaves.append(turn)
                leaves.append((*actions, action))

    grow(add(-1, PROMPT, 3), outcome, ())
    return tree, leaves


def slopes(actions):
    """The gradient of each action's log-probability by the logits of all states."""
    rows = np.zeros((STEPS, len(BEFORE), 2))
    for step, action in enumerate(actions):
        state = BEFORE.index(actions[:step])
        rows[step, state] = np.eye(2)[action] - POLICY[actions[:step]]
    return rows


@pytest.mark.parametrize(("row", "unbiased"), [("tree_value", True), ("arpo_hard", False)])
def test_expected_gradient_where_paths_branch_again(row, unbiased):
    chances = dict.fromkeys(WORTH, 1.0)
    for actions, step in product(WORTH, range(STEPS)):
        chances[actions] *= POLICY[actions[:step]][actions[step]]
    exact = sum(chances[a] * worth * slopes(a).sum(0) for a, worth in WORTH.items())
    outcomes = joint(grown(), 2)
    trees, leaves = zip(*(tree_of(outcome) for (outcome,) in outcomes), strict=True)
    rewards = [[WORTH[actions] for actions in of_tree] for of_tree in leaves]
    batch = credited(trees, rewards, ROWS[row], STEPS, [""] * 4)
    found = np.zeros_like(exact)
    for own, of_tree, chance in zip(batch, leaves, outcomes.values(), strict=True):
        weights = [credit.weight for credit in own.credits]
        for credit, actions in zip(own.credits, of_tree, strict=True):
            views = credit.advantages[:, None, None] * slopes(actions)
            found += chance * credit.weight * views.sum(0) / sum(weights)
    assert np.allclose(found, exact, atol=1e-6) == unbiased
