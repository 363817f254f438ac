"""The table: means and intervals of each agent and set."""

import pytest

from tasks.agents.table import markdown, summarise


def row(of_set, score, scorer="exact", calls=1, fault=""):
    return {
        "set": of_set,
        "scorer": scorer,
        "score": score,
        "success": score == 1,
        "tool_calls": calls,
        "model_calls": 2,
        "prompt_tokens": 1200,
        "completion_tokens": 3,
        "fault": fault,
    }


def test_each_set_and_all_of_them_have_means_with_intervals():
    rows = [row("one", 1.0, calls=2), row("one", 0.0, calls=3), *[row("two", 1.0)] * 6]
    one, two, both = summarise({"react": rows}, resamples=500, seed=0)
    assert [each["set"] for each in (one, two, both)] == ["one", "two", "all"]
    assert (one["success"]["mean"], two["success"]["mean"]) == (0.5, 1.0)
    assert (one["success"]["low"], one["success"]["high"]) == (0.0, 1.0)
    assert both["success"]["mean"] == pytest.approx(7 / 8)
    assert both["success"]["low"] < 7 / 8 < both["success"]["high"]
    assert (one["tool_calls"], both["questions"]) == (2.5, 8)
    assert one["score"] is None


def test_a_column_is_there_where_a_row_fills_it():
    exact = summarise({"react": [row("one", 1.0)]}, 10, 0)
    graded = summarise({"rag": [row("two", 0.25, "f1", fault="timeout")]}, 10, 0)
    head = "| agent | set | questions | success (%) | tool calls | requests | tokens read |"
    assert markdown(exact).startswith(head)
    whole = markdown([*exact, *graded])
    assert "| success (%) | f1 (%) |" in whole
    assert whole.splitlines()[2].endswith("| 1.00 | 2.00 | 1,200 | 3.00 | 0 |")
    assert "| rag | two | 1 | 0.0 [0.0, 0.0] | 25.0 [25.0, 25.0] |" in whole
