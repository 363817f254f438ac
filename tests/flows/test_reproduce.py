import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import asyncssh
import pytest

from tests import toy_project as toy
from tests import toy_training as training

RUN = (sys.executable, "-m", "flows.retrain", "toy")
REPRODUCE = (sys.executable, "-m", "flows.reproduce")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project of stages with records and with a local remote; tests leave its first commit."""
    folder = tmp_path_factory.mktemp("reproduce").resolve() / "project"
    folder.mkdir()
    training.create(folder, str(folder.parent / "remote"))
    return folder


@pytest.fixture(scope="module")
def branch(project, api):
    """The branch of a run that all tests share; one of a parameter that was set."""
    return run(project, api, "reinforce.update.learning_rate=0.5")


def run(folder, api, *changes):
    """Make a run; its branch."""
    changed = ["--set", *changes] if changes else []
    ran = toy.run(folder, *RUN, *changed, PREFECT_API_URL=api)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.splitlines()[-1]


def reproduce(folder, api, *arguments, **environment):
    return toy.run(folder, *REPRODUCE, *arguments, PREFECT_API_URL=api, **environment)


def restored(said):
    return Path(said.splitlines()[-1])


def test_a_run_comes_back_from_the_cache_and_is_found_identical_when_run_again(
    project, api, branch
):
    commit = toy.git(project, "rev-parse", branch)
    back = reproduce(project, api, branch)
    assert back.returncode == 0, back.stdout
    place = restored(back.stdout)
    assert place == project / f".beamline/restored/toy-{commit[:12]}"
    assert (place / "models/toy/trained").read_text() == "11.0"  # 1 + 0.5·2·(1+2+3+4)
    assert "0.11" in (place / "reports/toy/metrics.json").read_text()
    assert f"{place}/models/toy/trained" in back.stdout
    message = toy.git(project, "log", "-1", "--format=%s", branch)
    assert message == "Run of toy: success 11.0 % [11.0, 11.0]"

    again = reproduce(project, api, branch, "--verify")
    assert again.returncode == 0, again.stdout
    assert again.stdout.splitlines()[-1] == f"identical: toy at {commit[:12]}"
    for stage in ("prepare", "reinforce", "evaluate"):
        assert f"{stage} has run" in again.stdout, "from nothing, though DVC remembers it"
    assert list((project / ".beamline/runs").iterdir()) == []
    assert toy.git(project, "status", "--porcelain") == ""
    assert toy.git(project, "worktree", "list").splitlines()[1].startswith(str(place))


def test_what_is_not_repeatable_is_named_by_iteration_sub_step_and_both_values(
    project, api, branch
):
    again = reproduce(project, api, branch, "--verify", BEAMLINE_NOISE="0.25")
    assert again.returncode == 1
    said = again.stdout[again.stdout.index("differs") :].splitlines()
    assert said[0] == "differs first at reinforce@toy, iteration 2, update"
    assert said[1].startswith("  artifact policy: was ")
    before, now = said[1].split("was ")[1].split(", is ")
    assert len(before) == len(now) == 32
    assert before != now
    assert not any(line.startswith("  input") for line in said)
    assert any(line.startswith("  out models/toy/trained: was ") for line in said)


def plant(project, branch, file, before, after):
    """Commit a change on top of a run that leaves its dvc.lock as it is."""
    toy.run(project, "git", "checkout", "--quiet", "--detach", branch)
    text = (project / file).read_text()
    assert before in text
    (project / file).write_text(text.replace(before, after))
    return toy.commit(project, "planted")


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        (
            "params/toy.yaml",
            "learning_rate: 0.5\n    micro",
            "learning_rate: 0.2\n    micro",
            [
                "differs first at reinforce@toy, iteration 0, update",
                "  input settings.learning_rate: was 0.5, is 0.2",
                "  input params/toy.yaml reinforce.update.learning_rate: was 0.5, is 0.2",
            ],
        ),
        (
            "questions.jsonl",
            '"q3", "value": 3',
            '"q3", "value": 7',
            [
                "differs first at prepare@toy, iteration 0, prepare",
                '  input questions.jsonl, row 3: was {"id": "q3", "value": 3}, is '
                '{"id": "q3", "value": 7}',
            ],
        ),
        (
            "loss.py",
            "return 2 * value",
            "return 3 * value",
            [
                "differs first at reinforce@toy, iteration 0, update",
                "  input loss.py, line 3: was     return 2 * value, is     return 3 * value",
            ],
        ),
    ],
    ids=["a parameter", "a row of data", "a line of code"],
)
def test_a_planted_difference_is_named_at_its_place(
    project, api, branch, file, before, after, said
):
    commit = plant(project, branch, file, before, after)
    again = reproduce(project, api, commit, "--verify")
    assert again.returncode == 1, again.stdout
    for line in said:
        assert line in again.stdout, again.stdout


def test_a_clone_that_never_ran_anything_restores_and_verifies_through_the_remote(
    project, api, branch, tmp_path
):
    clone = tmp_path.resolve() / "clone"
    toy.run(tmp_path, "git", "clone", "--quiet", str(project), str(clone))
    back = reproduce(clone, api, branch)
    assert back.returncode == 0, back.stdout
    place = restored(back.stdout)
    assert place.is_relative_to(clone)
    assert (place / "models/toy/trained").read_text() == "11.0"
    assert list((clone / ".dvc/cache/runs").rglob("*")), "DVC's memory of runs came along"
    again = reproduce(clone, api, branch, "--verify")
    assert again.stdout.splitlines()[-1].startswith("identical: toy at "), again.stdout


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


def test_a_run_goes_through_an_ssh_server_to_another_clone(api, ssh, tmp_path):
    port, key = ssh
    project = tmp_path.resolve() / "project"
    project.mkdir()
    folder = tmp_path.resolve() / "on the server"
    url = f"ssh://someone@127.0.0.1:{port}{folder}"
    training.create(project, url)
    mine = ("dvc", "remote", "modify", "--local", "store", "keyfile", str(key))
    toy.run(project, *mine)
    branch = run(project, api)
    assert any(path.is_file() for path in (folder / "runs").rglob("*"))

    clone = tmp_path.resolve() / "clone"
    toy.run(tmp_path, "git", "clone", "--quiet", str(project), str(clone))
    toy.run(clone, *mine)
    again = reproduce(clone, api, branch, "--verify")
    assert again.stdout.splitlines()[-1].startswith("identical: toy at "), again.stdout


def test_a_verification_that_was_killed_goes_on(project, api, branch):
    text = (project / "evaluate.py").read_text()
    wait = "import time; Path('begun').touch(); time.sleep(0 if Path('go').exists() else 60)\n"
    commit = plant(project, branch, "evaluate.py", text, text + wait)
    process = subprocess.Popen(
        [*REPRODUCE, commit, "--verify"],
        cwd=project,
        env=toy.environment(PREFECT_API_URL=api),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (begun := list(project.glob(".beamline/runs/verify-*/begun"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    begun[0].with_name("go").touch()
    again = reproduce(project, api, commit, "--verify")
    assert "reinforce has run" not in again.stdout, "it had ended"
    assert "differs first at evaluate@toy\n  input evaluate.py, line " in again.stdout
    assert "  the outs are the same" in again.stdout


def test_what_is_no_run_and_what_is_nowhere_is_said_with_a_remedy(project, api, branch, tmp_path):
    said = reproduce(project, api, "nothing").stdout
    assert "reproduce: 'nothing' names no commit here: `git branch --all" in said
    said = reproduce(project, api, f"{branch}^")
    assert "is no run: it has no dvc.lock" in said.stdout
    assert said.returncode == 2
    clone = tmp_path.resolve() / "clone"
    toy.run(tmp_path, "git", "clone", "--quiet", str(project), str(clone))
    toy.run(clone, "dvc", "remote", "modify", "--local", "store", "url", str(tmp_path / "empty"))
    said = reproduce(clone, api, branch)
    assert said.returncode == 1
    assert "reproduce: dvc pull failed" in said.stdout
