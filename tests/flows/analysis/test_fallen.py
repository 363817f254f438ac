"""With which question to begin reading."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.analysis import fallen


@pytest.fixture
def rewarded(tmp_path, monkeypatch):
    """Write the rewards of a training: iteration, question, kind, successes of its leaves."""
    monkeypatch.chdir(tmp_path)

    def write(*asked):
        rows = [
            {"iteration": number, "question": question, "kind": kind, "leaf": leaf}
            | {"success": success, "reward": float(success)}
            for number, question, kind, successes in asked
            for leaf, success in enumerate(successes)
        ]
        Path("data/toy/trees").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), "data/toy/trees/rewards.parquet")

    return write


def test_the_question_that_has_fallen_most_comes_first(rewarded):
    rewarded(
        (0, "a", "sum", [True, True]),
        (0, "b", "sum", [True, True]),
        (3, "a", "sum", [True, False]),
        (3, "b", "sum", [False, False]),
        (5, "c", "sum", [False, False]),
    )
    worst = fallen.worst("toy")
    assert fallen.sentence(worst) == "b (sum) in iteration 3, success 100 → 0 %"
    assert fallen.fragment("toy", worst) == "#iteration=3&question=b&leaf=0"


def test_else_one_of_the_last_iteration_that_fails(rewarded):
    rewarded(
        (0, "a", "sum", [False, False]),
        (4, "b", "sum", [False, False]),
        (4, "c", "chain", [True, False]),
    )
    assert fallen.sentence(fallen.worst("toy")) == "b (sum) in iteration 4, success 0 %"
    worst = fallen.worst("toy", ["chain"])
    assert (worst.question, worst.leaf) == ("c", 1), "of a kind that is worse beyond chance"


def test_none_where_nothing_fails_or_nothing_is_there(rewarded):
    assert fallen.worst("toy") is None
    assert fallen.lost("toy", "cold start") == []
    rewarded((0, "a", "sum", [True]))
    assert fallen.worst("toy") is None


def test_held_out_questions_that_are_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/toy").mkdir(parents=True)
    rows = [
        {"agent": agent, "question": question, "kind": "sum", "success": success}
        for question, before, now in (("1", True, False), ("2", False, True), ("3", True, True))
        for agent, success in (("champion", before), ("trained", now), ("cold start", False))
    ]
    pq.write_table(pa.Table.from_pylist(rows), "data/toy/evaluation.parquet")
    lost = fallen.lost("toy", "champion")
    assert lost == [("1", "sum")]
    assert fallen.begin("toy", lost, []) == (
        "#iteration=evaluation&question=1&leaf=0",
        "1 (sum) of the evaluation, which was answered before",
    )
    assert fallen.begin("toy", [], []) == ("", "")
    assert fallen.lost("toy", "cold start") == []
