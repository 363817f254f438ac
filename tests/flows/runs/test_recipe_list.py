"""Recipes enter the lists that DVC reads, and nothing else in these files changes."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from flows.commands import retrain
from flows.runs import recipe_list

TAIL = "\nstages:\n  first: {foreach: '${recipes}'}\n"
PIPELINE = f"vars:\n  - other: 1\n  - recipes:\n      a: params/a.yaml # kept\n{TAIL}"
HEAD = recipe_list.HEAD


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params").mkdir()
    Path("dvc.yaml").write_text(PIPELINE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"{HEAD}recipes:\n  mine: params/mine.yaml\n"),
        ("x: 1 # x\n", "x: 1 # x\nrecipes:\n  mine: params/mine.yaml\n"),
        (
            "recipes:\n    b: params/b.yaml # b\n\n# last\nx: 1\n",
            "recipes:\n    b: params/b.yaml # b\n    mine: params/mine.yaml\n\n# last\nx: 1\n",
        ),
        ("recipes: {b: c} # b\n", "recipes: {b: c, mine: params/mine.yaml} # b\n"),
        ("recipes: {}\n", "recipes: {mine: params/mine.yaml}\n"),
    ],
)
def test_own_recipe_is_listed_in_any_layout(before, after):
    if before is not None:
        recipe_list.OWN.write_text(before)
    assert recipe_list.add_to_pipeline("mine") == recipe_list.OWN
    assert recipe_list.OWN.read_text() == after
    assert recipe_list.add_to_pipeline("mine") is None
    assert recipe_list.OWN.read_text() == after and Path("dvc.yaml").read_text() == PIPELINE
    assert not list(Path().glob("*.partial")) + list(Path().glob(".*.partial"))


def test_recipe_that_gets_a_base_is_read_from_its_whole_file():
    for name, file in (("a", "dvc.yaml"), ("mine", "params.yaml")):
        Path(f"params/{name}.yaml").write_text("seed: 1\n")
        recipe_list.add_to_pipeline(name)
        Path(f"params/{name}.yaml").write_text("base: tiny\n")
        assert recipe_list.add_to_pipeline(name) == Path(file)
        assert f"{name}: params/resolved/{name}.yaml" in Path(file).read_text()
        assert recipe_list.add_to_pipeline(name) is None
    assert Path("dvc.yaml").read_text() == PIPELINE.replace("params/a", "params/resolved/a")


def test_name_that_looks_like_a_number_is_quoted():
    recipe_list.add_to_pipeline("1")
    listed = yaml.safe_load(recipe_list.OWN.read_text())
    assert listed == {"recipes": {"1": "params/1.yaml"}}


@pytest.mark.parametrize("name", ["algorithms", "../params/mine"])
def test_what_is_no_name_is_not_listed(name):
    Path("params/algorithms.yaml").write_text("{}\n")
    Path("params/mine.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="is no"):
        list(recipe_list.write(name))
    assert not recipe_list.OWN.exists()


@pytest.mark.parametrize("text", ["stages: {}\n", "vars:\n- a.yaml\n"])
def test_pipeline_without_a_list_stays(text):
    Path("dvc.yaml").write_text(text)
    assert recipe_list.add_to_pipeline("mine") is None
    assert Path("dvc.yaml").read_text() == text and not recipe_list.OWN.exists()


def test_unsound_list_is_refused_by_name():
    recipe_list.OWN.write_text("recipes: {\n")
    with pytest.raises(ValueError, match=r"params\.yaml is not valid YAML"):
        recipe_list.add_to_pipeline("mine")


def test_recipe_of_both_lists_is_refused_before_dvc_does():
    recipe_list.OWN.write_text("recipes: {a: params/a.yaml, b: params/b.yaml}\n")
    with pytest.raises(ValueError, match=r"params\.yaml lists a, and so does dvc\.yaml"):
        recipe_list.add_to_pipeline("mine")


def test_recipes_added_at_once_are_all_there():
    names = [f"mine-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(recipe_list.add_to_pipeline, names))
    assert set(names) == set(yaml.safe_load(recipe_list.OWN.read_text())["recipes"])


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
    assert yaml.safe_load(Path("params.yaml").read_text())["recipes"] == {
        "mine": "params/mine.yaml"
    }


def test_pipeline_that_a_merge_has_left_in_its_earlier_form_is_refused():
    """DVC says that it cannot redefine a variable, or finds no key; nothing is written."""
    Path("dvc.yaml").write_text(f"vars:\n  - recipes:\n      - tiny\n      - mine\n{TAIL}")
    with pytest.raises(
        ValueError, match=r"^dvc\.yaml lists recipes as versions before 0\.8\.0 did"
    ):
        recipe_list.add_to_pipeline("mine")
    assert not recipe_list.OWN.exists()
