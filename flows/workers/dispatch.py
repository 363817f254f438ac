"""Where a stage runs: on a worker of the pool that its ``meta:`` names, or here.

A stage is sent where Prefect has a deployment ``stage/<pool>`` (flows/deploy.py) and DVC a default
remote: by that its inputs and outs travel, while Prefect carries the recipe, ``dvc.lock`` and the
few files that git keeps. Without the one or the other it runs here, as it does where its inputs
are no part of a commit.
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

from flows.runs import dvc_command, git, pipeline, transfer
from flows.tracking import run as track
from flows.tracking import store

FLOW = "stage"  # the flow of flows/deploy.py, with a deployment for each pool
MADE = "stage"  # the type of the artifact by which its flow run says what it has made
UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
LOOK = 1.0  # seconds between two looks at a stage that runs elsewhere


def send(stage: pipeline.Stage) -> bool:
    """Have a stage run on a worker of its pool, and fetch what it makes; False: it must run here.

    Raises RuntimeError where it fails there. Interrupted, it is cancelled there; where this process
    is killed, it goes on there, and the next call waits for that one.
    """
    if stage.pool is None or pipeline.is_done(stage.name):
        return False
    if why := _obstacle(stage):
        _say(f"stages for the pool '{stage.pool}' run here: {why}")
        return False
    things = pipeline.belongings(stage.name)
    transfer.push_paths(things.tracked)
    made = _made_elsewhere(stage, _request(stage.name))
    transfer.take_over(stage.name, made["lock"], made["files"])
    return True


def _obstacle(stage: pipeline.Stage) -> str | None:
    """Why a stage cannot be sent; None where it can."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(f"{FLOW}/{stage.pool}")
        except ObjectNotFound:
            return f"Prefect has no deployment {FLOW}/{stage.pool} (docs/deployments.md)"
    if transfer.default_remote() is None:
        return "DVC has no default remote by which inputs could travel (dvc remote add --default)"
    recipe = stage.name.split("@")[-1]
    if differ := git.uncommitted(f"params/{recipe}.yaml"):
        return f"this checkout differs from its last commit: {differ[0].strip()}"
    if loose := pipeline.belongings(stage.name).loose:
        return f"{loose[0]} is in neither git nor DVC"
    return None


@functools.cache
def _say(text: str) -> None:
    print(text, flush=True)


def _request(name: str) -> dict[str, Any]:
    """What the worker is told: the parameters of the flow in flows/deploy.py."""
    files = (Path("params", f"{name.split('@')[-1]}.yaml"), Path("dvc.lock"))
    environment = {}
    if store.store_uri().startswith("http"):  # other stores are out of the worker's reach
        known = ("MLFLOW_TRACKING_URI", track.PIPELINE_RUN)
        environment = {key: os.environ[key] for key in known if key in os.environ}
    return {
        "name": name,
        "commit": git.revision().commit,
        "files": {file.as_posix(): file.read_text() for file in files if file.exists()},
        "environment": environment,
    }


def _made_elsewhere(stage: pipeline.Stage, request: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage has made on a worker: its entry in dvc.lock, and its outs that git keeps."""
    made_from = {name: request[name] for name in ("name", "commit", "files")}
    tag = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    with get_client(sync_client=True) as client:
        run = _under_way(client, tag) or _start(stage, request, tag)
        print(f"{stage.name} runs on a worker of the pool '{stage.pool}' ({run.name})", flush=True)
        try:
            ended = _end(client, run.id)
        except (KeyboardInterrupt, SystemExit):
            client.set_flow_run_state(run.id, Cancelling(), force=True)
            raise
        if ended.state is None or not ended.state.is_completed():
            raise dvc_command.StageError(
                f"{stage.name} has failed on a worker of the pool '{stage.pool}': "
                f"{ended.state and ended.state.message}; its log is in flow run {run.name}"
            )
        return told(client, run.id)


def _under_way(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    """A flow run of the same request that has not ended, from a sender that is gone."""
    wanted = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
    )
    return next(iter(client.read_flow_runs(flow_run_filter=wanted, limit=1)), None)


def _start(stage: pipeline.Stage, request: Mapping[str, Any], tag: str) -> FlowRun:
    """A new flow run of the request, as a child of the task run that this is called in."""
    where = f"{FLOW}/{stage.pool}"
    return cast(FlowRun, run_deployment(where, parameters=dict(request), tags=[tag], timeout=0))


def _end(client: SyncPrefectClient, run: UUID) -> FlowRun:
    """The flow run, once it has ended; a server that is away meanwhile is waited for."""
    while True:
        try:
            found = client.read_flow_run(run)
        except httpx.HTTPError as error:
            _say(f"Prefect's server is away ({error}): what runs elsewhere goes on")
        else:
            if found.state is not None and found.state.is_final():
                return found
        time.sleep(LOOK)


def tell(made: Mapping[str, Any], name: str) -> None:
    """Have the flow run that this is called in say what its stage has made.

    An artifact: Prefect's server keeps it, so sender and worker need no storage in common.
    """
    Artifact(type=MADE, description=f"what {name} has made", data=dict(made)).create()


def told(client: SyncPrefectClient, run: UUID) -> dict[str, Any]:
    """What a flow run has said by ``tell``."""
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    for artifact in client.read_artifacts(artifact_filter=of_run):
        if artifact.type == MADE:
            return dict(json.loads(str(artifact.data)))
    raise RuntimeError(f"flow run {run} has ended, but does not say what its stage has made")
