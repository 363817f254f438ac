"""Run every stage of a recipe as tasks of one flow of Prefect, here or in a run's worktree.

flows/commands/retrain.py imports this only where something has to run: Prefect takes a second to
import.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed, State

from flows.analysis import fallen
from flows.host import gpu, memory_shortage
from flows.runs import dvc_command, pipeline, recipe_values
from flows.tracking import outcome_report, store
from flows.tracking.run import OUTS, Run, flatten, pipeline_run
from flows.tracking.traces import PAGE
from flows.workers import dispatch, run_names, run_pages
from flows.workers.configured_server import PARENT_TASK_RUN
from flows.workers.connection import name_process, prefect_server
from flows.workers.server import ui_address
from flows.workers.stage import call, explained, run_tags
from params.run_folders import RunFolders
from params.schema.base import Machine
from params.schema.recipe import Recipe
from params.whole_file import whole_file
from tasks import recipes

REJECTED = "Rejected"  # name of the state, of type COMPLETED, of a run that is not promoted

log = logging.getLogger(__name__)


def run_here(recipe: str) -> int:
    """Run the stages that are out of date in this checkout; return the exit status.

    What has failed is printed. Raises KeyboardInterrupt on Ctrl-C.
    """
    killed_before = memory_shortage.kernel_kills()
    try:
        with prefect_server(meanwhile=open_store) as server:
            name = run_names.of_run("retrain", recipe, run_names.from_variable())
            call(retrain, name, recipe, server)
    except dvc_command.KilledError as error:
        print(f"retrain: {error}: the same call goes on from here", file=sys.stderr)
        memory_shortage.report_kills(killed_before, recipe)
        return dvc_command.KILLED
    except dvc_command.StageError:  # the stage has printed why
        memory_shortage.report_kills(killed_before, recipe)  # of a process of the stage
        return 1
    except TimeoutError as error:
        print(
            f"retrain: {error} The limit is the stage's timeout_seconds in dvc.yaml.",
            file=sys.stderr,
        )
        return 1
    except Exception as error:
        if (reason := explained(error, recipe)) is None:
            raise
        print(f"retrain: {reason}", file=sys.stderr)
        return 1
    return 0


def run_in(recipe: str, folder: Path, changes: Sequence[str] = ()) -> None:
    """Run the stages with the code in ``folder``; Prefect and MLflow are this checkout's.

    ``changes``: what the recipe in ``folder`` overrides, for names. Raises RuntimeError where a
    stage fails, which has printed why, KilledError where it or what runs it was killed, and
    KeyboardInterrupt on Ctrl-C.
    """
    with prefect_server(meanwhile=open_store):
        where = {"MLFLOW_TRACKING_URI": store.store_uri(folder), dvc_command.RUN: folder.name}
        where |= run_names.as_variable(changes)
        if task_run.id:  # of a deployment's flow run (flows/deploy.py)
            where[PARENT_TASK_RUN] = str(task_run.id)
        command = ["flows.retrain", recipe, "--here"]
        status = dvc_command.supervise(command, where, folder, grace=2 * dvc_command.GRACE)
    if status == dvc_command.INTERRUPTED:
        raise KeyboardInterrupt
    if dvc_command.was_killed(status):
        raise dvc_command.KilledError(f"a process of the stages of {recipe} was killed")
    if status:
        raise RuntimeError(f"the stages of {recipe} have failed")


def open_store() -> None:
    """Import MLflow and open its store, which takes seconds; errors are reported later."""
    with suppress(Exception):
        store.connect(store.store_uri())


@flow(name="retrain", on_running=[name_process])
def retrain(recipe: str = "tiny") -> State[Any] | None:
    """Run the stages of a recipe that are out of date, and log the run to MLflow.

    Its state is named "Rejected" where the verdict is not to promote the policy, which is no error.
    """
    checked = recipes.load(recipe, Path("params"))
    stages = pipeline.stages(recipe)
    parameters = recipe_values.parameters(checked)
    about = recipe_values.About(recipe, flatten(parameters), recipe_values.run_before(recipe))
    with pipeline_run(recipe, parameters, run_tags(), about.name()) as run:
        run.log_file(whole_file(recipe, Path("params")))
        seconds: dict[str, float] = {}
        outs: dict[str, str] = {}
        for stage in stages:
            began = time.monotonic()
            as_task(stage, checked.machine)()
            seconds[stage.name.partition("@")[0]] = time.monotonic() - began
            outs |= pipeline.digests(stage.name)
            run.log_text(json.dumps(outs, indent=1), OUTS)
        outcome_report.log_outcome(run, recipe, seconds, about.lines())
        if (RunFolders(recipe).trees / "questions.parquet").is_file():
            write_page(about, checked, run)
        said = outcome_report.words(recipe, run, seconds)
        print("", *said, sep="\n", flush=True)
        show(about, run, said)
    if reason := outcome_report.rejection(recipe):
        return Completed(name=REJECTED, message=reason)
    return None


def show(about: recipe_values.About, run: Run, said: Sequence[str]) -> None:
    """Show in Prefect what came out, and where to look.

    The folder of a run as a commit is removed at its end; MLflow keeps the page.
    """
    recipe = about.recipe
    lost = fallen.lost(recipe, outcome_report.compared_with(recipe))
    place, which = fallen.begin(recipe, lost, outcome_report.worse_kinds(recipe))
    file, page = Path(PAGE.format(recipe)), run_pages.path_of(run.id)
    found = outcome_report.Findings(
        words=said,
        lost=lost,
        mlflow=store.page_of(ui_address(), run.id) or "",
        server=run_pages.server() if page else "",
        page=page,
        question=page + place if page and place else "",
        which=which,
        file=file.as_posix() if file.exists() and dvc_command.RUN not in os.environ else "",
        before=about.before[0] if about.before else "",
        changed=about.changes(),
    )
    outcome_report.show_in_prefect(recipe, found, os.environ.get(PARENT_TASK_RUN))
    outcome_report.emit_verdict(recipe, run, found)


def write_page(about: recipe_values.About, recipe: Recipe, run: Run) -> None:
    """Write the run's page and keep it in MLflow; a failure does not end a run with its results."""
    try:
        from flows.pages import facts, page_file  # with pandas, which no stage waits for

        before = facts.run_before(about.before[0], about.changes()) if about.before else None
        links = page_file.links_to(run.id, ui_address())
        file = page_file.write_run(about.recipe, recipe, links, before=before)
    except Exception as error:  # whatever it is, the run has its results
        log.warning("the page of the run was not written: %s: %s", type(error).__name__, error)
        return
    run.log_file(file)
    run.set_tags({"page": file.as_posix()})


def as_task(stage: pipeline.Stage, machine: Machine) -> Task[[], None]:
    """Return a stage as a Prefect task; the stage's own flow run becomes the task run's child.

    The stage is sent to the pool that its ``meta:`` names, if a worker of it is running, else it
    runs here, with GPUs of its own where the recipe asks for them.
    """

    @task(
        name=stage.name,
        task_run_name=stage.name,
        cache_policy=NO_CACHE,
        retries=stage.retries,
        retry_delay_seconds=stage.retry_delay_seconds,
        timeout_seconds=stage.timeout_seconds,
    )
    def reproduce() -> None:
        if not dispatch.send(stage):
            with gpu.held(stage.name, machine) as visible:
                dvc_command.reproduce(stage.name, **{PARENT_TASK_RUN: str(task_run.id)}, **visible)

    return reproduce
