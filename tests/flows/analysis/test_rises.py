"""What a run's decisions say of the entropy after tool results."""

from dataclasses import replace

import numpy as np
import pytest

from flows.analysis import rises
from tasks.trees.tree import AT_MARK, Decision
from tests import made_run

ENTROPIES = (0.001, 0.004, 0.002, 0.009)


def decided(tree, initial, entropy, node=2, kind="entropy"):
    """The tree with one decision at its result, by ARPO's rule."""
    rise = entropy - initial
    probability = None if kind == AT_MARK else 0.5 + 0.2 * rise
    added = int(rise > 0)
    decision = Decision(kind, node, 0, 9, initial, entropy, rise, probability, rise > 0, added)
    return replace(tree, decisions=[decision])


def trees(tokenizer, leaves, kind="entropy"):
    """Trees whose result has ``leaves`` - 1 leaves below it; with three, one of them is right."""
    random = np.random.default_rng(0)
    return [
        decided(
            made_run.tree(tokenizer.encode, random, f"q-{leaves}-{number}", leaves=leaves),
            *(0.003, entropy),
            kind=kind,
        )
        for number, entropy in enumerate(ENTROPIES)
    ]


@pytest.fixture
def run(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches = [trees(tokenizer, leaves) for leaves in (2, 4)]
    made_run.write(tmp_path, "toy", [[*batches[0], *batches[1]]], tokenizer)


def test_levels_are_those_of_the_decisions(run):
    measured = rises.of_run("toy")
    assert measured["decisions after tool results"] == (8,)
    assert measured["mean H_initial"] == (pytest.approx(0.003),)
    assert measured["mean H after the result"] == (pytest.approx(0.004),)
    assert measured["results with dH > 0 (%)"] == measured["the rule branches (%)"] == (50,)
    assert measured["dH, percentile 50"] == (pytest.approx(0.0),)
    assert measured["P, percentile 95"] == (pytest.approx(0.5012),)
    assert measured["results with several trajectories below"] == (4,)
    assert measured["of these, rewards differ (%)"] == (100,)
    assert measured["of these, dH > 0 (%)"] == (50,)
    assert measured["AUC of the rise dH"] == (), "all differ"
    shown = rises.table({"toy": measured, "other": {**measured, "mean H_initial": ()}})
    assert len({len(line) for line in shown.splitlines()}) == 1, "columns stand below each other"


def test_leaves_below_a_result_are_counted_with_their_rewards(run):
    judged = rises.judged_results("toy")
    assert judged["below"].tolist() == [1] * 4 + [3] * 4
    assert judged["differ"].tolist() == [False] * 4 + [True] * 4


def test_run_without_a_decision_after_a_result_is_named(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run.write(tmp_path, "toy", [trees(tokenizer, 4, AT_MARK)], tokenizer)
    with pytest.raises(ValueError, match="the run of toy has no branching decision after a tool"):
        rises.of_run("toy")


def by_pairs(values, positive):
    above, below = values[positive][:, None], values[~positive]
    return float(np.mean((above > below) + 0.5 * (above == below)))


def test_the_area_is_the_share_of_pairs_in_order_and_its_interval_is_over_trees():
    draw = np.random.default_rng(1)
    positive = draw.random(400) < 0.3
    values = np.round(draw.normal(positive, 1.0), 1)  # with ties
    apart, alike = np.arange(400), np.arange(400) // 40
    area, low, high = rises.auc(values, positive, apart)
    assert area == pytest.approx(by_pairs(values, positive))
    assert low < area < high and 0.03 < high - low < 0.15
    expected = 0.5 / 400**0.5  # about the standard error of a tenth as many positives
    assert high - low > expected
    repeated = (np.repeat(values[:40], 10), np.repeat(positive[:40], 10))
    wide = rises.auc(*repeated, np.repeat(np.arange(40), 10))
    narrow = rises.auc(*repeated, apart)
    assert wide[2] - wide[1] > 2 * (narrow[2] - narrow[1]), "repeats in a tree tell nothing new"
    assert rises.auc(values, positive, alike)[0] == area


def test_a_few_results_have_no_area():
    values, positive = np.arange(20.0), np.arange(20) < rises.LEAST - 1
    assert rises.auc(values, positive, np.arange(20)) == ()
