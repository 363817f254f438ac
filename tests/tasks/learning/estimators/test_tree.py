from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.learning.estimators.tree import token_identities
from tests.tasks.learning.estimators.conftest import (
    HALF,
    assert_same,
    batches,
    episode,
    estimator,
    groups,
    slow_relative,
    slow_whole,
)

PATHS = [np.array(path) for path in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 8, 9, 4])]
REWARDS = [1.0, 0.0, 0.0, 1.0]
ROWS = [
    [0.0, -0.2887, 0.0, 0.8660],
    [0.0, -0.2887, 0.0, -0.8660],
    [0.0, -0.2887, -0.8660, -0.8660],
    [0.0, 0.8660, 0.8660, 0.8660],
]


def keyed_on(identities):
    return [
        episode(reward, len(tokens), tokens=tokens)
        for reward, tokens in zip(REWARDS, identities, strict=True)
    ]


def test_golden_values_keyed_on_token_ids():
    some = estimator("prefix_calibrated")([keyed_on(token_identities(PATHS))])[0]
    assert [[round(float(a), 4) + 0.0 for a in leaf] for leaf in some] == ROWS
    third = HALF / 3  # .2887
    exact = [
        [0, -third, 0, HALF],
        [0, -third, 0, -HALF],
        [0, -third, -HALF, -HALF],
        [0, HALF, HALF, HALF],
    ]
    assert_same([some], [exact], tolerance=1e-5)


def test_golden_values_keyed_on_lineage():
    # The same rewards; the third leaf has token ids of its own for what it says like the others.
    lineage = [np.array(row) for row in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7], [0, 8, 9, 10])]
    some = estimator("prefix_calibrated")([keyed_on(lineage)])
    exact = [
        [0, 0, 0, HALF],
        [0, 0, 0, -HALF],
        [0, -HALF, -HALF, -HALF],
        [0, HALF, HALF, HALF],
    ]
    assert_same(some, [exact], tolerance=1e-5)


@given(batches)
def test_prefix_calibrated_equals_a_slow_loop(batch):
    expected = []
    for group in batch:
        initial = slow_relative([slow_whole(leaf) for leaf in group])
        credits = []
        for leaf in group:
            having = [
                [A for A, other in zip(initial, group, strict=True) if token in other.tokens]
                for token in leaf.tokens
            ]
            credits.append([sum(some) / len(some) for some in having])
        expected.append(credits)
    assert_same(estimator("prefix_calibrated")(batch), expected)


@given(batches)
def test_distinct_outputs_are_group_relative(batch):
    distinct = [
        [
            replace(leaf, tokens=1000 * index + np.arange(len(leaf.tokens)))
            for index, leaf in enumerate(group)
        ]
        for group in batch
    ]
    assert_same(
        estimator("prefix_calibrated")(distinct),
        estimator("group_relative", std=True)(distinct),
        tolerance=0,
    )


@given(groups())
def test_hard_and_soft_credit_sum_alike_over_sharers(group):
    tokens = np.concatenate([leaf.tokens for leaf in group])
    hard = np.concatenate(estimator("prefix_calibrated")([group])[0])
    soft = np.concatenate(estimator("group_relative", std=True)([group])[0])
    np.testing.assert_allclose(np.bincount(tokens, hard), np.bincount(tokens, soft), atol=1e-9)


@given(groups())
def test_shared_tokens_get_equal_credit(group):
    seen: dict[int, float] = {}
    for leaf, advantages in zip(group, estimator("prefix_calibrated")([group])[0], strict=True):
        for token, advantage in zip(leaf.tokens.tolist(), advantages, strict=True):
            assert seen.setdefault(token, advantage) == advantage


@given(groups())
def test_a_token_that_all_leaves_share_gets_no_credit(group):
    common = set.intersection(*(set(leaf.tokens.tolist()) for leaf in group))
    assume(common)
    leaf, advantages = group[0], estimator("prefix_calibrated")([group])[0][0]
    for token, advantage in zip(leaf.tokens, advantages, strict=True):
        assert token not in common or abs(advantage) < 1e-9


IDS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7)


@given(IDS, st.sampled_from([np.int32, np.int64]))
def test_identities_are_equal_iff_prefixes_are(paths, dtype):
    identities = token_identities([np.array(path, dtype) for path in paths])
    assert [len(some) for some in identities] == [len(path) for path in paths]
    assert all(some.dtype == np.int64 for some in identities)
    ends = [
        (tuple(path[: t + 1]), int(identity))
        for path, some in zip(paths, identities, strict=True)
        for t, identity in enumerate(some)
    ]
    prefixes, numbers = {prefix for prefix, _ in ends}, {identity for _, identity in ends}
    assert len(set(ends)) == len(prefixes) == len(numbers)


@pytest.mark.parametrize("paths", [[], [[]], [[], [5]], [[300, 1], [44, 1], [300, 1]]])
def test_identities_number_distinct_prefixes(paths):
    identities = token_identities([np.array(path, np.int64) for path in paths])
    prefixes = {tuple(path[: t + 1]) for path in paths for t in range(len(path))}
    assert sorted({int(i) for some in identities for i in some}) == list(range(len(prefixes)))
