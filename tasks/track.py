"""The only module that knows MLflow: one run a pipeline, a nested run a stage.

The store is ``.beamline/mlflow.db`` (SQLite) under the current directory, unless
``MLFLOW_TRACKING_URI`` names another; the artifacts of a SQLite store lie beside it in
``mlartifacts``. Tracking never ends a training run: what cannot be written waits in memory, is
tried again at later calls and once more at the end, and a warning says so.

MLflow is imported when the first run opens (about a second), not with this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from params.schema import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Assessment, TraceInfo
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

    from tasks.spans import Span, Trace

EXPERIMENT = "beamline"
PIPELINE_RUN = "BEAMLINE_PIPELINE_RUN"  # environment variable: the parent of the stages' runs
WITH_SPANS = "tags.`mlflow.trace.spansLocation` = 'TRACKING_STORE'"  # true once it has spans
LOCK_WAIT = 2.0  # seconds that one attempt waits for a locked SQLite store; MLflow itself waits 20
RETRY_AFTER = 30.0  # seconds without an attempt after one that failed
REFUSALS = ("INVALID_PARAMETER_VALUE", "NOT_IMPLEMENTED", "ENDPOINT_NOT_FOUND")  # not to be retried
ENTITIES_PER_BATCH = 100  # MLflow's limit for parameters, tags, and traces that a run links to

log = logging.getLogger(__name__)


class Run:
    """A run in the store. Every call is written at once, or waits while the store is away."""

    def __init__(self, name: str, open_run: Callable[[MlflowClient, str], str]) -> None:
        """``open_run(client, experiment_id)`` makes or finds the run and returns its id."""
        self.name = name
        self.id: str | None = None  # None until the store has taken the run
        self._open_run = open_run
        self._uri = store_uri()
        self._client: MlflowClient | None = None
        self._waiting: deque[Callable[[MlflowClient, str], object]] = deque()
        self._quiet_until = 0.0  # on the monotonic clock
        self._flush()

    def metrics(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write one value a name at ``step``; ``at`` is the record's own time, in unix seconds.

        A replay with the same step, time and values adds nothing, so ``at`` comes from the record
        and not from the clock. Names follow ``metric_name``.
        """
        stamp = round(at * 1000)
        points = [(metric_name(name), float(value)) for name, value in values.items()]

        def write(client: MlflowClient, run_id: str) -> None:
            from mlflow.entities import Metric

            batch = [Metric(name, value, stamp, step) for name, value in points]
            client.log_batch(run_id, metrics=batch)

        self._do(write)

    def params(self, values: Mapping[str, Any]) -> None:
        """Write parameters; nested mappings become dotted names. A written one cannot change."""
        flat = list(flatten(values).items())

        def write(client: MlflowClient, run_id: str) -> None:
            from mlflow.entities import Param

            batch = [Param(name, value) for name, value in flat]
            for start in range(0, len(batch), ENTITIES_PER_BATCH):
                client.log_batch(run_id, params=batch[start : start + ENTITIES_PER_BATCH])

        self._do(write)

    def tags(self, values: Mapping[str, str]) -> None:
        """Write tags; a later value of a name replaces the earlier one."""
        tags = dict(values)
        self._do(lambda client, run_id: _set_tags(client, run_id, tags))

    def figure(self, figure: Figure, name: str) -> None:
        """Keep a matplotlib figure as ``name`` (a ``.png``), replacing one of that name."""
        self._do(lambda client, run_id: client.log_figure(run_id, figure, name))

    def table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Keep rows as ``name`` (a ``.json``), which MLflow's UI shows as a table.

        MLflow's own log_table appends to a table of that name; this replaces it, so that a stage
        that is taken up again does not double its rows. Missing and non-finite values become null.
        """
        text = table_json(rows)

        def write(client: MlflowClient, run_id: str) -> None:
            client.log_text(run_id, text, name)
            tag = client.get_run(run_id).data.tags.get("mlflow.loggedArtifacts", "[]")
            shown, entry = json.loads(tag), {"path": name, "type": "table"}
            if entry not in shown:
                client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*shown, entry]))

        self._do(write)

    def file(self, path: Path) -> None:
        """Keep a copy of a file under its own name."""
        self._do(lambda client, run_id: client.log_artifact(run_id, str(path)))

    def traces(self, made: Callable[[], Sequence[Trace]]) -> None:
        """Keep trajectories as traces of this run, with their rewards as feedback.

        ``made`` makes them when they can be written, so that what waits is small. A trace is found
        by its key: a replay adds none, and one that another run has made is linked to this run too.
        """
        self._do(lambda client, run_id: _write_traces(client, run_id, self._uri, made()))

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, after one more attempt at what waits."""
        end_time = round(time.time() * 1000)
        self._quiet_until = 0.0
        self._do(lambda client, run_id: client.set_terminated(run_id, status, end_time))
        if self._waiting:
            log.warning(
                "%d records of run '%s' are lost: the tracking store %s stayed away",
                len(self._waiting),
                self.name,
                self._uri,
            )

    def _do(self, write: Callable[[MlflowClient, str], object]) -> None:
        self._waiting.append(write)
        if time.monotonic() >= self._quiet_until:
            self._flush()

    def _flush(self) -> None:
        """Write what waits, oldest first, until the store does not take a record."""
        try:
            check_writable(self._uri)
            client, run_id = self._opened()
        except Exception as error:  # whatever it is, training goes on
            self._pause(error)
            return
        while self._waiting:
            try:
                self._waiting[0](client, run_id)
            except Exception as error:
                if _may_pass(error):
                    self._pause(error)
                    return
                log.warning("run '%s': a record was left out: %s", self.name, error)
            self._waiting.popleft()

    def _opened(self) -> tuple[MlflowClient, str]:
        if self._client is None:
            self._client = connect(self._uri)
        if self.id is None:
            self.id = self._open_run(self._client, _experiment(self._client, self._uri))
        return self._client, self.id

    def _pause(self, error: Exception) -> None:
        self._quiet_until = time.monotonic() + RETRY_AFTER
        log.warning(
            "run '%s': the tracking store %s cannot be written (%s); %d records wait",
            self.name,
            self._uri,
            error,
            len(self._waiting),
        )


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
    name = f"{recipe_name} {datetime.now():%Y-%m-%d %H:%M:%S}"
    labels = {"recipe": recipe_name} | _prefect_tag() | dict(tags or {})
    run = Run(name, lambda client, where: _create(client, where, name, labels))
    run.params(recipe.model_dump(mode="json"))
    with _environment(PIPELINE_RUN, run.id), _ending(run):
        yield run


@contextmanager
def stage(
    recipe_name: str, stage_name: str, key: str, tags: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """The run of one stage, under the pipeline of ``BEAMLINE_PIPELINE_RUN`` where that is set.

    ``key`` names the work (a digest). A run of the same key that is still RUNNING was left by a
    process that was killed: it is taken up again and moved under the current pipeline. It ends as a
    pipeline does.
    """
    name = f"{stage_name}@{recipe_name}"
    labels = {"recipe": recipe_name, "stage": stage_name, "beamline.key": key}
    labels |= _prefect_tag() | dict(tags or {})
    if parent := os.environ.get(PIPELINE_RUN):
        labels["mlflow.parentRunId"] = parent
    run = Run(name, lambda client, where: _take_up_or_create(client, where, name, labels))
    with _ending(run):
        yield run


def store_uri() -> str:
    """The address of the store: ``MLFLOW_TRACKING_URI``, or SQLite in the current directory."""
    here = f"sqlite:///{Path.cwd() / '.beamline' / 'mlflow.db'}"
    return os.environ.get("MLFLOW_TRACKING_URI") or here


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


def check_writable(uri: str) -> None:
    """Raise sqlite3.Error within LOCK_WAIT seconds if a SQLite store that exists takes no writes.

    MLflow itself would wait 20 s for a lock and 100 s for a file that is no database.
    """
    file = _sqlite_file(uri)
    if file is None or not file.exists():
        return
    with closing(sqlite3.connect(file, timeout=LOCK_WAIT, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _may_pass(error: Exception) -> bool:
    """Whether the same record may be written later; False where the record itself is at fault."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in REFUSALS
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def connect(uri: str) -> MlflowClient:
    # read while MLflow is imported; by its own limits an absent server holds up a run for minutes
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow.tracking import MlflowClient

    # where something else had imported MLflow already, it has not read the level
    logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"])
    file = _sqlite_file(uri)
    if file is not None and not file.exists():
        _make_store(file, MlflowClient)
    return MlflowClient(uri)


def _make_store(file: Path, connect: Callable[[str], object]) -> None:
    """Build an empty SQLite store under another name, then link it to ``file``.

    MLflow's migrations break when two processes run them at once, and when one is killed in them
    the store stays broken. Write-ahead logging lets the UI read while a run writes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".new-store-") as folder:
        built, store = Path(folder) / "built.db", Path(folder) / "store.db"
        connect(f"sqlite:///{built}")
        shutil.copy(built, store)  # MLflow keeps its connection to the first
        with closing(sqlite3.connect(store)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        with suppress(FileExistsError):  # another process was faster
            os.link(store, file)


def _experiment(client: MlflowClient, uri: str) -> str:
    if found := client.get_experiment_by_name(EXPERIMENT):
        return found.experiment_id
    file = _sqlite_file(uri)
    artifacts = None if file is None else (file.absolute().parent / "mlartifacts").as_uri()
    try:
        return client.create_experiment(EXPERIMENT, artifact_location=artifacts)
    except Exception:
        if found := client.get_experiment_by_name(EXPERIMENT):  # another process was faster
            return found.experiment_id
        raise


def _create(client: MlflowClient, experiment: str, name: str, tags: Mapping[str, str]) -> str:
    return client.create_run(experiment, run_name=name, tags=dict(tags)).info.run_id


def _take_up_or_create(
    client: MlflowClient, experiment: str, name: str, tags: Mapping[str, str]
) -> str:
    unfinished = f"tags.`beamline.key` = '{tags['beamline.key']}' and attributes.status = 'RUNNING'"
    found = client.search_runs([experiment], unfinished, max_results=1)
    if not found:
        return _create(client, experiment, name, tags)
    run_id = found[0].info.run_id
    _set_tags(client, run_id, tags)
    return run_id


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


def _write_traces(client: MlflowClient, run_id: str, uri: str, traces: Sequence[Trace]) -> None:
    """Write those of the traces that are not there yet.

    MLflow's own tracing hides what fails and draws random ids; the two calls below it report their
    faults, and with ids that follow from the trace's key each may be made twice. The spans of all
    come last, in one transaction (spans first would cost three times as much): a trace counts as
    there once it has spans, so one that a kill has left without is completed.
    """
    from mlflow.tracing.client import TracingClient

    experiment = client.get_run(run_id).info.experiment_id
    store = TracingClient(uri)
    for start in range(0, len(traces), ENTITIES_PER_BATCH):
        batch = traces[start : start + ENTITIES_PER_BATCH]
        there = _there(client, experiment, batch)
        client.link_traces_to_run([i for i, run in there.items() if run != run_id], run_id)
        missing = [trace for trace in batch if _trace_id(trace) not in there]
        for trace in missing:
            store.start_trace(_trace_info(trace, experiment, run_id))
        store.log_spans(experiment, [span for trace in missing for span in _stored_spans(trace)])


def _there(client: MlflowClient, experiment: str, traces: Sequence[Trace]) -> dict[str, str | None]:
    """The ids of the traces that have been written whole -> the run that wrote them."""
    keys = ", ".join(f"'{trace.key}'" for trace in traces)
    found = client.search_traces(
        locations=[experiment],
        filter_string=f"attributes.client_request_id IN ({keys}) AND {WITH_SPANS}",
        max_results=len(traces),
        include_spans=False,
    )
    return {
        entry.info.trace_id: entry.info.trace_metadata.get("mlflow.sourceRun") for entry in found
    }


def _trace_id(trace: Trace) -> str:
    return f"tr-{trace.key}"


def _trace_info(trace: Trace, experiment: str, run_id: str) -> TraceInfo:
    """What MLflow knows of a trace beside its spans: all that it is found by."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    whole = trace.spans[0]
    return TraceInfo(
        trace_id=_trace_id(trace),
        client_request_id=trace.key,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=trace.began,
        execution_duration=whole.end - whole.start,
        state=TraceState.OK if whole.sound else TraceState.ERROR,
        request_preview=trace.question,
        response_preview=trace.answer,
        trace_metadata={"mlflow.sourceRun": run_id},
        tags={**trace.tags, "mlflow.traceName": trace.name},
        assessments=_assessments(trace),
    )


def _assessments(trace: Trace) -> list[Assessment]:
    """Reward, success and outcome as feedback, the gold answer as expectation."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    source = AssessmentSource(source_type="CODE", source_id="tasks/reward.py")
    known: dict[str, Any] = {
        "source": source,
        "trace_id": _trace_id(trace),
        "create_time_ms": trace.began,
        "last_update_time_ms": trace.began,
    }
    entries: list[Assessment] = [
        Feedback(name, value, rationale=trace.reason, **known)
        for name, value in trace.feedback.items()
    ]
    if trace.accepted:
        forms = list(trace.accepted)
        entries.append(Expectation("answer", forms if forms[1:] else forms[0], **known))
    for entry in entries:  # an id of its own, or a second attempt would add it again
        entry.assessment_id = f"a-{_digits(trace.key, entry.name, 32)}"
    return entries


def _stored_spans(trace: Trace) -> list[StoredSpan]:
    """The spans in MLflow's own form, parents first."""
    from mlflow.entities import Span as StoredSpan

    whole = _digits(trace.key, "0", 16)
    return [
        StoredSpan.from_dict(_span_fields(trace, span, number, whole))
        for number, span in enumerate(trace.spans)
    ]


def _span_fields(trace: Trace, span: Span, number: int, whole: str) -> dict[str, Any]:
    """One span as MLflow writes it to JSON; ``whole`` is the id of the first one."""
    attributes = {
        "mlflow.traceRequestId": _trace_id(trace),
        "mlflow.spanType": span.kind,
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        "outcome": span.outcome,
        **span.attributes,
    }
    if span.kind == "CHAT_MODEL":
        read, wrote = span.attributes["tokens_read"], span.attributes["tokens"]
        usage = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
        attributes |= {"mlflow.chat.tokenUsage": usage, "mlflow.message.format": "openai"}
    return {
        "trace_id": _trace_id(trace),
        "span_id": _digits(trace.key, str(number), 16),
        "parent_span_id": whole if number else None,
        "name": span.name,
        "start_time_unix_nano": (trace.began + span.start) * 1_000_000,
        "end_time_unix_nano": (trace.began + span.end) * 1_000_000,
        "status": {"code": "OK"} if span.sound else {"code": "ERROR", "message": span.outcome},
        "attributes": {
            name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()
        },
        "events": [],
        "links": [],
    }


def _digits(key: str, name: str, count: int) -> str:
    """Hexadecimal digits that belong to a name below a key."""
    return hashlib.blake2b(f"{key}/{name}".encode(), digest_size=count // 2).hexdigest()


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
