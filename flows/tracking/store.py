"""The MLflow store: find it, check that it answers, connect, and read what runs left in it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from flows.host import empty_databases, processes
from flows.host.addresses import address_without_password, without_password
from flows.host.plain_reasons import plain_reason
from params.schema.addresses import is_loopback

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

EXPERIMENT = "beamline"
NAME_TAG, PARENT_TAG = "beamline.run", "beamline.parent"  # names that hold without the store
PARENT_RUN, KEY_TAG = "mlflow.parentRunId", "beamline.key"
KIND_TAG, PIPELINE = "beamline.kind", "pipeline"  # of the runs of whole pipelines
WHOLE_RUNS = f"tags.`{KIND_TAG}` = '{PIPELINE}'"
TRAINING_MODE = "workflowType=machine_learning"  # of MLflow's UI, whose switch begins as "GenAI"
# UIs of MLflow that have a switch for their mode begin with that of the switch instead
EXPERIMENT_KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
NOT_CHOSEN = ("", "no_inferred_type")  # kinds that nobody has chosen, beside those MLflow infers
INFERRED = "_inferred"  # ends those
VIEW = "beamline"  # the id of the view of whole runs
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
WIDTHS = {  # pixels of its columns, in their order, by the ids of MLflow's UI
    "attributes.`Run Name`": 310,
    "runDateAndNestInfo": 130,
    "metrics.`success/cold_start`": 125,
    "metrics.`success/trained`": 115,
    "tags.`verdict`": 270,
    "duration": 80,
    "params.`seed`": 60,
    "params.`reinforce.algorithm`": 140,
}
LOCK_WAIT = 2.0  # seconds that one attempt waits for a locked SQLite store; MLflow itself waits 20


def abandoned() -> list[tuple[str, str]]:
    """Return ids and names of the runs that are RUNNING in the store and whose process is gone.

    Raises OSError or sqlite3.Error where the store is unreachable.
    """
    client = _client_of_store()
    experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
    if client is None or experiment is None:
        return []
    runs = client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
    return [
        (run.info.run_id, str(run.info.run_name))
        for run in runs
        if processes.is_gone(run.data.tags)
    ]


def end_abandoned(run_id: str) -> None:
    """Mark a run as KILLED, unless a living process has resumed it."""
    if run_id in dict(abandoned()) and (client := _client_of_store()):
        client.set_terminated(run_id, "KILLED")


def runs_tagged(tag: str, value: str) -> list[dict[str, str]]:
    """Return the tags of the runs whose ``tag`` is ``value``, the oldest run first.

    The run's ``id`` and ``name`` are added to them. Raises ConnectionError where the store cannot
    be read.
    """
    with _reading() as client:
        experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
        if client is None or experiment is None:
            return []
        filter_string, order = f"tags.`{tag}` = '{value}'", ["attributes.start_time ASC"]
        runs = client.search_runs([experiment.experiment_id], filter_string, order_by=order)
        return [
            {**run.data.tags, "id": run.info.run_id, "name": str(run.info.run_name)} for run in runs
        ]


def artifact_of(run: str, name: str) -> bytes | None:
    """Return a file that a run has kept; None where it has none, or there is no such run.

    Raises ConnectionError where the store cannot be read.
    """
    with _reading() as client, tempfile.TemporaryDirectory() as folder:
        experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
        if client is None or experiment is None:
            return None
        known = client.search_runs([experiment.experiment_id], f"attributes.run_id = '{run}'")
        if not known or name not in {file.path for file in client.list_artifacts(run)}:
            return None
        return Path(client.download_artifacts(run, name, folder)).read_bytes()


def page_of(address: str, run: str | None = None) -> str | None:
    """Return the page of a run, or of all pipelines' runs, in the MLflow UI at ``address``.

    None where the store has no such run or cannot be read.
    """
    try:
        with _reading() as client:
            experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
            if client is None or experiment is None:
                return None
            base = f"{address}/#/experiments/{experiment.experiment_id}/runs"
            if run is None:
                return f"{base}?{_whole_runs(experiment)}&{TRAINING_MODE}"
            return f"{base}/{client.get_run(run).info.run_id}?{TRAINING_MODE}"
    except Exception:  # a link is a convenience
        return None


def _whole_runs(experiment: Experiment) -> str:
    """Return the options of a link to the list of pipelines' runs."""
    if VIEW_TAG in experiment.tags:
        return f"viewStateShareKey={VIEW}"
    search_filter = quote(WHOLE_RUNS)
    return f"searchFilter={search_filter}&orderByKey=attributes.start_time"


def last_pipeline(recipe: str) -> tuple[str, dict[str, str]] | None:
    """Return name and parameters of the newest run of a recipe's pipeline; None without one.

    Raises ConnectionError where the store cannot be read.
    """
    with _reading() as client:
        experiment = client.get_experiment_by_name(EXPERIMENT) if client else None
        if client is None or experiment is None:
            return None
        found = client.search_runs(
            [experiment.experiment_id],
            f"{WHOLE_RUNS} and tags.recipe = '{recipe}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
    return (str(found[0].info.run_name), dict(found[0].data.params)) if found else None


def artifact_text(run: str, name: str) -> str | None:
    """Return the text of a run's artifact; None where the run has no such artifact.

    Raises ConnectionError where the store cannot be read.
    """
    try:
        content = artifact_of(run, name)
    except ConnectionError:
        raise
    except Exception as error:  # of whatever library keeps the files
        raise OSError(plain_reason(error)) from error
    return None if content is None else content.decode()


def version_tags(model: str, which: str) -> dict[str, str] | None:
    """Return the tags of a registered model's version and its ``version``; None without one.

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
        from mlflow.exceptions import (
            MlflowException,  # after `connect`, which sets how it is imported
        )

        if not isinstance(error, MlflowException | OSError | sqlite3.Error):
            raise
        message = f"the store {store_uri()} cannot be read ({plain_reason(error)})"
        raise ConnectionError(without_password(message)) from error


def _client_of_store() -> MlflowClient | None:
    """Return a client of the store, or None where there is no store yet."""
    file = _sqlite_file(store_uri())
    if file is not None and not file.exists():
        return None
    check_reachable(store_uri(), unreachable=True)
    return connect(store_uri())


def store_uri(seen_from: Path | None = None) -> str:
    """Return the store's address: ``MLFLOW_TRACKING_URI``, or SQLite in the current directory.

    ``seen_from``: the working folder of the process that it is for, by default this one's.
    """
    file = Path.cwd() / ".beamline" / "mlflow.db"
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(file, seen_from)


def sqlite_uri(file: Path, seen_from: Path | None = None) -> str:
    """Return the address of a SQLite store.

    SQLAlchemy takes what follows a question mark for options, and knows no way to quote one, so a
    path with one is given as seen from the working folder of the process that opens it.
    """
    path = os.path.relpath(file, seen_from or Path.cwd()) if "?" in str(file) else file
    return f"sqlite:///{path}"


def full_uri(shown: str) -> str:
    """Return a store's address with its password, where the configured store is the same place."""
    configured = store_uri()
    return configured if address_without_password(configured) == shown else shown


def check_reachable(uri: str, known: bool = False, unreachable: bool = False) -> None:
    """Raise OSError or sqlite3.Error within LOCK_WAIT seconds where a store takes no writes.

    MLflow itself would wait 20 s for a lock and 100 s for a file that is no database. ``known``:
    the file of a SQLite store existed before, so that it must exist. ``unreachable``: a server did
    not answer before, so that its health is checked.
    """
    file = _sqlite_file(uri)
    if file is None and unreachable:
        _check_health(uri)
    if file is None or not (known or file.exists()):
        return
    address = f"file:{quote(str(file))}?mode=rw"  # does not create it
    with closing(sqlite3.connect(address, LOCK_WAIT, isolation_level=None, uri=True)) as store:
        store.execute("BEGIN IMMEDIATE")
        store.execute("ROLLBACK")


def _check_health(uri: str) -> None:
    """Raise OSError unless an HTTP server answers, with whatever status."""
    try:
        address = address_without_password(uri).rstrip(
            "/"
        )  # urllib takes a user for a part of the host
        # urllib does not know ::1 in NO_PROXY
        direct = [urllib.request.ProxyHandler({})] if is_loopback(address) else []
        opener = urllib.request.build_opener(*direct)
        opener.open(f"{address}/health", timeout=LOCK_WAIT).close()
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # MLflow may know its certificate
            raise
    except ValueError:  # not an HTTP address
        return


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def connect(uri: str) -> MlflowClient:
    """Return a client of the store at ``uri``; a missing SQLite store is made first."""
    # read while MLflow is imported; its own limits would let a dead server block for minutes
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow.tracking import MlflowClient

    # for an MLflow that something else imported before the level was set
    logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"])
    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # a run logs the same in one line
    file = _sqlite_file(uri)
    if file is not None and not file.exists():
        _make_store(file, MlflowClient)
    return MlflowClient(uri)


def _make_store(file: Path, connect: Callable[[str], object]) -> None:
    """Build an empty SQLite store under another name, then link it to ``file``.

    MLflow's migrations fail when two processes run them at once, and a process that is killed in
    them leaves a broken store. Write-ahead logging lets the UI read while a run writes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".new-store-") as folder:
        built, store = Path(folder) / "built.db", Path(folder) / "store.db"
        if not empty_databases.take("mlflow", store):
            connect(sqlite_uri(built))
            shutil.copy(built, store)  # MLflow keeps its connection to the first
            with closing(sqlite3.connect(store)) as connection, connection:
                connection.execute("DELETE FROM experiments")  # "Default" names this folder
            empty_databases.keep("mlflow", store)
        with closing(sqlite3.connect(store)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        with suppress(FileExistsError):  # another process was faster
            os.link(store, file)


def experiment_id(client: MlflowClient, uri: str) -> str:
    """Return the id of the project's experiment; make it where it is missing.

    It is of the kind whose page begins with runs, unless somebody has chosen another one.
    """
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return _make_experiment(client, uri)
    kind = experiment.tags.get(EXPERIMENT_KIND, "")
    if kind in NOT_CHOSEN or kind.endswith(INFERRED):
        for name, value in experiment_tags().items():
            client.set_experiment_tag(experiment.experiment_id, name, value)
    return str(experiment.experiment_id)


def _make_experiment(client: MlflowClient, uri: str) -> str:
    file = _sqlite_file(uri)
    artifacts = None if file is None else (file.absolute().parent / "mlartifacts").as_uri()
    try:
        return str(client.create_experiment(EXPERIMENT, artifacts, tags=experiment_tags()))
    except Exception:
        if experiment := client.get_experiment_by_name(EXPERIMENT):  # another process was faster
            return str(experiment.experiment_id)
        raise


def experiment_tags() -> dict[str, str]:
    """Return the tags of the experiment: its kind, and a view of whole runs with their results.

    MLflow knows no columns of an experiment; a view, which its UI saves as such a tag, has some.
    """
    state = {
        "searchFilter": WHOLE_RUNS,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": [column for column in WIDTHS if "`" in column],
        "columnOrder": list(WIDTHS),
        "columnWidths": WIDTHS,
    }
    now = round(time.time() * 1000)
    view = {"name": "Whole runs", "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
    return {EXPERIMENT_KIND: MODEL_TRAINING, VIEW_TAG: json.dumps(view)}


def disconnect(client: MlflowClient) -> None:
    """Close the connections to a SQLite store, whose file may be replaced before the next one."""
    engine = getattr(client._tracking_client.store, "engine", None)
    if engine is not None:
        engine.dispose()
