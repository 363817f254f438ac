"""Flows of the deployments that prefect.yaml declares (docs/deployments.md).

A schedule starts ``retraining``: a run of a recipe in a worktree, which ends as a commit. ``stage``
runs one stage that another run has sent to this worker (flows/workers/dispatch.py). Both work in
the checkout that the worker's environment names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run, task_run
from prefect.states import Completed
from pydantic import Field

from flows.all_stages import REJECTED
from flows.commands import retrain
from flows.host import gpu
from flows.host.addresses import keep_passwords_from_logs
from flows.runs import commit_check, dvc_command, git, pipeline, transfer, worktree
from flows.tracking import store
from flows.workers import dispatch, received, run_names
from flows.workers.connection import name_process
from flows.workers.stage import PARENT_TASK_RUN
from tasks import recipes

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Change = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*=.*$")]
StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*@[a-z0-9][a-z0-9_-]*$")]
Commit = Annotated[str, Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]
DAY = 86400.0

# Moving data may fail and succeed the next time. A stage is not retried: it would fail again for
# the same reason, and the next run resumes it.
TRANSPORT: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": 2,
    "retry_delay_seconds": [10, 60],
    "timeout_seconds": 2 * 3600,
}


def was_killed(_: object, task_run: object, state: State[Any]) -> bool:
    """Return whether a task has failed because one of its processes was killed."""
    return isinstance(state.data, dvc_command.KilledError)


# What was killed goes on where it was. Killed by the kernel when memory ended, it may be killed
# again; a flow run whose own process is killed is tried again by automations.yaml.
KILLED: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": 2,
    "retry_delay_seconds": [10, 60],
    "retry_condition_fn": was_killed,
}


def retraining_name() -> str:
    """Return the name of the flow run that this is called in."""
    given = flow_run.parameters
    return run_names.of_run("retraining", given["recipe"], given["overrides"])


@flow(
    name="retraining",
    flow_run_name=retraining_name,
    timeout_seconds=7 * DAY,
    on_running=[name_process],
    log_prints=True,
)
def retraining(recipe: Name = "tiny", overrides: list[Change] = []) -> State[Any]:  # noqa: B006
    """Run a recipe of this checkout's last commit; the final state's message is the run's branch.

    That state is named "Rejected" where the verdict is not to promote the policy.

    ``overrides``: values of the recipe for this run, as ``section.key=value``.
    """
    keep_passwords_from_logs()
    branch = run(recipe, overrides)
    name = REJECTED if retrain.is_rejected(recipe, branch) else None
    return Completed(name=name, message=branch)


@task(**KILLED, persist_result=False)
def run(recipe: str, overrides: list[str]) -> str:
    """Run the recipe in a child flow run of this task run; return the branch."""
    return retrain.run(recipe, overrides)


@flow(
    name=dispatch.FLOW,
    flow_run_name="{name}",
    timeout_seconds=7 * DAY,
    on_running=[name_process],
    log_prints=True,
)
def stage(
    name: StageName,
    commit: Commit,
    files: dict[str, str],
    environment: dict[str, str] = {},  # noqa: B006
) -> State[Any]:
    """Run one stage of another checkout's run, ``name`` such as "reinforce@tiny".

    It is made from ``commit``, ``files`` (path → text: the recipe and dvc.lock) and the inputs in
    DVC's remote. ``environment`` has MLflow's address, whose password is this worker's. Raises
    ValueError, before anything is written, for a request that asks for more. A stage that failed or
    was killed is resumed when it is sent again to the same checkout.
    """
    keep_passwords_from_logs()
    received.check_environment(environment, dispatch.SENT)
    received.check_paths(files, dispatch.sent_files(name), Path())
    if transfer.default_remote() is None:
        raise ValueError(
            f"{Path.cwd()} has no default DVC remote from which {name} could fetch its inputs: "
            "dvc remote add --default <name> <url>"
        )
    purpose = {"stage": name, "commit": commit, "files": files}
    with worktree.held(name.replace("@", "-"), purpose) as folder:
        receive(name, commit, files, folder)
        reproduce(name, folder, environment)
        result = push(name, folder)
        worktree.finish(folder)
    dispatch.publish_result(result, name)
    return Completed(message=f"{name} has run in {Path.cwd()}")


@task(**TRANSPORT)
def receive(name: str, commit: str, files: dict[str, str], folder: Path) -> None:
    """Make a worktree with a stage's code, recipe and inputs."""
    if not worktree.is_ready(folder):
        git.fetch_commit(commit)
        commit_check.check(commit, name.split("@")[-1])
        git.add_worktree(folder, commit)
        transfer.share(folder)
        received.check_paths(files, dispatch.sent_files(name), folder)  # the commit may have links
        if faults := [*commit_check.lock_faults("dvc.lock", files.get("dvc.lock", ""))]:
            raise ValueError(f"the request for {name} is refused: {'; '.join(faults)}")
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        transfer.provide_sources(folder)
        worktree.set_ready(folder)
    transfer.pull_paths(pipeline.belongings(name, folder).tracked, folder)


@task(**KILLED)
def reproduce(name: str, folder: Path, environment: dict[str, str]) -> None:
    """Run the stage in its worktree, with a GPU of its own where the recipe wants one."""
    recipe = recipes.load(name.split("@")[-1], folder / "params")
    address = environment.get("MLFLOW_TRACKING_URI")
    uri = store.full_uri(address) if address else store.store_uri()
    where = {**environment, "MLFLOW_TRACKING_URI": uri}
    with gpu.held(name, recipe.machine) as visible:
        variables = {PARENT_TASK_RUN: str(task_run.id), **where, **visible}
        dvc_command.reproduce(name, folder, **variables)


@task(**TRANSPORT)
def push(name: str, folder: Path) -> dict[str, Any]:
    """Push a stage's outs; return its entry in dvc.lock, and the text of outs that git keeps."""
    transfer.push_stage(name, folder)
    small = pipeline.belongings(name, folder).small
    files = [file for path in small for file in _files(folder / path)]
    texts = {file.relative_to(folder).as_posix(): file.read_text() for file in files}
    return {"lock": pipeline.locked(folder)[name], "files": texts}


def _files(path: Path) -> list[Path]:
    """Return a file, or the files of a folder, as a list."""
    return [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
