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
import zipfile
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from flows import doctor
from flows.host import leftovers, processes
from flows.tracking import outbox
from flows.tracking.run import stage_run
from flows.workers import server
from tasks.engines.transformers import worker
from tasks.tools import python
from tasks.tools.python import PythonTool
from tests import toy_project as toy

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


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


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


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_process_whose_run_is_gone_is_found_and_ended(look, start, kind):
    command, environment = PROCESSES[kind]
    pid = start(ALONE, *command, **environment)
    found_and_cleared(look, f"orphan: process {pid}, {kind} whose run is gone")
    assert not is_running(pid)


def test_what_lives_with_its_run_or_is_not_ours_or_of_another_checkout_is_left_alone(
    look, start, tmp_path_factory
):
    pids = [start(LIVING, *command, **more) for command, more in PROCESSES.values()]
    pids += [start(ALONE, *command) for command in NOT_OURS]
    other = tmp_path_factory.mktemp("other")
    command, _ = PROCESSES["a Prefect server"]
    moved = ("sh", "-c", 'cd "$0" && exec "$@"', str(other))
    pids.append(start(ALONE, *moved, *command))
    assert look("--yes") == (0, [])
    assert all(is_running(pid) for pid in pids)


def test_an_orphaned_server_and_an_orphaned_dvc_end_with_what_they_have_started(
    project, look, start
):
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
            f"orphan: process {served}, a Prefect server whose run is gone",
            f"orphan: process {dvc}, a DVC that ran a stage whose run is gone",
        ]
    )
    assert look("--yes")[0] == 0
    assert toy.processes(project) == []


def test_orphaned_workers_are_known_by_their_command_lines(start):
    ours, theirs = socket.socketpair()
    limits = PythonTool.model_validate(toy.RECIPE["python"] | {"memory_mib": 512, "processes": 8})
    with theirs:
        shell = subprocess.Popen(
            # a command in the background would read from /dev/null
            ["sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!', "sh", *python._command(limits, "none")],
            stdin=theirs,
            stdout=subprocess.PIPE,
            text=True,
        )
    pid = int(shell.stdout.readline())
    shell.wait()
    try:
        wait_until(lambda: psutil.Process(pid).name() != "sh")
        assert kinds(toy.ROOT)[pid] == "a sandbox"
        assert pid not in kinds(toy.ROOT / "tests")
    finally:
        ours.close()
        processes.end(psutil.Process(pid))


def kinds(root):
    return {process.pid: kind for process, kind in processes.orphans(root)}


def test_an_orphan_that_samples_or_verifies_is_known_and_one_with_its_run_is_not(start):
    code = f"{SLEEP} # {worker.INSIDE}"
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


def test_paths_in_use_by_the_dead_are_freed_and_those_of_the_living_stay(project, look):
    list_of_paths = Path(".dvc/tmp/rwlock")
    living = {"pid": os.getpid(), "cmd": "dvc"}
    dead = {"pid": ended(), "cmd": "dvc"}
    held = {"read": {"/a": [living, dead]}, "write": {"/b": dead, "/c": living}}
    list_of_paths.write_text(json.dumps(held))
    found_and_cleared(look, "stale lock: DVC's list of paths in use, of processes that are gone")
    left = json.loads(list_of_paths.read_text())
    assert left == {"read": {"/a": [living]}, "write": {"/c": living}}


def test_a_lock_of_git_that_nobody_living_made_is_removed(project, look, start):
    start(LIVING, *sleeper("-m", "flows.retrain", "toy"))  # after the lock was written
    lock = Path(".git/index.lock")
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    found_and_cleared(look, "stale lock: .git/index.lock")
    assert not lock.exists()


def test_a_lock_that_a_living_run_may_have_made_is_left_alone(project, look, start):
    start(LIVING, *sleeper("-m", "flows.retrain", "toy"))
    Path(".git/index.lock").touch()
    assert look("--yes") == (0, [])


# half-written names


def test_half_written_names_are_removed_and_whole_ones_stay(project, look):
    step = Path(".beamline/ledger/toy/reinforce")
    left = [
        step / ".0001-update-abc.partial/policy",
        step / ".0001-update-abc.scratch/checkpoint",
        step / ".0000-rollout-abc.scratch/trees",
        Path("models/toy/.trained.partial/weights"),
        Path("data/toy/gates/verdict.json.partial"),
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
    )
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in whole)


def test_what_a_living_run_is_writing_stays_and_that_of_another_recipe_does_not(
    project, look, start
):
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


def test_an_unfinished_run_is_removed_with_its_worktree_and_a_living_one_stays(
    project, look, start
):
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
    ran = toy.run(project, "dvc", "repro", "first@toy")
    assert ran.returncode == 0, ran.stdout
    out = Path("data/toy/first")
    [file] = [f for f in Path(".dvc/cache").rglob("*") if f.is_file() and f.samefile(out)]
    return file


def test_a_file_of_the_cache_that_can_be_written_is_protected_again(look, cached):
    assert look() == (0, []), "DVC protects its cache"
    cached.chmod(0o644)
    found_and_cleared(look, f"unsafe cache: {cached} can be written")
    assert cached.stat().st_mode & 0o777 == 0o444


def test_a_file_of_the_cache_that_was_changed_is_dropped(look, cached):
    cached.chmod(0o644)
    Path("data/toy/first").write_text("edited in place")
    found_and_cleared(look, f"unsafe cache: {cached} has been changed in place")
    assert not cached.exists()


def test_links_to_outs_that_a_stage_edits_in_place_become_copies(project, look, cached):
    text, out = Path("dvc.yaml").read_text(), "        - data/${item}/first"
    head, _, tail = text.rpartition(out)  # the last one is an out, the other a dependency
    Path("dvc.yaml").write_text(f"{head}{out}:\n            persist: true{tail}")
    found_and_cleared(look, "unsafe cache: cache.type links outs that stages edit in place")
    assert not cached.samefile("data/toy/first")


# what MLflow and Prefect believe


def test_what_a_store_was_not_told_is_delivered_and_stays_while_the_store_is_away(
    project, look, monkeypatch
):
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


def test_a_run_killed_by_sigkill_leaves_what_doctor_clears_and_nothing_before(project, look, start):
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
        *("RUNNING in Prefect, and their processes are gone: ", "DVC's list of paths in use"),
    )
    with closing(sqlite3.connect(server.HOME / "prefect.db")) as store:
        for table in ("flow_run", "task_run"):
            states = store.execute(f"select distinct state_type from {table}").fetchall()
            assert states == [("CRASHED",)], table
    with closing(sqlite3.connect(".beamline/mlflow.db")) as store:
        assert store.execute("select distinct status from runs").fetchall() == [("KILLED",)]


# pins, the disk, and the program


def test_a_pin_that_has_drifted_is_installed_again(project):
    """In a virtual environment of its own, from a folder of packages."""
    venv, packages = project / "venv", project / "packages"
    packages.mkdir()
    for version in ("1.0", "2.0"):
        info = f"toy_pin-{version}.dist-info"
        with zipfile.ZipFile(packages / f"toy_pin-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toy_pin.py", "")
            head = f"Metadata-Version: 2.1\nName: toy-pin\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", head)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{info}/WHEEL", tag)
            wheel.writestr(f"{info}/RECORD", f"toy_pin.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [ours] = (venv / "lib").glob("python*/site-packages")
    (ours / "more.pth").write_text(f"{psutil.__path__[0]}/..\n")
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}
    interpreter = str(venv / "bin/python")
    pip = toy.run(
        project, interpreter, "-m", "pip", "install", "--no-deps", "toy-pin==1.0", **settings
    )
    assert pip.returncode == 0, pip.stdout
    Path("constraints.txt").write_text("# pins\ntoy-pin==2.0\nnot-installed==1.0\n")
    examine = (
        "import pathlib; from flows.host import leftovers; [print(f.what) or f.clear() for f in "
    )
    examine += "list(leftovers.pins(pathlib.Path('.')))]"
    said = toy.run(project, interpreter, "-c", examine, **settings).stdout
    assert said == "drifted pin: toy-pin is 1.0, constraints.txt says 2.0\n"
    assert toy.run(project, interpreter, "-c", examine, **settings).stdout == ""


def test_a_local_version_is_that_of_its_pin(project):
    installed = leftovers.installed_version("torch")
    Path("constraints.txt").write_text(f"torch=={installed.partition('+')[0]}\n")
    assert list(leftovers.pins(project)) == []


def test_a_disk_that_the_iterations_to_go_will_fill_is_told_and_left_to_the_user(project, look):
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


def test_the_program_lists_and_clears_and_its_exit_status_tells(project):
    command = (sys.executable, "-m", "flows.doctor")
    clean = toy.run(project, *command)
    assert (clean.returncode, clean.stdout) == (0, "nothing is left\n")
    assert not outbox.root().exists()
    assert not Path(".beamline").exists(), "looking leaves nothing"
    Path("models/toy").mkdir(parents=True)
    Path("models/toy/.trained.partial").write_text("")
    left = toy.run(project, *command)
    what = "half-written: models/toy/.trained.partial (0 bytes)"
    drop = "    clearing removes it; whoever was writing it begins anew in any case"
    assert (left.returncode, left.stdout) == (1, f"{what}\n{drop}\n1 left\n")
    cleared = toy.run(project, *command, "--yes")
    assert (cleared.returncode, cleared.stdout.splitlines()[-2:]) == (
        0,
        ["    cleared", "nothing is left"],
    )
    elsewhere = toy.run(project / "models", *command)
    assert elsewhere.returncode == 2
    assert "has no dvc.yaml: call it in a checkout" in elsewhere.stdout


def test_in_a_terminal_each_finding_is_asked_for(look, monkeypatch):
    Path("models/toy").mkdir(parents=True)
    for name in ("a", "b"):
        Path(f"models/toy/.{name}.partial").touch()
    answers = iter(["", "y"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert doctor.main([]) == 1
    assert [path.name for path in Path("models/toy").iterdir()] == [".a.partial"]
