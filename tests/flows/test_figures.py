import shutil

import numpy as np
import pytest

from flows.commands import figures
from tests import made_run
from tests.checkout import ROOT


@pytest.fixture
def run(tmp_path, tokenizer, monkeypatch):
    """A run of the recipe smoke with one iteration, as the working folder; its curve."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "params", "params")
    tree = made_run.tree(tokenizer.encode, np.random.default_rng(0), "one")
    data = made_run.write(tmp_path, "smoke", [[tree]], tokenizer)
    tokenizer.save_pretrained("models/smoke/trained")
    return data / "curve.csv"


def test_run_whose_last_policy_was_only_validated(run, capsys):
    run.write_text("iteration,success,tool_calls,validation_success\n0,0.5,3,\n1,,,0.25\n")
    assert figures.main(["smoke"]) == 0
    lines, _, table = capsys.readouterr().out.partition("\n\n")
    lines = lines.splitlines()
    assert [line.rpartition("/")[2] for line in lines[:-2]] == [
        *("success_by_calls.png", "entropy_by_tool.png", "advantages.png")
    ]
    assert [line.split(":")[:2] for line in lines[-2:]] == [
        ["not drawn", " episode_length"],
        ["not drawn", " dynamics"],
    ]
    assert "decisions after tool results" in table and "smoke" in table.splitlines()[0]


def test_run_without_an_iteration_is_named(run, capsys):
    run.write_text("iteration,success,validation_success\n0,,0.25\n")
    assert figures.main(["smoke"]) == 2
    said = capsys.readouterr().err
    assert "curve.csv has no iteration of a training: run `make run RECIPE=smoke` first" in said
    assert "`beamline reproduce <branch>` and call this in the folder that it prints" in said
