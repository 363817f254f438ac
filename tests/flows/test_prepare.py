"""The panels that a preparation writes: of a recipe's own held-out tasks, or of another run's."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages.prepare import write_panels
from tasks import recipes
from tasks.ledger.artifacts import Artifact
from tasks.trees import panels
from tasks.trees.tables import read_rows, save_questions
from tasks.trees.tree import Question

TASKS = [
    Question(f"test-{number}", "sum", f"{number} + 1?", (str(number + 1),)) for number in range(9)
]
NAMED = Path("data/sources/panels/theirs.json")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def by_hand(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write(name="smoke", changes=(), tasks=TASKS, named=None, folder="panels"):
    """Write the panels of a recipe whose splits have these tasks; return that of the test split."""
    recipe = recipes.load_changed(name, list(changes))
    for split in ("validation", "test"):
        save_questions(tasks, Path(f"{folder}-questions/{split}.parquet"))
    write_panels(recipe, Artifact.at(Path(f"{folder}-questions")), named, Path(folder))
    return json.loads(Path(folder, "test.json").read_text())


def test_a_panel_is_the_same_whatever_the_machine():
    one, two = (write(changes=[f"machine.threads={n}"], folder=str(n)) for n in (1, 2))
    assert one == two
    rows = {row["id"]: row for row in read_rows(Path("1-questions/test.parquet"))}
    assert {task["id"]: task["digest"] for task in one["tasks"]} == {
        name: by_hand({column: value for column, value in row.items() if value})
        for name, row in rows.items()
    }
    assert len(one["tasks"]) == len(TASKS)
    validation = json.loads(Path("1/validation.json").read_text())
    assert validation["tasks"] == one["tasks"]
    assert validation["digest"] != one["digest"], "the split counts"


@pytest.mark.parametrize(
    ("recipe", "source"),
    [
        ("tiny", "computation"),
        ("tiny-lake", "environment frozen_lake"),
        ("gsm8k-smoke", "benchmarks gsm8k/test"),
    ],
)
def test_a_panel_says_where_its_tasks_come_from(recipe, source):
    assert write(recipe)["source"] == source


def test_a_panel_of_another_recipe_takes_the_place_of_the_own_one():
    """Its order, too: the other recipe has another seed."""
    theirs = write(changes=["seed=5"], tasks=TASKS[:6])
    own = write()
    NAMED.parent.mkdir(parents=True)
    NAMED.write_text(json.dumps(theirs))
    taken = write(changes=[f"evaluate.panel={NAMED}"], named=panels.load(NAMED))
    assert taken == theirs
    assert taken["digest"] != own["digest"]
    assert json.loads(Path("panels/validation.json").read_text())["digest"] != theirs["digest"]


def test_a_panel_of_other_tasks_is_refused_with_all_of_them():
    panels.save(panels.panel_of(TASKS, "test", "computation", seed=0), NAMED)
    other = [replace(TASKS[0], text="9 + 9?"), *TASKS[1:7]]
    with pytest.raises(ValueError) as caught:
        write(changes=[f"evaluate.panel={NAMED}"], tasks=other, named=panels.load(NAMED))
    said = str(caught.value)
    assert said.startswith(f"evaluate.panel {NAMED}")
    assert {f"test-{number}" for number in range(9) if f"test-{number}" in said} == {
        "test-0",
        "test-7",
        "test-8",
    }


def test_a_panel_outside_of_what_dvc_watches_is_refused():
    with pytest.raises(ValueError, match=r"'evaluate'.*outside the folder data/sources/"):
        recipes.load_changed("smoke", ["evaluate.panel=data/tiny/panels/test.json"])
