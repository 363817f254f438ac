"""Run a stage of dvc.yaml as a program: a module of flows/ whose last line is ``main(flow)``.

DVC runs ``python -m flows.<stage> RECIPE``, as part of a retrain run or on its own.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Pending

from flows import end_import_phase, exit_fast
from flows.host import disk, requirements
from flows.host.parents import die_with_parent
from flows.runs import git
from flows.runs.dvc_command import INTERRUPTED
from flows.workers.connection import PARENT_TASK_RUN, name_process, prefect_server
from params.schema.recipe import algorithm_of
from tasks import recipes

RECORD_TIMEOUT = 120.0  # seconds until the server has recorded a task run


def main(flow: Flow[..., Any]) -> NoReturn:
    """Run a stage's flow with the recipe that the command line names, and exit.

    The exit status is 2 for an invalid recipe and 1 for a stage that fails, both with one message
    and no traceback; an unexpected error keeps its traceback.
    """
    end_import_phase()
    die_with_parent()
    parser = argparse.ArgumentParser(prog=f"beamline {flow.name}")
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    exit_fast(run(flow, parser.parse_args().recipe))


def check(recipe: str, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError for an invalid recipe, or one whose ``stages`` the disk has no room for."""
    loaded_recipe = recipes.load(recipe, Path("params"))
    disk.check(recipe, loaded_recipe, algorithm_of(loaded_recipe, Path("params")), stages)


def check_machine(recipe: str, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError with all that this machine lacks for ``stages`` of a recipe."""
    loaded_recipe = recipes.load(recipe, Path("params"))
    if faults := requirements.faults(loaded_recipe, os.environ, stages):
        raise ValueError("\n".join(f"params/{recipe}.yaml: {fault}" for fault in faults))


def explained(error: Exception) -> str | None:
    """Return the message for an error that ends a run; None for an error of the program."""
    if disk.is_full():
        return f"{error}. The disk is full: free some space, and the same call resumes here"
    return str(error) if isinstance(error, ValueError | RuntimeError) else None


def run_tags() -> dict[str, str]:
    """Return tags for an MLflow run: the commit, and the Prefect flow run around it."""
    checkout = git.revision()
    return {
        "prefect.flow_run": str(flow_run.id),
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
    except (ValueError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    try:
        with prefect_server():
            call(flow.with_options(flow_run_name=name, on_running=[name_process]), recipe)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if (message := explained(error)) is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1
    return 0


def call(flow: Flow[..., Any], recipe: str) -> None:
    """Call the flow; as a child of the task run that started this process, if one did."""
    task_run = os.environ.get(PARENT_TASK_RUN)
    parameters = {next(iter(inspect.signature(flow.fn).parameters)): recipe}
    if task_run is None:
        flow(**parameters)
        return
    with get_client(sync_client=True) as client:
        child = client.create_flow_run(
            flow,
            name=str(flow.flow_run_name),
            parameters=parameters,
            parent_task_run_id=_await_recorded(client, UUID(task_run)),
            state=Pending(),
        )
    run_flow(flow, flow_run=child, parameters=parameters)


def _await_recorded(client: SyncPrefectClient, task_run: UUID) -> UUID:
    """Wait until the server has recorded a task run; return its id."""
    deadline = time.monotonic() + RECORD_TIMEOUT
    while True:
        try:
            return client.read_task_run(task_run).id
        except ObjectNotFound:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Prefect's server has not recorded the task run {task_run} of this stage "
                    f"within {RECORD_TIMEOUT:.0f} s: is its task-run recorder switched off?"
                ) from None
            time.sleep(0.05)
