"""The whole pipeline of a recipe: every stage of dvc.yaml as a task, in the order of DVC's graph.

``python -m flows.retrain RECIPE --here`` runs it in this checkout. DVC remembers what was done: a
stage that nothing has changed for is skipped, by this flow as by ``dvc repro``.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from flows.server import prefect_server
from flows.stage import INTERRUPTED, PARENT_TASK_RUN, arrive, check, leave, run_tags
from params import schema
from tasks import track, version


@flow(name="retrain", flow_run_name="retrain {recipe}")
def retrain(recipe: str = "tiny") -> None:
    """Bring every stage of a recipe up to date, and keep the run in MLflow."""
    checked = schema.load(recipe, Path("params"))
    stages = version.stages(recipe)
    with track.pipeline(recipe, checked, run_tags()) as run:
        for stage in stages:
            as_task(stage)()
            run.tags(
                {f"dvc.{path}": digest for path, digest in version.digests(stage.name).items()}
            )


def as_task(stage: version.Stage) -> Task[[], None]:
    """A stage as a task of that name. The stage's own flow run becomes the task run's child."""

    @task(
        name=stage.name,
        task_run_name=stage.name,
        cache_policy=NO_CACHE,
        retries=stage.retries,
        retry_delay_seconds=stage.retry_delay_seconds,
        timeout_seconds=stage.timeout_seconds,
    )
    def reproduce() -> None:
        version.reproduce(stage.name, **{PARENT_TASK_RUN: str(task_run.id)})

    return reproduce


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status. 2: there is nothing that can be started."""
    parser = argparse.ArgumentParser(prog="python -m flows.retrain", description=__doc__)
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--here", action="store_true", help="in this checkout, without a commit")
    chosen = parser.parse_args(arguments)
    if not chosen.here:
        print(
            "retrain: runs in a worktree of their own are still to come: add --here",
            file=sys.stderr,
        )
        return 2
    try:
        schema.load(chosen.recipe, Path("params"))
        changed = version.status(chosen.recipe)
        if changed:
            check(chosen.recipe)
    except (ValueError, RuntimeError) as error:
        print(f"retrain: {error}", file=sys.stderr)
        return 2
    if not changed:
        print(f"nothing to do: {chosen.recipe} is up to date\n\n{_table(chosen.recipe)}")
        return 0
    ran_before = Path("dvc.lock").exists()
    for name, reasons in changed.items() if ran_before else ():
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        print(f"{name} has to run: {reasons[0]}{more}")
    return _run(chosen.recipe)


def _run(recipe: str) -> int:
    try:
        with prefect_server(meanwhile=_open_store):
            retrain(recipe)
    except version.StageError:  # the stage has said why
        return 1
    except TimeoutError as error:
        print(f"retrain: {error} That is what meta grants it in dvc.yaml.", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError) as error:
        print(f"retrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("retrain: interrupted; the next call goes on from here", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{_table(recipe)}")
    print("to see the run    make ui")
    what = f"params questions dvc.yaml dvc.lock reports/{recipe}"
    print(f"to keep it        git add {what} && git commit")
    return 0


def _open_store() -> None:
    """MLflow's import and a new store take seconds; a store that is away is for `track` to say."""
    with suppress(Exception):
        track.connect(track.store_uri())


def _table(recipe: str) -> str:
    """What the last run of evaluate found."""
    table = Path("reports") / recipe / "table.md"
    return table.read_text() if table.exists() else f"{table} was not written"


if __name__ == "__main__":
    arrive()
    leave(main(sys.argv[1:]))
