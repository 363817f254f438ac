"""What the estimators' tests share: random groups on trees, and the formulas as slow loops."""

import random
from functools import partial

import numpy as np
from hypothesis import strategies as st
from pydantic import TypeAdapter

from params.schema.algorithms import Estimator
from tasks.learning.algorithm import ESTIMATORS
from tasks.learning.estimators import LeafTrajectory

REWARDS = (-1.0, 0.0, 0.25, 0.5, 1.0, 1.1)
HALF = 0.75**0.5  # .8660: what two of four members with reward 1 get, the others 0


def estimator(kind, **settings):
    """The function ``groups -> advantages`` of a choice, as a row of the table would write it."""
    choice = TypeAdapter(Estimator).validate_python({"kind": kind, **settings})
    return partial(ESTIMATORS[kind], choice=choice)


def gae(gamma, lambda_, kind="gae", **settings):
    return estimator(kind, gamma=gamma, **{"lambda": lambda_}, **settings)


def episode(reward=0.0, length=1, **given):
    """An episode of one step with tokens that no other leaf of its kind is asked to share."""
    fields = {
        "token_rewards": np.zeros(length),
        "tokens": np.arange(length),
        "steps": np.zeros(length, np.int64),
        "states": ("start",) if length else (),
    }
    return LeafTrajectory(reward, **{**fields, **given})


def walk(states, rewards, final=0.0):
    """An episode of one token a step: the state and the reward of each."""
    return episode(
        final,
        len(states),
        token_rewards=np.array(rewards, np.float64),
        steps=np.arange(len(states)),
        states=tuple(states),
    )


def _grow(chance, stem, fresh, count, alphabet, charges):
    """A leaf: the ``stem`` (tokens, steps, states, token rewards, values) and ``fresh`` more."""
    tokens, steps, states, token_rewards, values = map(list, stem)
    for token in range(count, count + fresh):
        tokens.append(token)
        steps.append(steps[-1] + int(chance.random() < 0.5) if steps else 0)
        if steps[-1] == len(states):
            states.append(f"state {chance.randrange(alphabet)}")
        token_rewards.append(chance.choice(charges))
        values.append(chance.gauss())
    return tokens, steps, states, token_rewards, values


def _stem(chance, leaf):
    """The first tokens of a leaf, at least one of them, as another leaf's beginning."""
    keep = chance.randint(1, len(leaf[0]))
    tokens, steps, states, token_rewards, values = leaf
    kept = steps[keep - 1] + 1
    return tokens[:keep], steps[:keep], states[:kept], token_rewards[:keep], values[:keep]


@st.composite
def groups(draw):
    """Leaves of a random tree: shared beginnings, unequal lengths, equal and unequal rewards.

    Single members, one-token outputs, states that no other step has, and groups without spread
    are among them.
    """
    size, longest = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8]))
    chance = random.Random(draw(st.integers(0, 2**32 - 1)))
    alphabet, sharing = chance.choice([1, 3, 10**9]), chance.choice([0.0, 0.5, 1.0])
    charges = chance.choice([(0.0,), (0.0, -0.1, 0.05)])
    rewards = chance.sample(REWARDS, chance.randint(1, size))
    leaves = []
    for index in range(size):
        branches = index > 0 and chance.random() < sharing
        stem = _stem(chance, chance.choice(leaves)) if branches else ([],) * 5
        fresh = chance.randint(0 if branches else 1, longest)
        leaves.append(_grow(chance, stem, fresh, 100 * index, alphabet, charges))
    return [
        LeafTrajectory(
            rewards[index % len(rewards)],
            np.array(token_rewards),
            np.array(tokens, np.int64),
            np.array(steps, np.int64),
            tuple(states),
            np.array(values),
        )
        for index, (tokens, steps, states, token_rewards, values) in enumerate(leaves)
    ]


batches = st.lists(groups(), min_size=1, max_size=3)
factors = st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0])  # gamma and lambda


def slow_whole(leaf):
    return leaf.reward + sum(leaf.token_rewards.tolist())


def slow_relative(values, std=True):
    """(x - mean) / (standard deviation with n - 1, plus 1e-6), one value at a time."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    deviation = (sum((x - mean) ** 2 for x in values) / (len(values) - 1)) ** 0.5
    return [(x - mean) / (deviation + 1e-6 if std else 1) for x in values]


def slow_whitened(batch):
    """``slow_relative`` over everything in a nest of lists; the nest stays."""
    advantages = iter(slow_relative([x for leaves in batch for xs in leaves for x in xs]))
    return [[[next(advantages) for _ in xs] for xs in leaves] for leaves in batch]


def on_every_token(per_leaf, group):
    return [[x] * len(leaf.tokens) for x, leaf in zip(per_leaf, group, strict=True)]


def assert_same(some, others, tolerance=1e-8):
    """Two results of estimators, group by group and leaf by leaf, in number, length and value.

    The tolerance leaves room for rounding where a spread of some 1e-17 meets the epsilon.
    """
    for group, other in zip(some, others, strict=True):
        for leaf, expected in zip(group, other, strict=True):
            assert len(leaf) == len(expected)
            np.testing.assert_allclose(leaf, expected, rtol=0, atol=tolerance)
