"""Questions, SFT traces and the first policy: generated or read, and checked."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows import stage
from params import schema
from tasks import ledger, track
from tasks.ledger import Step
from tasks.prepare import prepare as prepare_data
from tasks.prepare import user_files
from tasks.toolbox import open_tools


@flow(name="prepare")
def prepare(recipe: str) -> None:
    """Fill ``data/<recipe>/questions``, ``traces.parquet`` and ``models/<recipe>/initial``."""
    chosen = schema.load(recipe, Path("params"))
    step = Step(recipe, "prepare", 0, chosen.seed)
    with (
        track.stage(recipe, "prepare", ledger.stage_key(chosen), stage.run_tags()) as run,
        open_tools(chosen) as tools,
    ):
        made = prepare_data(
            step=step,
            settings=chosen.prepare,
            sources=user_files(chosen.prepare),
            dialogue=chosen.dialogue,
            machine=chosen.machine,
            limits=chosen.python,
            tools=tools,
        )
        run.metrics(made["metrics"], step=0, at=made["finished"])
        data, models = Path("data", recipe), Path("models", recipe)
        ledger.publish(ledger.of(made, "questions"), data / "questions")
        ledger.publish(ledger.of(made, "traces"), data / "traces.parquet")
        ledger.publish(ledger.of(made, "gates"), data / "gates" / "prepare")
        ledger.publish(ledger.of(made, "initial"), models / "initial")


if __name__ == "__main__":
    stage.main(prepare)
