"""The cold start: supervised fine-tuning of the first policy on the traces."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows import stage
from params import schema
from tasks import ledger, track
from tasks.cold_start import cold_start as fine_tune
from tasks.ledger import Step


@flow(name="cold_start")
def cold_start(recipe: str) -> None:
    """Make ``models/<recipe>/cold_start`` of ``models/<recipe>/initial``."""
    chosen = schema.load(recipe, Path("params"))
    initial = ledger.artifact(Path("models", recipe, "initial"))
    traces = ledger.artifact(Path("data", recipe, "traces.parquet"))
    key = ledger.stage_key(chosen, initial, traces)
    with track.stage(recipe, "cold_start", key, stage.run_tags()) as run:
        made = fine_tune(
            step=Step(recipe, "cold_start", 0, chosen.seed),
            policy=initial,
            traces=traces,
            settings=chosen.cold_start,
            machine=chosen.machine,
        )
        for point in made["curve"]:
            values = {name: value for name, value in point.items() if name != "step"}
            run.metrics(values, step=point["step"], at=made["finished"])
        ledger.publish(ledger.of(made, "policy"), Path("models", recipe, "cold_start"))


if __name__ == "__main__":
    stage.main(cold_start)
