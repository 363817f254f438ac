import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from params.schema.evaluate import Evaluate
from tasks.evaluate import (
    AGENTS,
    EvaluateInputs,
    compare,
    evaluate,
    markdown,
    success_rows,
    table_rows,
)
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step
from tasks.reward import TABLE
from tasks.trees import panels
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.tables import write_table
from tasks.trees.tree import Question

SETTINGS = Evaluate(panel=None, questions=4, temperature=0.6, top_p=0.95, bootstrap=200)


TASKS = [Question(f"test-{number:05d}", "story", "", ("1",)) for number in range(4)]
PANEL = panels.summary(panels.panel_of(TASKS, "test", "computation", seed=0), 0, 4)


def answer(number, kind, success, **values):
    row = {
        "question": f"test-{number:05d}",
        "kind": kind,
        "leaf": 0,
        "scorer": "exact",
        "reward": float(success),
        "score": float(success),
        "breakdown": {"score": float(success)},
        "success": success,
        "answer": "1",
        "faults": [],
        "sound": True,
        "outcome": "answer",
        "tool_calls": 1,
        "tool_errors": 0,
        "response_tokens": 20,
        "sampled_tokens": 15,
    }
    return {**row, **values}


BEFORE = [
    answer(0, "story", True),
    answer(1, "chain", False, tool_calls=2, tool_errors=1),
    answer(2, "story", False, answer=None, response_tokens=40),
    answer(3, "chain", False, tool_calls=0),
]
AFTER = [
    answer(0, "story", True),
    answer(1, "chain", True, tool_calls=2),
    answer(2, "story", True),
    answer(3, "chain", False, tool_calls=3),
]
TWO = AGENTS[:2]
ANSWERS = dict(zip(TWO, (BEFORE, AFTER), strict=True))


@pytest.fixture
def rows():
    return compare(ANSWERS, resamples=200, seed=7)


def named(rows, measure):
    (row,) = [row for row in rows if row["measure"] == measure]
    return row


def test_means_of_every_measure(rows):
    means = {row["measure"]: [row[agent]["mean"] for agent in TWO] for row in rows}
    assert means == {
        "success": [0.25, 0.75],
        "success, chain": [0.0, 0.5],
        "success, story": [0.5, 1.0],
        "answer rate": [0.75, 1.0],
        "tool calls a question": [1.0, 1.75],
        "tool errors a question": [0.25, 0.0],
        "response length": [25.0, 20.0],
    }
    assert [row["questions"] for row in rows] == [4, 2, 2, 4, 4, 4, 4]


def test_intervals_are_those_of_the_bootstrap_over_questions(rows):
    for row, values in (
        ("success", [True, False, False, False]),
        ("tool calls a question", [1, 2, 1, 0]),
    ):
        low, high = bootstrap_interval(np.array(values, float), 200, seed=7)
        assert named(rows, row)["cold start"] == {"mean": np.mean(values), "low": low, "high": high}


def test_a_graded_score_has_a_row_of_its_own():
    graded = [
        answer(0, "film", False, scorer="f1", score=0.5),
        answer(1, "film", True, scorer="f1"),
        answer(2, "film", False, scorer="f1", score=0.7, sound=False),
        answer(3, "sum", True),
    ]
    compared = compare({"cold start": graded, "trained": graded}, resamples=50, seed=7)
    assert named(compared, "score")["trained"]["mean"] == 0.5
    assert named(compared, "score")["questions"] == 3
    assert [row["measure"] for row in compared][3:5] == ["score", "answer rate"]
    assert [row["kind"] for row in success_rows(compared)] == ["all"] * 2 + ["film"] * 2 + [
        "sum"
    ] * 2


def test_a_world_has_ended_episodes_instead_of_answers():
    episodes = [
        answer(number, "frozen_lake", number == 0, answer=None, outcome=outcome)
        for number, outcome in enumerate(["terminated", "truncated", "cut", "terminated"])
    ]
    compared = compare({"cold start": episodes, "trained": episodes}, resamples=50, seed=7)
    assert named(compared, "episodes that ended")["trained"]["mean"] == 0.5
    assert "answer rate" not in [row["measure"] for row in compared]


def test_an_agent_that_is_always_right_has_no_width(rows):
    assert named(rows, "success, story")["trained"] == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_a_kind_looks_at_its_own_questions_only(rows):
    worse = [answer(0, "story", False), *AFTER[1:]]
    changed = compare({"cold start": BEFORE, "trained": worse}, resamples=200, seed=7)
    assert named(changed, "success, chain") == named(rows, "success, chain")
    assert named(changed, "success, story") != named(rows, "success, story")


def test_the_table_that_a_person_reads():
    cell = {"mean": 0.25, "low": 0.125, "high": 0.5}
    other = {"mean": 1.0, "low": 0.9, "high": 1.0}
    rows = [
        {"measure": "success", "questions": 4, "unit": "%", "cold start": cell, "trained": other},
        {"measure": "calls", "questions": 4, "unit": "", "cold start": cell, "trained": other},
        {
            "measure": "length",
            "questions": 3,
            "unit": "tokens",
            "cold start": cell,
            "trained": other,
        },
    ]
    assert markdown(rows) == (
        "| | questions | cold start | trained |\n"
        "|---|---:|---:|---:|\n"
        "| success (%) | 4 | 25.0 [12.5, 50.0] | 100.0 [90.0, 100.0] |\n"
        "| calls | 4 | 0.25 [0.12, 0.50] | 1.00 [0.90, 1.00] |\n"
        "| length (tokens) | 3 | 0.25 [0.12, 0.50] | 1.00 [0.90, 1.00] |\n"
    )


def test_flat_rows_have_one_row_a_measure_and_agent(rows):
    flat = table_rows(rows)
    assert len(flat) == 2 * len(rows)
    assert flat[0] == {
        "measure": "success",
        "questions": 4,
        "agent": "cold start",
        **named(rows, "success")["cold start"],
    }


def test_rows_of_the_figure_are_success_by_kind(rows):
    shown = success_rows(rows)
    assert [(row["kind"], row["agent"], row["success"]) for row in shown] == [
        ("all", "cold start", 0.25),
        ("all", "trained", 0.75),
        ("chain", "cold start", 0.0),
        ("chain", "trained", 0.5),
        ("story", "cold start", 0.5),
        ("story", "trained", 1.0),
    ]


def test_a_kind_keeps_its_name_whatever_it_is():
    # a kind is the name of a user's file
    answers = {agent: [answer(0, "success stories", True)] for agent in TWO}
    kinds = [row["kind"] for row in success_rows(compare(answers, resamples=10, seed=0))]
    assert kinds == ["all", "all", "success stories", "success stories"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluated(before, after, champion=None):
    answers = {"before": before, "after": after, "champion": champion}
    for name, rows in answers.items():
        if rows:
            write_table(pa.Table.from_pylist(rows, schema=TABLE), Path(f"{name}.parquet"))
    inputs = EvaluateInputs(
        cold_start=Artifact.at(Path("before.parquet")),
        trained=Artifact.at(Path("after.parquet")),
        champion=Artifact.at(Path("champion.parquet")) if champion else None,
        settings=SETTINGS,
        panel=PANEL,
    )
    return evaluate.fn(Step("smoke", "evaluate", 0, 7), inputs)


def test_the_whole_evaluation_leaves_answers_metrics_and_table(folder, rows):
    made = evaluated(BEFORE, AFTER)
    assert made["rows"] == rows
    table = Path(artifacts.output(made, "table").path).read_text()
    assert table == f"{markdown(rows)}\n{panels.sentence(PANEL)}\n"
    metrics = json.loads(Path(artifacts.output(made, "metrics").path).read_text())
    assert metrics["panel"] == panels.of_answers(Path(artifacts.output(made, "answers").path))
    assert metrics["panel"] == PANEL
    assert metrics["success"]["trained"] == named(rows, "success")["trained"]
    assert set(metrics["success"]) == set(TWO)
    answers = pq.read_table(artifacts.output(made, "answers").path).to_pylist()
    assert [row["agent"] for row in answers] == ["cold start"] * 4 + ["trained"] * 4
    assert [row["success"] for row in answers] == [row["success"] for row in BEFORE + AFTER]


def test_equal_answers_give_equal_bytes(folder):
    one = evaluated(BEFORE, AFTER)["artifacts"]
    for path in artifacts.ROOT.rglob("record.json"):
        path.unlink()
    assert evaluated(BEFORE, AFTER)["artifacts"] == one


def test_agents_that_never_answer_can_be_compared(folder):
    silent = [answer(i, "story", False, answer=None, tool_calls=0) for i in range(3)]
    made = evaluated(silent, silent)
    assert made["rows"][0]["trained"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    answers = pq.read_table(artifacts.output(made, "answers").path)
    assert pa.types.is_string(answers.schema.field("answer").type)


def test_a_champion_is_a_third_agent_and_leaves_the_other_two_as_they_were(folder, rows):
    made = evaluated(BEFORE, AFTER, champion=BEFORE)
    assert [row | {"champion": row["cold start"]} for row in rows] == made["rows"]
    header, rule, first = Path(artifacts.output(made, "table").path).read_text().splitlines()[:3]
    assert header == "| | questions | cold start | trained | champion |"
    assert rule == "|---|---:|---:|---:|---:|"
    cells = [cell.strip() for cell in first.split("|")]
    assert cells[3] == cells[5] != cells[4]
    answers = pq.read_table(artifacts.output(made, "answers").path).to_pylist()
    assert [row["agent"] for row in answers[8:]] == ["champion"] * 4
    assert [row["success"] for row in answers[8:]] == [row["success"] for row in BEFORE]
    metrics = json.loads(Path(artifacts.output(made, "metrics").path).read_text())
    assert metrics["success"]["champion"] == metrics["success"]["cold start"]
    assert len(table_rows(made["rows"])) == 3 * len(rows)
