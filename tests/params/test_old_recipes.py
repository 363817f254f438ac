"""Recipes of earlier versions load and are planned as they are, or are refused with each change."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from flows.commands import plan
from flows.host import gpu_cards
from params import recipe_files
from params.schema.base import PARAMS
from tasks import recipes
from tests.params.edits import REMOVED, edited

# Taken with `git show <commit>:params/<recipe>.yaml`, from the oldest commit with own/, the last
# one before judge, the oldest one whose keys all have their names of today, and the last ones
# before reward_model and before turns_per_policy.
COMMITS = ["8af0e79", "8cdb6d7", "b134764", "7bbe760", "b98cdff"]
FIRST = "7530f30"  # the version 0.1.0
FILES = Path(__file__).with_name("old")
OLD = sorted(file for commit in COMMITS for file in (FILES / commit).glob("*.yaml"))
# What a later version has set in its own recipe, with the value of a recipe that does not say it.
SET_SINCE = {"8af0e79": {"reinforce__validation": None}}
# Keys that were tuned since then in recipes of which there are old files.
RETUNED = {
    "tiny-lake": (
        *("prepare__questions__train", "prepare__expert__traces", "prepare__expert__wrong_act"),
        *("cold_start__steps", "cold_start__save_every", "reinforce__iterations"),
        *("reinforce__update__learning_rate", "reinforce__update__mini_batches"),
        *("evaluate__temperature", "evaluate__top_p"),
    ),
    "household": (
        *("prepare__policy__rotary_base", "prepare__expert__give_up", "cold_start__steps"),
        *("reinforce__iterations", "reinforce__questions", "reinforce__rollout__rows"),
        *("reinforce__update__mini_batches", "prepare__questions__train"),
        *("prepare__expert__traces", "environment__household__wrong_act"),
        *("prepare__policy__context", "dialogue__response_tokens", "dialogue__tool_calls"),
        *("environment__household__steps", "reinforce__update__learning_rate"),
        *("reinforce__update__gradient_clip", "reinforce__validation__publish"),
    ),
}
PYTHON = {
    **{"sandbox": "auto", "cpu_seconds": 1, "wall_seconds": 20.0, "memory_mib": 256},
    **{"processes": 8, "file_mib": 4, "output_characters": 2000},
}
SEARCH = {
    **{"corpus": None, "results": 1, "snippet_words": 24, "query_characters": 400},
    **{"k1": 1.2, "b": 0.75},
}
BONUS = {"smoke": 0.1, "tiny-search": 0.0}
TOOLS = {"smoke": {"python": PYTHON}, "tiny-search": {"python": PYTHON, "search": SEARCH}}
CHANGES = [  # of a recipe of the version 0.1.0, in the order of the message
    *("remove 'dialogue.tools'", "move the section 'python' into 'tools'"),
    *("section 'search'", "write 'reinforce.reward' as a list"),
    *("write 'prepare.intake.folder: data/sources/intake/", "add 'dialect: {tags: {}}'"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder params/ with the tables of today, in a working folder without a GPU."""
    shutil.copytree(PARAMS, tmp_path / "params", ignore=lambda *_: ["schema", "__pycache__"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_cards, "card_here", lambda: None)
    return tmp_path / "params"


def write(folder, name, values):
    """Write the whole file of a recipe."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def retuned(file):
    """Return the old values of keys that were tuned since; REMOVED for those it does not have."""
    values = yaml.safe_load(file.read_text())

    def old(key):
        place = values
        for part in key.split("__"):
            place = place.get(part, REMOVED) if place is not REMOVED else REMOVED
        return place

    return {key: old(key) for key in RETUNED.get(file.stem, ())}


def test_there_are_recipes_of_each_commit():
    assert [file.parent.name for file in OLD if file.stem == "smoke"] == sorted(COMMITS[:3])
    assert {file.parent.name for file in OLD} == set(COMMITS)


@pytest.mark.parametrize("file", OLD, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_old_recipe_is_that_of_today_and_planned_alike(folder, capsys, file):
    def planned():
        status = plan.main([file.stem])
        return status, capsys.readouterr().out

    since = SET_SINCE.get(file.parent.name, {}) | retuned(file)
    if since:
        write(folder, file.stem, edited(recipe_files.read(file.stem, folder), since))
    today, plan_of_today = recipes.load(file.stem, folder), planned()
    assert plan_of_today[0] == 0
    shutil.copy(file, folder)
    assert "reward_model" not in (folder / file.name).read_text()
    old = recipes.load(file.stem, folder)
    assert old == today.model_copy(update={"expect": None})
    assert old.model_dump_json() == today.model_dump_json(), "another key of the ledger"
    assert planned() == plan_of_today


def test_server_that_says_nothing_may_stand_beside_the_servers_of_today(folder):
    today = recipe_files.read("tiny", folder)
    write(folder, "mine", edited(today, {"engine__server": None}))
    assert recipes.load("mine", folder) == recipes.load("tiny", folder)


def test_server_of_an_older_recipe_is_told_its_key_of_today(folder):
    values = recipe_files.read("tiny", folder)
    write(folder, "mine", edited(values, {"engine__server": "http://gpu-2:8000"}))
    with pytest.raises(ValueError, match=re.escape("'engine.servers: [http://gpu-2:8000]'")):
        recipes.load("mine", folder)


@pytest.mark.parametrize("name", TOOLS)
def test_recipe_of_the_first_version_is_refused_with_all_changes_that_it_needs(folder, name):
    """With each of them made, and nothing else, it is a recipe of today."""
    shutil.copy(FILES / FIRST / f"{name}.yaml", folder)
    with pytest.raises(ValueError) as error:
        recipes.load(name, folder)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == len(CHANGES)
    assert all(change in line for change, line in zip(CHANGES, lines, strict=True))
    values = yaml.safe_load((folder / f"{name}.yaml").read_text())
    del values["python"], values["search"], values["dialogue"]["tools"]
    reward = [{"answer": {"weight": 1.0, "wrong": 0.0}}, {"format": {"broken": -1.0}}]
    values["reinforce"]["reward"] = [*reward, {"many_tools": {"bonus": BONUS[name]}}]
    values["prepare"]["intake"]["folder"] = f"data/sources/intake/{name}"
    write(folder, name, values | {"tools": TOOLS[name], "dialect": {"tags": {}}})
    whole = edited(recipe_files.read(name, PARAMS), SET_SINCE["8af0e79"])
    write(
        folder, "today", edited(whole, {"prepare__intake__folder": f"data/sources/intake/{name}"})
    )
    assert recipes.load(name, folder) == recipes.load("today", folder).model_copy(
        update={"expect": None}
    )


@pytest.mark.parametrize(
    ("key", "before"),
    [
        ("dialect", "{tags: {}}"),
        ("reward_model__scored", "all"),
        ("environment__household__held_out", "0.5"),
    ],
)
def test_missing_key_is_named_with_what_happened_before_there_was_it(folder, key, before):
    *above, name = key.split("__")
    recipe = {"reward_model": "tiny-reward-model", "environment": "household"}
    values = recipe_files.read(recipe.get(above[0] if above else "", "tiny"), folder)
    section = values
    for part in above:
        section = section[part]
    del section[name]
    write(folder, "mine", values)
    with pytest.raises(ValueError, match=re.escape(f"'{name}: {before}' is what happened before")):
        recipes.load("mine", folder)
