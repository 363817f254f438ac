"""Report on the check of a policy: one line in the terminal, its differences in MLflow, a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from flows.tracking.run import Run
from tasks.check_policy import PolicyCheckError
from tasks.ledger.artifacts import Record


def reported(run: Run, check: Callable[[], Record]) -> Record:
    """Return the record of a check, printed and logged; differences beyond a tolerance are logged.

    Raises PolicyCheckError as the check does.
    """
    try:
        record = check()
    except PolicyCheckError as error:
        run.log_metrics(error.metrics, step=0, at=time.time())
        raise
    print(record["line"], flush=True)
    run.log_metrics(record["metrics"], step=0, at=record["finished"])
    run.set_tags({"policy_check": record["line"]})
    return record


def write(record: Record, file: Path) -> None:
    """Write the line of a check, for the page of a run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"line": record["line"]}) + "\n")
