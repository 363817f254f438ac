import re
import shutil
import socket

import pytest

from flows.commands import launch
from flows.host import requirements
from params.schema.addresses import SERVERS
from tasks import recipes
from tests import toy_project as toy

TOKEN = "0123456789abcdef"


def changed(name, *changes):
    return recipes.load_changed(name, changes, toy.ROOT / "params")


@pytest.fixture
def server():
    """The address of a server that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_programs_of_servers_stages_and_processes(server):
    recipe = changed("tiny-vllm", "machine.processes=4", f'engine.servers=["{server}"]')
    secret = {launch.TOKEN: TOKEN}
    started = launch.programs("tiny-vllm", recipe, secret, {"reinforce@tiny-vllm": "gpu"})
    text = launch.report("tiny-vllm", started, [])
    port = server.rpartition(":")[2]
    for words in (
        f"tasks.engines.vllm.serve models/tiny-vllm/initial --host 127.0.0.1 --port {port}",
        "beamline retrain tiny-vllm --here",
        "a worker of the pool gpu",
        "--standalone --nproc-per-node=4 -m tasks.learning.learner_process",
    ):
        assert words in text
    assert TOKEN not in text
    alone = launch.programs("tiny", changed("tiny"), {}, {})
    assert [one.command for one in alone] == ["beamline retrain tiny --here"]


def test_sound_launch_has_no_fault(server, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "LOCAL", ())  # as if this file system were shared
    monkeypatch.setattr(requirements, "ENGINES", {"vllm": requirements.ENGINES["transformers"]})
    recipe = changed("tiny-vllm", "machine.processes=4", f'engine.servers=["{server}"]')
    command = "env torchrun --nnodes=2 --nproc-per-node=2"
    environment = {launch.TOKEN: TOKEN, launch.LAUNCH: command, launch.HOST: "node-1"}
    path = str(shutil.which("env")).rpartition("/")[0]
    assert launch.faults(recipe, environment | {"PATH": path}, tmp_path) == []


def test_all_faults_are_named_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "LOCAL", (launch.file_system(tmp_path),))
    monkeypatch.setattr(launch.gpu, "visible", lambda: ["a GPU"])
    recipe = changed(
        "tiny-vllm",
        *("machine.processes=6", "machine.device=cuda", 'engine.servers=["http://127.0.0.1:9"]'),
    )
    command = "no-such-launcher torchrun --nnodes 2 --nproc_per_node 4"
    found = "\n".join(launch.faults(recipe, {launch.LAUNCH: command}, tmp_path))
    for words in (
        "BEAMLINE_SERVER_TOKEN is not set",
        r"http://127\.0\.0\.1:9 does not answer",
        "starts 4 learner processes on this machine, which has 1 GPUs",
        "'no-such-launcher', which is no program here",
        "2 x 4 processes, and machine.processes is 6",
        "BEAMLINE_HOST is not set",
        "of this machine alone, and 2 machines",
    ):
        assert re.search(words, found), words


def test_servers_of_the_environment_win(monkeypatch):
    recipe = changed("tiny", 'engine.servers=["http://gpu-1:8000"]')
    monkeypatch.setenv(SERVERS, "http://gpu-2:8000, https://gpu-3:8000,")
    started = launch.programs("tiny", recipe, {}, {})
    assert [one.machine for one in started[:2]] == ["gpu-2", "gpu-3"]
    assert "tasks.engines.transformers.serve models/tiny/initial --host gpu-2" in started[0].command
    monkeypatch.delenv(SERVERS)
    assert launch.servers(recipe) == ["http://gpu-1:8000"]


@pytest.mark.parametrize("named", ["gpu-2:8000", "http://gpu-2:8000,http://gpu-2:8000"])
def test_environment_that_names_no_servers_is_an_error(monkeypatch, capsys, named):
    monkeypatch.chdir(toy.ROOT)
    monkeypatch.setenv(SERVERS, named)
    assert launch.main(["tiny"]) == 2
    assert SERVERS in capsys.readouterr().err


def test_servers_that_start_with_the_run_are_not_asked(tmp_path):
    environment = {launch.TOKEN: TOKEN}
    for host, faulty in (("127.0.0.1", False), ("no-such-machine.invalid", True)):
        recipe = changed("tiny-vllm", f'engine.servers=["http://{host}:9"]')
        found = launch.faults(recipe, environment, tmp_path, starting=True)
        assert any("does not answer" in fault for fault in found) == faulty


def test_faulty_recipe_and_faults_give_a_status(capsys, monkeypatch):
    monkeypatch.chdir(toy.ROOT)
    for name in (launch.LAUNCH, launch.HOST):
        monkeypatch.delenv(name, raising=False)
    assert launch.main(["tiny"]) == 0
    assert launch.main(["tiny", "--set", "machine.processes=0"]) == 2
    assert "machine.processes" in capsys.readouterr().err
    monkeypatch.setenv(launch.LAUNCH, "env torchrun --nnodes=1 --nproc-per-node=2")
    assert launch.main(["tiny"]) == 1
