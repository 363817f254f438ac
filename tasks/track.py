"""The only module that knows MLflow: one run a pipeline, a nested run a stage.

The store is ``.beamline/mlflow.db`` (SQLite) under the current directory, unless
``MLFLOW_TRACKING_URI`` names another; the artifacts of a SQLite store lie beside it in
``mlartifacts``. Tracking never ends a training run: what cannot be written waits in
``.beamline/untracked`` (tasks/spool.py), and a warning says so once. It is delivered when the store
is back: at a later call of the same run, at its end, or by the next run or ``make doctor``. What is
delivered twice is there once: metrics have the times of their records, traces and runs are looked
for before they are written, everything else replaces itself.

MLflow is imported when the first run opens (about a second), not with this module.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import ssl
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from params.schema import Recipe
from tasks import processes, spool
from tasks.spool import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Assessment, TraceInfo
    from mlflow.entities import Span as StoredSpan
    from mlflow.tracking import MlflowClient

    from tasks.spans import Span, Trace

EXPERIMENT = "beamline"
PIPELINE_RUN = "BEAMLINE_PIPELINE_RUN"  # environment variable: the parent of the stages' runs
UNTRACKED = "untracked:"  # begins its value where the store has not taken that run yet
NAME_TAG, PARENT_TAG = "beamline.run", "beamline.parent"  # names that hold without the store
PARENT_RUN, KEY_TAG = "mlflow.parentRunId", "beamline.key"
COMMIT, DIGEST = "beamline.commit", "beamline.digest"  # tags of a registered model's version
WITH_SPANS = "tags.`mlflow.trace.spansLocation` = 'TRACKING_STORE'"  # true once it has spans
LOCK_WAIT = 2.0  # seconds that one attempt waits for a locked SQLite store; MLflow itself waits 20
RETRY_AFTER = 30.0  # seconds without an attempt after one that failed
REFUSALS = ("INVALID_PARAMETER_VALUE", "NOT_IMPLEMENTED", "ENDPOINT_NOT_FOUND")  # not to be retried
ENTITIES_PER_BATCH = 100  # MLflow's limit for parameters, tags, and traces that a run links to

log = logging.getLogger(__name__)


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

    def _open(self, about: dict[str, Any], held: spool.Spool | None = None) -> None:
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
                len(spool.entries(self._spool.folder)),
                self.name,
                _shown(spool.root()),
                self._uri,
            )
            spool.close(self._spool)

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
            self._spool = self._spool or spool.create(
                self._about | {"id": self.id}, self._about["tags"][NAME_TAG]
            )
            spool.add(self._spool, record)
        except OSError as error:  # a full disk
            self._leave_out(error)
            return
        self.flush()

    def flush(self) -> int:
        """Write what waits, oldest first, until the store does not take a record; how many."""
        told = 0
        for entry in spool.entries(self._spool.folder) if self._spool else []:
            if not self._write(spool.read(entry)):
                return told
            entry.unlink()
            told += 1
        if self._spool and self._reached():
            spool.remove(self._spool)
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
            _disconnect(self._client)
            self._client = None
        if not self._away:
            log.warning(
                "run '%s': the tracking store %s cannot be written (%s); what the run has to say "
                "waits in %s",
                self.name,
                self._uri,
                error,
                _shown(spool.root()),
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
    for folder in spool.waiting():
        with spool.held(folder) as held:
            about = spool.about(folder) if held else {}
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


def abandoned() -> list[tuple[str, str]]:
    """Ids and names of the runs in the store that are RUNNING though their process is gone.

    Raises OSError or sqlite3.Error where the store is away.
    """
    client = _client_of_store()
    experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
    if client is None or experiment is None:
        return []
    found = client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
    return [
        (run.info.run_id, str(run.info.run_name))
        for run in found
        if processes.is_gone(run.data.tags)
    ]


def end_abandoned(run_id: str) -> None:
    """Mark a run as KILLED, unless a living process has taken it up."""
    if run_id in dict(abandoned()) and (client := _client_of_store()):
        client.set_terminated(run_id, "KILLED")


def runs_tagged(tag: str, value: str) -> list[dict[str, str]]:
    """The tags of the runs whose ``tag`` is ``value``, the oldest run first.

    With them go its ``id`` and ``name``. Raises ConnectionError where the store cannot be read.
    """
    with _reading() as client:
        experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
        if client is None or experiment is None:
            return []
        wanted, order = f"tags.`{tag}` = '{value}'", ["attributes.start_time ASC"]
        found = client.search_runs([experiment.experiment_id], wanted, order_by=order)
        return [
            {**run.data.tags, "id": run.info.run_id, "name": str(run.info.run_name)}
            for run in found
        ]


def version_tags(model: str, which: str) -> dict[str, str] | None:
    """The tags of a registered model's version, with its ``version``; None where there is none.

    ``which``: the version's number or an alias. Raises ConnectionError where the store cannot be
    read.
    """
    with _reading() as client:
        held = list(client.search_model_versions(f"name = '{model}'")) if client else []
        aliases = client.get_registered_model(model).aliases if client and held else {}
    number = str(aliases.get(which, which))
    return next(({**v.tags, "version": number} for v in held if str(v.version) == number), None)


@contextmanager
def _reading() -> Iterator[MlflowClient | None]:
    try:
        yield _client_of_store()
    except Exception as error:
        from mlflow.exceptions import MlflowException  # `connect` settles how it is imported

        if not isinstance(error, MlflowException | OSError | sqlite3.Error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise ConnectionError(f"the store {store_uri()} cannot be read ({said})") from error


def _client_of_store() -> MlflowClient | None:
    """A client of the store, if there is one; none is made."""
    file = _sqlite_file(store_uri())
    if file is not None and not file.exists():
        return None
    check_reachable(store_uri(), away=True)
    return connect(store_uri())


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


def check_reachable(uri: str, known: bool = False, away: bool = False) -> None:
    """Raise OSError or sqlite3.Error within LOCK_WAIT seconds where a store takes no writes.

    MLflow itself would wait 20 s for a lock and 100 s for a file that is no database. ``known``: a
    SQLite store has been there, so that its file must be; ``away``: a server did not answer before,
    and is asked whether it does.
    """
    file = _sqlite_file(uri)
    if file is None and away:
        _ask(uri)
    if file is None or not (known or file.exists()):
        return
    address = f"file:{quote(str(file))}?mode=rw"  # does not make it
    with closing(sqlite3.connect(address, LOCK_WAIT, isolation_level=None, uri=True)) as store:
        store.execute("BEGIN IMMEDIATE")
        store.execute("ROLLBACK")


def _ask(uri: str) -> None:
    """Raise OSError unless an HTTP server answers, whatever it says."""
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=LOCK_WAIT).close()
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # MLflow may know its certificate
            raise
    except ValueError:  # no address of HTTP
        return


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


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
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a run says it in a line
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


def _disconnect(client: MlflowClient) -> None:
    """Close the connections to a SQLite store: its file may be another one when it is back."""
    engine = getattr(client._tracking_client.store, "engine", None)
    if engine is not None:
        engine.dispose()


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
    experiment = _experiment(client, uri)
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


def _write_traces(client: MlflowClient, run_id: str, uri: str, record: Record) -> None:
    """Write those of the traces that are not there yet.

    MLflow's own tracing hides what fails and draws random ids; the two calls below it report their
    faults, and with ids that follow from the trace's key each may be made twice. The spans of all
    come last, in one transaction (spans first would cost three times as much): a trace counts as
    there once it has spans, so one that a kill has left without is completed.
    """
    from mlflow.tracing.client import TracingClient

    traces = [_as_trace(fields) for fields in record.said["traces"]]
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


def _as_trace(fields: Mapping[str, Any]) -> Trace:
    """A trace as ``asdict`` or JSON gives it back."""
    from tasks.spans import Span, Trace  # and numpy with it, which a call that does nothing spares

    trace = Trace(**fields)
    parts = tuple(Span(**part) for part in fields["spans"])
    return replace(trace, spans=parts, accepted=tuple(trace.accepted))


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


WRITERS: dict[str, Callable[[MlflowClient, str, str, Record], None]] = {
    "metrics": _write_metrics,
    "params": _write_params,
    "tags": _write_tags,
    "file": _write_file,
    "table": _write_table,
    "traces": _write_traces,
    "end": _write_end,
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
