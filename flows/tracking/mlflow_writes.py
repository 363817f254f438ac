"""Write a run to MLflow: open it, and send it messages of each kind.

A message may be sent twice: every write has the same effect once or repeated.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flows.host import processes
from flows.tracking.outbox import OutboxMessage
from flows.tracking.store import KEY_TAG, NAME_TAG, PARENT_RUN, PARENT_TAG, experiment_id
from flows.tracking.trace_writing import ENTITIES_PER_BATCH, write_traces

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

POINTS_PER_BATCH = 1_000  # of metrics; MLflow takes no more at once
REFUSALS = ("INVALID_PARAMETER_VALUE", "NOT_IMPLEMENTED", "ENDPOINT_NOT_FOUND")  # not to be retried


def open_run(client: MlflowClient, uri: str, name: str, tags: Mapping[str, str]) -> str:
    """Return the id of the run that an earlier attempt made, else resume one of its key or make it.

    Only a run that is RUNNING, and whose process is not known to live, is resumed.
    """
    experiment = experiment_id(client, uri)
    labels = dict(tags)
    if parents := _find(client, experiment, NAME_TAG, labels.get(PARENT_TAG)):
        labels[PARENT_RUN] = next(iter(parents))
    unfinished = _find(client, experiment, KEY_TAG, labels.get(KEY_TAG), "RUNNING")
    run_ids = list(_find(client, experiment, NAME_TAG, labels[NAME_TAG]))
    run_ids += [run for run, its in unfinished.items() if not processes.is_alive(its)]
    if run_ids:
        _set_tags(client, run_ids[0], labels)
        return run_ids[0]
    run_id: str = client.create_run(experiment, run_name=name, tags=labels).info.run_id
    # children may have reached the store before their parent
    for child in _find(client, experiment, PARENT_TAG, labels[NAME_TAG]):
        client.set_tag(child, PARENT_RUN, run_id)
    return run_id


def has_run(client: MlflowClient, run_id: str) -> bool:
    """Return whether the store has the run; a new store in the place of an old one has not."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


def can_retry(error: Exception) -> bool:
    """Return whether the same message may succeed later; False where the message is at fault."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in REFUSALS
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _find(
    client: MlflowClient, experiment: str, tag: str, value: str | None, status: str | None = None
) -> dict[str, dict[str, str]]:
    """Return the runs whose ``tag`` is ``value``, with all their tags; none for None."""
    if value is None:
        return {}
    filter_string = f"tags.`{tag}` = '{value}'"
    if status:
        filter_string += f" and attributes.status = '{status}'"
    return {
        run.info.run_id: run.data.tags for run in client.search_runs([experiment], filter_string)
    }


# ---------------------------------------------------------------- a writer for each kind


def _write_metrics(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    from mlflow.entities import Metric

    fields = message.fields
    points = [
        Metric(n, v, fields["timestamp"], fields["step"]) for n, v in fields["values"].items()
    ]
    client.log_batch(run_id, metrics=points)


def _write_curves(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    from mlflow.entities import Metric

    at = message.fields["timestamp"]
    points = [Metric(name, value, at, step) for name, value, step in message.fields["points"]]
    for start in range(0, len(points), POINTS_PER_BATCH):
        client.log_batch(run_id, metrics=points[start : start + POINTS_PER_BATCH])


def _write_params(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    from mlflow.entities import Param

    batch = [Param(name, value) for name, value in message.fields["values"].items()]
    for start in range(0, len(batch), ENTITIES_PER_BATCH):
        client.log_batch(run_id, params=batch[start : start + ENTITIES_PER_BATCH])


def _write_tags(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    _set_tags(client, run_id, message.fields["values"])


def _write_datasets(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(
            Dataset(
                **{"name": entry["name"], "digest": entry["digest"], "source_type": "local"},
                source=json.dumps({"uri": entry["source"]}),
            ),
            [InputTag("mlflow.data.context", entry["context"])],
        )
        for entry in message.fields["datasets"]
    ]
    if inputs:
        client.log_inputs(run_id, inputs)


def _write_file(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / message.fields["name"]
        file.write_bytes(message.content)
        client.log_artifact(run_id, str(file))


def _write_table(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    name = message.fields["name"]
    client.log_text(run_id, message.fields["text"], name)
    tag = client.get_run(run_id).data.tags.get("mlflow.loggedArtifacts", "[]")
    shown, entry = json.loads(tag), {"path": name, "type": "table"}
    if entry not in shown:
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*shown, entry]))


def _write_end(client: MlflowClient, run_id: str, uri: str, message: OutboxMessage) -> None:
    client.set_terminated(run_id, message.fields["status"], message.fields["end_time"])


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


WRITERS: dict[str, Callable[[MlflowClient, str, str, OutboxMessage], None]] = {
    "metrics": _write_metrics,
    "curves": _write_curves,
    "params": _write_params,
    "tags": _write_tags,
    "datasets": _write_datasets,
    "file": _write_file,
    "table": _write_table,
    "traces": write_traces,
    "end": _write_end,
}
