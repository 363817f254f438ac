"""Show a training that goes on: its page is written anew whenever a policy was validated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from flows.pages import page_file
from flows.tracking.alarms import Alarm
from tasks import collect
from tasks.training.inputs import collect_inputs
from tasks.training.iteration import Iteration
from tasks.training.setup import Training

NEWEST = 2  # iterations whose trees are in the page: it is written in a second

log = logging.getLogger(__name__)


def show(
    training: Training, iterations: Sequence[Iteration], alarms: Sequence[Alarm]
) -> Path | None:
    """Write the page of the iterations so far and return it; None where that fails."""
    try:
        inputs = collect_inputs(training, iterations)
        older = len(iterations) - NEWEST
        tables = [one if number >= older else {} for number, one in enumerate(inputs.tables)]
        curve = collect.curve_of(inputs, training.start.seed)
        return page_file.write_live(
            training.start.recipe,
            training.recipe,
            collect.joined(tables),
            {str(name): [*map(_value, curve[name])] for name in curve},
            alarms,
        )
    except Exception as error:  # whatever it is, training goes on
        log.warning("the page of the training was not written: %s: %s", type(error).__name__, error)
        return None


def _value(value: float) -> float | None:
    return None if pd.isna(value) else float(value)
