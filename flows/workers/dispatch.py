"""Send a stage to a worker of the pool that its ``meta:`` names, where that is possible.

A stage is sent where Prefect has a deployment ``stage/<pool>`` (flows/deploy.py) and DVC has a
default remote, which carries inputs and outs; Prefect carries the recipe, ``dvc.lock`` and the few
files that git keeps. Otherwise, and where its inputs are not part of a commit, it runs here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.artifacts import Artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.host.addresses import address_without_password, without_password
from flows.runs import dvc_command, git, pipeline, transfer
from flows.tracking import store
from flows.tracking.run import PIPELINE_RUN
from flows.workers import received
from flows.workers.connection import current_server
from flows.workers.outages import AwayError

FLOW = "stage"  # the flow of flows/deploy.py, with a deployment for each pool
RESULT = "stage"  # the type of the artifact that has a stage's result
UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
SENT = ("MLFLOW_TRACKING_URI", PIPELINE_RUN)  # environment variables that a worker may get
POLL = 1.0  # seconds between two checks of a stage that runs on a worker
AWAY = "Prefect's server is away"  # a reason to run a stage here
CRASHES = 2  # after which a stage is sent once more


def send(stage: pipeline.Stage) -> bool:
    """Run a stage on a worker of its pool and fetch its outs; return False if it must run here.

    Raises StageError where it fails there. A stage that crashes, because its process was killed or
    its machine is lost (automations.yaml), is sent again. An interrupt cancels it there. Where this
    process is killed, the worker continues, and the next call waits for it.
    """
    if stage.pool is None or pipeline.is_done(stage.name):
        return False
    if reason := _obstacle(stage):
        _print_once(f"stages for the pool '{stage.pool}' run here: {reason}")
        return False
    transfer.push_paths(pipeline.belongings(stage.name).tracked)
    try:
        result = _run_on_worker(stage, _request(stage.name))
    except AwayError:
        _print_once(f"stages for the pool '{stage.pool}' run here: {AWAY}")
        return False
    received.check_paths(result["files"], pipeline.belongings(stage.name).small, Path())
    transfer.take_over(stage.name, result["lock"], result["files"])
    return True


def sent_elsewhere(recipe: str) -> set[str]:
    """Return the stages ("reinforce") of a recipe that workers may run, and so not this machine."""
    pooled = {stage.name.partition("@")[0] for stage in pipeline.stages(recipe) if stage.pool}
    carried = pooled and transfer.default_remote() is not None
    return pooled if carried and current_server() is not None else set()


def _obstacle(stage: pipeline.Stage) -> str | None:
    """Return the reason why a stage cannot be sent, or None."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(f"{FLOW}/{stage.pool}")
        except ObjectNotFound:
            return f"Prefect has no deployment {FLOW}/{stage.pool} (docs/deployments.md)"
        except AwayError:
            return AWAY
    if transfer.default_remote() is None:
        return "DVC has no default remote to carry inputs (dvc remote add --default)"
    sent = pipeline.recipe_paths(stage.name.split("@")[-1])
    if differ := git.uncommitted(*sent):
        return f"this checkout differs from its last commit: {differ[0].strip()}"
    if loose := [path for path in pipeline.belongings(stage.name).loose if path not in sent]:
        return f"{loose[0]} is in neither git nor DVC"
    return None


@functools.cache
def _print_once(text: str) -> None:
    print(text, flush=True)


def _request(name: str) -> dict[str, Any]:
    """Return the parameters of the flow ``stage`` in flows/deploy.py."""
    files = [Path(path) for path in sent_files(name)]
    environment = {}
    if store.store_uri().startswith("http"):  # a worker cannot reach other stores
        environment = {
            key: address_without_password(os.environ[key]) for key in SENT if key in os.environ
        }
    return {
        "name": name,
        "commit": git.revision().commit,
        "files": {file.as_posix(): file.read_text() for file in files if file.exists()},
        "environment": environment,
    }


def sent_files(name: str) -> tuple[str, ...]:
    """Return the paths that a request for a stage may have: its recipe's and ``dvc.lock``."""
    return *pipeline.recipe_paths(name.split("@")[-1]), "dvc.lock"


def _run_on_worker(stage: pipeline.Stage, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a stage on a worker; return its entry in dvc.lock, and its outs that git keeps."""
    with get_client(sync_client=True) as client:
        for crashes in range(CRASHES + 1):
            run, ended = _run_once(client, stage, request)
            if ended.state is None or not ended.state.is_crashed() or crashes == CRASHES:
                break
            print(f"{stage.name} has crashed ({ended.state.message}): sent again", flush=True)
        if ended.state is None or not ended.state.is_completed():
            raise dvc_command.StageError(
                f"{stage.name} failed on a worker of the pool '{stage.pool}': "
                f"{ended.state and ended.state.message}; its log is in flow run {run.name}"
            )
        return result_of(client, run.id)


def _run_once(
    client: SyncPrefectClient, stage: pipeline.Stage, request: Mapping[str, Any]
) -> tuple[FlowRun, FlowRun]:
    """Start a flow run of the request, or find the one of a killed sender; await its end."""
    tag = request_tag(request)
    run = _unfinished_run(client, tag) or _start(stage, request, tag)
    print(f"{stage.name} runs on a worker of the pool '{stage.pool}' ({run.name})", flush=True)
    try:
        return run, _await_end(client, run.id)
    except (KeyboardInterrupt, SystemExit):
        client.set_flow_run_state(run.id, Cancelling(), force=True)
        raise


def request_tag(request: Mapping[str, Any]) -> str:
    """Return what requests for the same work share: stage, commit and files, not the environment.

    A sender that was killed recognizes its flow run by this tag when it is called again.
    """
    inputs = {name: request[name] for name in ("name", "commit", "files")}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _unfinished_run(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    """Return a flow run of the same request that a killed sender has started, if one runs."""
    run_filter = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
    )
    return next(iter(client.read_flow_runs(flow_run_filter=run_filter, limit=1)), None)


def _start(stage: pipeline.Stage, request: Mapping[str, Any], tag: str) -> FlowRun:
    """Start a flow run of the request, as a child of the task run that this is called in."""
    where = f"{FLOW}/{stage.pool}"
    return cast(FlowRun, run_deployment(where, parameters=dict(request), tags=[tag], timeout=0))


def _await_end(client: SyncPrefectClient, run: UUID) -> FlowRun:
    """Wait until a flow run has ended, through outages of the server; return it."""
    while True:
        try:
            flow_run = client.read_flow_run(run)
        except httpx.HTTPError as error:
            reason = without_password(str(error))
            _print_once(f"Prefect's server is unreachable ({reason}); the worker continues")
        else:
            if flow_run.state is not None and flow_run.state.is_final():
                return flow_run
        time.sleep(POLL)


def publish_result(result: Mapping[str, Any], name: str) -> None:
    """Store the result of a stage with the flow run that this is called in.

    It is an artifact of Prefect's server, so sender and worker need no common storage.
    """
    Artifact(type=RESULT, description=f"result of {name}", data=dict(result)).create()


def result_of(client: SyncPrefectClient, run: UUID) -> dict[str, Any]:
    """Return what a flow run has stored by ``publish_result``. Raises RuntimeError for nothing."""
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    for artifact in client.read_artifacts(artifact_filter=of_run):
        if artifact.type == RESULT:
            return dict(json.loads(str(artifact.data)))
    raise RuntimeError(f"flow run {run} has ended without a result of its stage")
