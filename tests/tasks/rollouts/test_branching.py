"""The branching rule, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.reinforce import Rollout
from tasks.rollouts.branching import (
    branch_probability,
    branching_points,
    decide,
    least_rise,
    wants_branch,
)
from tasks.trees.metrics import window_entropy
from tasks.trees.tree import AFTER_RESULT, AT_MARK, PROMPT, RESULT, TURN, Node


def budget(draw: bool, threshold: float = 0.5, entropy_weight: float = 0.2) -> Rollout:
    return Rollout(
        leaves=16,
        initial=8,
        branch=2,
        marks_per_rollout=1,
        entropy_window=20,
        base_probability=0.5,
        entropy_weight=entropy_weight,
        threshold=threshold,
        draw=draw,
        temperature=1.0,
        rows=16,
    )


@pytest.mark.parametrize(
    ("window", "mean"), [(1, 0.25), (2, 0.5), (3, 0.5), (4, 0.375), (100, 0.375)]
)
def test_window_is_the_first_tokens(window, mean):
    assert window_entropy(np.array([0.25, 0.75, 0.5, 0.0], np.float32), window) == mean


def test_no_tokens_have_no_entropy():
    assert window_entropy(np.zeros(0, np.float32), 20) == 0.0


@pytest.mark.parametrize(
    ("initial", "entropy", "expected"), [(0.2, 0.2, 0.5), (0.0, 1.0, 0.7), (1.0, 0.0, 0.3)]
)
def test_probability_is_equation_3(initial, entropy, expected):
    assert branch_probability(entropy - initial, budget(draw=False)) == pytest.approx(expected)


def test_probability_is_not_clipped():
    steep = budget(draw=False, entropy_weight=3.0)
    assert branch_probability(1.0, steep) == pytest.approx(3.5)
    assert branch_probability(-1.0, steep) == pytest.approx(-2.5)


@given(probability=st.floats(-2, 3), threshold=st.floats(-1, 2), uniform=st.floats(0, 0.999))
def test_branches_above_the_threshold(probability, threshold, uniform):
    branches = wants_branch(probability, budget(draw=False, threshold=threshold), uniform)
    assert branches == (probability > threshold)


def test_at_the_threshold_there_is_no_branch():
    assert not wants_branch(0.5, budget(draw=False), 0.0)


@pytest.mark.parametrize(
    ("probability", "share"), [(-1.0, 0.0), (0.0, 0.0), (0.3, 0.3), (1.0, 1.0), (2.0, 1.0)]
)
def test_drawn_branch_has_its_clipped_probability(probability, share):
    coins = (np.arange(1000) + 0.5) / 1000
    wishes = [wants_branch(probability, budget(draw=True), float(coin)) for coin in coins]
    assert np.mean(wishes) == pytest.approx(share)


@given(
    rise=st.floats(-1, 1),
    threshold=st.sampled_from([0.3, 0.5, 0.6]),
    weight=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_paths_branch_above_the_least_rise(rise, threshold, weight):
    settings = budget(draw=False, threshold=threshold, entropy_weight=weight)
    least = least_rise(settings)
    assert least is not None
    if abs(rise - least) > 1e-9:
        wants = wants_branch(branch_probability(rise, settings), settings, 0.0)
        assert wants == (rise > least)


def test_no_least_rise_if_drawn_or_without_entropy():
    assert least_rise(budget(draw=True)) is None
    assert least_rise(budget(draw=False, entropy_weight=0.0)) is None
    assert least_rise(budget(draw=False, entropy_weight=-1.0)) is None


# ---- decisions

LATER = np.array([0.5, 0.7], np.float32)
PLACE = {"node": 3, "path": 1, "position": 17}


def test_decision_after_a_result():
    decision = decide(0.25, LATER, budget(draw=False), 0.9, **PLACE)
    assert (decision.kind, decision.node, decision.path, decision.position) == (
        AFTER_RESULT,
        *PLACE.values(),
    )
    assert (decision.initial_entropy, decision.entropy) == (0.25, pytest.approx(0.6))
    assert decision.rise == pytest.approx(0.35)
    assert decision.probability == pytest.approx(0.57)
    assert (decision.wanted, decision.added) == (True, 0)
    assert not decide(0.65, LATER, budget(draw=False), 0.0, **PLACE).wanted
    assert not decide(0.25, LATER, budget(draw=True), 0.58, **PLACE).wanted
    assert decide(0.25, LATER, budget(draw=True), 0.56, **PLACE).wanted


def test_branches_are_always_wanted_at_a_mark():
    decision = decide(0.9, LATER, budget(draw=True), **PLACE)
    assert (decision.kind, decision.wanted, decision.probability) == (AT_MARK, True, None)
    assert decision.rise == pytest.approx(-0.3)


# ---- points at marks


def trajectory(*lengths: int) -> list[Node]:
    """A prompt, then turns and results in alternation, of these lengths.

    The entropies of the sampled tokens are 0.00, 0.01, ... over the trajectory.
    """
    nodes, done = [], 0
    for place, length in enumerate(lengths):
        kind = PROMPT if place == 0 else (RESULT, TURN)[place % 2]
        sampled = length if kind == TURN else 0
        entropies = np.arange(done, done + sampled, dtype=np.float32) / 100
        tokens = np.zeros(length, np.int32)
        nodes.append(Node(place - 1, kind, "", "", tokens, -entropies, entropies))
        done += sampled
    return nodes


def points_at(marks, most=9, lengths=(4, 3, 5, 2)):
    nodes = trajectory(*lengths)
    ends = np.zeros(sum(len(node.entropies) for node in nodes), np.bool_)
    ends[marks] = True
    return branching_points(nodes, ends, most)


def test_a_mark_inside_a_turn_is_a_point_there():
    (point,) = points_at([1])
    assert (point.place, point.tokens, point.position, point.inside) == (1, 2, 6, True)
    assert point.entropies == pytest.approx([0.02])


def test_mark_at_a_turns_end_points_after_the_result():
    (point,) = points_at([2])
    assert (point.place, point.tokens, point.position, point.inside) == (2, 5, 12, False)
    assert point.entropies == pytest.approx([0.03, 0.04])


def test_a_mark_with_no_token_after_it_is_no_point():
    assert points_at([4]) == []
    assert [point.position for point in points_at([3, 4])] == [13]
    assert points_at([], lengths=(4,)) == []


def test_the_first_marks_count():
    assert [point.position for point in points_at([0, 2, 3], most=2)] == [5, 12]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_point_lies_where_its_mark_ends(turns, data):
    lengths = [3, *[length for turn in turns for length in (turn, 2)][:-1]]
    marks = sorted(data.draw(st.sets(st.integers(0, sum(turns) - 1))))
    found = points_at(marks, 99, lengths)
    assert len(found) == len([mark for mark in marks if mark < sum(turns) - 1])
    for mark, point in zip(marks, found, strict=False):
        assert point.position == sum(lengths[: point.place]) + point.tokens
        assert point.inside == (point.tokens < lengths[point.place])
        assert point.entropies[0] == pytest.approx((mark + 1) / 100)
        kinds = [node.kind for node in trajectory(*lengths)]
        assert kinds[point.place] == (TURN if point.inside else RESULT)
