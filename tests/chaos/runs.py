"""Runs of the recipe smoke that a test starts, breaks and calls once more, with real processes."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import yaml

from flows.host import warm
from params import recipe_files
from tasks.ledger import artifacts, substeps
from tests.checkout import call, checkout, environment, others_parent, retrain
from tests.toy_project import git, processes
from tests.waiting import LONGEST

HERE = retrain("smoke")
AS_COMMIT = (sys.executable, "-m", "flows.retrain", "smoke")
TRAINING = (sys.executable, "-m", "dvc", "repro", "reinforce@smoke")  # alone, to save time
LEDGER = Path(".beamline/ledger/smoke")
VERBS = ("rollout", "reward", "advantage", "update")
PATIENCE = 1200.0  # seconds that a run has at most; a quiet machine takes under a minute


def create(folder):
    """A clean checkout, whose commits have an author; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    checkout(folder)
    for key, value in {"name": "test", "email": "test@example.org"}.items():
        git(folder, "config", f"user.{key}", value)
    return folder


def act_in_a_world(folder):
    """Make smoke, in a clean checkout, a recipe of a world: tiny-lake, made small."""
    place = folder / "params/smoke.yaml"
    smoke = yaml.safe_load(place.read_text())
    lake = recipe_files.read("tiny-lake", folder / "params")
    lake["machine"], lake["cold_start"] = smoke["machine"], smoke["cold_start"] | {"steps": 20}
    prepare = lake["prepare"]
    prepare["policy"] = smoke["prepare"]["policy"] | {"vocabulary": 320}
    prepare["questions"] |= {"train": 60, "validation": 4, "test": 20}
    prepare["expert"]["traces"] = 60
    lake["reinforce"] |= {"iterations": 3, "questions": 4, "keep": smoke["reinforce"]["keep"]}
    lake["evaluate"], lake["verdict"] = smoke["evaluate"] | {"questions": 20}, smoke["verdict"]
    place.write_text(yaml.safe_dump(lake))
    git(folder, "commit", "--quiet", "--all", "--message", "a world")


def share_rollouts(folder):
    """Let two policies share each rollout of smoke, in a clean checkout."""
    place = folder / "params/smoke.yaml"
    recipe = yaml.safe_load(place.read_text())
    recipe["reinforce"] |= {"iterations": 4, "ahead": 2, "turns_per_policy": 2}
    place.write_text(yaml.safe_dump(recipe))
    git(folder, "commit", "--quiet", "--all", "--message", "policies share rollouts")


def learn_in_two_processes(folder):
    """Make smoke, in a clean checkout, a recipe whose policy learns in two processes."""
    place = folder / "params/smoke.yaml"
    place.write_text(place.read_text().replace("\n  processes: 1 ", "\n  processes: 2 "))
    git(folder, "commit", "--quiet", "--all", "--message", "two processes learn")


def learn_rewards(folder):
    """Let a reward model take the rule's place in an easy world, in a clean checkout."""
    act_in_a_world(folder)
    place = folder / "params/smoke.yaml"
    recipe = yaml.safe_load(place.read_text())
    learned = recipe_files.read("tiny-reward-model", folder / "params")["reward_model"]
    again = learned["again"] | {"every": 1, "steps": 4}
    few = {"labels": 0.6, "steps": 8, "save_every": 2, "again": again}
    recipe["reward_model"] = learned | few
    recipe["reinforce"]["reward"] = [{"model": {"weight": 1.0}}]
    recipe["environment"]["frozen_lake"] |= {"distance": 1, "holes": 0.1}
    place.write_text(yaml.safe_dump(recipe))
    git(folder, "commit", "--quiet", "--all", "--message", "a learned reward")


def copy(template, folder):
    """A checkout in the state of another one, but with an MLflow store of its own; the folder.

    What DVC has linked to its cache is linked in the copy, too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", template, folder], check=True)
    for left in ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "unsent"):
        path = folder / ".beamline" / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def start(folder, command=HERE, within=(), held=None, **variables):
    """A run in ``folder`` as a user starts it, its output in the file ``said`` beside it.

    ``within`` is what it is a command of. ``held`` is a sub-step that is written and does not end
    ("reinforce/0001-update"), until the run is killed or ``release`` is called.
    """
    plain = {name: value for name, value in environment().items() if name != warm.VARIABLE}
    if held:
        file = _held(folder)
        file.write_text(held)
        plain |= {"PYTHONPATH": str(Path(__file__).with_name("held")), "TESTS_HELD": str(file)}
    with said(folder).open("ab") as output:
        return subprocess.Popen(
            [*within, *command],
            cwd=folder,
            env=plain | variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def release(folder):
    """Let the sub-step end that a run is held in."""
    _held(folder).unlink()


def _held(folder):
    return folder.with_name(f"{folder.name}.held")


def said(folder):
    """The file that the runs in a folder have written to."""
    return folder.with_name(f"{folder.name}.said")


def finish(folder, command=HERE, **rest):
    """One more call, to its end: it must succeed. What it has said.

    Its programs are forked from the tests' process.
    """
    before = said(folder).stat().st_size if said(folder).exists() else 0
    status = start(folder, command, **others_parent(), **rest).wait(PATIENCE)
    text = said(folder).read_bytes()[before:].decode()
    assert status == 0, text
    return text


def wait_for(run, happened):
    """Wait until ``happened()``, which must stay true; a run that ends before is at fault."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert run.poll() is None or happened(), "the run has ended before"
        assert time.monotonic() < deadline, "that never happened"
        time.sleep(0.001)


def ended(folder, sub_step):
    """Whether a sub-step of reinforce ("0001-update") has its record."""
    return any((folder / LEDGER / "reinforce").glob(f"{sub_step}-*"))


def begun(folder, sub_step):
    """Whether a sub-step of reinforce is being written, or has ended."""
    partial = (folder / LEDGER / "reinforce").glob(f".{sub_step}-*.partial")
    return any(partial) or ended(folder, sub_step)


def saved(folder, stage):
    """Whether a training of a stage has a checkpoint, or has ended."""
    place = folder / LEDGER / stage
    return any(place.glob(".*.scratch/checkpoint-*/record.json")) or any(
        place.glob(f"[0-9]*-{stage}-*")
    )


def below(number):
    """The process with this number and all that descend from it, it first."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [number]
    for each in found:  # grows while it is gone through
        found += children.get(each, [])
    return found


def prepare(folder, stage):
    """Bring ``folder`` up to a stage of smoke, and return it."""
    made = call(folder, "dvc", "repro", f"{stage}@smoke", **others_parent())
    assert made.returncode == 0, made.stdout
    return folder


def all_of(run, folder):
    """The processes of a run, those included that were forked for it from the tests' process."""
    found = below(run.pid)
    for place in (folder, *(folder / ".beamline/runs").glob("*")):
        for number in working_in(place):
            found += [each for each in below(number) if each not in found]
    return found


def working_in(place):
    """The processes whose working folder is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == place:
                found.append(int(process.name))
    return found


def kill(numbers):
    """SIGKILL, for those that are still there."""
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def sandboxes(number):
    """The first process of each sandbox of the Python tool below a process."""
    found = [pid for pid in below(number) if name(pid) in ("bwrap", "unshare")]
    return [pid for pid in found if not any(pid in below(other)[1:] for other in found)]


def learners(number):
    """The processes below a process that learn together."""
    module = "tasks.learning.learner_process"
    found = [pid for pid in below(number) if module in command(pid)]
    return [pid for pid in found if not set(children(pid)) & set(found)]


def command(pid):
    """The arguments of a process; none for one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def is_working(sandbox):
    """Whether a sandbox runs code; None for one that starts or ends.

    Its parent has a supervisor, whose children are a keeper and, while code runs, a runner.
    """
    below_it = children(sandbox)
    while below_it and name(below_it[0]) in ("bwrap", "unshare"):
        below_it = children(below_it[0])
    supervisors = children(below_it[0]) if below_it else []
    family = children(supervisors[0]) if supervisors else []
    return len(family) > 1 if family else None


def children(number):
    with suppress(OSError):
        return [
            int(pid) for pid in Path(f"/proc/{number}/task/{number}/children").read_text().split()
        ]
    return []


def name(number):
    with suppress(OSError):
        return Path(f"/proc/{number}/comm").read_text().strip()
    return ""


def outcome(folder, command=HERE):
    """Digest of each out of the finished run: of the checkout, or of the one commit of a run."""
    if command in (HERE, TRAINING):
        text = (folder / "dvc.lock").read_text()
    else:
        [branch] = git(folder, "for-each-ref", "--format=%(refname)", "refs/heads/runs").split()
        text = git(folder, "show", f"{branch}:dvc.lock")
    locked = yaml.safe_load(text)["stages"]
    return {out["path"]: out["md5"] for stage in locked.values() for out in stage["outs"]}


def records(folder):
    """When each sub-step that has a record has ended: its folder -> seconds."""
    found = sorted((folder / ".beamline").rglob(f"[0-9]*-*-*/{artifacts.RECORD}"))
    return {
        str(file.parent.relative_to(folder)): json.loads(file.read_text())["finished"]
        for file in found
    }


def check_sound(folder):
    """Nothing half-written is taken for whole, and nothing of the run still lives."""
    for file in sorted((folder / ".beamline").rglob(f"[0-9]*-*-*/{artifacts.RECORD}")):
        assert substeps.read(file.parent), f"{file.parent} is not what its record says"
    for file in sorted((folder / ".dvc/cache/files/md5").glob("??/*")):
        if file.is_file():
            digest = hashlib.md5(file.read_bytes()).hexdigest()
            assert file.parent.name + file.name.removesuffix(".dir") == digest, f"{file} is damaged"
    deadline = time.monotonic() + LONGEST
    while (left := living(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "these have outlived the run"


def living(folder):
    """Command lines of processes that work in the folder, or in a worktree of a run of it."""
    worktrees = [place for place in (folder / ".beamline/runs").glob("*") if place.is_dir()]
    return [line for place in [folder, *worktrees] for line in processes(place)]


def names(numbers):
    """What these processes are, as far as they still are."""
    found = []
    for number in numbers:
        with suppress(OSError):
            words = Path(f"/proc/{number}/cmdline").read_text().split("\0")
            found.append(" ".join(Path(word).name for word in words)[:60].strip())
    return found


def tracked(folder):
    """The runs in a checkout's own MLflow store: name -> status."""
    with closing(sqlite3.connect(folder / ".beamline/mlflow.db")) as store:
        return dict(store.execute("SELECT name, status FROM runs").fetchall())


def measured(store):
    """The metrics in a store of MLflow, less the times: (run, metric, step, value), sorted."""
    query = """SELECT runs.name, metrics.key, step, value FROM metrics
               JOIN runs ON runs.run_uuid = metrics.run_uuid
               WHERE metrics.key NOT LIKE '%second%' ORDER BY 1, 2, 3"""
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(query).fetchall()
