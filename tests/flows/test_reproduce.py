import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import asyncssh
import pytest
import yaml

from flows.commands import reproduce
from flows.runs import cache, transfer
from tests import toy_project as toy
from tests import toy_training as training
from tests.checkout import others_parent
from tests.waiting import wait_until

LABELLED = "models/toy/reward_model/trees"


@pytest.fixture
def call(capfd):
    """Run the command line; its exit status and what it and its children print."""

    def run(*arguments):
        capfd.readouterr()
        status = reproduce.main([*arguments])
        return status, "".join(capfd.readouterr())

    return run


def test_run_is_restored_from_the_cache(trained, call):
    project, branch = trained
    commit = toy.git(project, "rev-parse", branch)
    status, text = call(branch)
    place = Path(text.splitlines()[-1])
    assert (status, place) == (0, project / f".beamline/restored/toy-{commit[:12]}")
    assert (place / "models/toy/trained").read_text() == "11.0"  # 1 + 0.5·2·(1+2+3+4)
    assert "0.11" in (place / "reports/toy/metrics.json").read_text()
    assert f"{place}/models/toy/trained" in text
    message = toy.git(project, "log", "-1", "--format=%s", branch)
    assert message == "Run of toy: success 11.0 % [11.0, 11.0]"


@pytest.fixture
def ssh(tmp_path):
    """An SSH server on loopback with SFTP; its port, and the file of the key that it lets in."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    file = tmp_path / "key"
    key.write_private_key(file)
    known = asyncssh.import_authorized_keys(key.export_public_key().decode())
    loop = asyncio.new_event_loop()
    listening = asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=known,
        sftp_factory=True,
    )
    server = loop.run_until_complete(listening)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.get_port(), file
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    loop.close()


def use_ssh(folder, address, key):
    toy.set_remote(folder, address)
    with (folder / ".dvc/config").open("a") as settings:
        settings.write(f"    keyfile = {key}\n")
    toy.run(folder, "git", "update-index", "--skip-worktree", ".dvc/config")


def test_clone_restores_and_verifies_a_run_over_ssh(trained, ssh, tmp_path, monkeypatch, call):
    project, branch = trained
    commit = toy.git(project, "rev-parse", branch)
    port, key = ssh
    server = tmp_path.resolve() / "on the server"
    address = f"ssh://someone@127.0.0.1:{port}{server}"
    use_ssh(project, address, key)
    transfer.push("toy", reproduce.restore(commit, "toy"))
    assert any(path.is_file() for path in (server / "runs").rglob("*"))

    clone = tmp_path.resolve() / "clone"
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    use_ssh(clone, address, key)
    monkeypatch.chdir(clone)
    status, text = call(branch, "--verify")
    assert (status, text.splitlines()[-1]) == (0, f"identical: toy at {commit[:12]}")
    place = clone / f".beamline/restored/toy-{commit[:12]}"
    assert (place / "models/toy/trained").read_text() == "11.0"
    assert list((clone / ".dvc/cache/runs").rglob("*")), "the run-cache was pulled"
    for stage in ("prepare", "reinforce", "evaluate"):
        assert f"{stage} has run" in text, "though the run-cache has it"
    assert list((clone / ".beamline/runs").iterdir()) == []
    assert toy.git(clone, "status", "--porcelain") == ""
    assert toy.git(clone, "worktree", "list").splitlines()[1:] != []


def test_a_replay_has_the_trees_of_every_stage_that_sampled(tmp_path):
    assert reproduce.stored_trees(tmp_path, "toy") == {}
    training, labelled = (tmp_path / place for place in ("data/toy/trees", LABELLED))
    training.mkdir(parents=True)
    assert reproduce.stored_trees(tmp_path, "toy") == {"BEAMLINE_TREES": str(training)}
    labelled.mkdir(parents=True)
    assert reproduce.stored_trees(tmp_path, "toy") == {
        "BEAMLINE_TREES": str(training),
        "BEAMLINE_LABELLED_TREES": str(labelled),
    }


def plant(project, branch, changes):
    """Commit changes on top of a run that leave its dvc.lock as it is."""
    toy.git(project, "checkout", "--quiet", "--detach", branch)
    for file, (before, after) in changes.items():
        text = (project / file).read_text()
        assert before in text
        (project / file).write_text(text.replace(before, after))
    return toy.commit(project, "planted")


@pytest.mark.kills
def test_killed_verification_continues_and_names_the_difference(trained, api, call):
    project, branch = trained
    rate = "learning_rate: 0.5\n    micro", "learning_rate: 0.2\n    micro"
    loss = "# what is learned from\n", "# another comment\n"
    code = "return 2 * value", "return 3 * value"
    plant(project, branch, {"params/toy.yaml": rate, "loss.py": loss})
    commit = plant(project, "HEAD", {"loss.py": code})
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.reproduce", commit, "--verify"],
        env=toy.environment(PREFECT_API_URL=api, BEAMLINE_PAUSE="in evaluate"),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: list(project.glob(".beamline/runs/verify-*/begun")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    os.environ.update(others_parent())  # trained restores it
    status, text = call(commit, "--verify")
    assert status == 1, text
    assert "evaluate has run" in text
    assert "reinforce has run" not in text, "it had ended"
    for line in [
        "differs first at reinforce@toy, iteration 0, update",
        "  input settings.learning_rate: was 0.5, is 0.2",
        "  input params/toy.yaml reinforce.update.learning_rate: was 0.5, is 0.2",
        "  input loss.py, line 3: was     return 2 * value, is     return 3 * value",
    ]:
        assert line in text.splitlines(), text
    policy = next(line for line in text.splitlines() if line.startswith("  artifact policy: was "))
    before, now = policy.split("was ")[1].split(", is ")
    assert len(before) == len(now) == 32
    assert any(line.startswith("  out models/toy/trained: was ") for line in text.splitlines())


DICE = """
import random

def roll(die: str) -> float:
    \"\"\"Roll a die.\"\"\"
    return random.SystemRandom().random()

roll.repeatable = False
"""
ROLLED = """
from pathlib import Path
from tasks.environments import open_environment
from tasks.environments.contract import recording
from tasks.recipes import kind_of
from tasks.tools.recording import CALLS, Origin, publish_calls
from tasks.trees.tree import Call, Question

def loss(value):
    name, origin = "own/dice.py:roll", Origin("reinforce", value)
    tools = {name: kind_of("tools", name).settings()}
    with (
        open_environment(tools, {}, 1, Path()) as environment,
        recording(environment, origin, Path) as recorded,
        recorded.environment.session() as session,
    ):
        ((handle, _),) = session.open([Question("q", "toy", "roll", ())])
        (seen,) = session.act([(handle, Call("roll", str(value)))])
        place = Path("data/toy/trees", str(value))
        recorded.save_calls(place)
    publish_calls({origin: place / CALLS}, place / CALLS)
    return float(seen.text)
"""


def test_results_that_no_run_gets_again_are_taken_from_the_record(trained, api, call):
    project, branch = trained
    (project / "own").mkdir()
    (project / "own/dice.py").write_text(DICE)
    plant(project, branch, {"loss.py": (training.LOSS, ROLLED)})
    branch = training.retrain(project, api, "reinforce.iterations=1")
    status, text = call(branch, "--verify")
    assert (status, "reinforce has run" in text) == (0, True), text
    commit = toy.git(project, "rev-parse", branch)
    assert text.splitlines()[-1] == f"identical: toy at {commit[:12]}"


CHAMPION = """
from pathlib import Path
import yaml
from flows.host.parents import die_with_parent
from flows.runs import cache

die_with_parent()
pinned = yaml.safe_load(Path("params/toy.yaml").read_text())["champion"]
cache.restore(pinned["digest"], Path("models/toy/champion/policy"))
"""


def test_a_clone_verifies_a_run_that_was_compared_with_a_champion(
    project, api, tmp_path, monkeypatch, call
):
    """The champion was registered by hand: as a folder of its own, no remote has it."""
    folder = project / "made"
    folder.mkdir()
    toy.create(folder, flows=False)
    toy.set_remote(folder, str(tmp_path / "remote"))
    (folder / "first.py").write_text(CHAMPION)
    pipeline = yaml.safe_load((folder / "dvc.yaml").read_text())
    del pipeline["stages"]["later"]
    pipeline["stages"]["first"]["do"]["outs"] = ["models/${key}/champion"]
    (folder / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    monkeypatch.chdir(folder)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/weights").write_text("w")
    digest = cache.keep(tmp_path / "policy")
    toy.write_recipe(folder, champion={"version": 2, "commit": None, "digest": digest})
    toy.commit(folder)
    toy.repro(folder)
    commit = toy.commit(folder, "a run\n\nRecipe: toy")
    objects = tmp_path / "remote/files"  # as after a push, which knows outs alone
    shutil.copytree(".dvc/cache/files", objects)
    (objects / "md5" / digest[:2] / digest[2:]).unlink()
    toy.git(folder, "clone", "--quiet", str(folder), str(tmp_path / "clone"))
    monkeypatch.chdir(tmp_path / "clone")
    with patch.dict(os.environ, toy.environment(PREFECT_API_URL=api), clear=True):
        status, text = call(commit, "--verify")
    assert (status, text.splitlines()[-1]) == (0, f"identical: toy at {commit[:12]}"), text
    assert text.startswith(f"this runs the code of commit {commit[:12]}")


def test_unknown_and_unreachable_runs_have_a_status_and_a_message(
    trained, tmp_path, monkeypatch, call
):
    project, branch = trained
    status, text = call("nothing")
    assert status == 2
    assert "'nothing'" in text
    status, text = call(f"{branch}^")
    assert status == 2
    assert "no dvc.lock" in text
    clone = tmp_path.resolve() / "clone"
    toy.git(project, "clone", "--quiet", str(project), str(clone))
    toy.set_remote(clone, str(tmp_path / "empty"))
    monkeypatch.chdir(clone)
    status, text = call(branch)
    assert status == 1
    assert "dvc pull failed" in text
