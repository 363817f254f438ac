"""Report alarms of training: in the terminal, in MLflow, and as an artifact in Prefect."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from prefect.artifacts import create_markdown_artifact

from flows.tracking import prefect_events
from flows.tracking.alarms import Alarm, History
from flows.tracking.progress import Progress
from flows.tracking.run import Run
from tasks.trees.validation import Validated

log = logging.getLogger(__name__)


class StoppedError(RuntimeError):
    """Training has ended because of an alarm that the recipe names in ``reinforce.stop_on``."""


class AlarmWatch:
    """The history of a training run, whose alarms are reported where people look."""

    def __init__(self, recipe: str, stop_on: Sequence[str], questions: int) -> None:
        self.recipe, self.stop_on = recipe, stop_on
        self.history = History(questions)

    def look(
        self,
        metrics: Mapping[str, float],
        policies: Sequence[Validated],
        run: Run,
        progress: Progress,
        finished: float,
    ) -> None:
        """Add the metrics of an iteration, and report each alarm the first time that it is raised.

        ``policies``: those that were asked the validation questions in this iteration.

        ``finished``: when the iteration ended, in unix seconds. Raises StoppedError for an alarm
        that ends the run.
        """
        new_alarms, raised = self.history.add(metrics, policies), self.history.raised
        for alarm in new_alarms:
            progress.write(sentence(alarm))
            run.log_metrics({f"alarm/{alarm.name}": 1.0}, step=alarm.iteration, at=finished)
        if new_alarms:
            run.set_tags({"alarms": ", ".join(raised)})
            _show_in_prefect(self.recipe, list(raised.values()))
            for alarm in new_alarms:
                _emit(self.recipe, alarm, run.commit)
        for alarm in new_alarms:
            if alarm.name in self.stop_on:
                raise StoppedError(
                    f"{sentence(alarm)}. The run ends here, since reinforce.stop_on names "
                    f"{alarm.name}; without it, the same call goes on from this iteration"
                )


def sentence(alarm: Alarm) -> str:
    """Return an alarm as a line of text."""
    return f"alarm {alarm.name} in iteration {alarm.iteration}: {alarm.message}"


def _emit(recipe: str, alarm: Alarm, commit: str) -> None:
    """Tell Prefect's automations about an alarm."""
    payload = {
        "alarm": alarm.name,
        "iteration": alarm.iteration,
        "message": alarm.message,
        "commit": commit,
    }
    labels = {"beamline.alarm": alarm.name}
    prefect_events.emit(prefect_events.ALARM, recipe, labels, payload)


def _show_in_prefect(recipe: str, raised: Sequence[Alarm]) -> None:
    """Add the alarms to the flow run of this process; a fault of Prefect's server ends no run."""
    lines = ["| alarm | iteration | |", "|---|---:|---|"]
    lines += [f"| {alarm.name} | {alarm.iteration} | {alarm.message} |" for alarm in raised]
    key = f"alarms-{re.sub(r'[^a-z0-9-]+', '-', recipe.lower())}"
    try:
        create_markdown_artifact("\n".join(lines), key=key, description="alarms of the training")
    except Exception as error:  # whatever it is, training goes on
        if not getattr(error, "is_said", False):  # flows/workers/outages.py
            log.warning("Prefect's server did not take the alarms: %s", error)
