"""What a run says of its recipe, over a repository of git."""

import json
from pathlib import Path

import pytest

from flows.runs import dvc_command, earlier_run, git, recipe_values
from flows.tracking.run import flatten
from tasks import recipes
from tests import toy_project as toy


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """A project whose recipe is committed; its commit."""
    toy.create(tmp_path, flows=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(dvc_command.RUN, raising=False)
    return toy.commit(tmp_path)


def about(before=None):
    values = flatten(recipe_values.parameters(recipes.load("toy", Path("params"))))
    return recipe_values.About("toy", values, before)


def edit(old, new, file="params/toy.yaml"):
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))


def test_run_of_a_committed_recipe_tells_what_differs_from_the_run_before(committed):
    assert about().name() == ""
    values = dict(about().parameters)
    assert about(("toy earlier", values)).name() == ""
    earlier = {**values, "evaluate.bootstrap": "500"}
    run = about(("toy earlier", earlier))
    assert run.name() == "toy bootstrap=1"
    assert run.lines() == [
        "**Restore**: commit it, then `beamline reproduce COMMIT --recipe toy` "
        f"(code `{committed[:12]}`)",
        "**Recipe**: `evaluate.bootstrap` 500 → 1, beside the run before (`toy earlier`)",
    ]
    assert about().lines()[1] == "**Recipe**: its first run here"


def test_values_that_no_commit_has_are_in_the_name(committed, monkeypatch):
    edit("bootstrap: 1", "bootstrap: 7")
    edit("seed: 3", "seed: 5")
    assert about().name() == "toy bootstrap=7 seed=5"
    edit("std: true}\n  ratio: token", "std: false}\n  ratio: token", "params/algorithms.yaml")
    assert about().name() == "toy bootstrap=7 seed=5 estimator.std=false"
    assert "with changes that are in no commit" in about().lines()[0]
    monkeypatch.setenv(dvc_command.RUN, "toy-20260101-abc")
    assert about().lines()[0] == (
        f"**Restore**: `beamline reproduce runs/toy-20260101-abc` (code `{committed[:12]}`)"
    )


def test_values_of_a_commit(committed):
    assert recipe_values.at(committed, "toy") == recipe_values.here("toy")
    assert recipe_values.at(committed, "other") == {}


def commit_results(folder, success):
    reports = folder / "reports/toy/metrics.json"
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.write_text(json.dumps({"success": {"trained": {"mean": success}}}))
    return toy.commit(folder, f"success {success}")


def test_run_before_is_the_newest_commit_with_other_results(committed, tmp_path):
    assert earlier_run.before("toy", "") is None
    first = commit_results(tmp_path, 0.5)
    edit("bootstrap: 1", "bootstrap: 7")
    toy.git(tmp_path, "checkout", "--quiet", "-b", "runs/toy-20260101-abc")
    second = commit_results(tmp_path, 0.6)
    toy.git(tmp_path, "checkout", "--quiet", "-")
    here = Path("reports/toy/metrics.json").read_text()
    found = earlier_run.before("toy", here)
    assert (found.commit, found.metrics["success"]["trained"]["mean"]) == (second, 0.6)
    assert earlier_run.changes(found, "toy") == {"evaluate.bootstrap": ("7", "1")}
    of_branch = git.content(second, "reports/toy/metrics.json")
    assert earlier_run.before("toy", of_branch).commit == first, "the run here is that one"
    damaged = tmp_path / "reports/toy/metrics.json"
    damaged.write_text("{")
    toy.commit(tmp_path, "damaged")
    assert earlier_run.before("toy", of_branch).commit == first
