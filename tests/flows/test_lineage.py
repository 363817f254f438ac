"""The command line, and every command that it prints, on runs of the flows themselves."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from flows.runs import cache, provenance
from tests import toy_project as toy
from tests import toy_training as training

LINEAGE = (sys.executable, "-m", "flows.lineage")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with a local remote."""
    folder = tmp_path_factory.mktemp("lineage").resolve() / "project"
    folder.mkdir()
    training.create(folder, str(folder.parent / "remote"))
    return folder


@pytest.fixture(scope="module")
def branch(project, api):
    """The branch of a run, whose data are in the cache and in the remote."""
    command = (sys.executable, "-m", "flows.retrain", "toy", "--set", "evaluate.bootstrap=2")
    ran = toy.run(project, *command, PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.splitlines()[-1]


def as_json(folder, *arguments):
    said = toy.run(folder, *LINEAGE, *arguments, "--json")
    assert said.returncode == 0, said.stdout
    return json.loads(said.stdout)


def given_back(folder, link, said, monkeypatch):
    """The digest of what a link's command has brought."""
    monkeypatch.chdir(folder)
    place = Path(said.splitlines()[-1])
    if link["what"] == "commit":
        return toy.git(place, "rev-parse", "HEAD")
    if link["what"] == "source":
        return cache.digest_of(place / link["where"])
    if link["what"] == "parameters":
        return hashlib.md5(said.encode()).hexdigest()
    if link["what"] == "MLflow run":
        return json.loads(said[said.index("{") :])["info"]["run_id"]
    assert place == provenance.HOME / place.parts[2] / link["where"]
    return cache.digest_of(place)


def clone_of(project, folder):
    toy.run(project, "git", "clone", "--quiet", str(project), str(folder))
    return folder


@pytest.mark.parametrize("where", ["where it ran", "in a clone that never ran anything"])
def test_every_command_of_a_chain_gives_what_the_chain_says(
    project, branch, tmp_path, monkeypatch, where
):
    cloned = where != "where it ran"
    folder = clone_of(project, tmp_path.resolve() / "clone") if cloned else project
    links = as_json(folder, "success.trained.mean")
    commands = [link for link in links if link["command"]]
    restorable = ["benchmark result", "checkpoint", "trees", "questions", "dataset", "source"]
    tracked = [] if cloned else ["MLflow run"]
    assert [link["what"] for link in commands] == [*restorable, "commit", "parameters", *tracked]
    for link in [*commands, *commands]:  # each may be repeated
        said = toy.run(folder, "sh", "-c", link["command"])
        assert said.returncode == 0, said.stdout
        assert given_back(folder, link, said.stdout, monkeypatch) == link["digest"], link
    name = f"origin/{branch}" if cloned else branch
    assert [link["name"] for link in links if link["what"] == "commit"] == [name]


def test_the_text_tells_the_same_as_json_and_leaves_the_checkout_alone(project, branch):
    before = toy.git(project, "status", "--porcelain", "--ignored")
    text = toy.run(project, *LINEAGE, "models/toy/trained", "--at", branch)
    assert text.returncode == 0
    for link in as_json(project, "models/toy/trained", "--at", branch):
        title = f"{link['what']}: {link['name']}" if link["name"] else link["what"]
        assert title in text.stdout.splitlines()
        for part in (link["digest"], link["where"], link["command"]):
            assert part in text.stdout
    assert f"    set: evaluate.bootstrap=2\n    $ git show {branch_commit(project, branch)}:" in (
        text.stdout
    )
    assert toy.git(project, "status", "--porcelain", "--ignored") == before


def branch_commit(project, branch):
    return toy.git(project, "rev-parse", branch)[: provenance.SHORT]


def test_only_some_ids_are_printed_unless_all_are_asked_for(project, branch):
    def ids(*arguments):
        said = toy.run(project, *LINEAGE, "data/toy/trees", "--iteration", "2", *arguments)
        assert said.returncode == 0, said.stdout
        (line,) = [line for line in said.stdout.splitlines() if "by id" in line]
        return line.strip()

    assert ids() == "9 by id: q3, q3-1, q3-2, q3-3 and 5 more (--all)"
    assert ids("--all") == "9 by id: q3, " + ", ".join(f"q3-{n}" for n in range(1, 9))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models/toy/train"], "near it: models/toy/trained\nWHAT is"),
        (["models/toy/trained", "--at", "nothing"], "'nothing' names no commit here"),
        (["models/toy/trained", "--iteration", "7"], "--iteration 7: this run has 0 to 3"),
        (["toy@champion"], "has no 'toy@champion'"),
    ],
)
def test_what_cannot_be_told_is_said_with_status_2_and_no_traceback(
    project, branch, arguments, said
):
    ran = toy.run(project, *LINEAGE, *arguments)
    assert ran.returncode == 2
    assert ran.stdout.startswith("lineage: ")
    assert said in ran.stdout
    assert "Traceback" not in ran.stdout
