"""Tables of a comparison, from results as plain mappings."""

import numpy as np
import pytest

from flows.tracking import comparison_tables as tables

SPENT = {"sampled_tokens": 1000.0, "tool_calls": 20, "environment_steps": 40, "seconds": 90.0}
PANEL = {
    "digest": "1f2e" * 16,
    "split": "test",
    "source": "toy",
    "tasks": 2,
    "first": 0,
    "of": {"digest": "1f2e" * 16, "tasks": 2},
}
TRAINED = {"spent": SPENT, "steps_a_batch": 2, "iterations": 3, "trained_tokens": 1234.0}


def result(variant, seed, right, **others):
    success = sum(right) / len(right)
    kinds = ["story", "chain"] * len(right)
    others = {
        "kinds": kinds[: len(right)],
        "scores": [float(value) for value in right],
        "panel": PANEL,
        **({} if variant == "cold start" else TRAINED),
        **others,
    }
    return {"variant": variant, "seed": seed, "right": right, "success": success, **others}


FOUND = [
    result("cold start", 0, [1, 0]),
    result("arpo", 0, [1, 1]),
    result("cold start", 1, [0, 0]),
    result("arpo", 1, [1, 0], iterations=4),
]


def answers(draw, rate, seeds=3, questions=200, noise=0.0):
    """Right answers of each seed to questions of equal difficulty."""
    rates = np.clip(rate + noise * draw.normal(size=(seeds, 1)), 0, 1)
    return (draw.random((seeds, questions)) < rates).astype(int).tolist()


def compared(**rates):
    """Results of variants with these rates of success."""
    draw = np.random.default_rng(5)
    return [
        result(variant.replace("_", " "), seed, right)
        for variant, rate in rates.items()
        for seed, right in enumerate(answers(draw, rate))
    ]


def test_alarms_are_listed_by_variant_and_seed():
    raised = [{"success_lost": 7}, {"success_lost": 9, "entropy_rise": 8}]
    results = [result("arpo", seed, [1, 0], alarms=each) for seed, each in enumerate(raised)]
    text = tables.alarm_markdown([*FOUND, *results])
    assert "| arpo | success_lost | 0 (7), 1 (9) |" in text
    assert "| arpo | entropy_rise | 1 (8) |" in text
    assert tables.alarm_markdown(FOUND) == ""


def test_table_has_a_row_a_variant():
    rows = tables.table_rows(FOUND, resamples=200)
    assert [(row["success"], row["by_seed"]) for row in rows] == [
        (0.25, {0: 0.5, 1: 0.0}),
        (0.75, {0: 1.0, 1: 0.5}),
    ]
    assert all(row["low"] <= row["success"] <= row["high"] for row in rows)
    lines = tables.markdown(rows).splitlines()
    assert lines[3].endswith("| 100.0, 50.0 | 2 | 3.5 | 1,000 | 20 | 40 | 1,234 | 1.5 |")
    assert {line.count("|") for line in lines} == {11}


def test_graded_scores_have_a_column():
    graded = [{**FOUND[0], "scores": [1.0, 0.5]}, {**FOUND[2], "scores": [0.0, 0.1]}, FOUND[1]]
    rows = tables.table_rows(graded, resamples=200)
    assert [row["score"]["mean"] for row in rows] == [0.4, 1.0]
    lines = tables.markdown(rows).splitlines()
    assert lines[0].startswith(
        "| variant | success (%) | by seed (%) | score (%) | steps a batch |"
    )
    assert "| 50.0, 0.0 | 40.0 [" in lines[2]
    assert {line.count("|") for line in lines} == {12}


def test_graded_scores_have_differences_of_their_own():
    half = [result("half", 0, [0, 0], scores=[0.5, 0.7]), result("half", 1, [0, 0], scores=[0, 0])]
    none = [result("none", 0, [0, 0]), result("none", 1, [0, 0])]
    (row,) = tables.difference_rows([*none, *half], 50, "none", tables.SCORES)
    assert (row["mean"], row["variant"]) == (pytest.approx(0.3), "half")
    text = tables.report([*none, *half], tables.table_rows([*none, *half], 50), 50, "none")
    in_success, in_score = text.split("The same in the mean score:")
    assert "| half | 0.0 [0.0, 0.0] |" in in_success and "| half | 30.0 [" in in_score
    assert "The same" not in tables.report(FOUND, tables.table_rows(FOUND, 50), 50)


def test_success_by_kind_is_of_the_questions_of_that_kind():
    rows = tables.kind_rows(FOUND, resamples=200)
    means = {
        row["variant"]: {kind: found["success"] for kind, found in row["kinds"].items()}
        for row in rows
    }
    assert means == {
        "cold start": {"chain": 0.0, "story": 0.5},
        "arpo": {"chain": 0.5, "story": 1.0},
    }
    lines = tables.kind_markdown(rows).splitlines()
    assert lines[2] == "| variant | chain (%) | story (%) |"
    assert lines[5].startswith("| arpo | 50.0 [0.0, 100.0] | 100.0 [100.0, 100.0] |")
    of_one_kind = [{**one, "kinds": ["story"] * 2} for one in FOUND]
    for results, said in ((FOUND, True), (of_one_kind, False)):
        text = tables.report(results, tables.table_rows(results, 50), 50)
        assert ("by kind" in text) == said
        assert text.endswith("\nPanel 1f2e1f2e1f2e: 2 tasks of the split test (toy)\n")


def test_differences_are_paired_with_the_best_or_the_baseline():
    results = compared(cold_start=0.3, weak=0.5, strong=0.6)
    rows = tables.difference_rows(results, 400)
    assert [(row["variant"], row["baseline"]) for row in rows] == [
        ("cold start", "strong"),
        ("weak", "strong"),
    ]
    right = {
        name: np.mean([r["right"] for r in results if r["variant"] == name])
        for name in ("weak", "strong")
    }
    assert rows[1]["mean"] == pytest.approx(right["weak"] - right["strong"])
    assert rows[1]["low"] <= rows[1]["mean"] <= rows[1]["high"]
    assert rows[0]["told"] and "seeds_needed" not in rows[0]
    against = tables.difference_rows(results, 400, baseline="weak")
    assert {row["baseline"] for row in against} == {"weak"}
    assert against[1]["mean"] == pytest.approx(-rows[1]["mean"])


def test_a_difference_that_cannot_be_told_says_what_it_takes():
    rows = tables.difference_rows(compared(one=0.5, other=0.51), 400)
    (row,) = rows
    assert not row["told"]
    assert row["finds"] > abs(row["mean"]) > 0
    assert row["questions_needed"] > 200
    row |= {"seeds_needed": 41, "questions_needed": 123_456}
    assert "| 41 seeds or 130,000 questions |" in tables.difference_markdown([row])
    row |= {"seeds_needed": None, "questions_needed": 200}
    assert "| 210 questions |" in tables.difference_markdown([row]), "more than there are"
    row["questions_needed"] = None
    assert "| more seeds and more questions |" in tables.difference_markdown([row])
    (alone,) = tables.difference_rows(
        [r for r in compared(one=0.5, other=0.56) if not r["seed"]], 50
    )
    assert alone["seeds"] == 1
    assert tables.ONE_SEED in tables.difference_markdown([alone])
    assert tables.ONE_SEED not in tables.difference_markdown(rows)
    (equal,) = tables.difference_rows([result("a", 0, [1, 0]), result("b", 0, [1, 0])], 50)
    assert "no difference" in tables.difference_markdown([equal])


def test_seeds_that_only_one_has_are_left_out():
    results = compared(one=0.4, other=0.6)[:-1]
    (row,) = tables.difference_rows(results, 50)
    assert row["seeds"] == 2
    assert tables.difference_rows(results[:3], 50) == [], "nothing to compare with yet"


def test_gamma_and_lambda_span_a_grid():
    def of(variant, gamma, lambda_, right):
        estimator = {"kind": "grouped_gae", "gamma": gamma, "lambda": lambda_}
        return result(variant, 0, right, algorithm={"estimator": estimator})

    results = [
        of("gagpo", 0.95, 0.8, [1, 1]),
        of("gagpo, algorithm.estimator.lambda=0", 0.95, 0.0, [1, 0]),
        of("gagpo, algorithm.estimator.gamma=1", 1.0, 0.8, [0, 0]),
        of("gagpo, algorithm.ratio=token", 0.95, 0.8, [0, 0]),
    ]
    text = tables.sensitivity_markdown(results, tables.table_rows(results, 50))
    assert text.splitlines()[2:] == [
        "| gamma | lambda 0 | lambda 0.8 |",
        "|---|---:|---:|",
        "| 0.95 | 50.0 [0.0, 100.0] | 100.0 [100.0, 100.0] |",
        "| 1 | | 0.0 [0.0, 0.0] |",
    ]
    assert tables.sensitivity_markdown(results[:1], tables.table_rows(results[:1], 50)) == ""
