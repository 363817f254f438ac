"""Suggestions: the name that somebody may have meant, and no name where nothing is like it."""

import pytest

from params import recipe_files, suggestions
from params.schema.algorithms import load_algorithms
from tasks import recipes
from tests.params.edits import edited

TINY = recipe_files.read("tiny")
KEYS = ["context", "machine.threads", "a.b.threads", "a.temperature", "a.b.c.temperature"]


@pytest.mark.parametrize(
    ("name", "known", "suggestion"),
    [
        ("tyni", ["tiny", "tiny-search", "smoke"], "tiny"),
        ("ARPO", ["arpo", "grpo"], "arpo"),
        ("zzz", ["tiny", "smoke"], None),
        ("tiny", [], None),
    ],
)
def test_nearest_name(name, known, suggestion):
    assert suggestions.nearest(name, known) == suggestion
    said = f" (did you mean '{suggestion}'?)" if suggestion else ""
    assert suggestions.meant(name, known) == said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("machine.thread", " (did you mean 'machine.threads'?)"),  # not the one elsewhere
        ("temperature", " (did you mean 'a.temperature' or 'a.b.c.temperature'?)"),
        ("a.temprature", " (did you mean 'a.temperature'?)"),
        ("machine.contxt", " (did you mean 'context'?)"),
        ("machine.colour", ""),
    ],
)
def test_keys_of_the_same_section_come_before_those_elsewhere(key, said):
    assert suggestions.meant_key(key, KEYS) == said


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ({"machine__thread": 2}, "'machine.threads'"),
        ({"temperature": 1}, "'reinforce.rollout.temperature'"),
        ({"reinforce__leafs": 3}, "'reinforce.rollout.leaves'"),
        ({"context": 1}, "'prepare.policy.context'"),  # of each kind of policy, and named once
        ({"tools__python__cpu_secs": 1}, "'tools.python.cpu_seconds'"),
        ({"tools__pyton": {}}, "'python'"),
        ({"dialect": {"nativ": {}}}, "'native'"),
        ({"environment": {"frozenlake": {}}}, "'frozen_lake'"),
        ({"prepare__expert__kind": "computations"}, "'computation'"),
        ({"reinforce__reward": [{"answr": {}}]}, "'answer'"),
        ({"reinforce__reward": [{"answer": {"weigth": 1}}]}, "'reinforce.reward.0.answer.weight'"),
    ],
)
def test_fault_of_a_recipe_names_what_was_meant(change, meant):
    with pytest.raises(ValueError) as caught:
        recipes.check(edited(TINY, change), "params/mine.yaml")
    [asked] = {line.partition("did you mean ")[2] for line in str(caught.value).splitlines()} - {""}
    assert meant in asked
    assert asked.count(meant) == 1


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("reinforce.rollout.leafs=3", "'reinforce.rollout.leaves'"),
        ("temperature=1", "'evaluate.temperature' or 'reinforce.rollout.temperature'"),
        ("reinforce.ahed=2", "'reinforce.ahead'"),  # which the file may leave out
        ("algorithm.estimatr=1", "'estimator'"),
        ("machnie.threads=1", "'machine'"),
    ],
)
def test_key_to_set_is_suggested(change, meant):
    with pytest.raises(ValueError, match="did you mean") as caught:
        recipes.load_changed("tiny", [change])
    assert meant in str(caught.value).replace("tiny.", "").replace("arpo.", "")


def test_row_of_the_algorithms_is_suggested():
    rows = load_algorithms()
    assert "arpo" in rows
    with pytest.raises(ValueError, match=r"did you mean 'arpo'\?"):
        recipes.load_changed("tiny", ["reinforce.algorithm=arpp"])
