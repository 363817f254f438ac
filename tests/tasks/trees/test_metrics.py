from dataclasses import replace

import numpy as np
import pytest

from tasks.trees.metrics import (
    COUNTS,
    PROFILE_AFTER,
    PROFILE_BEFORE,
    around_results,
    entropy_profile,
    refusals,
    rise_metrics,
    together,
    tree_metrics,
)
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, REFUSAL, RESULT, TURN, Decision, Node, Question, Tree
from tests.trees import world_tree

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
            "environment_steps": 4,
            "episode_steps": (2 + 3) / 2,
            "sampled_tokens": 7,
            "response_tokens": (2 + 3 + 3 + 2 + 3 + 1 + 2 + 1) / 2,
            "answer_rate": 0.5,
            "entropy": (0.1 + 0.3 + 0.5 + 0.7 + 0.9 + 0.2 + 0.4) / 7,
            "entropy_before_result": (0.2 + 0.2) / 2,
            "entropy_after_result": (0.6 + 0.2 + 0.4) / 3,
            "decisions": 1,
            "initial_entropy": 0.2,
            "result_entropy": 0.7,
            **dict.fromkeys(["entropy_rise", *(f"entropy_rise_p{p}" for p in (5, 50, 95))], 0.5),
            "rises": 1,
            **{f"branch_probability_p{p}": 0.6 for p in (5, 50, 95)},
            "branches_wanted": 1,
        },
        abs=1e-6,
    )


def test_rises_are_those_after_results():
    rises = [-0.002, -0.001, 0.0, 0.003]
    decisions = [
        Decision("entropy", 2, 0, 9, 0.004, 0.004 + rise, rise, 0.5 + 0.2 * rise, rise > 0, 0)
        for rise in rises
    ]
    at_a_mark = Decision("mark", 2, 0, 9, 0.9, 0.0, -0.9, None, True, 1)
    found = rise_metrics([*decisions, at_a_mark])
    assert (found["decisions"], found["rises"], found["branches_wanted"]) == (4, 0.25, 0.25)
    assert found["initial_entropy"] == pytest.approx(0.004)
    assert found["entropy_rise"] == pytest.approx(found["result_entropy"] - 0.004) == 0
    assert found["entropy_rise_p50"] == -0.0005
    assert found["branch_probability_p5"] == pytest.approx(0.5 + 0.2 * found["entropy_rise_p5"])
    assert rise_metrics([at_a_mark]) == {}


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
    before, after = PROFILE_BEFORE, PROFILE_AFTER
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


def test_metrics_of_turns_in_parts():
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


def test_turns_that_branch_after_the_window_count_once():
    metrics = tree_metrics([split_tree()], window=2)
    assert metrics["entropy_after_result"] == pytest.approx((0.55 + 0.4) / 2, abs=1e-6)


def test_profile_of_turns_in_parts():
    around = {-2: [0.1, 0.1], -1: [0.3, 0.9], 1: [0.5, 0.4], 2: [0.6], 3: [0.7, 0.8]}
    profile = entropy_profile([split_tree()])
    assert [point["position"] for point in profile] == list(around)
    means = [np.mean(values) for values in around.values()]
    assert [point["mean"] for point in profile] == pytest.approx(means, abs=1e-6)


def test_the_profile_is_cut_inside_a_part():
    reach = PROFILE_AFTER
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


# ---------------------------------------------------------------- worlds


@pytest.mark.parametrize("fresh", [False, True])
def test_acts_that_are_refused_and_tried_again(fresh):
    """Three leaves share a refusal: one writes the same once more, one what is refused, too.

    The world says why it refuses "to B"; its word for "to D" is none.
    """
    episodes = {"ABBC": [0.0, -0.1, 0.0], "ABDC": [0.0, -0.1, 0.0], "ABC": [0.0, 1.0]}
    tree = world_tree(episodes, fresh)
    reasons = {"to B": "locked", "to D": "No such way!"}
    for place, node in enumerate(tree.nodes):
        if node.text in reasons:
            info = {REFUSAL: reasons[node.text]}
            seen = replace(node.observation, outcome=Outcome.NOT_ADMISSIBLE, info=info)
            tree.nodes[place] = replace(node, observation=seen)
    found = refusals([*tree.trajectories()])
    expected = {"refused": 5 / 8, "refused_again": 1 / 8, "refused_locked": 4 / 8}
    assert found == pytest.approx(expected)
    without = {"refused": 0.0, "refused_again": 0.0}
    assert together([found, without])["refused_locked"] == 2 / 8, "nothing refused is 0"
    assert refusals([]) == {"refused": 0, "refused_again": 0}


@pytest.mark.parametrize("fresh", [False, True])
def test_metrics_of_a_world(fresh):
    tree = world_tree(
        {"ABC": [0.0, -0.1, 1.0], "ABD": [0.0, -0.1, 0.0], "AE": [0.5, 0.0]}, fresh, cut=["AE"]
    )
    found = tree_metrics([tree], window=2)
    plain = tree_metrics([straight_tree()], window=2)
    of_worlds = (
        "terminated",
        "truncated",
        "world_broken",
        "step_reward",
        "refused",
        "refused_again",
    )
    assert list(found) == [*plain, *of_worlds]
    assert (found["refused"], found["refused_again"]) == (0, 0)
    assert (found["tool_calls"], found["tool_errors"], found["environment_steps"]) == (7, 0, 7)
    assert found["tool_calls_a_leaf"] == found["episode_steps"] == pytest.approx(8 / 3)
    assert (found["terminated"], found["truncated"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["step_reward"] == pytest.approx((0.0 - 0.1 + 1.0 - 0.1 + 0.0 + 0.5 + 0.0) / 7)
    before, after = around_results([tree], window=2)
    ended = [node.entropies for node in tree.nodes if node.text == "to the end"]
    assert len(before) == 4 and not any(turn is end for turn in before for end in ended)
    assert len(after) == 5 and all(len(turn) == 2 for turn in after), "all but the first turns"
    assert {point["position"] for point in entropy_profile([tree])} >= {-1, 1}


# ---------------------------------------------------------------- several batches


def test_one_batch_is_its_own_metrics():
    metrics = tree_metrics([small_tree()], window=2)
    assert together([metrics]) == metrics


def test_metrics_of_several_batches():
    batches = [tree_metrics([tree], window=2) for tree in (small_tree(), straight_tree())]
    found = together(batches)
    assert list(found) == list(batches[0])
    assert (found["leaves"], found["branches"], found["tool_calls"]) == (3, 1, 2)
    assert (found["tool_errors"], found["sampled_tokens"]) == (1, 9)
    assert found["answer_rate"] == pytest.approx((0.5 + 1) / 2)
    assert found["response_tokens"] == pytest.approx((8.5 + 2) / 2)
    assert (found["decisions"], found["entropy_rise"]) == (1, 0.5), "of the batch that has some"
    counts = {name for name in found if found[name] == sum(b.get(name, 0) for b in batches) != 0}
    assert set(COUNTS) <= counts


# ---------------------------------------------------------------- intervals


# ---------------------------------------------------------------- paired differences
