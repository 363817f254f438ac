"""Runs in MLflow: one for a pipeline and a nested one for each stage.

A run logs metrics, parameters, tables, figures and traces. Messages that the store cannot take now
are queued in an outbox (flows/tracking/outbox.py), and a later run sends them. A fault of tracking
never ends a stage.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.host import processes
from flows.host.addresses import address_without_password, without_password
from flows.host.plain_reasons import plain_reason
from flows.tracking import outbox
from flows.tracking.mlflow_writes import WRITERS, can_retry, has_run, open_run
from flows.tracking.outbox import OutboxMessage, RunOutbox
from flows.tracking.store import (
    KEY_TAG,
    KIND_TAG,
    NAME_TAG,
    PARENT_RUN,
    PARENT_TAG,
    PIPELINE,
    check_reachable,
    connect,
    disconnect,
    full_uri,
    store_uri,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.tracking import MlflowClient

    from flows.tracking.traces import MlflowTrace

PIPELINE_RUN = "BEAMLINE_PIPELINE_RUN"  # environment variable: the parent of the stages' runs
UNSENT = "unsent:"  # begins its value where the store does not have that run yet
COMMIT_TAG = "mlflow.source.git.commit"  # which MLflow's UI shows as the run's version
OUTS = (
    "outs.json"  # artifact of a pipeline's run: DVC's digest of each out; before, tags dvc.<path>
)
COMMIT, DIGEST = "beamline.commit", "beamline.digest"  # tags of a registered model's version
TIME = "%Y-%m-%d %H:%M:%S"  # in the name of a run with nothing special
RETRY_AFTER = 30.0  # seconds without an attempt after one that failed

log = logging.getLogger(__name__)


class Run:
    """A run in the store. Every call is sent at once, or queued while the store is unreachable."""

    def __init__(self, description: dict[str, Any], held: RunOutbox | None = None) -> None:
        """Describe a run by its name, tags, store ("uri") and id; ``held`` has its messages.

        The description is kept in files, so its address has no password.
        """
        self.name: str = description["name"]
        self.id: str | None = description["id"]  # None until the store has the run
        self._description = description
        self._uri: str = full_uri(description["uri"])
        self._client: MlflowClient | None = None
        self._outbox = held
        self._unreachable = held is not None
        self._retry_at = 0.0  # on the monotonic clock

    @property
    def handle(self) -> str:
        """The run's id, or a name that stands for it until it has one; for PIPELINE_RUN."""
        return self.id or UNSENT + self._description["tags"][NAME_TAG]

    @property
    def commit(self) -> str:
        """The commit of the code that the run is made with; "" where it is not known."""
        return str(self._description["tags"].get(COMMIT_TAG, ""))

    @property
    def is_queued(self) -> bool:
        """Whether messages of the run are unsent."""
        return self._outbox is not None

    def log_metrics(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Log one value a name at ``step``; ``at`` is the record's own time, in unix seconds.

        A replay with the same step, time and values adds nothing, so ``at`` comes from the record
        and not from the clock. Names follow ``metric_name``.
        """
        points = {metric_name(name): float(value) for name, value in values.items()}
        self._log("metrics", values=points, step=step, timestamp=round(at * 1000))

    def log_curves(
        self, curves: Mapping[str, Sequence[float]], steps: Sequence[int], at: float
    ) -> None:
        """Log whole curves at once: name -> a value for each of ``steps``; NaN is left out."""
        points = [
            (metric_name(name), float(value), step)
            for name, values in curves.items()
            for step, value in zip(steps, values, strict=True)
            if not math.isnan(value)
        ]
        self._log("curves", points=points, timestamp=round(at * 1000))

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log parameters; nested mappings become dotted names. A logged one cannot change."""
        self._log("params", values=flatten(values))

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set tags; a later value of a name replaces the earlier one."""
        self._log("tags", values=dict(values))

    def log_datasets(self, datasets: Sequence[Mapping[str, str]]) -> None:
        """Log what the run has read: name, digest, source (a path) and context of each dataset."""
        self._log("datasets", datasets=[dict(entry) for entry in datasets])

    def log_figure(self, figure: Figure, name: str) -> None:
        """Keep a matplotlib figure as ``name`` (a ``.png``), replacing one of that name."""

        def draw() -> OutboxMessage:
            picture = io.BytesIO()
            figure.savefig(picture, format="png")
            return OutboxMessage("file", {"name": name}, picture.getvalue())

        self._send_or_queue(draw)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Keep rows as ``name`` (a ``.json``), which MLflow's UI shows as a table.

        MLflow's own log_table appends to a table of that name; this replaces it, so that a stage
        that is resumed does not double its rows. Missing and non-finite values become null.
        """
        self._log("table", text=table_json(rows), name=name)

    def log_text(self, text: str, name: str) -> None:
        """Keep a text as the file ``name``, replacing one of that name."""
        self._send_or_queue(lambda: OutboxMessage("file", {"name": name}, text.encode()))

    def log_file(self, path: Path) -> None:
        """Keep a copy of a file under its own name."""
        self._send_or_queue(lambda: OutboxMessage("file", {"name": path.name}, path.read_bytes()))

    def log_traces(self, make: Callable[[], Sequence[MlflowTrace]]) -> None:
        """Keep trajectories as traces of this run, with their rewards as feedback.

        A trace is found by its key: a replay adds none, and one that another run has made is linked
        to this run too. Where ``make`` fails, the run goes on without them.
        """
        self._send_or_queue(
            lambda: OutboxMessage("traces", {"traces": [asdict(trace) for trace in make()]})
        )

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, after one more attempt to send its queue."""
        self._retry_at = 0.0
        self._log("end", status=status, end_time=round(time.time() * 1000))
        if self._outbox:
            log.warning(
                "run '%s': %d messages are unsent, queued in %s for the tracking store %s: the "
                "next run, or make doctor, sends them",
                self.name,
                len(self._outbox.files()),
                _relative(outbox.root()),
                self._description["uri"],
            )
            self._outbox.close()

    def send_queue(self) -> int:
        """Send queued messages, oldest first, until the store refuses one; return how many."""
        sent = 0
        for file in self._outbox.files() if self._outbox else []:
            if not self._send(outbox.read(file)):
                return sent
            file.unlink()
            sent += 1
        if self._outbox and self.reach():
            self._outbox.remove()
            self._outbox, self._unreachable = None, False
            log.warning(
                "run '%s': the tracking store answers again and has every queued message", self.name
            )
        return sent

    def reach(self) -> bool:
        """Connect to the store and open the run there; return whether that succeeded.

        There is no attempt for RETRY_AFTER seconds after one that failed.
        """
        if time.monotonic() < self._retry_at:
            return False
        try:
            # each stage is a process, and MLflow would wait 20 s in each for a server that hangs
            first = self._client is None
            check_reachable(self._uri, self.id is not None, self._unreachable or first)
            self._client = self._client or connect(self._uri)
            if self.id is None or (self._unreachable and not has_run(self._client, self.id)):
                tags = self._description["tags"]
                self.id = open_run(self._client, self._uri, self.name, tags)
        except Exception as error:  # whatever it is, training goes on
            self._pause(error)
            return False
        return True

    def _log(self, kind: str, **fields: Any) -> None:
        self._send_or_queue(lambda: OutboxMessage(kind, fields))

    def _send_or_queue(self, make: Callable[[], OutboxMessage]) -> None:
        """Send a message, or queue it behind those that are unsent."""
        try:
            message = make()
        except Exception as error:  # whatever it is, training goes on
            self._drop(error)
            return
        if self._outbox is None and self._send(message):
            return
        try:
            if self._outbox is None:
                key = self._description["tags"][NAME_TAG]
                self._outbox = outbox.create(self._description | {"id": self.id}, key)
            self._outbox.add(message)
        except OSError as error:  # a full disk
            self._drop(error)
            return
        self.send_queue()

    def _send(self, message: OutboxMessage) -> bool:
        """Return whether a message is done with: sent, or dropped because it is itself at fault."""
        if not self.reach():
            return False
        assert self._client and self.id
        try:
            WRITERS[message.kind](self._client, self.id, self._uri, message)
        except Exception as error:
            if can_retry(error):
                self._pause(error)
                return False
            self._drop(error)
        return True

    def _pause(self, error: Exception) -> None:
        """Disconnect, and make no attempt for RETRY_AFTER seconds."""
        self._retry_at = time.monotonic() + RETRY_AFTER
        if self._client is not None:
            disconnect(self._client)
            self._client = None
        if not self._unreachable:
            log.warning(
                "run '%s': the tracking store %s cannot be written (%s); messages are queued in %s",
                self.name,
                self._description["uri"],
                plain_reason(error),
                _relative(outbox.root()),
            )
        self._unreachable = True

    def _drop(self, error: Exception) -> None:
        log.warning("run '%s': a message was dropped: %s", self.name, without_password(str(error)))


def start_run(name: str, tags: Mapping[str, str], parent: str | None = None) -> Run:
    """Open a run; with the tag ``beamline.key``, resume the unfinished one of that key, if any.

    ``parent`` is the id of the run it belongs under or, after UNSENT, that run's name tag.
    """
    labels = dict(tags) | processes.identity() | {NAME_TAG: uuid.uuid4().hex}
    if parent:
        unsent = parent.startswith(UNSENT)
        labels[PARENT_TAG if unsent else PARENT_RUN] = parent.removeprefix(UNSENT)
    run = Run(
        {"name": name, "tags": labels, "uri": address_without_password(store_uri()), "id": None}
    )
    run.reach()
    return run


def send_unsent() -> int:
    """Send what earlier runs queued; return how many messages the stores accepted.

    Messages that a living run holds, and those that a store still refuses, stay queued. Costs
    nothing where nothing is queued.
    """
    sent, unreachable = 0, set()
    for folder in outbox.unsent_runs():
        with outbox.hold(folder) as held:
            description = held.run() if held else {}
            if held is None or description["uri"] in unreachable:
                continue
            run = Run(description, held)
            sent += run.send_queue()
            if run.is_queued:
                unreachable.add(description["uri"])
    return sent


@contextmanager
def pipeline_run(
    recipe_name: str,
    parameters: Mapping[str, Any],
    tags: Mapping[str, str] | None = None,
    name: str = "",
) -> Iterator[Run]:
    """Open the run of a whole pipeline, with its parameters; its name is ``name`` or has the time.

    While it is open, ``BEAMLINE_PIPELINE_RUN`` names to this process and its children the run that
    the stages belong under. It ends FINISHED, FAILED on an Exception, KILLED on any other exit
    (KeyboardInterrupt, SystemExit from a signal handler). MLflow's UI shows the tag
    ``mlflow.source.git.commit`` as the run's version.
    """
    send_unsent()
    labels = {"recipe": recipe_name, KIND_TAG: PIPELINE} | _prefect_tag() | dict(tags or {})
    run = start_run(name or f"{recipe_name} {datetime.now():{TIME}}", labels)
    run.log_params(parameters)
    with _environment(PIPELINE_RUN, run.handle), _ending(run):
        yield run


@contextmanager
def stage_run(
    recipe_name: str, stage_name: str, key: str, tags: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """Open the run of one stage, under the pipeline of ``BEAMLINE_PIPELINE_RUN`` if that is set.

    ``key`` identifies the work (a digest). A run of the same key that is still RUNNING, and whose
    process is not known to live, was left by a killed one: it is resumed, under the current
    pipeline. It ends as a pipeline's run does.
    """
    send_unsent()
    labels = {"recipe": recipe_name, "stage": stage_name, KEY_TAG: key}
    labels |= _prefect_tag() | dict(tags or {})
    run = start_run(f"{stage_name}@{recipe_name}", labels, os.environ.get(PIPELINE_RUN))
    with _ending(run):
        yield run


def metric_name(name: str) -> str:
    """Return ``name`` as MLflow accepts it: "@" becomes "_at_" (pass_at_1), other signs "_"."""
    return re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as dotted names; strings stay, other values are written as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def table_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows in the "split" form of MLflow's tables; columns in order of first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    data = [[_finite(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, default=str)


def _relative(path: Path) -> Path:
    """Return a path below the current folder as a relative one."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _prefect_tag() -> dict[str, str]:
    """Return a tag with the flow run of a Prefect worker's process, if this is one."""
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
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
