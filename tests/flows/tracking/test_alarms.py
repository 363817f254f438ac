"""Alarms: which metrics raise them, that good runs raise none, and how they are reported."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.tracking.alarm_report import AlarmWatch, StoppedError
from flows.tracking.alarms import ALARMS, Seen, alarms
from flows.tracking.progress import Progress
from params.schema.reinforce import AlarmName
from tasks.recipes import load
from tasks.trees.validation import Validated
from tests.examples import examples

REPORTS = Path(__file__).parents[3] / "reports"
QUESTIONS = 32  # an iteration
STEADY = {
    "entropy": [0.5] * 12,
    "groups_without_spread": [0.25] * 12,
    "success": [0.4] * 12,
    "reward": [0.4] * 12,
    "reward_deviation": [0.2] * 12,
    "gradient_norm": [0.3] * 12,
    "mismatch_highest": [0.01] * 12,
    "masked_share": [0.02, 0.4] * 6,
    "world_broken": [0.0, 0.2] * 6,
    "tool_calls_a_leaf": [1.2] * 12,
    "model_estimate": [0.45] * 12,
    "model_estimate_deviation": [0.2] * 12,
    "held_out_questions": [3.0] * 12,
    "model_gap": [0.05] * 12,
    "model_gap_deviation": [0.2] * 12,
}
SPOILT = {
    "entropy_collapse": {"entropy": [0.5] * 7 + [0.02] * 5},
    "entropy_rise": {"entropy": [0.5] * 6 + [1.0] * 6, "success": [0.4] * 6 + [0.21] * 6},
    "no_spread": {"groups_without_spread": [0.25] * 10 + [1.0] * 2},
    "success_lost": {"success": [0.85] * 6 + [0.5] * 6},
    "reward_lost": {"reward": [0.4] * 6 + [0.1] * 6},
    "tools_unused": {
        "tool_calls_a_leaf": [1.2] * 6 + [0.05] * 6,
        "reward": [0.4] * 6 + [0.8] * 6,
    },
    "history_changed": {"requests_continued": [1.0] * 10 + [0.4] * 2},
    "gradient_spike": {"gradient_norm": [0.3] * 11 + [4.0]},
    "masked": {"masked_share": [0.02] * 10 + [0.1] * 2},
    "world_broken": {"world_broken": [0.0] * 10 + [0.1] * 2},
    "mismatch_spike": {"mismatch_highest": [0.15] * 11 + [1.6]},
    "model_hacked": {
        "model_gap": [0.05] * 12 + [0.5] * 12,
        "held_out_questions": [3.0] * 24,
        "model_gap_deviation": [0.2] * 24,
    },
}


def exam(iterations, right, questions=120):
    """Return a policy that got so many of the validation questions right, the first ones."""
    values = {f"q{number:03}": float(number < right) for number in range(questions)}
    return Validated(iterations, {"success": values, "score": values}, float(iterations))


def seen(curve, *asked):
    return Seen(curve, QUESTIONS, asked)


def names(curve, *asked):
    return [alarm.name for alarm in alarms(seen(curve, *asked))]


def test_the_recipe_can_name_every_alarm():
    assert (
        set(get_args(AlarmName))
        == set(ALARMS)
        == {
            *SPOILT,
            "validation_lost",
            "reward_hacked",
        }
    )


@pytest.mark.parametrize("name", SPOILT)
def test_each_alarm_is_raised_by_its_own_metric_alone(name):
    curve = STEADY | SPOILT[name]
    (alarm,) = alarms(seen(curve))
    assert (alarm.name, alarm.iteration) == (name, max(map(len, curve.values())) - 1)
    assert names(STEADY) == []


def test_low_entropy_where_little_is_left_to_learn():
    low = STEADY | SPOILT["entropy_collapse"]
    assert names(low | {"success": [0.4] * 6 + [0.95] * 6}) == []
    assert names(low | {"success": [0.4] * 6 + [0.85] * 6}) == ["entropy_collapse"]


def test_a_mismatch_that_does_no_harm_raises_none():
    small = {"mismatch_highest": [0.01] * 11 + [0.9]}
    assert names(STEADY | small) == [], "90 times the median, and still below 1"


def test_tools_that_are_not_needed_or_never_were_used_raise_none():
    spoilt = STEADY | SPOILT["tools_unused"]
    assert names(spoilt | {"reward": [0.4] * 12}) == [], "no better for it"
    assert names(spoilt | {"tool_calls_a_leaf": [0.2] * 6 + [0.0] * 6}) == []
    assert names(spoilt | {"tool_calls_a_leaf": [1.2] * 6 + [0.3] * 6}) == []


def test_validation_below_its_best_beyond_chance():
    assert names(STEADY, exam(0, 80), exam(10, 60)) == ["validation_lost"]
    assert names(STEADY, exam(0, 80), exam(10, 78)) == [], "two questions are within chance"
    assert names(STEADY, exam(0, 60), exam(10, 80)) == []
    assert names(STEADY, exam(0, 60)) == []


def test_a_reward_that_rises_while_validation_falls():
    rising = STEADY | {"reward": [0.1 * number for number in range(12)]}
    assert names(rising, exam(0, 80), exam(10, 60)) == ["validation_lost", "reward_hacked"]
    assert names(rising, exam(0, 60), exam(10, 80)) == []
    liked = STEADY | {"model_estimate": [0.05 * number for number in range(12)]}
    assert names(liked, exam(0, 80), exam(10, 60)) == ["validation_lost", "model_hacked"]
    assert names(liked, exam(0, 60), exam(10, 80)) == []


@given(st.integers(0, 2**32 - 1))
@examples(25, deadline=None)
def test_chance_alone_raises_no_alarm_of_loss(seed):
    drawn = np.random.default_rng(seed)
    curve = {"success": (drawn.random((60, QUESTIONS)) < 0.7).mean(axis=1).tolist()}
    for end in range(1, 61):
        assert names({"success": curve["success"][:end]}) == []


@pytest.mark.parametrize("name", SPOILT)
def test_first_iterations_raise_none(name):
    metric, values = next(iter(SPOILT[name].items()))
    assert names({metric: values[-1:]}) == [], "one bad batch at the start shows nothing"
    assert names({}) == []


# Of an iteration of committed comparisons, where the recipe asks another number today.
QUESTIONS_THEN = {"household": 8}


def test_trained_runs_raise_none():
    files = sorted(REPORTS.glob("*/comparison/*/seed-*.json"))
    trained = [
        (file.parts[-4], found["curve"])
        for file in files
        if "curve" in (found := json.loads(file.read_text()))
    ]
    assert len(trained) >= 80
    for recipe, curve in trained:
        questions = QUESTIONS_THEN.get(recipe) or load(recipe).reinforce.questions
        for end in range(1, 1 + len(curve["success"])):
            until = {name: values[:end] for name, values in curve.items()}
            assert alarms(Seen(until, questions)) == [], recipe


class Log:
    """A run of MLflow that keeps what it is told."""

    def __init__(self):
        self.metrics, self.tags, self.commit = [], {}, ""

    def log_metrics(self, values, step, at):
        self.metrics.append((values, step, at))

    def set_tags(self, values):
        self.tags |= values


def watched(stop_on, log):
    watch = AlarmWatch("toy", stop_on, QUESTIONS)
    curve = STEADY | SPOILT["gradient_spike"] | SPOILT["success_lost"]
    for number in range(12):
        metrics = {name: values[number] for name, values in curve.items()}
        watch.look(metrics, (), log, Progress("reinforce", 12), finished=float(number))


def test_an_alarm_is_reported_once(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "flows.tracking.alarm_report.create_markdown_artifact",
        lambda text, key, description: shown.append((key, text)),
    )
    log = Log()
    watched([], log)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "alarm success_lost in iteration 8",
        "alarm gradient_spike in iteration 11",
    ]
    assert "from 85.0 % at its best" in lines[0] and "was 0.3 before" in lines[1]
    assert log.metrics == [
        ({"alarm/success_lost": 1.0}, 8, 8.0),
        ({"alarm/gradient_spike": 1.0}, 11, 11.0),
    ]
    assert log.tags == {"alarms": "success_lost, gradient_spike"}
    assert [key for key, _ in shown] == ["alarms-toy"] * 2
    assert "| gradient_spike | 11 |" in shown[1][1]


def test_a_recipe_may_stop_on_an_alarm(monkeypatch, capsys):
    monkeypatch.setattr(
        "flows.tracking.alarm_report.create_markdown_artifact", lambda *_, **__: None
    )
    log = Log()
    with pytest.raises(StoppedError, match=r"reinforce\.stop_on names success_lost"):
        watched(["success_lost"], log)
    assert [step for _, step, _ in log.metrics] == [8]


def test_an_estimate_that_stops_being_too_low_is_no_hack():
    held_out = {"held_out_questions": [3.0] * 24, "model_gap_deviation": [0.1] * 24}
    for start, expected in ((-0.5, []), (0.0, ["model_hacked"])):
        gaps = [start] * 12 + [start + 0.5] * 12
        assert names(STEADY | held_out | {"model_gap": gaps}) == expected
