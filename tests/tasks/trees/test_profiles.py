"""Entropy around tool results, by tool."""

import numpy as np
import pytest

from tasks.trees import metrics, profiles
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree


def node(parent, kind, text="", entropies=()):
    found = np.array(entropies, np.float32)
    tokens = np.zeros(max(1, len(found)), np.int32)
    outcome = "ok" if kind == RESULT else "answer"
    return Node(parent, kind, outcome, text, tokens, found, found)


def tree():
    """A search, then python in one branch, and an answer at once in the other."""
    nodes = [
        node(-1, PROMPT),
        node(0, TURN, "search", [0.1, 0.2]),
        node(1, RESULT),
        node(2, TURN, "python", [0.3, 0.4]),
        node(2, TURN, "", [0.7]),
        node(3, RESULT),
        node(5, TURN, "", [0.5, 0.6]),
    ]
    return Tree(Question("1", "toy", "?", ("1",)), nodes, [4, 6])


def test_each_tool_has_a_profile_of_its_own():
    found = profiles.entropy_by_tool([tree()], lambda text: text)
    assert set(found) == {"python", "search"}
    assert found["search"]["position"] == [-2, -1, 1, 2]
    assert found["search"]["mean"] == pytest.approx([0.1, 0.2, 0.5, 0.4])
    assert found["search"]["tokens"] == [1, 1, 2, 1]
    assert found["python"]["mean"] == pytest.approx([0.3, 0.4, 0.5, 0.6])


def test_with_one_name_for_all_it_is_the_profile_of_a_rollout():
    whole = profiles.entropy_by_tool([tree(), tree()], lambda text: "any")["any"]
    rows = metrics.entropy_profile([tree(), tree()])
    for name in ("position", "mean", "standard_error"):
        assert whole[name] == pytest.approx([row[name] for row in rows])


def test_pooled_profiles_are_that_of_all_tokens():
    values = [[0.1, 0.3], [0.8, 0.7, 0.2]]
    made = [
        {
            "position": [1],
            "mean": [np.mean(own)],
            "standard_error": [np.std(own) / np.sqrt(len(own))],
            "tokens": [len(own)],
        }
        for own in values
    ]
    every = np.concatenate(values)
    found = profiles.pooled(made)
    assert found["mean"] == pytest.approx([every.mean()])
    assert found["standard_error"] == pytest.approx([every.std() / np.sqrt(5)])
    assert found["tokens"] == [5]
