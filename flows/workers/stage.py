"""What the stages of dvc.yaml have in common: each is a module whose last line is ``main(flow)``.

``python -m flows.<stage> RECIPE`` is what DVC runs, for a retrain run or on its own.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections.abc import Collection
from importlib.util import find_spec
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
from flows.host import disk
from flows.runs import dvc_command, git
from flows.workers.connection import PARENT_TASK_RUN, name_process, prefect_server
from params.schema import recipe as schema
from tasks import settings

RECORDED = 30.0  # seconds that the server has to record that task run, which reaches it as an event
RUN = "BEAMLINE_RUN"  # environment variable: the run that this process does the stages of
SAMPLING = ("reinforce", "evaluate")  # stages that need the engine
INTERRUPTED = 130  # what a shell makes of SIGINT


def main(flow: Flow[..., Any]) -> NoReturn:
    """Run a stage's flow, which takes the recipe's name, as the command line says, and exit.

    Exit status 2 for a recipe that does not hold, 1 for a stage that fails; both with one message
    and no traceback, unless the fault is none that the stage knows of.
    """
    end_import_phase()
    dvc_command.die_with_parent()
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow.fn.__name__}")
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    exit_fast(_run(flow, parser.parse_args().recipe))


def check(recipe: str, stages: Collection[str] = disk.STAGES) -> None:
    """Raise ValueError for a recipe that does not hold, or that ``stages`` have no room for."""
    chosen = settings.load(recipe, Path("params"))
    disk.check(recipe, chosen, schema.algorithm_of(chosen, Path("params")), stages)


def check_engine(recipe: str) -> None:
    """Raise ValueError for a recipe whose engine is not installed where it is to sample."""
    engine = settings.load(recipe, Path("params")).engine
    if engine.kind == "vllm" and not engine.server and not find_spec("vllm"):
        raise ValueError(
            f"params/{recipe}.yaml: 'engine.kind' = 'vllm', which is not installed here: make run "
            "takes an environment that has it, pip install 'beamline[vllm]' adds it to this one, "
            "and engine.server names one elsewhere"
        )


def explained(error: Exception) -> str | None:
    """What to say of an error that ends a run; None where it is a fault of the program."""
    if disk.is_full():
        return f"{error}. The disk is full: make room, and the same call goes on from here"
    return str(error) if isinstance(error, ValueError | RuntimeError) else None


def run_tags() -> dict[str, str]:
    """What MLflow shows beside a run: the commit it is of, and the Prefect flow run around it."""
    checkout = git.revision()
    return {
        "prefect.flow_run": str(flow_run.id),
        "mlflow.source.git.commit": checkout.commit,
        "git.dirty": str(checkout.dirty).lower(),
    }


def _run(flow: Flow[..., Any], recipe: str) -> int:
    name = f"{flow.name} {recipe}"
    try:
        check(recipe, [stage for stage in disk.STAGES if stage == flow.name])
        if flow.name in SAMPLING:
            check_engine(recipe)
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
        if (said := explained(error)) is None:
            raise
        print(f"{name}: {said}", file=sys.stderr)
        return 1
    return 0


def call(flow: Flow[..., Any], recipe: str) -> None:
    """Call the flow; where a task run of another one has started it, as a child of that one."""
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
            parent_task_run_id=_recorded(client, UUID(task_run)),
            state=Pending(),
        )
    run_flow(flow, flow_run=child, parameters=parameters)


def _recorded(client: SyncPrefectClient, task_run: UUID) -> UUID:
    """The task run's id, once the server knows it."""
    deadline = time.monotonic() + RECORDED
    while True:
        try:
            return client.read_task_run(task_run).id
        except ObjectNotFound:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Prefect's server has not recorded the task run {task_run} of this stage "
                    f"within {RECORDED:.0f} s: is its task-run recorder switched off?"
                ) from None
            time.sleep(0.05)
