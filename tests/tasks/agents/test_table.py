"""The table: means and intervals of each agent and set."""

import pytest

from tasks.agents.table import markdown, reasons, summarise


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


def test_the_lenient_score_has_a_column_where_every_task_has_one():
    known = [{**row("one", 0.0), "lenient": right, "last_number": None} for right in (True, False)]
    (whole,), (older,) = (summarise({"bare": rows}, 50, 0) for rows in (known, [row("one", 1.0)]))
    assert (whole["lenient"]["mean"], whole["last_number"]) == (0.5, None)
    assert "| success (%) | lenient (%) | tool calls |" in markdown([whole, older])
    assert "lenient" not in markdown([older])


def test_failed_requests_have_their_reasons_with_counts():
    rows = [row("one", 0.0, fault=fault) for fault in ["503", "503", "timeout", "\x1b[2J" * 99, ""]]
    text = reasons({"react": rows, "direct": [row("one", 1.0)]}, ["results.parquet"])
    _, told, _, line = text.rstrip("\n").split("\n")
    assert "column `fault` of `results.parquet`" in told
    assert line.startswith(
        "- react: the server answers with the status 503 (2), timeout (1), \\x1b"
    )
    assert len(line) < 200
    many = [row("one", 0.0, fault=f"fault {number}") for number in range(9)]
    assert "other reasons (4)" in reasons({"react": many}, ["a"])
    assert reasons({"direct": [row("one", 1.0)]}, []) == ""
