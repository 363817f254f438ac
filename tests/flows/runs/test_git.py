from pathlib import Path

import pytest

from flows.runs import git
from tests import toy_project as toy
from tests.flows.runs.conftest import RUN


@pytest.fixture
def clone(tmp_path_factory):
    """Where a clone of the project can go."""
    return tmp_path_factory.mktemp("clone") / "main"


def test_revision_has_the_commit_and_whether_it_is_changed(project):
    assert git.revision() == git.Revision("", dirty=True)
    toy.commit(project)
    clean = git.revision()
    assert len(clean.commit) == 40
    assert not clean.dirty
    toy.repro(project)
    assert Path("reports/toy/table.md").exists()
    assert git.revision() == clean, "what a run writes is no change of what it was made from"
    Path("new").write_text("")
    assert git.revision() == git.Revision(clean.commit, dirty=True)


def test_digests_are_of_the_commit_and_recipe_alone(ran):
    made = git.resolve(RUN)
    Path("dvc.lock").unlink()
    found = git.digests_at(made, "toy")
    assert found["data/toy/first"] == "eb260e9ae827821beceeed4104f0ad89"
    assert set(found) == {"data/toy/first", "data/toy/later", "reports/toy/table.md"}
    assert git.digests_at(made, "other") == {}


def test_file_missing_in_a_commit_is_named(project):
    made = toy.commit(project)
    assert git.content(made, "first.py") == Path("first.py").read_text()
    with pytest.raises(ValueError, match=f"commit {made} has no dvc.lock: "):
        git.digests_at(made, "toy")
    with pytest.raises(ValueError, match=r"commit nowhere has no first\.py"):
        git.content("nowhere", "first.py")


def test_branch_of_a_remote_is_found(project, clone, monkeypatch):
    made = toy.commit(project)
    git.branch("runs/toy-1", made)
    assert git.resolve("runs/toy-1") == git.resolve(made[:8]) == made
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    monkeypatch.chdir(clone)
    assert git.resolve("runs/toy-1") == made
    assert git.branches_at(made)
    with pytest.raises(ValueError, match="'runs/toy-2' names no commit here"):
        git.resolve("runs/toy-2")


def test_commit_is_fetched_from_a_remote(project, clone, monkeypatch):
    toy.commit(project)
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    Path("new").write_text("")
    later = toy.commit(project, "later")
    monkeypatch.chdir(clone)
    git.fetch_commit(later)
    assert git.committed("new", at=later)
    assert not git.committed("new")
    with pytest.raises(RuntimeError, match="none of its git remotes does: git push it"):
        git.fetch_commit("0" * 40)
