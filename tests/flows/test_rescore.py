"""Trajectories of a run scored again by another reward or scorer."""

import csv
import shutil

import numpy as np
import pytest

from flows.commands import rescore
from tasks.rewards import rescoring
from tests import made_run
from tests.checkout import ROOT

STRICT = """
base: smoke
reinforce:
  reward:
    - answer: {weight: 1.0, wrong: -1.0}
"""
SCORER = '''
def last_digit(answer, accepted):
    """Right where the last digits are equal, whatever else."""
    return {"score": float(answer[-1:] == accepted[0][-1:])}
'''


@pytest.fixture
def run(tmp_path, tokenizer, monkeypatch):
    """A run of the recipe smoke with four iterations, in which ever more answers are wrong."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "params", "params")
    chance = np.random.default_rng(0)
    iterations = [
        [made_run.tree(tokenizer.encode, chance, f"q{number}", leaves=number + 3)]
        for number in range(4)
    ]
    made_run.write(tmp_path, "smoke", iterations, tokenizer)
    tokenizer.save_pretrained("models/smoke/trained")
    (tmp_path / "params" / "strict.yaml").write_text(STRICT)
    return tmp_path


def test_another_reward_and_its_trend(run, capsys):
    assert rescore.main(["smoke", "--as", "strict"]) == 0
    said = capsys.readouterr().out
    assert said.rstrip("\n") == (run / "reports/smoke/rescored.md").read_text().rstrip("\n")
    *blocks, whole = [line for line in said.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0] for line in blocks] == ["| 1-1", "| 2-2", "| 3-3", "| 4-4"]
    # of leaves 1, 2, ... the second is right; the one that is cut has -1 in both
    rewards = [(1 - 1 + 0 * number) / (number + 3) for number in range(4)]
    others = [(1 - (number + 2)) / (number + 3) for number in range(4)]
    for line, own, other in zip(blocks, rewards, others, strict=True):
        assert [float(cell) for cell in line.split(" | ")[2:4]] == pytest.approx(
            [own, other], abs=6e-4
        )
    assert whole.startswith("| all | 18 |")
    assert "- reward: the other scoring minus the run's own changes by -" in said
    assert "which may be exploitation of it" in said
    assert "reward 0.00, other -1.00; answer '1'" in said
    with (run / "reports/smoke/rescored.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18 and {row["iteration"] for row in rows} == set("0123")


def test_another_scorer(run, capsys):
    (run / "own").mkdir()
    (run / "own" / "digits.py").write_text(SCORER)
    assert rescore.main(["smoke", "--scorer", "own/digits.py:last_digit"]) == 0
    said = capsys.readouterr().out
    assert "scored again by the scorer own/digits.py:last_digit" in said
    assert "They differ nowhere." in said, "answers have one digit"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--scorer", "nonsense"], "--scorer nonsense: "),
        (["--as", "nonsense"], "nonsense"),
        (["--as", "tiny-reward-model"], "has the part model"),
    ],
)
def test_what_cannot_be_scored_by_is_named(run, capsys, arguments, expected):
    assert rescore.main(["smoke", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_all_faults_are_named_at_once(run, capsys):
    assert rescore.main(["tiny", "--as", "tiny-reward-model", "--scorer", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("no such file", "--scorer nonsense", "the part model"))


def test_a_recipe_without_a_run_is_named(run, capsys):
    assert rescore.main(["tiny", "--as", "strict"]) == 2
    assert (
        "rewards.parquet: no such file: run `make run RECIPE=tiny` first" in capsys.readouterr().err
    )


def test_a_trend_is_a_line_through_means():
    gaps = [0.0, -0.1, -0.2, -0.3, -0.4]
    found = rescoring.trend([{"reward": 1.0, "other_reward": 1.0 + gap} for gap in gaps], "reward")
    assert (found.slope, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1), abs=1e-7)
    assert found.is_told
    wavering = [{"reward": 0.0, "other_reward": gap} for gap in (0.1, -0.1, 0.1, -0.1)]
    assert not rescoring.trend(wavering, "reward").is_told
    assert rescoring.trend(wavering[:2], "reward") is None


def test_scorings_of_other_trajectories_are_refused():
    row = {"question": "a", "leaf": 0, "reward": 1.0, "success": True, "answer": "7"}
    assert rescoring.paired([row], [{**row, "reward": 0.5}])[0]["other_reward"] == 0.5
    with pytest.raises(ValueError, match="not of the same trajectories"):
        rescoring.paired([row], [{**row, "leaf": 1}])
