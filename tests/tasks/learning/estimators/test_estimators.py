"""Properties that every estimator has, whatever its formula."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from tasks.learning.estimators import group
from tests.tasks.learning.estimators.conftest import (
    assert_same,
    batches,
    episode,
    estimator,
    gae,
    groups,
)

BY_REWARD = {  # without a time axis and within the group
    "return": estimator("return"),
    "group relative": estimator("group_relative", std=True),
    "group relative without std": estimator("group_relative", std=False),
    "leave one out": estimator("leave_one_out"),
    "prefix calibrated": estimator("prefix_calibrated"),
    "tree value": estimator("tree_value"),
}
BY_DIFFERENCE = {name: chosen for name, chosen in BY_REWARD.items() if name != "return"}
BY_STEP = {
    "two level": estimator("two_level", omega=1.0, gamma=0.95, std=True),
    "two level without std": estimator("two_level", omega=1.0, gamma=0.95, std=False),
    "grouped GAE": gae(0.95, 0.8, "grouped_gae"),
    "grouped GAE, not normalised": gae(0.95, 0.8, "grouped_gae", normalisation="none"),
    "grouped GAE and an episode term": gae(0.95, 0.8, "grouped_gae", omega=0.5),
}
BY_BATCH = {
    "batch whitened": estimator("batch_whitened", baseline=False),
    "batch whitened after the mean": estimator("batch_whitened", baseline=True),
    "GAE": gae(gamma=0.99, lambda_=0.95),
}
BY_STEPS_OF_A_BATCH = {
    "grouped GAE, over the batch": gae(0.95, 0.8, "grouped_gae", normalisation="batch"),
}
WITHIN_GROUP = BY_REWARD | BY_STEP
EVERY = WITHIN_GROUP | BY_BATCH | BY_STEPS_OF_A_BATCH
COMPARING = {name: chosen for name, chosen in EVERY.items() if name not in ("return", "GAE")}


def each(estimators):
    """One after the other on the same example; a failure notes the name."""
    for name, credit in estimators.items():
        note(name)
        yield credit


def frozen(batch):
    for leaf in (leaf for leaves in batch for leaf in leaves):
        for array in (leaf.token_rewards, leaf.tokens, leaf.steps, leaf.values):
            array.flags.writeable = False
    return batch


@given(batches)
def test_advantages_are_finite_and_inputs_unchanged(batch):
    for credit in each(EVERY):
        advantages = credit(frozen(batch))
        assert [[len(leaf.tokens) for leaf in leaves] for leaves in batch] == [
            [len(tokens) for tokens in leaves] for leaves in advantages
        ]
        assert all(a.dtype == np.float64 for leaves in advantages for a in leaves)
        assert all(np.isfinite(a).all() for leaves in advantages for a in leaves)


@given(batches, st.randoms(use_true_random=False))
def test_order_does_not_matter(batch, random):
    order = [random.sample(range(len(leaves)), len(leaves)) for leaves in batch]
    turns = random.sample(range(len(batch)), len(batch))
    for credit in each(EVERY):
        expected = credit(batch)
        assert_same(
            credit([[batch[g][leaf] for leaf in order[g]] for g in turns]),
            [[expected[g][leaf] for leaf in order[g]] for g in turns],
        )


@given(batches)
def test_other_groups_do_not_matter(batch):
    for credit in each(WITHIN_GROUP):
        alone = [credit([leaves])[0] for leaves in batch]
        assert_same(credit(batch), alone, tolerance=0)


@given(groups(), st.sampled_from([-1.0, 0.1, 1 / 3, 1e9]), st.integers(1, 16))
def test_equal_leaves_give_exactly_zero(leaves, value, size):
    # One-token outputs for all; in longer ones returns may differ by their distance from the end.
    alike = [episode(value)] * size
    for credit in each(COMPARING):
        assert [a.tolist() for a in credit([alike])[0]] == [[0.0]] * size
    for credit in each(BY_DIFFERENCE):
        assert all((a == 0).all() for a in credit([leaves[:1] * size])[0])


@given(groups())
def test_steps_do_not_matter_to_whole_rewards(leaves):
    finer = [
        replace(leaf, steps=np.arange(len(leaf.tokens)), states=("s",) * len(leaf.tokens))
        for leaf in leaves
    ]
    for credit in each(BY_REWARD):
        assert_same(credit([finer]), credit([leaves]), tolerance=0)


@given(groups(), st.sampled_from([-3.0, -0.5, 0.25, 8.0]))
def test_shift_of_a_groups_rewards_does_not_matter(leaves, shift):
    shifted = [replace(leaf, reward=leaf.reward + shift) for leaf in leaves]
    for credit in each(BY_DIFFERENCE):
        assert_same(credit([shifted]), credit([leaves]), tolerance=1e-8)


@given(groups())
def test_token_rewards_are_part_of_the_whole_reward(leaves):
    whole = [
        replace(leaf, reward=group.whole_rewards([leaf])[0], token_rewards=0 * leaf.token_rewards)
        for leaf in leaves
    ]
    for credit in each(BY_REWARD):
        assert_same(credit([whole]), credit([leaves]), tolerance=0)


@pytest.mark.parametrize("credit", EVERY.values(), ids=list(EVERY))
def test_empty_batch_and_empty_leaves(credit):
    assert credit([]) == []
    assert credit([[]]) == [[]]
    empty = episode(1.0, 0, values=np.zeros(0))
    assert [len(a) for a in credit([[empty, empty]])[0]] == [0, 0]


@given(batches)
def test_whitened_advantages_have_mean_0_and_spread_1(batch):
    for credit in each(BY_BATCH):
        flat = np.concatenate([a for leaves in credit(batch) for a in leaves])
        assert abs(flat.mean()) < 1e-9
        if np.abs(flat).max() > 1e-6:  # else there was no spread
            assert abs(flat.std(ddof=1) - 1) < 1e-3
