"""The part ``model``: an estimate is worth its weight in a sound format, and nothing in another."""

import pytest

from tasks.rewards.contract import Ending
from tasks.rewards.model import Model, value
from tasks.trees.tree import Question


def ending(faults=(), estimate=0.75):
    fields = {"text": "", "answer": "7", "breakdown": {}, "tools": frozenset()}
    question = Question("q", "toy", "3+4?", ("7",))
    return Ending(question, 0, [], faults=faults, estimate=estimate, **fields)


@pytest.mark.parametrize(
    ("faults", "estimate", "worth"),
    [((), 0.75, 1.5), (("think",), 0.75, 0.0), (("think",), None, 0.0)],
)
def test_a_broken_format_earns_no_estimate(faults, estimate, worth):
    assert value(Model(weight=2.0), ending(faults, estimate)) == worth


def test_a_trajectory_without_an_estimate_is_named():
    with pytest.raises(ValueError, match="question q, leaf 0"):
        value(Model(), ending(estimate=None))
