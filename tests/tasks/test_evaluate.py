import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from params.schema.evaluate import Evaluate
from params.schema.verdict import Verdict
from tasks.evaluate import (
    AGENTS,
    EvaluateInputs,
    compare,
    difference_markdown,
    differences,
    evaluate,
    markdown,
    success_rows,
    table_rows,
)
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.reward import TABLE
from tasks.trees import panels
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.tables import write_table
from tasks.trees.tree import Question

VERDICT = Verdict(measure="success", confidence=0.95, margin=0.0, bootstrap=200)
SETTINGS = Evaluate(
    panel=None,
    questions=4,
    samples=1,
    temperature=0.6,
    top_p=0.95,
    bootstrap=200,
    protocol="verified",
)


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


def test_failures_of_the_infrastructure_are_counted_where_there_are_any():
    failed = [answer(0, "story", False, outcome="world_failed", answer=None), *AFTER[1:]]
    rows = {row["measure"]: row for row in compare({**ANSWERS, "trained": failed}, 200, 0)}
    assert rows["infrastructure failed"]["trained"]["mean"] == 0.25
    assert rows["infrastructure failed"]["cold start"]["mean"] == 0
    assert rows["success"]["trained"]["mean"] == 0.5, "they count as wrong"
    assert not any("infrastructure" in row["measure"] for row in compare(ANSWERS, 200, 0))


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
        "answer rate, chain": [1.0, 1.0],
        "answer rate, story": [0.5, 1.0],
        "tool calls a question": [1.0, 1.75],
        "tool calls a question, chain": [1.0, 2.5],
        "tool calls a question, story": [1.0, 1.0],
        "tool errors a question": [0.25, 0.0],
        "tool errors a question, chain": [0.5, 0.0],
        "tool errors a question, story": [0.0, 0.0],
        "response length": [25.0, 20.0],
        "response length, chain": [20.0, 20.0],
        "response length, story": [30.0, 20.0],
    }
    assert [row["questions"] for row in rows] == [4, 2, 2] * 5
    assert [row["set"] for row in rows] == ["", "chain", "story"] * 5


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
    assert [row["measure"] for row in compared][3:6] == ["score", "score, film", "answer rate"]
    assert [row["kind"] for row in success_rows(compared)] == ["all"] * 2 + ["film"] * 2 + [
        "sum"
    ] * 2


def test_the_lenient_scores_stand_beside_the_strict_one_where_they_mean_something(folder):
    found = [(True, True), (True, False), (False, None), (None, None)]
    names = ("lenient", "last_number")
    before = [
        {**row, **dict(zip(names, f, strict=True))} for row, f in zip(BEFORE, found, strict=True)
    ]
    after = [{**row, "lenient": True, "last_number": None} for row in AFTER]
    compared = compare({"cold start": before, "trained": before}, 200, 7)
    assert [row["measure"] for row in compared][3:6] == [
        "lenient",
        "lenient, chain",
        "lenient, story",
    ]
    lenient, last = named(compared, "lenient"), named(compared, "last number")
    assert (lenient["questions"], last["questions"]) == (3, 2)
    low, high = bootstrap_interval(np.array([1.0, 1.0, 0.0]), 200, seed=7)
    assert lenient["trained"] == {"mean": 2 / 3, "low": low, "high": high}
    assert last["trained"]["mean"] == 0.5
    made = evaluated(before, after)
    table = Path(artifacts.output(made, "table").path).read_text()
    assert "| lenient (%) | 3 |" in table and "lenient, chain" not in table
    assert "last number" not in table, "one of the two policies has no such answer"


def test_a_world_has_ended_episodes_instead_of_answers():
    episodes = [
        answer(number, "frozen_lake", number == 0, answer=None, outcome=outcome)
        for number, outcome in enumerate(["terminated", "truncated", "cut", "terminated"])
    ]
    compared = compare({"cold start": episodes, "trained": episodes}, resamples=50, seed=7)
    assert named(compared, "episodes that ended")["trained"]["mean"] == 0.5
    assert "answer rate" not in [row["measure"] for row in compared]


REPEATED = [  # right of five answers, by question
    answer(number, kind, right, leaf=leaf, answer=text)
    for number, kind, texts in [
        (0, "story", "aab1c"),  # right: 1; the majority: a
        (1, "story", "1a1bc"),  # right: 2, which are the majority
        (2, "chain", "1111a"),
        (3, "chain", "aa11b"),  # two texts are given equally often, one of them right
    ]
    for leaf, (text, right) in enumerate((text, text == "1") for text in texts)
]


def test_several_answers_to_a_question():
    compared = compare({"cold start": REPEATED, "trained": REPEATED}, resamples=50, seed=7)
    means = {row["measure"]: row["trained"]["mean"] for row in compared if not row["set"]}
    assert means["success"] == pytest.approx((1 + 2 + 4 + 2) / 20)
    assert means["pass@3"] == pytest.approx((0.6 + 0.9 + 1.0 + 0.9) / 4)
    assert means["pass^3"] == pytest.approx((0 + 0 + 0.4 + 0) / 4)
    assert (means["pass@5"], means["pass^5"]) == (1.0, 0.0)
    assert means["maj@5"] == (0 + 1 + 1 + 0.5) / 4
    assert named(compared, "maj@5, chain")["trained"]["mean"] == 0.75
    assert {row["questions"] for row in compared if not row["set"]} == {4}, "not twenty"
    table = markdown(compared)
    assert "| pass@3, chain (%) | 2 |" in table and "tool calls a question, chain" not in table


def test_intervals_are_clustered_by_question():
    one = [answer(number, "story", number < 2) for number in range(4)]
    five = [{**row, "leaf": leaf} for row in one for leaf in range(5)]
    wide, repeated = (
        named(compare({"cold start": rows, "trained": rows}, 200, 7), "success")["trained"]
        for rows in (one, five)
    )
    assert wide == repeated, "equal answers to the same questions tell nothing new"


def test_differences_are_paired_by_question_and_corrected_for_the_sets():
    def right(numbers):
        kinds = ("chain", "film", "story")
        return [answer(n, kinds[n % 3], n in numbers) for n in range(60)]

    answers = {
        "cold start": right(range(0, 20)),
        "trained": right(range(0, 60)),
        "champion": right(range(0, 60)),
    }
    found = differences(answers, VERDICT, seed=7)
    rows = {(row["against"], row["set"]): row for row in found}
    assert list(rows) == [
        (against, kind)
        for against in ("cold start", "champion")
        for kind in ("", "chain", "film", "story")
    ]
    whole = rows["cold start", ""]
    assert whole["mean"] == pytest.approx(40 / 60) and whole["p"] < 0.001
    assert "p_holm" not in whole
    of_sets = [rows["cold start", kind] for kind in ("chain", "film", "story")]
    assert [row["questions"] for row in of_sets] == [20] * 3
    assert all(row["p"] < row["p_holm"] <= 3 * row["p"] for row in of_sets)
    same = rows["champion", ""]
    assert (same["mean"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)
    assert "| success, less cold start | 60 | 66.7 [" in difference_markdown(found)
    assert "< 0.001" in difference_markdown(found)


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
    cells = {"cold start": cell, "trained": other}
    rows = [
        {"measure": name, "set": kind, "questions": count, "unit": unit, **cells}
        for name, kind, count, unit in (
            ("success", "", 4, "%"),
            ("success, story", "story", 2, "%"),
            ("calls", "", 4, ""),
            ("calls, story", "story", 2, ""),
            ("length", "", 3, "tokens"),
        )
    ]
    assert markdown(rows) == (
        "| | questions | cold start | trained |\n"
        "|---|---:|---:|---:|\n"
        "| success (%) | 4 | 25.0 [12.5, 50.0] | 100.0 [90.0, 100.0] |\n"
        "| success, story (%) | 2 | 25.0 [12.5, 50.0] | 100.0 [90.0, 100.0] |\n"
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
        verdict=VERDICT,
        panel=PANEL,
    )
    return evaluate(SubStep("smoke", "evaluate", 0, 7), inputs)


def test_the_whole_evaluation_leaves_answers_metrics_and_table(folder, rows):
    made = evaluated(BEFORE, AFTER)
    assert made["rows"] == rows
    table = Path(artifacts.output(made, "table").path).read_text()
    paired = differences(ANSWERS, VERDICT, seed=7)
    assert table == (f"{markdown(rows)}\n{difference_markdown(paired)}\n{panels.sentence(PANEL)}\n")
    metrics = json.loads(Path(artifacts.output(made, "metrics").path).read_text())
    assert metrics["panel"] == panels.of_answers(Path(artifacts.output(made, "answers").path))
    assert metrics["panel"] == PANEL
    assert metrics["success"]["trained"] == named(rows, "success")["trained"]
    assert set(metrics["success"]) == set(TWO)
    assert metrics["differences"]["success"]["cold start"]["mean"] == 0.5
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
