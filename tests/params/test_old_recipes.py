"""Recipes of earlier commits, which lack keys of today, load and are planned as they are."""

import shutil
from pathlib import Path

import pytest

from flows.commands import plan
from flows.host import gpu_cards
from params.schema.base import PARAMS
from tasks import recipes

# Taken with `git show <commit>:params/<recipe>.yaml`, from the commits before reward_model and
# before turns_per_policy were added, and from the oldest one whose keys all have their names of
# today.
OLD = sorted(Path(__file__).with_name("old").glob("*/*.yaml"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder params/ with the tables of today, in a working folder without a GPU."""
    shutil.copytree(PARAMS, tmp_path / "params", ignore=lambda *_: ["schema", "__pycache__"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_cards, "card_here", lambda: None)
    return tmp_path / "params"


def test_there_are_recipes_of_three_commits():
    assert len({file.parent.name for file in OLD}) == 3


@pytest.mark.parametrize("file", OLD, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_old_recipe_is_that_of_today_and_planned_alike(folder, capsys, file):
    def planned():
        status = plan.main([file.stem])
        return status, capsys.readouterr().out

    today, plan_of_today = recipes.load(file.stem, folder), planned()
    assert plan_of_today[0] == 0
    shutil.copy(file, folder)
    assert "reward_model" not in (folder / file.name).read_text()
    old = recipes.load(file.stem, folder)
    assert old == today
    assert old.model_dump_json() == today.model_dump_json(), "another key of the ledger"
    assert planned() == plan_of_today
