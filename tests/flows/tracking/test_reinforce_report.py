import time

import pytest

from flows.tracking import reinforce_report
from flows.tracking.progress import Progress
from params.schema.reinforce import Reinforce


class Log:
    """Keeps what a run logs."""

    def __init__(self):
        self.metrics, self.times, self.traces, self.figures = {}, set(), 0, []

    def log_metrics(self, values, step, at):
        self.metrics |= values
        self.times.add((step, at))

    def log_traces(self, make):
        self.traces += 1

    def log_figure(self, figure, name):
        self.figures.append(name)


def record(number, at, seconds, **metrics):
    return {
        "step": {"iteration": number},
        "finished": at,
        "seconds": seconds,
        "metrics": metrics,
    }


def iteration(number, gathered, learned):
    """An iteration of two batches; when it was rolled out and when it was learned from."""
    return {
        "rollout": [
            record(number, gathered, {"sampling": 2.0, "tools": 1.0}, sampled_tokens=300)
            for _ in range(2)
        ],
        "reward": [
            record(number, gathered, {"reward": 0.25}, reward=reward, success=reward)
            for reward in (0.5, 1.0)
        ],
        "advantage": [record(number, learned, {"advantage": 0.5})],
        "update": [record(number, learned, {"update": 4.0}, trained_tokens=200)],
    }


PARTS = {"sampling": 4.0, "tools": 2.0, "reward": 0.5, "advantage": 0.5, "update": 4.0}


def log(found, began, ahead=0):
    settings = Reinforce.model_construct(
        ahead=ahead, trace_every=2, trace_questions=1, validation=None
    )
    logged = Log()
    return logged, reinforce_report.log_iteration(
        logged, Progress("reinforce", 1), found, settings, began
    )


def test_iteration_is_logged_with_speeds_and_seconds():
    now = time.time()
    logged, [seconds] = log(iteration(3, now - 5, now - 1), began=now - 20)
    assert {name: seconds[name] for name in PARTS} == PARTS
    assert 20 <= sum(seconds.values()) <= time.time() - (now - 20)
    assert logged.metrics["reward"] == 0.75
    assert logged.metrics["sampled_tokens_a_second"] == 600 / 4
    assert logged.metrics["trained_tokens_a_second"] == 200 / 4
    assert logged.metrics["seconds_tools"] == 2
    assert logged.metrics["seconds_orchestration"] == seconds["orchestration"] > 0
    assert logged.times == {(3, now - 1)}


@pytest.mark.parametrize(
    ("ahead", "gathered", "learned", "timed"),
    [(0, -5, -1, 1), (0, -15, -1, 0), (1, -15, -1, 1), (1, -15, -12, 0)],
)
def test_remembered_sub_steps_are_not_timed(ahead, gathered, learned, timed):
    now = time.time()
    found = iteration(0, now + gathered, now + learned)
    logged, seconds = log(found, began=now - 10, ahead=ahead)
    assert len(seconds) == timed
    assert ("seconds_update" in logged.metrics) == bool(timed)
    assert all(value >= 0 for each in seconds for value in each.values())


@pytest.mark.parametrize("ahead", [0, 1])
def test_verbs_of_a_reward_model_count_when_they_ran(ahead):
    now = time.time()
    found = iteration(3, now - 5, now - 2)
    found["estimate"] = [record(3, now - 4, {"estimate": 0.5})]
    logged, [seconds] = log(found, began=now - 20, ahead=ahead)
    assert logged.times == {(3, now - 2)}, "the update ends last"
    assert seconds["estimate"] == 0.5
    found["reward_model"] = [record(3, now - 1, {"reward_model": 0.75}, auc=0.5)]
    logged, [seconds] = log(found, began=now - 20, ahead=ahead)
    assert logged.times == {(3, now - 1)}
    assert (seconds["reward_model"], logged.metrics["reward_model/auc"]) == (0.75, 0.5)
    assert log(found, began=now - 0.5, ahead=ahead)[1] == []
    found["reward_model"][0]["finished"] = now - 30
    assert log(found, began=now - 20, ahead=ahead)[1] == [], "it came from the ledger"


@pytest.mark.parametrize(("number", "traced"), [(0, 1), (1, 0), (2, 1)])
def test_some_iterations_are_traced(number, traced):
    assert log(iteration(number, 1.0, 1.0), began=2.0)[0].traces == traced


def test_mean_seconds_are_printed_and_drawn(capsys):
    logged = Log()
    reinforce_report.report_time(logged, [])
    assert capsys.readouterr().out == ""
    reinforce_report.report_time(logged, [{"tools": 1.0, "update": 2.0}, {"tools": 1, "update": 4}])
    total, *parts = capsys.readouterr().out.splitlines()
    assert "4.00" in total
    split = [line.split() for line in parts]
    assert split == [["update", "3.000", "75.0%"], ["tools", "1.000", "25.0%"]]
    assert logged.figures == ["seconds_by_part.png"]


def test_a_part_that_some_iterations_lack_took_them_no_time(capsys):
    uneven = [{"update": 2.0}, {"update": 4.0, "reward_model": 1.0}]
    for seconds in (uneven, uneven[::-1]):
        reinforce_report.report_time(Log(), seconds)
        total, *parts = capsys.readouterr().out.splitlines()
        assert "3.50" in total
        split = [line.split() for line in parts]
        assert split == [["update", "3.000", "85.7%"], ["reward_model", "0.500", "14.3%"]]


def test_training_curve_has_the_measures_that_every_iteration_has():
    first, second = iteration(0, 1.0, 1.0), iteration(1, 1.0, 1.0)
    for one, spread in ((first, 0.5), (second, 0.25)):
        one["advantage"][0]["metrics"] = {"advantage_spread": spread}
    first["update"][0]["metrics"]["gradient_norm"] = 2.0
    found = reinforce_report.training_curve([first, second])
    assert found == {"success": [0.75, 0.75], "advantage_spread": [0.5, 0.25]}


def test_figures_are_those_that_have_something_to_show():
    curve = [{"iteration": 0, "reward": 0.5, "success": 0.5}]
    dynamics = {"iteration": [0.0], "success": [0.5]}
    nothing = {"state_groups": [], "profile": [], "decisions": []}
    data = {"curve": curve, "asked": [], "dynamics": dynamics, **nothing, "rise": 0.5}
    always = set(reinforce_report._drawn(data))
    assert always >= {"learning_curve", "training_dynamics"}
    sizes = [{"iteration": 0, "sizes": {"1": 3, "2": 4}}]
    assert set(reinforce_report._drawn(data | {"state_groups": sizes})) - always == {"state_groups"}
