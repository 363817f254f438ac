"""A recipe's name enters the list in dvc.yaml, and nothing else in the file changes."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from flows.commands import retrain
from flows.runs import recipe_list
from tests.toy_project import ROOT

TAIL = "\n# the stages\nstages:\n  first: {foreach: '${recipes}'}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  - a # kept\n  - b # too\n", "  - a # kept\n  - b # too\n  - mine\n"),
        ("    - 'a'\n\n    # last\n    - b\n", "    - 'a'\n\n    # last\n    - b\n    - mine\n"),
        (" [a, b]  # c\n", " [a, b, mine]  # c\n"),
        (" [\n    a,\n    b\n  ]\n", " [\n    a,\n    b, mine\n  ]\n"),
    ],
)
def test_name_is_added_in_any_layout(before, after):
    head = "# stages of a run\nvars:\n- other: 1\n- recipes:"
    before, after = (
        head + ("\n" if "-" in part[:8] else "") + part + TAIL for part in (before, after)
    )
    recipe_list.PIPELINE.write_text(before)
    was = recipe_list.PIPELINE.stat().st_ino
    assert recipe_list.add_to_pipeline("mine")
    assert recipe_list.PIPELINE.read_text() == after
    assert recipe_list.PIPELINE.stat().st_ino != was, "another file in its place, never half of one"
    assert not recipe_list.add_to_pipeline("mine")
    assert recipe_list.PIPELINE.read_text() == after
    assert not list(Path().glob("*.partial")) + list(Path().glob(".*.partial"))


def test_name_that_looks_like_a_number_is_quoted():
    recipe_list.PIPELINE.write_text("vars:\n  - recipes:\n      - a\n" + TAIL)
    recipe_list.add_to_pipeline("1")
    assert yaml.safe_load(recipe_list.PIPELINE.read_text())["vars"] == [{"recipes": ["a", "1"]}]


@pytest.mark.parametrize("text", ["stages: {}\n", "vars:\n  - recipes: []\n", "vars:\n- a.yaml\n"])
def test_pipeline_without_a_list_stays(text):
    recipe_list.PIPELINE.write_text(text)
    assert not recipe_list.add_to_pipeline("mine")
    assert recipe_list.PIPELINE.read_text() == text


def test_recipes_added_at_once_are_all_there():
    recipe_list.PIPELINE.write_text((ROOT / "dvc.yaml").read_text())
    names = [f"mine-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(recipe_list.add_to_pipeline, names))
    [listed] = yaml.safe_load(recipe_list.PIPELINE.read_text())["vars"]
    assert set(names) < set(listed["recipes"])


def test_run_here_adds_a_recipe_that_has_a_file(project, capsys):
    """The stages do not start: their ``meta:`` is refused, after the recipe has been added."""
    dvc_yaml = Path("dvc.yaml").read_text().replace("timeout_seconds", "no_such_key")
    Path("dvc.yaml").write_text(dvc_yaml)
    assert retrain.main(["mine", "--here"]) == 2
    assert "params/mine.yaml does not exist" in capsys.readouterr().err
    assert Path("dvc.yaml").read_text() == dvc_yaml
    shutil.copy("params/toy.yaml", "params/mine.yaml")
    assert retrain.main(["mine", "--here"]) == 2
    said = capsys.readouterr()
    assert "added mine" in said.out and "no_such_key" in said.err
    assert yaml.safe_load(Path("dvc.yaml").read_text())["vars"] == [{"recipes": ["toy", "mine"]}]
