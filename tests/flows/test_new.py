"""A new recipe is written, listed and run by DVC; what cannot be leaves nothing behind."""

import sys
from pathlib import Path

import pytest

from flows.commands import new
from tests import toy_project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    toy_project.create(folder, flows=False)
    return folder


def files(folder):
    """Return what files below a folder hold, those of git and DVC aside."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not {".git", ".dvc", "__pycache__"} & {*file.parts}
    }


def test_new_recipe_is_run_by_dvc(project):
    before = files(project)
    said = toy_project.run(project, sys.executable, "-m", "flows.new", "mine", "--from", "toy")
    assert said.returncode == 0, said.stdout
    added = {name for name, text in files(project).items() if before.get(name) != text}
    written = {"params/mine.yaml", "params/resolved/mine.yaml", "params.yaml"}
    assert added - {".beamline/recipes.lock"} == written
    assert f"git add {' '.join(['params/mine.yaml', 'params/resolved/mine.yaml'])}" in said.stdout
    assert toy_project.repro(project, "later@mine") == ["first@mine", "later@mine"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["toy"], "there already"),
        (["toy", "--from", "toy"], "there already"),
        (["a/b", "--from", "toy"], "no name"),
        (["sources", "--from", "toy"], "other files"),
        (["yours"], "no recipe 'tiny' to start from (did you mean 'toy'"),
        (["yours", "--from", "ty"], "did you mean 'toy'"),
        (["yours", "--from", "algorithms"], "no recipe 'algorithms'"),
    ],
)
def test_refusal_leaves_nothing(project, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(project)
    before = files(project)
    assert new.main(arguments) == 2
    assert reason in capsys.readouterr().err
    assert files(project) == before


def test_file_that_appears_meanwhile_is_not_overwritten(project, monkeypatch):
    monkeypatch.chdir(project)
    other = Path("params/late.yaml")
    monkeypatch.setattr(new.new_recipe, "check_name", lambda *_: other.write_text("theirs"))
    assert new.main(["late", "--from", "toy"]) == 2
    assert other.read_text() == "theirs"
