"""Runs that are spoilt on purpose: their recipes are sound, and a fault begins when it says."""

from types import SimpleNamespace

import pytest

from benchmarks.spoilt_runs import BREVITY, RUNS, Run, faulty, stale, table
from tasks import recipes
from tasks.ledger.artifacts import Artifact
from tasks.training import sampling
from tasks.training.agents import Agents
from tests.toy_project import ROOT

QUESTIONS = 32  # an iteration of the recipe tiny


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/brevity.py").write_text(BREVITY)
    monkeypatch.chdir(tmp_path)


def test_every_run_is_a_sound_recipe(project):
    for run in RUNS.values():
        recipe = recipes.load_changed(run.recipe, run.changes, ROOT / "params")
        assert recipe.reinforce.questions == QUESTIONS
        assert recipe.reinforce.iterations >= run.iterations > run.begins


def test_a_fault_begins_in_its_iteration_and_ends_with_the_run():
    first, newest = Artifact("first", "1"), Artifact("newest", "2")
    training = SimpleNamespace(
        recipe=recipes.load("tiny", ROOT / "params"),
        algorithm=SimpleNamespace(branching="none"),
        environment=SimpleNamespace(specs=()),
        policy=first,
        questions=first,
        corpus=first,
    )
    sound = sampling.rollout_inputs
    with faulty(Run(fault=stale, begins=3)):
        for iteration, policy in enumerate([newest, newest, newest, first, first]):
            agents = Agents(newest, iteration, None, None, first)
            inputs = sampling.rollout_inputs(training, agents, iteration * QUESTIONS, 0)
            assert inputs.policy == policy
    assert sampling.rollout_inputs is sound


def test_the_table_names_each_alarm_with_its_iteration():
    curve = {"reward": [0.0] * 5 + [1.0] * 5, "success": [0.5] * 10}
    run = {"iterations": 10, "validation": {"0": 0.75, "10": 0.25}, "curve": curve}
    lines = table({"lost": {**run, "alarms": {"no_spread": 7}}, "good": {**run, "alarms": {}}})
    assert "| lost | 10 | 0.00 → 1.00 | 50.0 → 50.0 | 75.0 → 25.0 | `no_spread` (7) |" in lines
    assert lines.endswith("| none |")
