"""What training spent until success reached a level."""

import pytest

from flows.tracking import calls_to_success as calls


def curve(success, each=10):
    return {"success": success, "tool_calls": [each * (i + 1) for i in range(len(success))]}


def test_first_full_window_of_the_level_counts():
    own = curve([0.9, 0.0, 0.0, 0.6, 0.6, 0.6])
    assert calls.spent_until(own, 0.6, window=3) == 60, "a lucky iteration does not"
    assert calls.spent_until(own, 0.6, window=1) == 10
    assert calls.spent_until(own, 0.3, window=3) == 30, "the first window ends with the third"
    assert calls.spent_until(own, 0.95, window=1) is None
    assert calls.spent_until(curve([0.5]), 0.5) == 10, "shorter than a window"


def test_levels_lie_above_every_start():
    found = calls.levels({"a": [curve([0.32, 0.52])], "b": [curve([0.4, 0.41])]}, window=1)
    assert found == [0.45, 0.5]
    assert calls.levels({}) == []


def test_an_interval_needs_that_all_seeds_reached_the_level():
    curves = {
        "a": [curve([0.5] * 5), curve([0.5] * 5, 30)],
        "b": [curve([0.5] * 5), curve([0] * 5)],
    }
    first, second = calls.calls_rows(curves, [0.5])
    assert first["levels"][0.5] == {"seeds": 2, "reached": 2, "mean": 100, "low": 50, "high": 150}
    assert second["levels"][0.5] == {"seeds": 2, "reached": 1}
    text = calls.calls_markdown([first, second])
    assert "100 [50, 150]" in text
    assert "1 of 2 seeds" in text


@pytest.mark.parametrize(
    ("cost", "said"),
    [(4, "less than the paper's"), (5, "contains the paper's"), (8, "does not come out")],
)
def test_ratio_is_taken_at_the_highest_level_of_all_and_said_plainly(cost, said):
    low, high = [0.3] * 5, [0.3] * 5 + [0.8] * 5
    curves = {
        "ARPO": [curve(high, cost), curve(high, cost)],
        "GRPO": [curve(high, 10), curve(high, 10)],
    }
    found = calls.ratio(curves, "ARPO", "GRPO", [0.4, 0.8, 0.9])
    assert (found["level"], found["ratio"]) == (0.8, pytest.approx(cost / 10))
    assert said in calls.ratio_sentence(found, "ARPO", "GRPO", 0.5)
    assert not calls.ratio({**curves, "GRPO": [curve(low)] * 2}, "ARPO", "GRPO", [0.8])
    assert "cannot be told" in calls.ratio_sentence(None, "ARPO", "GRPO", 0.5)
