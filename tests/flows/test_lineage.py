"""The command line, and every command that it prints, on a run of the flows themselves."""

import hashlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from flows.commands import lineage, reproduce
from flows.runs import cache, provenance_subject
from tests import toy_project as toy

COMMANDS = {"lineage": lineage.main, "reproduce": reproduce.main}


@pytest.fixture
def call(capfd):
    """Run a command that a chain shows, with success; what it prints."""

    def run(command):
        words = shlex.split(command)
        if words[0] != "beamline":
            ran = toy.run(Path.cwd(), "sh", "-c", command)
            assert ran.returncode == 0, ran.stdout
            return ran.stdout
        capfd.readouterr()
        assert COMMANDS[words[1]](words[2:]) == 0
        return capfd.readouterr().out

    return run


@pytest.fixture
def chain(call):
    """The chain of what the arguments ask for."""
    return lambda *words: json.loads(call(f"beamline lineage {shlex.join(words)} --json"))


def restored_digest(link, output):
    """The digest of what a link's command has restored or shown."""
    place = Path(output.splitlines()[-1])
    if link["what"] == "commit":
        return toy.git(place, "rev-parse", "HEAD")
    if link["what"] == "source":
        return cache.digest_of(place / link["where"])
    if link["what"] == "parameters":
        return hashlib.md5(output.encode()).hexdigest()
    if link["what"] == "MLflow run":
        return json.loads(output[output.index("{") :])["info"]["run_id"]
    assert place == provenance_subject.HOME / place.parts[2] / link["where"]
    return cache.digest_of(place)


@pytest.mark.parametrize("cloned", [False, True], ids=["where it ran", "in a new clone"])
def test_each_command_of_a_chain_restores_its_link(
    trained, tmp_path, monkeypatch, call, chain, cloned
):
    project, branch = trained
    if cloned:
        toy.git(project, "clone", "--quiet", str(project), str(tmp_path / "clone"))
        monkeypatch.chdir(tmp_path / "clone")
    links = chain("success.trained.mean")
    commands = [link for link in links if link["command"]]
    restorable = ["benchmark result", "checkpoint", "trees", "questions", "dataset", "source"]
    tracked = [] if cloned else ["MLflow run"]
    assert [link["what"] for link in commands] == [*restorable, "commit", "parameters", *tracked]
    for link in [*commands, commands[0]]:  # which may be repeated
        assert restored_digest(link, call(link["command"])) == link["digest"], link
    name = f"origin/{branch}" if cloned else branch
    assert [link["name"] for link in links if link["what"] == "commit"] == [name]


def test_text_has_the_links_and_leaves_the_checkout_alone(trained, chain):
    project, branch = trained
    before = toy.git(project, "status", "--porcelain", "--ignored")
    wanted = ("models/toy/trained", "--at", branch)
    text = toy.run(project, sys.executable, "-m", "flows.lineage", *wanted)
    assert text.returncode == 0
    for link in chain(*wanted):
        title = f"{link['what']}: {link['name']}" if link["name"] else link["what"]
        assert title in text.stdout.splitlines()
        for part in (link["digest"], link["where"], link["command"]):
            assert part in text.stdout
    commit = toy.git(project, "rev-parse", branch)[: provenance_subject.SHORT]
    set_value = "    set: reinforce.update.learning_rate=0.5\n"
    assert f"{set_value}    $ git show {commit}:" in text.stdout
    assert toy.git(project, "status", "--porcelain", "--ignored") == before


def test_few_ids_are_printed_unless_all_are_asked_for(trained, call):
    def ids(more=""):
        text = call(f"beamline lineage data/toy/trees --iteration 2 {more}")
        (line,) = [line for line in text.splitlines() if "by id" in line]
        return line.strip()

    assert ids() == "9 by id: q3, q3-1, q3-2, q3-3 and 5 more (--all)"
    assert ids("--all") == "9 by id: q3, " + ", ".join(f"q3-{n}" for n in range(1, 9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models/toy/train"], "models/toy/trained"),
        (["models/toy/trained", "--at", "nothing"], "'nothing'"),
        (["models/toy/trained", "--iteration", "7"], "0 to 3"),
        (["toy@champion"], "'toy@champion'"),
    ],
)
def test_unknown_name_gives_status_2_and_a_message(trained, capsys, arguments, message):
    assert lineage.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lineage: ")
    assert message in printed.err
