"""Find what crashes have left in this checkout, or what contradicts in a recipe.

``beamline doctor`` lists what is left, offers in a terminal to clear it; ``--yes`` clears
everything. The exit status is 0 where nothing is left, else 1. What living processes use, and other
checkouts and users, are left alone.

``beamline doctor RECIPE`` checks params/<recipe>.yaml alone and clears nothing: faults, what
contradicts in it, and what this machine lacks for it. The exit status is 1 where there is anything.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import UUID

from flows import end_import_phase
from flows.host import leftovers, processes
from flows.host.addresses import without_password
from flows.host.leftovers import Finding
from flows.runs import (
    cache,
    dvc_command,
    dvc_settings,
    earlier_outs,
    git,
    ledger_mirror,
    remote_copies,
)
from flows.tracking import outbox, store
from flows.tracking.run import send_unsent
from flows.workers import connection
from flows.workers.server import HOME

FlowRun = tuple[str, str, str | None, datetime | None]  # id, name, process and start
Check = Callable[[Path], Iterator[Finding]]

# ---------------------------------------------------------------- processes, locks, DVC's cache


def orphans(root: Path) -> Iterator[Finding]:
    """Find processes that a run has started and that outlived it."""
    for process, kind in processes.orphans(root):
        yield Finding(
            f"orphan: process {process.pid}, {kind} whose run has ended",
            "ends it and its children",
            partial(processes.end, process),
        )


def dvc_locks(root: Path) -> Iterator[Finding]:
    """Find paths that DVC considers in use by processes that have ended."""
    if dead := dvc_command.dead_locks():
        yield Finding(
            f"stale lock: DVC's list of paths in use, of processes that have ended: {_few(dead)}",
            "drops these entries",
            dvc_command.free_locks,
        )


def earlier(root: Path) -> Iterator[Finding]:
    """Find outs of an earlier run that a killed stage has left under another name."""
    if outs := earlier_outs.waiting(root):
        yield Finding(
            f"moved aside: {_few(outs)}, of an earlier run, by a stage that was killed",
            "puts them back",
            partial(earlier_outs.put_back, root),
        )


def unpushed(root: Path) -> Iterator[Finding]:
    """Find files of runs that DVC's remote lacks, and sub-steps that the ledger's mirror lacks."""
    try:
        lacking = remote_copies.missing()
        mirror = ledger_mirror.of_checkout()
        if mirror:
            ledger_mirror.forget_lost("*", mirror)
    except (RuntimeError, ValueError) as error:
        yield Finding(str(error), "is left to you: correct the remote or the mirror", None)
        return
    if lacking:
        yield Finding(
            f"not pushed: {lacking}",
            "pushes them",
            partial(remote_copies.push_missing, ask=True),
        )
    if mirror and mirror.logged:
        what = f"not known: what the mirror {mirror.address} lacks of the ledger"
        yield Finding(what, "is left to you: make the mirror reachable", None)
    elif mirror and (folders := ledger_mirror.undelivered("*", mirror)):
        yield Finding(
            f"not sent: {len(folders)} sub-steps of the ledger, to the mirror {mirror.address}",
            "sends them",
            partial(ledger_mirror.send_missing, "*"),
        )


def cache_links(root: Path) -> Iterator[Finding]:
    """Find files and settings with which an edit of an out would change DVC's cache."""
    for file, intact in cache.open_objects().items():
        name = file.relative_to(root)
        yield Finding(
            f"unsafe cache: {name} can be written through the outs that are links to it"
            if intact
            else f"unsafe cache: {name} has been changed in place",
            "removes the write permission" if intact else "deletes it; DVC makes it again",
            partial(cache.close_object, file),
        )
    if edited := cache.edited_outs():
        yield Finding(
            f"unsafe cache: cache.type links outs that stages edit in place: {_few(edited)}",
            "has DVC copy outs in this checkout (cache.type reflink,copy in .dvc/config.local)",
            cache.copy_outs,
        )


def worktrees(root: Path) -> Iterator[Finding]:
    """Find worktrees of unfinished runs."""
    return leftovers.worktrees(root, git.remove_worktree)


# ---------------------------------------------------------------- MLflow and Prefect


def unsent(root: Path) -> Iterator[Finding]:
    """Find messages of runs that MLflow's store or Prefect's server has not accepted yet."""
    for folder in outbox.unsent_runs():
        run, count = outbox.read_run(folder), len(outbox.Outbox(folder).files())
        yield Finding(
            f"unsent: {count} messages of run '{run['name']}' for the store {run['uri']}",
            "sends them, if the store answers",
            send_unsent,
        )
    if files := outbox.flow_runs().files():
        ended = sorted({outbox.read(file).fields["flow_run"] for file in files})
        yield Finding(
            f"unsent: how flow runs ended, for Prefect's server: {_few(ended)}",
            "sends them to the server that runs use now",
            lambda: _with_prefect(lambda address: None),  # connecting sends them
        )


def tracked_runs(root: Path) -> Iterator[Finding]:
    """Find runs that are RUNNING in MLflow although their process has ended."""
    try:
        ended = store.abandoned()
    except (OSError, sqlite3.Error) as error:
        message = f"the tracking store {store.store_uri()} is unreachable: {error}"
        print(without_password(message), file=sys.stderr)
        return
    for run_id, name in ended:
        yield Finding(
            f"no end: run '{name}' is RUNNING in MLflow, and its process has ended",
            "marks it as KILLED; a call that continues its work gets its own run",
            partial(store.end_abandoned, run_id),
        )


def flow_runs(root: Path) -> Iterator[Finding]:
    """Find flow runs that are RUNNING in Prefect although their process has ended."""
    ended = [run for run in _running() if _has_ended(*run[2:])]
    if ended:
        names = _few([run[1] for run in ended])
        yield Finding(
            f"no end: RUNNING in Prefect, and their processes have ended: {names}",
            "marks them, and their task runs, as CRASHED",
            lambda: _with_prefect(partial(_crash, [UUID(run[0]) for run in ended])),
        )


def _has_ended(process: str | None, started: datetime | None) -> bool:
    """Return whether the process of a flow run, "host:id" by ``name_process``, has ended."""
    host, _, pid = (process or "").rpartition(":")
    if host != processes.host() or started is None or not pid.isdecimal():
        return False
    return not processes.lives(int(pid), started.timestamp())


def _running() -> list[FlowRun]:
    """List RUNNING flow runs, from the server that runs use or from its database."""
    address = connection.current_server()
    return _running_at(address) if address else _running_in(HOME / "prefect.db")


def _running_in(database: Path) -> list[FlowRun]:
    if not database.exists():
        return []
    query = "SELECT id, name, infrastructure_pid, start_time FROM flow_run WHERE state_type = ?"
    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as store:
        rows = store.execute(query, ["RUNNING"]).fetchall()
    return [
        (run, name, process, start and datetime.fromisoformat(start).replace(tzinfo=UTC))
        for run, name, process, start in rows
    ]


def _running_at(address: str) -> list[FlowRun]:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import filters, objects

    running = filters.FlowRunFilterStateType(any_=[objects.StateType.RUNNING])
    flow_run_filter = filters.FlowRunFilter(state=filters.FlowRunFilterState(type=running))
    with SyncPrefectClient(address) as client:
        runs = client.read_flow_runs(flow_run_filter=flow_run_filter)
    return [(str(run.id), run.name, run.infrastructure_pid, run.start_time) for run in runs]


def _crash(runs: list[UUID], address: str) -> None:
    """Mark flow runs, and their RUNNING task runs, as CRASHED."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas import filters, objects
    from prefect.states import Crashed, State

    running = filters.TaskRunFilterStateType(any_=[objects.StateType.RUNNING])
    state: State[None] = Crashed(message="its process has ended")
    with SyncPrefectClient(address) as client:
        for run in runs:
            inner = client.read_task_runs(
                flow_run_filter=filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[run])),
                task_run_filter=filters.TaskRunFilter(
                    state=filters.TaskRunFilterState(type=running, name=None)
                ),
            )
            for task_run in inner:
                client.set_task_run_state(task_run.id, state, force=True)
            client.set_flow_run_state(run, state, force=True)


def _with_prefect(work: Callable[[str], object]) -> None:
    with connection.prefect_server() as server:
        work(server.address)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ---------------------------------------------------------------- a recipe


def diagnosis(name: str, folder: Path = Path("params")) -> list[str]:
    """Return all that is wrong with a recipe and with this machine for it, one line each."""
    from flows.host import requirements  # with engines and rooms, which the other checks need not
    from tasks import recipes
    from tasks.recipes import contradictions

    try:
        recipe = recipes.load(name, folder)
    except ValueError as error:
        return str(error).splitlines()
    found = [*contradictions.faults(recipe), *contradictions.missing_files(recipe)]
    found += requirements.faults(recipe, os.environ)
    return [f"{folder / name}.yaml: {line}" for line in found]


def check_recipe(name: str) -> int:
    """Print the diagnosis of a recipe; return the exit status."""
    found = diagnosis(name)
    print("\n".join(found) if found else f"{name}: nothing contradicts")
    return 1 if found else 0


# ---------------------------------------------------------------- the program

CHECKS: tuple[Check, ...] = (
    orphans,
    dvc_locks,
    leftovers.git_locks,
    earlier,
    unpushed,
    unsent,
    tracked_runs,
    flow_runs,
    leftovers.half_written,
    worktrees,
    cache_links,
    leftovers.pins,
    leftovers.disk,
)


def examine(root: Path, confirm: Callable[[Finding], bool]) -> int:
    """Print the findings, clear those that ``confirm`` accepts; return how many are left."""
    left = 0
    for check in CHECKS:
        for finding in list(check(root)):
            print(f"{finding.what}\n    clearing {finding.clearing}", flush=True)
            if finding.clear is None or not confirm(finding):
                left += 1
                continue
            try:
                finding.clear()
            except (OSError, RuntimeError, ValueError) as error:
                print(without_password(f"    it could not be cleared: {error}"))
            cleared = finding.what not in {other.what for other in check(root)}
            print("    cleared" if cleared else "    it is still there")
            left += not cleared
    return left


def _ask(finding: Finding) -> bool:
    return input("    clear it? [y/N] ").strip().lower() in ("y", "yes")


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: this is no checkout."""
    parser = argparse.ArgumentParser(
        prog="beamline doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="params/<recipe>.yaml, to check it alone")
    parser.add_argument("--yes", action="store_true", help="clear all that is found")
    args = parser.parse_args(arguments)
    root = Path.cwd().resolve()
    if not (root / "dvc.yaml").exists():
        print(f"doctor: {root} has no dvc.yaml: call it in a checkout", file=sys.stderr)
        return 2
    if args.recipe:
        return check_recipe(args.recipe)
    ask = _ask if sys.stdin.isatty() else lambda finding: False
    try:
        dvc_settings.load()  # several checks read them
        left = examine(root, (lambda finding: True) if args.yes else ask)
    except (ValueError, RuntimeError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    print(f"{left} left" if left else "nothing is left")
    return 1 if left else 0


if __name__ == "__main__":
    end_import_phase()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
