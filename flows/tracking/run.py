"""One MLflow run a pipeline and a nested one a stage: metrics, tables, figures, traces.

Records that the store cannot take now wait in the outbox (flows/tracking/outbox.py) and are sent by
a later run. Tracking never ends a stage.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.host import processes
from flows.tracking import outbox
from flows.tracking.outbox import Record
from params.schema.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.tracking import MlflowClient

    from flows.tracking.traces import Trace
from flows.tracking.store import check_reachable, connect, disconnect, experiment_id, log, store_uri
from flows.tracking.trace_writing import ENTITIES_PER_BATCH, write_traces

PIPELINE_RUN = "BEAMLINE_PIPELINE_RUN"  # environment variable: the parent of the stages' runs
UNTRACKED = "untracked:"  # begins its value where the store has not taken that run yet
NAME_TAG, PARENT_TAG = "beamline.run", "beamline.parent"  # names that hold without the store
PARENT_RUN, KEY_TAG = "mlflow.parentRunId", "beamline.key"
COMMIT, DIGEST = "beamline.commit", "beamline.digest"  # tags of a registered model's version
RETRY_AFTER = 30.0  # seconds without an attempt after one that failed
REFUSALS = ("INVALID_PARAMETER_VALUE", "NOT_IMPLEMENTED", "ENDPOINT_NOT_FOUND")  # not to be retried


class Run:
    """A run in the store. Every call is written at once, or waits while the store is away."""

    def __init__(self, name: str, tags: Mapping[str, str], parent: str | None = None) -> None:
        """Open a run; with the tag ``beamline.key``, the unfinished one of that key if there is.

        ``parent`` is the run it belongs under, or, after UNTRACKED, that run's name tag.
        """
        labels = dict(tags) | processes.identity() | {NAME_TAG: uuid.uuid4().hex}
        if parent:
            awaited = parent.startswith(UNTRACKED)
            labels[PARENT_TAG if awaited else PARENT_RUN] = parent.removeprefix(UNTRACKED)
        self._open({"name": name, "tags": labels, "uri": store_uri(), "id": None})
        self._reached()

    def _open(self, about: dict[str, Any], held: outbox.Spool | None = None) -> None:
        self.name: str = about["name"]
        self.id: str | None = about["id"]  # None until the store has taken the run
        self._about = about
        self._uri: str = about["uri"]
        self._client: MlflowClient | None = None
        self._spool = held
        self._away = held is not None
        self._quiet_until = 0.0  # on the monotonic clock

    @property
    def handle(self) -> str:
        """The run's id, or what stands for it until it has one; for PIPELINE_RUN."""
        return self.id or UNTRACKED + self._about["tags"][NAME_TAG]

    def metrics(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write one value a name at ``step``; ``at`` is the record's own time, in unix seconds.

        A replay with the same step, time and values adds nothing, so ``at`` comes from the record
        and not from the clock. Names follow ``metric_name``.
        """
        points = {metric_name(name): float(value) for name, value in values.items()}
        self._say("metrics", values=points, step=step, stamp=round(at * 1000))

    def params(self, values: Mapping[str, Any]) -> None:
        """Write parameters; nested mappings become dotted names. A written one cannot change."""
        self._say("params", values=flatten(values))

    def tags(self, values: Mapping[str, str]) -> None:
        """Write tags; a later value of a name replaces the earlier one."""
        self._say("tags", values=dict(values))

    def figure(self, figure: Figure, name: str) -> None:
        """Keep a matplotlib figure as ``name`` (a ``.png``), replacing one of that name."""

        def drawn() -> Record:
            picture = io.BytesIO()
            figure.savefig(picture, format="png")
            return Record("file", {"name": name}, picture.getvalue())

        self._do(drawn)

    def table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Keep rows as ``name`` (a ``.json``), which MLflow's UI shows as a table.

        MLflow's own log_table appends to a table of that name; this replaces it, so that a stage
        that is taken up again does not double its rows. Missing and non-finite values become null.
        """
        self._say("table", text=table_json(rows), name=name)

    def file(self, path: Path) -> None:
        """Keep a copy of a file under its own name."""
        self._do(lambda: Record("file", {"name": path.name}, path.read_bytes()))

    def traces(self, made: Callable[[], Sequence[Trace]]) -> None:
        """Keep trajectories as traces of this run, with their rewards as feedback.

        A trace is found by its key: a replay adds none, and one that another run has made is linked
        to this run too. Where ``made`` fails, the run goes on without them.
        """
        self._do(lambda: Record("traces", {"traces": [asdict(trace) for trace in made()]}))

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, after one more attempt at what waits."""
        self._quiet_until = 0.0
        self._say("end", status=status, end_time=round(time.time() * 1000))
        if self._spool:
            log.warning(
                "%d records of run '%s' wait in %s for the tracking store %s: the next run, or "
                "make doctor, delivers them",
                len(outbox.entries(self._spool.folder)),
                self.name,
                _shown(outbox.root()),
                self._uri,
            )
            outbox.close(self._spool)

    def _say(self, kind: str, **said: Any) -> None:
        self._do(lambda: Record(kind, said))

    def _do(self, made: Callable[[], Record]) -> None:
        """Write a record, or keep it after those that wait."""
        try:
            record = made()
        except Exception as error:  # whatever it is, training goes on
            self._leave_out(error)
            return
        if self._spool is None and self._write(record):
            return
        try:
            self._spool = self._spool or outbox.create(
                self._about | {"id": self.id}, self._about["tags"][NAME_TAG]
            )
            outbox.add(self._spool, record)
        except OSError as error:  # a full disk
            self._leave_out(error)
            return
        self.flush()

    def flush(self) -> int:
        """Write what waits, oldest first, until the store does not take a record; how many."""
        told = 0
        for entry in outbox.entries(self._spool.folder) if self._spool else []:
            if not self._write(outbox.read(entry)):
                return told
            entry.unlink()
            told += 1
        if self._spool and self._reached():
            outbox.remove(self._spool)
            self._spool, self._away = None, False
            log.warning("run '%s': the tracking store is back, and has all that waited", self.name)
        return told

    def _write(self, record: Record) -> bool:
        """Whether a record need not wait: it is written, or it is itself at fault."""
        if not self._reached():
            return False
        assert self._client and self.id
        try:
            WRITERS[record.kind](self._client, self.id, self._uri, record)
        except Exception as error:
            if _may_pass(error):
                self._pause(error)
                return False
            self._leave_out(error)
        return True

    def _reached(self) -> bool:
        """Whether the store answers and has the run; no attempt soon after one that failed."""
        if time.monotonic() < self._quiet_until:
            return False
        try:
            check_reachable(self._uri, known=self.id is not None, away=self._away)
            self._client = self._client or connect(self._uri)
            if self.id is None or (self._away and not _knows(self._client, self.id)):
                self.id = _open_run(self._client, self._uri, self.name, self._about["tags"])
        except Exception as error:  # whatever it is, training goes on
            self._pause(error)
            return False
        return True

    def _pause(self, error: Exception) -> None:
        self._quiet_until = time.monotonic() + RETRY_AFTER
        if self._client is not None:
            disconnect(self._client)
            self._client = None
        if not self._away:
            log.warning(
                "run '%s': the tracking store %s cannot be written (%s); what the run has to say "
                "waits in %s",
                self.name,
                self._uri,
                error,
                _shown(outbox.root()),
            )
        self._away = True

    def _leave_out(self, error: Exception) -> None:
        log.warning("run '%s': a record was left out: %s", self.name, error)


def deliver() -> int:
    """Tell the store what earlier runs could not; how many records it took.

    What a living run holds, and what the store still does not take, stays where it is. Costs
    nothing where nothing waits.
    """
    told, away = 0, set()
    for folder in outbox.waiting():
        with outbox.held(folder) as held:
            about = outbox.about(folder) if held else {}
            if held is None or about["uri"] in away:
                continue
            run = Run.__new__(Run)
            run._open(about, held)
            told += run.flush()
            if run._spool:
                away.add(about["uri"])
    return told


@contextmanager
def pipeline(
    recipe_name: str, recipe: Recipe, tags: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """The run of a whole pipeline, with the recipe as its parameters.

    While it is open, ``BEAMLINE_PIPELINE_RUN`` tells this process and its children which run the
    stages belong under. It ends FINISHED, FAILED on an Exception, KILLED on any other exit
    (KeyboardInterrupt, SystemExit from a signal handler). MLflow's UI shows the tag
    ``mlflow.source.git.commit`` as the run's version.
    """
    deliver()
    labels = {"recipe": recipe_name} | _prefect_tag() | dict(tags or {})
    run = Run(f"{recipe_name} {datetime.now():%Y-%m-%d %H:%M:%S}", labels)
    run.params(recipe.model_dump(mode="json"))
    with _environment(PIPELINE_RUN, run.handle), _ending(run):
        yield run


@contextmanager
def stage(
    recipe_name: str, stage_name: str, key: str, tags: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """The run of one stage, under the pipeline of ``BEAMLINE_PIPELINE_RUN`` where that is set.

    ``key`` names the work (a digest). A run of the same key that is still RUNNING, and whose
    process is not known to live, was left by one that was killed: it is taken up again and moved
    under the current pipeline. It ends as a pipeline does.
    """
    deliver()
    labels = {"recipe": recipe_name, "stage": stage_name, KEY_TAG: key}
    labels |= _prefect_tag() | dict(tags or {})
    run = Run(f"{stage_name}@{recipe_name}", labels, os.environ.get(PIPELINE_RUN))
    with _ending(run):
        yield run


def metric_name(name: str) -> str:
    """``name`` as MLflow takes it: "@" becomes "_at_" (pass@1 → pass_at_1), other bad signs "_"."""
    return re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names; strings stay, every other value is written as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in the "split" form of MLflow's tables; columns in order of first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    data = [[_finite(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str)


def _shown(path: Path) -> Path:
    """A path as it is told, from the current folder on."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _may_pass(error: Exception) -> bool:
    """Whether the same record may be written later; False where the record itself is at fault."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in REFUSALS
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _knows(client: MlflowClient, run_id: str) -> bool:
    """Whether a store that was away still has the run; a new one in its place has not."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


def _open_run(client: MlflowClient, uri: str, name: str, tags: Mapping[str, str]) -> str:
    """Find the run that an earlier attempt has made, take up one of its key, or make it."""
    experiment = experiment_id(client, uri)
    labels = dict(tags)
    if awaited := _find(client, experiment, NAME_TAG, labels.get(PARENT_TAG)):
        labels[PARENT_RUN] = next(iter(awaited))
    unfinished = _find(client, experiment, KEY_TAG, labels.get(KEY_TAG), "RUNNING")
    found = list(_find(client, experiment, NAME_TAG, labels[NAME_TAG]))
    found += [run for run, its in unfinished.items() if not processes.is_alive(its)]
    if found:
        _set_tags(client, found[0], labels)
        return found[0]
    run_id: str = client.create_run(experiment, run_name=name, tags=labels).info.run_id
    for child in _find(client, experiment, PARENT_TAG, labels[NAME_TAG]):  # were faster
        client.set_tag(child, PARENT_RUN, run_id)
    return run_id


def _find(
    client: MlflowClient, experiment: str, tag: str, value: str | None, status: str | None = None
) -> dict[str, dict[str, str]]:
    """The runs whose ``tag`` is ``value``, with all their tags; none for None."""
    if value is None:
        return {}
    wanted = f"tags.`{tag}` = '{value}'"
    if status:
        wanted += f" and attributes.status = '{status}'"
    return {run.info.run_id: run.data.tags for run in client.search_runs([experiment], wanted)}


# ---------------------------------------------------------------- how each kind is written


def _write_metrics(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    from mlflow.entities import Metric

    said = record.said
    points = [Metric(n, v, said["stamp"], said["step"]) for n, v in said["values"].items()]
    client.log_batch(run_id, metrics=points)


def _write_params(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    from mlflow.entities import Param

    batch = [Param(name, value) for name, value in record.said["values"].items()]
    for start in range(0, len(batch), ENTITIES_PER_BATCH):
        client.log_batch(run_id, params=batch[start : start + ENTITIES_PER_BATCH])


def _write_tags(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    _set_tags(client, run_id, record.said["values"])


def _write_file(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / record.said["name"]
        file.write_bytes(record.content)
        client.log_artifact(run_id, str(file))


def _write_table(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    name = record.said["name"]
    client.log_text(run_id, record.said["text"], name)
    tag = client.get_run(run_id).data.tags.get("mlflow.loggedArtifacts", "[]")
    shown, entry = json.loads(tag), {"path": name, "type": "table"}
    if entry not in shown:
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*shown, entry]))


def _write_end(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    client.set_terminated(run_id, record.said["status"], record.said["end_time"])


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


WRITERS: dict[str, Callable[[MlflowClient, str, str, Record], None]] = {
    "metrics": _write_metrics,
    "params": _write_params,
    "tags": _write_tags,
    "file": _write_file,
    "table": _write_table,
    "traces": write_traces,
    "end": _write_end,
}


def _prefect_tag() -> dict[str, str]:
    """The flow run of a Prefect worker's process; a flow that knows its own passes it as a tag."""
    flow_run = os.environ.get("PREFECT__FLOW_RUN_ID")
    return {"prefect.flow_run": flow_run} if flow_run else {}


@contextmanager
def _ending(run: Run) -> Iterator[None]:
    status = "KILLED"
    try:
        yield
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        run.end(status)


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable (or unset it: None) for the time of the block."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
