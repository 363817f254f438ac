import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import yaml
from prefect.workers.process import ProcessWorker

from flows.workers import automations, server
from tests import toy_project as toy
from tests.chaos.runs import below, kill

FAST = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_HEARTBEAT_SECONDS": "5"}
AUTHOR = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "test"}
AUTHOR |= {"GIT_CONFIG_KEY_1": "user.email", "GIT_CONFIG_VALUE_1": "test@example.org"}
# writes where it runs, and waits for the file `go-<name>`
HELD = (
    "import os, time; Path('{0}/{1}').write_text(f'{{Path.cwd()}} {{os.getpid()}}'); "
    "[time.sleep(0.05) for _ in iter(Path('{0}/go-{1}').exists, True)]"
)

# a machine is lost sooner than a real one: heartbeats come every 30 s
INSTALL = """
import sys
from pathlib import Path
from flows.workers import automations
lost, again, *telling = automations.declared(Path(sys.argv[1]))
lost["trigger"]["within"] = 40
for _ in range(2):
    automations.install([lost, again, *telling])
"""

CANCELLED = {"type": {"any_": ["CANCELLED"]}}


def wait_until(condition, workers):
    """Poll a condition for as long as the workers run; no clock, so a slow machine only waits."""
    while not (found := condition()):
        assert all(worker.poll() is None for worker in workers), "a worker has ended by itself"
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A client of a server with all that `make ui` starts, the scheduler among it."""
    folder = tmp_path_factory.mktemp("server")
    with (
        contextlib.chdir(folder),
        (folder / "log").open("wb") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(toy.ROOT))
        for loop in ("LOOP_SECONDS", "RECENT_DEPLOYMENTS_LOOP_SECONDS"):
            patch.setenv(f"PREFECT_SERVER_SERVICES_SCHEDULER_{loop}", "2")
        patch.setenv("PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS", "3")  # not 100 of each schedule
        server.HOME.mkdir(parents=True)
        process, port = server.start_prefect("ui", 0, log)
        server.await_answer(process, port, "/api/health", log.name)
    with httpx.Client(base_url=f"http://{server.HOST}:{port}/api", timeout=None) as client:
        yield client
    server.stop(process)


@pytest.fixture(scope="module")
def team(tmp_path_factory, service):
    """A toy project with the deployments, a checkout for a worker of each pool, a DVC remote."""
    tmp_path = tmp_path_factory.mktemp("team").resolve()
    origin, notes = tmp_path / "origin", tmp_path / "notes"
    for folder in (origin, notes, tmp_path / "remote"):
        folder.mkdir()
    toy.create(origin, flows=True)
    toy.give_base(origin)
    toy.give_pool(origin)
    toy.run(origin, "dvc", "remote", "add", "--default", "shared", str(tmp_path / "remote"))
    for name in ("first", "later"):
        toy.write_stage(origin, name, True, HELD.format(notes, name))
    (origin / "flows").mkdir()
    shutil.copy(toy.ROOT / "flows/deploy.py", origin / "flows")
    declared = yaml.safe_load((toy.ROOT / "prefect.yaml").read_text())
    declared["deployments"][0]["parameters"] = {"recipe": "toy", "overrides": ["seed=5"]}
    (origin / "prefect.yaml").write_text(yaml.safe_dump(declared))
    toy.commit(origin)
    for name in ("cpu", "gpu", "other/cpu"):
        toy.git(tmp_path, "clone", "--quiet", str(origin), name)
    address = str(service.base_url).rstrip("/")
    home = {"PREFECT_API_URL": address, "PREFECT_HOME": f"{tmp_path}/home"}
    environment = FAST | AUTHOR | home
    template = ProcessWorker.get_default_base_job_template()
    for name in ("cpu", "gpu"):
        pool = {"name": name, "type": "process", "base_job_template": template}
        assert service.post("/work_pools/", json=pool).status_code == 201
    workers = [start_worker(tmp_path / name, environment) for name in ("cpu", "gpu")]
    said = toy.run(origin, "prefect", "--no-prompt", "deploy", "--all", **environment)
    assert said.returncode == 0, said.stdout
    install = [sys.executable, "-c", INSTALL, str(toy.ROOT / automations.FILE)]
    said = toy.run(origin, *install, **environment)
    assert said.returncode == 0, said.stdout
    for verb in ("made", "updated"):
        assert said.stdout.count(f"{verb} the automation") == 2, "and none is there twice"
    yield tmp_path, workers
    for worker in workers:  # left to itself, one now and then takes over half a minute to end
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def start_worker(checkout, environment):
    """A worker of the pool that has the checkout's name."""
    command = ["prefect", "worker", "start", "--pool", checkout.name]
    with (checkout.parent / f"{checkout.name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            cwd=checkout,
            env=toy.environment(**environment, BEAMLINE_CHECKOUT=str(checkout)),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def said(team):
    return "".join(file.read_text() for file in sorted(team.rglob("*.log")))


def let_go(team, *names):
    for name in names:
        (team / f"notes/go-{name}").touch()


def hold(team, *names):
    """Have these stages wait, and forget where they have run."""
    for name in names:
        for note in (name, f"go-{name}"):
            (team / "notes" / note).unlink(missing_ok=True)


def begun(team, name, workers):
    """Wait until a stage runs; return its folder and its process, and forget them."""
    note = team / "notes" / name
    wait_until(lambda: note.exists() and note.read_text(), workers)
    folder, _, process = note.read_text().rpartition(" ")
    note.unlink()
    return folder, int(process)


def start(service, name, *overrides):
    """Start a run of a deployment; return a function that reads its flow run."""
    found = service.get(f"/deployments/name/retraining/{name}").json()
    asked = {
        "parameters": {"recipe": "toy", "overrides": list(overrides)},
        "state": {"type": "SCHEDULED"},
    }
    made = service.post(f"/deployments/{found['id']}/create_flow_run", json=asked)
    made.raise_for_status()
    return lambda: service.get(f"/flow_runs/{made.json()['id']}").json()


def process_of(run):
    """Return the process of a flow run, which it has told the server."""
    return int(run["infrastructure_pid"].rpartition(":")[2])


def check_deployed(found, declared):
    """Check that Prefect has read every key of prefect.yaml."""
    for each in declared["deployments"]:
        made = found[each["name"]]
        for key in ("description", "entrypoint", "tags", "enforce_parameter_schema"):
            assert made[key] == each[key]
        assert made["parameters"] == each.get("parameters", {})
        assert made["pull_steps"] == declared["pull"]
        assert made["work_pool_name"] == each["work_pool"]["name"]
        assert made["job_variables"] == each["work_pool"]["job_variables"]
        limit = each.get("concurrency_limit")
        if limit:
            assert made["global_concurrency_limit"]["limit"] == limit["limit"]
            strategy = made["concurrency_options"]["collision_strategy"]
            assert strategy == limit["collision_strategy"]
        schedules = {schedule["slug"]: schedule for schedule in made["schedules"]}
        for schedule in each.get("schedules", []):
            kept = schedules.pop(schedule["slug"])
            assert kept["parameters"] == schedule.get("parameters", {})
            for key in ("cron", "timezone"):
                assert kept["schedule"][key] == schedule[key]
        assert not schedules


def test_scheduled_run_sends_a_stage_to_another_pool(team, service):
    team, workers = team

    def read(path, **body):
        return service.post(f"/{path}", json=body).json()

    by_name = {each["name"]: each for each in read("deployments/filter")}
    address = f"/deployments/{by_name['tiny']['id']}"
    due = {"interval": 10, "anchor_date": datetime.now(UTC).isoformat()}
    added = service.post(f"{address}/schedules", json=[{"schedule": due, "active": True}])
    assert added.status_code == 201
    wait_until((team / "notes/first").exists, workers)
    assert (team / "notes/first").read_text().startswith(f"{team}/cpu/.beamline/runs/toy-")

    check_deployed(by_name, yaml.safe_load((team / "origin/prefect.yaml").read_text()))
    # the next run is due beside the first
    wait_until(lambda: read("flow_runs/filter", flow_runs={"state": CANCELLED}), workers)
    service.delete(f"{address}/schedules/{added.json()[0]['id']}").raise_for_status()
    colour = {"parameters": {"overrides": ["colour"]}}
    refused = service.post(f"{address}/create_flow_run", json=colour)
    assert refused.status_code == 409
    assert "colour" in refused.text
    let_go(team, "first", "later")

    def ended():
        runs = read("flow_runs/filter", flow_runs={"name": {"any_": ["retraining toy seed=5"]}})
        over = [run for run in runs if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED")]
        return over and over[0]

    run = wait_until(ended, workers)
    logs = said(team)
    assert run["state_type"] == "COMPLETED", logs
    assert run["auto_scheduled"]
    branch = run["state"]["message"]
    assert branch.startswith("runs/toy-")
    assert "Set: seed=5" in toy.git(team / "cpu", "log", "-1", "--format=%B", branch)
    files = toy.git(team / "cpu", "ls-tree", "-r", "--name-only", branch).splitlines()
    assert "reports/toy/table.md" in files, "what git keeps came back too"
    lock = yaml.safe_load(toy.git(team / "cpu", "show", f"{branch}:dvc.lock"))
    assert set(lock["stages"]) == {"first@toy", "later@toy"}
    assert (team / "notes/later").read_text().startswith(f"{team}/gpu/.beamline/runs/later-toy-")
    assert "later@toy runs on a worker of the pool 'gpu'" in logs
    for checkout in ("cpu", "gpu"):
        assert list((team / checkout / ".beamline/runs").iterdir()) == []
    [sent] = read("flow_runs/filter", flow_runs={"name": {"any_": ["later@toy"]}})
    assert sent["state_type"] == "COMPLETED"
    assert sent["parent_task_run_id"], "it is in the tree of the run that has sent it"
    [inner] = read("flow_runs/filter", flow_runs={"name": {"any_": ["retrain toy seed=5"]}})
    assert inner["parent_task_run_id"], "and that one in the tree of the schedule's"


@pytest.mark.kills
def test_run_whose_processes_are_killed_is_tried_again_by_itself(team, service):
    """A stage here, the flow run, and a stage on another worker are killed, one after the other."""
    team, workers = team
    hold(team, "first", "later")
    run = start(service, "tiny", "seed=6", "evaluate.questions=2")  # not in a cache
    place, stage = begun(team, "first", workers)
    os.kill(stage, signal.SIGKILL)
    again, _ = begun(team, "first", workers)
    assert again == place, "in the same flow run, in the worktree that is there"
    assert run()["run_count"] == 1
    os.kill(process_of(run()), signal.SIGKILL)
    again, _ = begun(team, "first", workers)
    assert again == place
    let_go(team, "first")
    place, stage = begun(team, "later", workers)
    [sent] = [
        each
        for each in service.post("/flow_runs/filter", json={}).json()
        if each["name"] == "later@toy" and each["state_type"] == "RUNNING" and each["deployment_id"]
    ]
    kill(below(process_of(sent)))
    again, _ = begun(team, "later", workers)
    assert again == place
    let_go(team, "later")
    wait_until(lambda: run()["state"]["type"] in ("COMPLETED", "FAILED"), workers)
    assert run()["state"]["type"] == "COMPLETED", said(team)
    # a machine that is slow to send a heartbeat counts as lost once more
    assert run()["run_count"] >= 2
    assert "later@toy has crashed" in said(team)


@pytest.mark.kills
def test_run_of_a_lost_machine_goes_on_elsewhere(team, service):
    """Nobody can report the death: only heartbeats are missing."""
    team, workers = team
    hold(team, "first")
    run = start(service, "tiny", "seed=7")
    place, _ = begun(team, "first", workers)
    assert place.startswith(f"{team}/cpu/")
    lost = workers[0]
    kill([*below(lost.pid), *below(process_of(run()))])
    lost.wait()
    home = {"PREFECT_API_URL": str(service.base_url).rstrip("/"), "PREFECT_HOME": f"{team}/home"}
    workers[0] = start_worker(team / "other/cpu", FAST | AUTHOR | home)
    assert run()["state"]["type"] == "RUNNING"
    place, _ = begun(team, "first", workers)
    assert place.startswith(f"{team}/other/cpu/")
    let_go(team, "first", "later")
    wait_until(lambda: run()["state"]["type"] in ("COMPLETED", "FAILED"), workers)
    assert run()["state"]["type"] == "COMPLETED", said(team)
    assert run()["run_count"] >= 2
