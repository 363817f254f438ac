"""Run a stage of dvc.yaml as a program: a module of flows/ whose last line is ``main(flow)``.

DVC runs ``python -m flows.<stage> RECIPE``, as part of a retrain run or on its own.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Pending

from flows import end_import_phase, exit_fast
from flows.host import disk, first_check, memory_shortage, requirements
from flows.host.parents import die_with_parent
from flows.runs import git
from flows.runs.dvc_command import INTERRUPTED
from flows.workers import configured_server, run_log, run_names
from flows.workers.configured_server import PARENT_TASK_RUN
from flows.workers.connection import name_process, prefect_server
from flows.workers.outages import AwayError, PrefectServer
from flows.workers.own_files import SHOWN, OwnFiles
from params import recipe_files
from params.schema.recipe import algorithm_of
from params.whole_file import whole_file
from tasks import recipes
from tasks.extensions.named import OWN
from tasks.recipes import contradictions

LATE_RECORD_TIMEOUT = 2.0  # seconds, where the server was lost before
RECORD_TIMEOUT = 30.0  # seconds until the server has recorded a task run; it takes less than one


def main(flow: Flow[..., Any]) -> NoReturn:
    """Run a stage's flow with the recipe that the command line names, and exit.

    The exit status is 2 for an invalid recipe and 1 for a stage that fails, both with one message
    and no traceback; an unexpected error keeps its traceback.
    """
    end_import_phase()
    die_with_parent()
    exit_fast(run(flow, first_check.parser(flow.name).parse_args().recipe))


def check(recipe: str, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError for an invalid recipe, or one whose ``stages`` the disk has no room for.

    Also where DVC has read a whole file that is older than the recipe or its base.
    """
    if recipe_files.differs(recipe, Path("params")):
        whole = whole_file(recipe, Path("params"))
        raise ValueError(
            f"{whole} is older than the recipe or its base, and DVC reads it: `beamline dvc repro "
            f"...` or `make run RECIPE={recipe}` writes it anew"
        )
    loaded_recipe = recipes.load(recipe, Path("params"))
    disk.check(recipe, loaded_recipe, algorithm_of(loaded_recipe, Path("params")), stages)


def check_machine(recipe: str, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError with all that this machine lacks for ``stages`` of a recipe."""
    requirements.check(recipe, recipes.load(recipe, Path("params")), stages)


def warn(name: str, recipe: str) -> None:
    """Print what contradicts in a recipe, and what this machine lacks for its later stages.

    A first stage alone may run all the same: another machine may have what the others need.
    """
    loaded_recipe = recipes.load(recipe, Path("params"))
    found = contradictions.faults(loaded_recipe)
    lacking = requirements.faults(loaded_recipe, os.environ)
    found += [f"later stages cannot run on this machine: {fault}" for fault in lacking]
    for line in found:
        print(f"{name}: params/{recipe}.yaml: {line}", file=sys.stderr)


def explained(error: Exception, recipe: str) -> str | None:
    """Return the message for an error that ends a run; None for an error of the program."""
    if disk.is_full():
        return f"{error}. The disk is full: free some space, and the same call resumes here"
    if message := memory_shortage.explained(error, recipe):
        return message
    if isinstance(error, OSError) and error.errno is None:  # a sentence, as of a policy's files
        return " ".join(str(error).split())
    if place := _place_in_own(error):  # as of a dialect, which runs in this process
        return f"{place}: {type(error).__name__}: {error}"
    return str(error) if isinstance(error, ValueError | RuntimeError) else None


def _place_in_own(error: Exception) -> str:
    """Return file, line and function of a user's code that has raised an error, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = OWN.resolve()
    for frame in reversed(frames):
        if (file := Path(frame.filename)).is_relative_to(own):
            return f"{file.relative_to(own.parent)}, line {frame.lineno}, in {frame.name}"
    return ""


def run_tags() -> dict[str, str]:
    """Return tags for an MLflow run: the commit, and the Prefect flow run around it."""
    checkout = git.revision()
    shown = {"prefect.flow_run": str(flow_run.id)} if flow_run.id else {}
    return shown | {
        "mlflow.source.git.commit": checkout.commit,
        "mlflow.source.name": f"flows/{Path(sys.argv[0]).name}",
        "mlflow.source.type": "LOCAL",
        "git.dirty": str(checkout.dirty).lower(),
    }


def run(flow: Flow[..., Any], recipe: str) -> int:
    """Check the recipe and run a stage's flow on it; return the exit status (see ``main``)."""
    name = f"{flow.name} {recipe}"
    try:
        stages = [stage for stage in disk.STAGES if stage == flow.name]
        check(recipe, stages)
        check_machine(recipe, stages)
        if flow.name == disk.STAGES[0] and PARENT_TASK_RUN not in os.environ:
            warn(name, recipe)
        configured_server.check()
    except (ValueError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    before = OwnFiles()
    try:
        with prefect_server() as server:
            call(flow, run_names.of_stage(flow.name, recipe), recipe, server)
        before.check()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if (message := explained(error, recipe)) is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1
    finally:
        warn_of_new_files(name, before)
    return 0


def warn_of_new_files(name: str, before: OwnFiles) -> None:
    """Print which files of ``own/`` are new, as those that a world writes.

    What has ended would be computed again in the next run, since any of them may decide it.
    """
    if added := before.added():
        print(
            f"{name}: new while it ran: {', '.join(added[:SHOWN])}. What is in {OWN}/ decides "
            "results, so the next run computes them again: write such files elsewhere, as to /tmp",
            file=sys.stderr,
        )


def call(flow: Flow[..., Any], name: str, recipe: str, server: PrefectServer) -> None:
    """Call the flow; as a child of the task run that started this process, if one did.

    The flow run has this name, and what is printed meanwhile in its log. Where the server is away,
    the function of the flow is called, and no flow run shows it.
    """
    parameters = {next(iter(inspect.signature(flow.fn).parameters)): recipe}
    named = flow.with_options(flow_run_name=name, on_running=[name_process, run_log.begin])
    with run_log.copied_output():
        _call(named, parameters, server)


def _call(flow: Flow[..., Any], parameters: dict[str, Any], server: PrefectServer) -> None:
    try:
        task_run = os.environ.get(PARENT_TASK_RUN)
        child = _made_child(flow, parameters, UUID(task_run), server) if task_run else None
    except AwayError:
        flow.fn(**parameters)
        return
    try:
        run_flow(flow, flow_run=child, parameters=parameters) if child else flow(**parameters)
    except AwayError:  # what it has done so far is found
        flow.fn(**parameters)


def _made_child(
    flow: Flow[..., Any], parameters: dict[str, Any], task_run: UUID, server: PrefectServer
) -> FlowRun:
    """Make the flow run of a stage, as a child of its task run."""
    with get_client(sync_client=True) as client:
        return client.create_flow_run(
            flow,
            name=str(flow.flow_run_name),
            parameters=parameters,
            parent_task_run_id=_await_recorded(client, task_run, server),
            state=Pending(),
        )


def _await_recorded(
    client: SyncPrefectClient, task_run: UUID, server: PrefectServer
) -> UUID | None:
    """Wait until the server has recorded a task run; return its id.

    None where a server that was lost before has not; what it missed comes later. Raises AwayError
    where another one has not: it has no room for records, or its recorder is switched off.
    """
    deadline = time.monotonic() + (LATE_RECORD_TIMEOUT if server.was_lost else RECORD_TIMEOUT)
    while True:
        try:
            return client.read_task_run(task_run).id
        except ObjectNotFound:
            if time.monotonic() > deadline:
                if server.was_lost:
                    return None
                reason = (
                    f"it has not recorded the task run {task_run} within {RECORD_TIMEOUT:.0f} s: "
                    "is its disk full, or its task-run recorder switched off?"
                )
                server.lose(reason)
                raise AwayError(reason) from None
            time.sleep(0.05)
