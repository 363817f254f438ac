import fcntl
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from flows.commands import doctor
from flows.host import leftovers, processes
from flows.runs import earlier_outs
from flows.tracking import outbox
from flows.tracking.run import stage_run
from flows.workers import server
from params import overrides
from tasks.engines.transformers import sampling_worker
from tasks.extensions.descendants import OWNER
from tasks.tools import sandbox
from tasks.tools.python import PythonTool
from tests import toy_project as toy
from tests.waiting import wait_until

ALONE = ("sh", "-c", '"$@" & echo $!', "sh")  # starts a command and ends before it
LIVING = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
SLEEP = "import time; time.sleep(100)"


@pytest.fixture
def look(project, capsys):
    """Call doctor in the toy project: its exit status, and what it found."""

    def call(*arguments):
        status = doctor.main(list(arguments))
        said = capsys.readouterr().out.splitlines()
        assert all(line.startswith("    clearing ") for line in said[1:-1:2] if not arguments)
        return status, [line for line in said[:-1] if not line.startswith(" ")]

    return call


@pytest.fixture
def start(project):
    """Start a command in the project, as a child of ALONE or LIVING; its process id."""
    started = []

    def begin(parent, *command, fds=(), **environment):
        process = subprocess.Popen(
            [*parent, *command],
            cwd=project,
            env=toy.environment(**environment),
            pass_fds=fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        started.append(process)  # with its pipe, or what it prints would end it
        if parent == ALONE:
            pid = int(process.stdout.readline())
            process.wait()
        else:
            wait_until(lambda: psutil.Process(process.pid).children())
            pid = psutil.Process(process.pid).children()[0].pid
        wait_until(lambda: psutil.Process(pid).name() != "sh")
        return pid

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ended():
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def found_and_cleared(look, *expected):
    """Doctor finds what is expected and nothing else, leaves it, clears it, finds nothing."""
    status, found = look()
    assert (status, len(found)) == (1, len(expected)), found
    assert all(any(said in line for line in found) for said in expected), found
    assert look("--yes")[0] == 0
    assert look() == (0, [])


# a recipe


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], []),
        (["machine.device=cuda"], ["'machine.device' = 'cuda': ", "beamline plan"]),
        (
            ["dialogue.system='<search>x</search>'", "dialogue.tool_calls=0"],
            ["shows the tags <search>", "'dialogue.tool_calls' = 0"],
        ),
        (["engine.kind=vlm"], ["'engine.kind' = 'vlm'"]),
    ],
)
def test_recipe_is_checked_alone(tmp_path, monkeypatch, capsys, changes, words):
    shutil.copytree(toy.ROOT / "params", tmp_path / "params")
    (tmp_path / "dvc.yaml").touch()
    overrides.apply_to("smoke", changes, tmp_path / "params")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.main(["smoke"]) == bool(words)
    lines = capsys.readouterr().out.splitlines()
    if not words:
        assert lines == ["smoke: nothing contradicts"]
    assert all(any(word in line for line in lines) for word in words)
    assert all(line.startswith("params/smoke.yaml: ") for line in lines if words)


def test_recipe_that_is_not_there_is_suggested(project, capsys):
    assert doctor.main(["toi"]) == 1
    assert "no recipe 'toi'" in capsys.readouterr().out


# processes


def sleeper(*words):
    return (sys.executable, "-c", SLEEP, *words)


PROCESSES = {
    "a Prefect server": (sleeper("-m", "flows.workers.server", "serve", "5", "run"), {}),
    "MLflow's page": (sleeper("-m", "mlflow", "ui"), {"BEAMLINE_PARENT": "1"}),
    "a stage": (sleeper("-m", "flows.reinforce", "toy"), {"DVC_STAGE": "reinforce@toy"}),
}
NOT_OURS = (
    sleeper("-m", "mlflow", "ui"),  # the user's
    sleeper("-m", "flows.reinforce", "toy"),  # started by hand, and sent to the background
    sleeper("-m", "flows.retrain", "toy"),
    sleeper(),
)


def test_orphans_are_found_and_ended(project, look, start):
    of_users = sleeper("left by a guard that was killed"), {OWNER: str(project)}
    orphans = PROCESSES | {"a process of a user's tool or world": of_users}
    pids = {kind: start(ALONE, *command, **more) for kind, (command, more) in orphans.items()}
    said = "orphan: process {}, {} whose run has ended"
    found_and_cleared(look, *(said.format(pid, kind) for kind, pid in pids.items()))
    assert not any(is_running(pid) for pid in pids.values())


def test_processes_of_runs_and_of_others_are_left_alone(look, start, tmp_path_factory):
    pids = [start(LIVING, *command, **more) for command, more in PROCESSES.values()]
    pids += [start(ALONE, *command) for command in NOT_OURS]
    other = tmp_path_factory.mktemp("other")
    command, _ = PROCESSES["a Prefect server"]
    moved = ("sh", "-c", 'cd "$0" && exec "$@"', str(other))
    pids.append(start(ALONE, *moved, *command))
    assert look("--yes") == (0, [])
    assert all(is_running(pid) for pid in pids)


def test_orphans_end_with_their_children(project, look, start):
    toy.write_stage(project, "first", flows=False, before=f"Path('begun').touch(); {SLEEP}")
    server.HOME.mkdir(parents=True)
    with socket.create_server((server.HOST, 0)) as listening:
        descriptor = listening.fileno()
        served = start(
            ALONE,
            *(sys.executable, "-m", "flows.workers.server", "serve", str(descriptor), "run"),
            fds=[descriptor],
        )
    dvc = start(ALONE, sys.executable, "-m", "flows.runs.dvc_command", "repro", "-s", "first@toy")
    wait_until(Path("begun").exists)
    _, found = look()
    assert sorted(found) == sorted(
        [
            f"orphan: process {served}, a Prefect server whose run has ended",
            f"orphan: process {dvc}, a DVC that ran a stage whose run has ended",
        ]
    )
    assert look("--yes")[0] == 0
    assert toy.processes(project) == []


def test_orphaned_sandbox_is_recognised(start):
    ours, theirs = socket.socketpair()
    limits = PythonTool.model_validate(
        toy.RECIPE["tools"]["python"] | {"memory_mib": 512, "processes": 8}
    )
    command = sandbox.command(limits.model_dump(), "none")
    with theirs:
        shell = subprocess.Popen(
            # a command in the background would read from /dev/null
            ["sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!', "sh", *command],
            stdin=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
    pid = int(shell.stdout.readline())
    shell.wait()
    try:
        wait_until(lambda: pid in kinds(toy.ROOT))  # it is several programs, one after the other
        assert kinds(toy.ROOT)[pid] == "a sandbox"
        assert pid not in kinds(toy.ROOT / "tests")
    finally:
        ours.close()
        processes.end(psutil.Process(pid))


def kinds(root):
    return {process.pid: kind for process, kind in processes.orphans(root)}


def test_orphaned_workers_are_recognised(start):
    code = f"{SLEEP} # {sampling_worker.INSIDE}"
    verifier = str(toy.ROOT / "tasks/scorers/maths_worker.py")
    at_root = ("sh", "-c", f'cd "{toy.ROOT}" && exec "$@"', "sh")
    sampling = start(ALONE, *at_root, sys.executable, "-c", code)
    verifying = start(ALONE, *sleeper(verifier, "{}"))
    beside = start((*at_root, *LIVING), sys.executable, "-c", code)
    found = kinds(toy.ROOT)
    assert (found[sampling], found[verifying]) == (
        "a process that samples",
        "a verifier of mathematics",
    )
    assert beside not in found


# locks


def test_paths_in_use_by_ended_processes_are_freed(project, look):
    list_of_paths = Path(".dvc/tmp/rwlock")
    living = {"pid": os.getpid(), "cmd": "dvc"}
    dead = {"pid": ended(), "cmd": "dvc"}
    held = {"read": {"/a": [living, dead]}, "write": {"/b": dead, "/c": living}}
    list_of_paths.write_text(json.dumps(held))
    found_and_cleared(look, "stale lock: DVC's list of paths in use")
    left = json.loads(list_of_paths.read_text())
    assert left == {"read": {"/a": [living]}, "write": {"/c": living}}


def test_stale_lock_of_git_is_removed(project, look, start):
    start(LIVING, *sleeper("-m", "flows.retrain", "toy"))  # after the lock was written
    lock = Path(".git/index.lock")
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    found_and_cleared(look, "stale lock: .git/index.lock")
    assert not lock.exists()


def test_outs_that_a_killed_stage_left_aside_are_put_back(project, look):
    reports = Path("reports/toy")
    reports.mkdir(parents=True)
    (reports / ".table.md.earlier").write_text("whole")
    (reports / "table.md").write_text("half")
    record = earlier_outs.HOME / "later@toy.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"outs": ["reports/toy/table.md"], "done": False}))
    assert look()[0] == 1
    found = look("--yes")[1]
    assert found[0].startswith("moved aside: reports/toy/table.md, of an earlier run")
    assert (reports / "table.md").read_text() == "whole"
    assert [path.name for path in reports.iterdir()] == ["table.md"]


def test_lock_that_may_be_of_a_living_run_stays(project, look, start):
    start(LIVING, *sleeper("-m", "flows.retrain", "toy"))
    Path(".git/index.lock").touch()
    assert look("--yes") == (0, [])


# half-written names


def test_half_written_names_are_removed(project, look):
    step = Path(".beamline/ledger/toy/reinforce")
    left = [
        step / ".0001-update-abc.partial/policy",
        step / ".0001-update-abc.scratch/checkpoint",
        step / ".0000-rollout-abc.scratch/trees",
        Path("models/toy/.trained.partial/weights"),
        Path("data/toy/gates/verdict.json.partial"),
        Path("params/resolved/.toy.yaml.9.partial"),
        Path(".beamline/.new-store-1/built.db"),
    ]
    whole = [step / "0000-rollout-abc/record.json", Path("data/toy/partial/a.scratch.parquet")]
    whole += [Path("data/sources/mine/train.jsonl.partial")]  # of the user
    for file in (*left, *whole):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("12345")
    found_and_cleared(
        look,
        *("/.0001-update-abc.partial (5 bytes)", ".0001-update-abc.scratch"),
        *(".0000-rollout-abc.scratch", "models/toy/.trained.partial"),
        *("data/toy/gates/verdict.json.partial", ".beamline/.new-store-1"),
        "params/resolved/.toy.yaml.9.partial",
    )
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in whole)


def test_names_of_a_living_run_stay(project, look, start):
    shutil.copy("params/toy.yaml", "params/other.yaml")
    for recipe in ("toy", "other"):
        Path(f"data/{recipe}/.curve.csv.partial").mkdir(parents=True)
    start(LIVING, *sleeper("-m", "flows.retrain", "toy"))
    found_and_cleared(look, "data/other/.curve.csv.partial")
    assert Path("data/toy/.curve.csv.partial").exists()
    start(LIVING, *sleeper("-m", "prefect.engine"))  # a worker's, which names no recipe
    Path("data/other/.curve.csv.partial").mkdir(parents=True)
    assert look("--yes") == (0, [])


# worktrees


def worktree(project, name):
    """A worktree of a run, with the record beside it."""
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    toy.run(project, "git", "add", "dvc.yaml")
    toy.run(project, "git", *who, "commit", "-qm", "toy")
    place = project / ".beamline/runs" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_name(f"{name}.json").write_text("{}")
    made = toy.run(project, "git", "worktree", "add", "--detach", str(place))
    assert made.returncode == 0, made.stdout
    return place


def test_unfinished_run_is_removed_a_living_one_stays(project, look, start):
    left, worked_in, held = (worktree(project, name) for name in ("left", "worked_in", "held"))
    start(LIVING, "sh", "-c", f"cd {worked_in} && exec sleep 100")
    wait_until(lambda: processes.work_below(worked_in))
    with held.with_name("held.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        found_and_cleared(look, "unfinished run: .beamline/runs/left")
    assert sorted(path.name for path in left.parent.iterdir()) == [
        *("held", "held.json", "worked_in", "worked_in.json")
    ]
    listed = toy.run(project, "git", "worktree", "list").stdout
    assert str(left) not in listed
    assert str(held) in listed


# DVC's cache


@pytest.fixture
def cached(project):
    """The file in the cache that an out of the project is a link to."""
    Path(".dvc/config").write_text("[cache]\n    type = hardlink\n")
    for stage in ("first", "later"):
        toy.write_stage(project, stage, flows=False)
    toy.repro(project, "first@toy")
    out = Path("data/toy/first")
    [file] = [f for f in Path(".dvc/cache").rglob("*") if f.is_file() and f.samefile(out)]
    return file


def test_writable_file_of_the_cache_is_protected(look, cached):
    assert look() == (0, []), "DVC protects its cache"
    cached.chmod(0o644)
    found_and_cleared(look, f"unsafe cache: {cached} can be written")
    assert cached.stat().st_mode & 0o777 == 0o444


def test_changed_file_of_the_cache_is_deleted(look, cached):
    cached.chmod(0o644)
    Path("data/toy/first").write_text("edited in place")
    found_and_cleared(look, f"unsafe cache: {cached} has been changed in place")
    assert not cached.exists()


def test_links_to_edited_outs_become_copies(project, look, cached):
    text, out = Path("dvc.yaml").read_text(), "        - data/${key}/first"
    head, _, tail = text.rpartition(out)  # the last one is an out, the other a dependency
    Path("dvc.yaml").write_text(f"{head}{out}:\n            persist: true{tail}")
    found_and_cleared(look, "unsafe cache: cache.type links outs that stages edit in place")
    assert not cached.samefile("data/toy/first")


# what MLflow and Prefect believe


def test_unsent_messages_stay_until_the_store_answers(project, look, monkeypatch):
    store = project / "store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    store.write_text("no database" * 100)
    with stage_run("toy", "first", "k") as run:
        run.log_metrics({"reward": 0.5}, 0, 1.0)
    expected = f"unsent: 2 messages of run 'first@toy' for the store sqlite:///{store}"
    assert look("--yes") == (1, [expected])
    store.unlink()
    found_and_cleared(look, "unsent: 2 messages of run 'first@toy'")
    with closing(sqlite3.connect(store)) as database:
        assert database.execute("select name, status from runs").fetchall() == [
            ("first@toy", "FINISHED")
        ]


def test_flow_runs_of_other_machines_are_left_alone(project, look):
    server.HOME.mkdir(parents=True)
    with closing(sqlite3.connect(server.HOME / "prefect.db")) as store, store:
        store.execute(
            "create table flow_run (id, name, infrastructure_pid, start_time, state_type)"
        )
        for host in (processes.host(), "elsewhere"):
            row = ("1", f"on {host}", f"{host}:999999999", "2026-01-01 00:00:00", "RUNNING")
            store.execute("insert into flow_run values (?, ?, ?, ?, ?)", row)
    _, [found] = look()
    assert found.endswith(f"their processes have ended: on {processes.host()}")


@pytest.mark.kills
def test_leftovers_of_a_killed_run_are_cleared(project, look, start):
    before = f"""
    from flows.tracking.run import stage_run
    with stage_run("toy", "first", "k"):
        Path("begun").touch()
        {SLEEP}"""
    toy.write_stage(project, "first", flows=True, before=before.strip())
    pid = start(LIVING, sys.executable, "-m", "flows.retrain", "toy", "--here")
    wait_until(Path("begun").exists)
    Path("data/toy").mkdir(parents=True, exist_ok=True)
    Path("data/toy/.first.partial").touch()
    assert look("--yes") == (0, []), "the run lives"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: toy.processes(project) == [])
    found_and_cleared(
        look,
        *("run 'toy 20", "run 'first@toy' is RUNNING in MLflow", "half-written"),
        *("RUNNING in Prefect, and their processes have ended: ", "DVC's list of paths in use"),
    )
    with closing(sqlite3.connect(server.HOME / "prefect.db")) as store:
        for table in ("flow_run", "task_run"):
            states = store.execute(f"select distinct state_type from {table}").fetchall()
            assert states == [("CRASHED",)], table
    with closing(sqlite3.connect(".beamline/mlflow.db")) as store:
        assert store.execute("select distinct status from runs").fetchall() == [("KILLED",)]


# pins, the disk, and the program


def test_another_version_of_a_package_is_reported(project, look):
    installed = leftovers.installed_version("torch").partition("+")[0]  # a local version counts
    Path("constraints.txt").write_text(f"# pins\ntorch=={installed}\nnot-installed==1.0\n")
    assert look() == (0, [])
    Path("constraints.txt").write_text(f"torch=={installed}\npsutil==1.0\n")
    status, [found] = look("--yes")
    assert (status, found.split(" is ")[0]) == (1, "drifted pin: psutil")
    assert "1.0" in found


def test_disk_that_will_be_full_is_reported(project, look):
    toy.write_recipe(project, reinforce__iterations=4)
    for iteration in range(2):
        place = Path(f".beamline/ledger/toy/reinforce/000{iteration}-update-abc")
        place.mkdir(parents=True)
        with (place / "policy").open("wb") as file:
            file.truncate(2**42)  # four terabytes, of which none is written
    status, [said] = look("--yes")
    assert status == 1
    assert said.startswith("full disk ahead: 2 iterations of toy need 9 TB, ")
    toy.write_recipe(project, reinforce__iterations=2)
    assert look() == (0, [])


def test_program_lists_clears_and_returns_a_status(project, look, monkeypatch, capsys):
    command = (sys.executable, "-m", "flows.doctor")
    clean = toy.run(project, *command)
    assert (clean.returncode, clean.stdout.count("\n")) == (0, 1), clean.stdout
    assert not outbox.root().exists()
    assert not Path(".beamline").exists(), "looking leaves nothing"
    Path("models/toy").mkdir(parents=True)
    Path("models/toy/.trained.partial").write_text("")
    assert look() == (1, ["half-written: models/toy/.trained.partial (0 bytes)"])
    cleared = toy.run(project, *command, "--yes")
    assert cleared.returncode == 0, cleared.stdout
    assert not Path("models/toy/.trained.partial").exists()
    monkeypatch.chdir("models")
    assert doctor.main([]) == 2
    assert "no dvc.yaml" in capsys.readouterr().err


def test_terminal_asks_for_each_finding(look, monkeypatch):
    Path("models/toy").mkdir(parents=True)
    for name in ("a", "b"):
        Path(f"models/toy/.{name}.partial").touch()
    answers = iter(["", "y"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert doctor.main([]) == 1
    assert [path.name for path in Path("models/toy").iterdir()] == [".a.partial"]


def test_remote_that_cannot_be_used_is_left(project, look, capsys):
    local = project / ".dvc/config.local"
    local.write_text("[core]\nremote = nosuch\n")
    for arguments in ([], ["--yes"]):
        assert doctor.main(arguments) == 1
        said = capsys.readouterr().out
        assert "the runs are not pushed: .dvc/config.local: core.remote = 'nosuch'" in said
        assert said.endswith("1 left\n")
    local.write_text("[core]\nnosuch = 1\n")
    assert doctor.main([]) == 2
    assert capsys.readouterr().err.startswith("doctor: .dvc/config.local: core.nosuch = '1'")
