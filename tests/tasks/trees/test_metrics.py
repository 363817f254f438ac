import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trees import metrics as statistics
from tasks.trees.intervals import bootstrap_interval, paired_bootstrap
from tasks.trees.metrics import entropy_profile, together, tree_metrics
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, RESULT, TURN, Decision, Node, Question, Tree

NONE = np.zeros(0, np.float32)
QUESTION = Question("q", "story", "How many?", ("3",))


def node(parent, kind, entropies=(), outcome="", tokens=None):
    """A node whose sampled tokens have these entropies; others have ``tokens`` tokens."""
    count = len(entropies) if tokens is None else tokens
    values = np.array(entropies, np.float32)
    return Node(parent, kind, outcome, "", np.zeros(count, np.int32), -values, values)


def small_tree():
    """Two leaves that share the first call and its result; one leaf calls a second time.

    prompt -> turn [.1 .3] -> result ok -> turn [.5 .7 .9] answer
                                        -> turn [.2] -> result error -> turn [.4] cut
    """
    nodes = [
        node(-1, PROMPT, tokens=4),
        node(0, TURN, [0.1, 0.3], "call"),
        node(1, RESULT, tokens=3, outcome="ok"),
        node(2, TURN, [0.5, 0.7, 0.9], "answer"),
        node(2, TURN, [0.2], "call"),
        node(4, RESULT, tokens=2, outcome="error"),
        node(5, TURN, [0.4], "cut"),
    ]
    decision = Decision("entropy", 2, 0, 9, 0.2, 0.7, 0.5, 0.6, True, 1)
    return Tree(QUESTION, nodes, [3, 6], [decision])


def straight_tree():
    """One leaf that answers without a call."""
    return Tree(QUESTION, [node(-1, PROMPT, tokens=2), node(0, TURN, [0.6, 0.0], "answer")], [1])


def test_golden_metrics_of_a_small_tree():
    assert tree_metrics([small_tree()], window=2) == pytest.approx(
        {
            "leaves": 2,
            "branches": 1,
            "tool_calls": 2,  # not 3: the first one is shared
            "tool_errors": 1,
            "tool_calls_a_leaf": 1.5,
            "sampled_tokens": 7,
            "response_tokens": (2 + 3 + 3 + 2 + 3 + 1 + 2 + 1) / 2,
            "answer_rate": 0.5,
            "entropy": (0.1 + 0.3 + 0.5 + 0.7 + 0.9 + 0.2 + 0.4) / 7,
            "entropy_before_result": (0.2 + 0.2) / 2,
            "entropy_after_result": (0.6 + 0.2 + 0.4) / 3,
        },
        abs=1e-6,
    )


def test_metrics_of_a_batch_weigh_leaves_not_trees():
    metrics = tree_metrics([small_tree(), straight_tree()], window=2)
    assert metrics["leaves"] == 3
    assert metrics["answer_rate"] == pytest.approx(2 / 3)
    assert metrics["tool_calls_a_leaf"] == pytest.approx(1)
    assert metrics["entropy"] == pytest.approx((3.1 + 0.6) / 9)


def test_metrics_without_any_tool_call_are_finite():
    metrics = tree_metrics([straight_tree()], window=20)
    assert metrics["tool_calls"] == metrics["entropy_before_result"] == 0
    assert np.isfinite(list(metrics.values())).all()


def test_golden_profile_around_tool_results():
    # before the results, by position from them: [.1 .3] (once, though two turns follow), [.2];
    # after them: [.5 .7 .9], [.2], [.4]
    around = {-2: [0.1], -1: [0.3, 0.2], 1: [0.5, 0.2, 0.4], 2: [0.7], 3: [0.9]}
    profile = entropy_profile([small_tree()])
    assert [point["position"] for point in profile] == list(around)
    for point, values in zip(profile, around.values(), strict=True):
        assert point["mean"] == pytest.approx(np.mean(values), abs=1e-6)
        error = np.std(values) / len(values) ** 0.5
        assert point["standard_error"] == pytest.approx(error, abs=1e-6)


def test_the_profile_is_cut_on_both_sides():
    long = np.linspace(0, 1, 50)
    nodes = [
        node(-1, PROMPT, tokens=1),
        node(0, TURN, long, "call"),
        node(1, RESULT, tokens=1, outcome="ok"),
        node(2, TURN, long, "answer"),
    ]
    profile = entropy_profile([Tree(QUESTION, nodes, [3])])
    before, after = statistics.PROFILE_BEFORE, statistics.PROFILE_AFTER
    positions = [*range(-before, 0), *range(1, after + 1)]
    assert [point["position"] for point in profile] == positions
    means = [point["mean"] for point in profile]
    assert means == pytest.approx([*long[-before:], *long[:after]], abs=1e-6)


def test_a_profile_of_no_calls_is_empty():
    assert entropy_profile([straight_tree()]) == []


def test_a_turn_that_leaves_share_counts_once():
    tree = small_tree()
    alone = entropy_profile([tree])
    tree.leaves += [3, 6]  # more leaves over the same nodes
    assert entropy_profile([tree]) == alone
    twice = tree_metrics([tree], window=2)
    assert (twice["tool_calls"], twice["sampled_tokens"], twice["leaves"]) == (2, 7, 4)


def split_tree():
    """Turns in parts: two calls share .1, their results have two turns that share .5 .6.

    prompt -> [.1] -> [.3] call -> result -> [.5 .6] -> [.7] answer
                                                     -> [.8] answer
                   -> [.9] call -> result -> [.4] answer
    """
    nodes = [
        node(-1, PROMPT, tokens=4),
        node(0, TURN, [0.1], Outcome.PART),
        node(1, TURN, [0.3], "call"),
        node(1, TURN, [0.9], "call"),
        node(2, RESULT, tokens=3, outcome="ok"),
        node(3, RESULT, tokens=2, outcome="ok"),
        node(4, TURN, [0.5, 0.6], Outcome.PART),
        node(6, TURN, [0.7], "answer"),
        node(6, TURN, [0.8], "answer"),
        node(5, TURN, [0.4], "answer"),
    ]
    return Tree(QUESTION, nodes, [7, 8, 9])


def test_turns_in_parts_count_by_what_they_are_and_shared_tokens_once():
    metrics = tree_metrics([split_tree()], window=3)
    expected = {
        "leaves": 3,
        "tool_calls": 2,
        "tool_calls_a_leaf": 1,
        "sampled_tokens": 8,
        "response_tokens": (8 + 8 + 5) / 3,
        "answer_rate": 1,
        "entropy": (0.1 + 0.3 + 0.9 + 0.5 + 0.6 + 0.7 + 0.8 + 0.4) / 8,
        "entropy_before_result": ((0.1 + 0.3) / 2 + (0.1 + 0.9) / 2) / 2,
        "entropy_after_result": ((0.5 + 0.6 + 0.7) / 3 + (0.5 + 0.6 + 0.8) / 3 + 0.4) / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_turns_that_part_behind_the_window_count_once():
    metrics = tree_metrics([split_tree()], window=2)
    assert metrics["entropy_after_result"] == pytest.approx((0.55 + 0.4) / 2, abs=1e-6)


def test_the_profile_sees_each_token_of_a_turn_in_parts_once_and_in_its_place():
    around = {-2: [0.1, 0.1], -1: [0.3, 0.9], 1: [0.5, 0.4], 2: [0.6], 3: [0.7, 0.8]}
    profile = entropy_profile([split_tree()])
    assert [point["position"] for point in profile] == list(around)
    means = [np.mean(values) for values in around.values()]
    assert [point["mean"] for point in profile] == pytest.approx(means, abs=1e-6)


def test_the_profile_is_cut_inside_a_part():
    reach = statistics.PROFILE_AFTER
    nodes = [
        node(-1, PROMPT, tokens=1),
        node(0, TURN, [0.1], "call"),
        node(1, RESULT, tokens=1, outcome="ok"),
        node(2, TURN, np.full(reach - 2, 0.2), Outcome.PART),
        node(3, TURN, np.full(9, 0.3), "answer"),
    ]
    profile = entropy_profile([Tree(QUESTION, nodes, [4])])
    assert [point["position"] for point in profile] == [-1, *range(1, reach + 1)]
    assert [point["mean"] for point in profile[-3:]] == pytest.approx([0.2, 0.3, 0.3], abs=1e-6)


# ---------------------------------------------------------------- several batches


def test_one_batch_is_its_own_metrics():
    metrics = tree_metrics([small_tree()], window=2)
    assert together([metrics]) == metrics


def test_of_several_batches_counts_add_up_and_the_rest_are_means():
    batches = [tree_metrics([tree], window=2) for tree in (small_tree(), straight_tree())]
    found = together(batches)
    assert list(found) == list(batches[0])
    assert (found["leaves"], found["branches"], found["tool_calls"]) == (3, 1, 2)
    assert (found["tool_errors"], found["sampled_tokens"]) == (1, 9)
    assert found["answer_rate"] == pytest.approx((0.5 + 1) / 2)
    assert found["response_tokens"] == pytest.approx((8.5 + 2) / 2)
    counts = {name for name in found if found[name] == sum(b[name] for b in batches) != 0}
    assert set(statistics.COUNTS) <= counts


# ---------------------------------------------------------------- intervals


def test_an_interval_of_equal_values_is_that_value():
    for value in (0.0, 1.0, 0.3):
        low, high = bootstrap_interval(np.full(50, value), 100, seed=1)
        assert (low, high) == pytest.approx((value, value))


def test_an_interval_holds_its_mean_and_depends_on_its_seed_alone():
    values = np.random.default_rng(0).random(60)
    low, high = bootstrap_interval(values, 500, seed=3)
    assert low < values.mean() < high
    assert bootstrap_interval(values, 500, seed=3) == (low, high)
    assert bootstrap_interval(values, 500, seed=4) != (low, high)


def test_an_interval_is_as_wide_as_theory_says():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(values, 2000, seed=0)
    error = values.std(ddof=1) / 400**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_intervals_cover_the_truth_about_95_times_in_100(rate):
    random = np.random.default_rng(11)
    runs = 400
    covered = 0
    for seed in range(runs):
        low, high = bootstrap_interval((random.random(100) < rate).astype(float), 300, seed)
        covered += low <= rate <= high
    assert 0.91 < covered / runs < 0.98


# ---------------------------------------------------------------- paired differences

VALUES = st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=40)


@st.composite
def pairs(draw):
    """Two agents' values on the same questions."""
    first = draw(VALUES)
    size = len(first)
    second = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=size, max_size=size))
    return np.array(first), np.array(second)


def paired(candidate, other, confidence=0.9, seed=5):
    return paired_bootstrap(candidate, other, confidence, 200, seed)


def test_golden_paired_difference():
    candidate, other = np.array([1.0, 1, 1, 0, 1, 1, 0, 1]), np.array([0.0, 1, 0, 0, 1, 0, 1, 1])
    found = paired_bootstrap(candidate, other, 0.95, 1000, seed=7)
    assert found.mean == 0.25  # three won, one lost, of eight
    # by hand, over the same resamples
    random = np.random.default_rng(7)
    draws = random.integers(8, size=(1000, 8))
    means = sorted(np.mean([candidate[i] - other[i] for i in draw]) for draw in draws)
    assert (found.low, found.high) == tuple(np.percentile(means, [2.5, 97.5]))
    assert (found.low, found.high) == (-0.25, 0.625)
    wins, ties = sum(mean > 0 for mean in means), sum(mean == 0 for mean in means)
    assert found.probability == pytest.approx((wins + ties / 2) / 1000)
    assert 0.75 < found.probability < 0.9


@given(pairs())
def test_two_agents_that_change_places_change_the_sign_and_share_one_probability(pair):
    one, other = paired(*pair), paired(*reversed(pair))
    assert one.mean == pytest.approx(-other.mean)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert one.probability + other.probability == pytest.approx(1)


@given(pairs())
def test_the_interval_is_ordered_within_reach_and_wider_with_more_confidence(pair):
    found, wider = paired(*pair), paired(*pair, confidence=0.99)
    assert -1 <= wider.low <= found.low <= found.high <= wider.high <= 1
    assert 0 <= found.probability <= 1


@given(VALUES)
def test_an_agent_is_no_better_than_itself(values):
    found = paired(np.array(values), np.array(values))
    assert (found.mean, found.low, found.high, found.probability) == (0, 0, 0, 0.5)


@given(pairs(), st.floats(0.01, 1))
def test_what_both_gain_on_every_question_says_nothing(pair, gain):
    found, moved = paired(*pair), paired(pair[0] + gain, pair[1] + gain)
    assert (moved.mean, moved.low, moved.high) == pytest.approx(
        (found.mean, found.low, found.high), abs=1e-9
    )


def test_pairing_takes_the_questions_own_difficulty_out():
    """Both fail the same half of the questions: unpaired, one point could not be seen."""
    other = np.tile([0.0, 1.0], 100)
    candidate = other.copy()
    candidate[:10:2] = 1  # five questions more
    found = paired_bootstrap(candidate, other, 0.95, 2000, seed=0)
    assert found.low > 0
    assert found.probability > 0.98
    unpaired = bootstrap_interval(candidate, 2000, 0), bootstrap_interval(other, 2000, 0)
    assert unpaired[0][0] < unpaired[1][1]


def test_paired_intervals_cover_the_truth_about_as_often_as_they_say():
    random = np.random.default_rng(3)
    covered = 0
    for seed in range(300):
        hard = random.random(120)
        candidate, other = random.random(120) < hard, random.random(120) < hard * 0.8
        found = paired_bootstrap(candidate.astype(float), other.astype(float), 0.9, 300, seed)
        covered += found.low <= 0.1 <= found.high
    assert 0.84 < covered / 300 < 0.95


@pytest.mark.parametrize(("one", "other"), [([], []), ([1.0], []), ([1.0, 0.0], [1.0])])
def test_values_that_are_not_of_the_same_questions_are_refused(one, other):
    with pytest.raises(ValueError, match="cannot be paired"):
        paired(np.array(one), np.array(other))
