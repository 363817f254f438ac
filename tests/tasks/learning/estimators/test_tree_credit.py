from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.learning.estimators.tree_credit import path_weights, token_identities
from tests.tasks.learning.estimators.conftest import (
    HALF,
    assert_same,
    batches,
    episode,
    estimator,
    groups,
    on_every_token,
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


def test_golden_values_of_rollout_relative():
    """Two rollouts: one that branched into two, one alone, whose reward is added as it is."""
    leaves = [
        episode(reward, len(tokens), tokens=np.array(tokens))
        for reward, tokens in ((1.0, [0, 1]), (0.0, [0, 2, 3]), (1.0, [4]))
    ]
    third = 1 / 3**0.5  # standard deviation of 1, 0, 1
    whole, branched = np.array([1, -2, 1]) / 3 / third, 2**0.5 / 2
    found = [leaf[0] for leaf in estimator("rollout_relative")([leaves])[0]]
    expected = [sum(pair) for pair in zip(whole, (branched, -branched, 1.0), strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@given(batches)
def test_rollout_relative_equals_a_slow_loop(batch):
    def term(leaf, members):
        rewards = [slow_whole(member) for member in members]
        if len(members) == 1:
            return rewards[0] / (1 + 1e-6)
        return slow_relative(rewards)[next(i for i, one in enumerate(members) if one is leaf)]

    for group in batch:
        found = estimator("rollout_relative")([group])[0]
        for leaf, credit in zip(group, found, strict=True):
            same = [
                other
                for other in group
                if other is leaf
                or (len(leaf.tokens) and len(other.tokens) and other.tokens[0] == leaf.tokens[0])
            ]
            expected = term(leaf, group) + term(leaf, same)
            np.testing.assert_allclose(credit, [expected] * len(leaf.tokens), atol=1e-8)


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


# ---------------------------------------------------------------- value from the tree

TREE_VALUE = estimator("tree_value")


def values_from(group, prefix):
    """V of each path that goes on after the tokens ``prefix``."""
    behind = [leaf for leaf in group if leaf.tokens[: len(prefix)].tolist() == prefix]
    ended = [slow_whole(leaf) for leaf in behind if len(leaf.tokens) == len(prefix)]
    following = {int(leaf.tokens[len(prefix)]) for leaf in behind if len(leaf.tokens) > len(prefix)}
    return ended + [slow_value(group, [*prefix, token]) for token in following]


def slow_value(group, prefix):
    """V after the tokens ``prefix``, by its definition: the mean over the paths from there on."""
    values = values_from(group, prefix)
    return sum(values) / len(values)


def sharers(group, token):
    return [index for index, leaf in enumerate(group) if token in leaf.tokens]


def test_golden_values_of_tree_value():
    # V(123) = 1/2, V(12) = (1/2 + 0)/2 = 1/4, V(1) = (1/4 + 1)/2 = 5/8 = V(prompt)
    exact = [
        [0, -3 / 8, 1 / 4, 1 / 2],
        [0, -3 / 8, 1 / 4, -1 / 2],
        [0, -3 / 8, -1 / 4, -1 / 4],
        [0, 3 / 8, 3 / 8, 3 / 8],
    ]
    assert_same(TREE_VALUE([keyed_on(token_identities(PATHS))]), [exact], tolerance=1e-12)


def test_a_path_that_branched_counts_once():
    # One path from the prompt branches into three right leaves, the other is wrong: V is 1/2.
    right = [episode(1.0, 2, tokens=np.array([0, last])) for last in (1, 2, 3)]
    wrong = episode(0.0, 2, tokens=np.array([4, 5]))
    half = [1 / 2, 0]
    assert_same(TREE_VALUE([[*right, wrong]]), [[half, half, half, [-1 / 2] * 2]], tolerance=0)


def test_leaves_that_end_where_others_go_on_are_paths_of_their_own():
    # After token 0: a leaf that ends (1), one that goes on (0), so V is 1/2; the third has 3.
    group = [
        episode(reward, len(tokens), tokens=np.array(tokens))
        for reward, tokens in ((1.0, [0]), (0.0, [0, 1]), (3.0, [2]))
    ]
    assert_same(TREE_VALUE([group]), [[[-5 / 4], [-5 / 4, -1 / 2], [5 / 4]]], tolerance=0)


@given(batches)
def test_tree_value_is_a_slow_loop_over_its_definition(batch):
    """Where paths part a token has the change of V; it holds until they part again."""
    expected = []
    for group in batch:
        expected.append([])
        for leaf in group:
            tokens, credits = leaf.tokens.tolist(), []
            for t, token in enumerate(tokens):
                before = sharers(group, tokens[t - 1]) if t else list(range(len(group)))
                if t == 0 or sharers(group, token) != before:
                    change = slow_value(group, tokens[: t + 1]) - slow_value(group, tokens[:t])
                credits.append(change)
            expected[-1].append(credits)
    assert_same(TREE_VALUE(batch), expected)


@given(groups())
def test_credits_of_segments_sum_to_the_reward_less_the_value_of_the_prompt(group):
    prompt = slow_value(group, [])
    for index, (leaf, credits) in enumerate(zip(group, TREE_VALUE([group])[0], strict=True)):
        segments = {
            tuple(sharers(group, token)): credit
            for token, credit in zip(leaf.tokens, credits, strict=True)
        }
        end = slow_value(group, leaf.tokens.tolist())  # other leaves may end or begin there
        assert abs(sum(segments.values()) - (end - prompt)) < 1e-9
        if (index,) in segments:
            assert abs(sum(segments.values()) - (slow_whole(leaf) - prompt)) < 1e-9


@given(groups(), st.data())
def test_another_path_of_equal_value_changes_nothing_but_what_follows_it(group, data):
    leaf = data.draw(st.sampled_from(group))
    shared = data.draw(st.integers(0, len(leaf.tokens)))
    prefix = leaf.tokens[:shared].tolist()
    equal = episode(slow_value(group, prefix), shared + 2, tokens=np.array([*prefix, 901, 902]))
    before, (*after, added) = TREE_VALUE([group])[0], TREE_VALUE([[*group, equal]])[0]
    np.testing.assert_allclose(added[shared:], 0, atol=1e-9)
    for other, old, new in zip(group, before, after, strict=True):
        through = other.tokens[:shared].tolist() == prefix
        untouched = shared if through else len(other.tokens)
        np.testing.assert_allclose(new[:untouched], old[:untouched], atol=1e-9)


@given(groups(), st.sampled_from([0.1, 1 / 3, -1.1]))
def test_equal_rewards_on_a_tree_give_exactly_zero(group, reward):
    alike = [replace(leaf, whole=reward) for leaf in group]
    assert all((credits == 0).all() for credits in TREE_VALUE([alike])[0])


@given(groups())
def test_without_branches_tree_value_is_leave_one_out_but_for_its_scale(group):
    distinct = [
        replace(leaf, tokens=1000 * index + np.arange(len(leaf.tokens)))
        for index, leaf in enumerate(group)
    ]
    (relative,) = estimator("leave_one_out")([distinct])
    scale = (len(group) - 1) / len(group)
    assert_same(TREE_VALUE([distinct]), [[scale * credits for credits in relative]])
    mean = sum(map(slow_whole, group)) / len(group)
    plain = on_every_token([slow_whole(leaf) - mean for leaf in group], group)
    assert_same(TREE_VALUE([distinct]), [plain])


OTHERS = estimator("tree_value", leave_one_out=True)


def test_golden_values_of_tree_value_without_the_path_itself():
    # Two paths part at each point, so each is compared with the other: twice the credit.
    exact = [
        [0, -3 / 4, 1 / 2, 1],
        [0, -3 / 4, 1 / 2, -1],
        [0, -3 / 4, -1 / 2, -1 / 2],
        [0, 3 / 4, 3 / 4, 3 / 4],
    ]
    assert_same(OTHERS([keyed_on(token_identities(PATHS))]), [exact], tolerance=1e-12)


@given(groups())
def test_a_path_is_compared_with_the_mean_of_the_others(group):
    found = OTHERS([group])[0]
    for leaf, credits in zip(group, found, strict=True):
        tokens = leaf.tokens.tolist()
        for t, token in enumerate(tokens):
            before = sharers(group, tokens[t - 1]) if t else list(range(len(group)))
            if t == 0 or sharers(group, token) != before:
                values = values_from(group, tokens[:t])
                own = slow_value(group, tokens[: t + 1])
                others = (sum(values) - own) / max(len(values) - 1, 1)
                change = own - others if len(values) > 1 else 0
            assert abs(credits[t] - change) < 1e-9


@given(groups())
def test_without_branches_it_is_leave_one_out(group):
    distinct = [
        replace(leaf, tokens=1000 * index + np.arange(len(leaf.tokens)))
        for index, leaf in enumerate(group)
    ]
    assert_same(OTHERS([distinct]), estimator("leave_one_out")([distinct]))


# ---------------------------------------------------------------- weights of paths


def test_golden_weights_of_paths():
    weights = path_weights(token_identities(PATHS))
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 4, 1 / 2]


@given(groups())
def test_paths_that_part_share_the_weight_of_what_is_before_them(group):
    tokens = [leaf.tokens.tolist() for leaf in group]
    weights = path_weights([leaf.tokens for leaf in group])
    prefixes = {tuple(path[:t]) for path in tokens for t in range(len(path) + 1)}
    for prefix in prefixes:
        below = [leaf for leaf, path in enumerate(tokens) if tuple(path[: len(prefix)]) == prefix]
        parts = {}
        for leaf in below:
            ends = len(tokens[leaf]) == len(prefix)
            key = ("ends", leaf) if ends else tokens[leaf][len(prefix)]
            parts[key] = parts.get(key, 0) + weights[leaf]
        whole = len(parts) if prefix == () else weights[below].sum()
        assert list(parts.values()) == pytest.approx([whole / len(parts)] * len(parts))


# ---------------------------------------------------------------- keys


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
