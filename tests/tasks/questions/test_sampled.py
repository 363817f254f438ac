"""A recipe whose traces are sampled, and one without a cold start: what is refused, and why."""

import pytest

from params import recipe_files
from tasks.recipes import check

SAMPLED = {
    "kind": "sampled",
    "policy": None,
    "questions": None,
    "attempts": 4,
    "most": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "rows": 16,
}


def recipe(expert, cold_start=True):
    """The recipe smoke with another expert, and without its cold start."""
    values = recipe_files.read("smoke")
    values["prepare"]["expert"] = expert
    if not cold_start:
        values["cold_start"] = None
    return check(values, "mine.yaml")


def test_the_settings_of_a_sampled_expert_are_typed():
    expert = recipe({**SAMPLED, "policy": {"name": "some/teacher", "revision": "abc"}}).prepare
    assert expert.expert.policy.revision == "abc"
    budget = expert.expert.budget()
    assert (budget.leaves, budget.branch, budget.rows, budget.temperature) == (4, 0, 16, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"most": 5}, "most 5 exceeds attempts 4: lower the former, or raise the latter"),
        ({"rows": 3}, "rows 3 cannot hold the 4 attempts"),
        ({"questions": 91}, "prepare.expert.questions 91 exceeds prepare.questions.train 90"),
        ({"top_p": 0.0}, "prepare.expert.top_p"),
        ({"retries": 1}, "unknown key 'prepare.expert.retries'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        recipe({**SAMPLED, **changes})


def test_a_cold_start_and_an_expert_come_together_or_not_at_all():
    without = recipe(None, cold_start=False)
    assert (without.prepare.expert, without.cold_start) == (None, None)
    with pytest.raises(ValueError, match=r"set prepare\.expert to null, or write the section"):
        recipe(SAMPLED, cold_start=False)
    with pytest.raises(ValueError, match="set cold_start to null too, or name an expert"):
        recipe(None)
