"""Questions, a corpus, SFT traces and the first policy: generated or read, and checked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prefect import flow

from flows import stage
from params import schema
from tasks import ledger, track
from tasks.ledger import Step
from tasks.prepare import prepare as prepare_data
from tasks.prepare import source_files
from tasks.toolbox import open_tools


@flow(name="prepare")
def prepare(recipe: str) -> None:
    """Fill ``data/<recipe>`` (questions, corpus, traces) and ``models/<recipe>/initial``."""
    chosen = schema.load(recipe, Path("params"))
    sets = schema.named_sets(chosen, Path("params"))
    sources = source_files(chosen.prepare, chosen.search, sets)
    step = Step(recipe, "prepare", 0, chosen.seed)
    with track.stage(
        recipe, "prepare", ledger.stage_key(chosen, *sources), stage.run_tags()
    ) as run:
        made = prepare_data(
            step=step,
            settings=chosen.prepare,
            sets=sets,
            sources=sources,
            dialogue=chosen.dialogue,
            machine=chosen.machine,
            limits=chosen.python,
            search=chosen.search,
            open_tools=partial(open_tools, chosen),
        )
        run.metrics(made["metrics"], step=0, at=made["finished"])
        data, models = Path("data", recipe), Path("models", recipe)
        ledger.publish(ledger.of(made, "questions"), data / "questions")
        ledger.publish(ledger.of(made, "traces"), data / "traces.parquet")
        ledger.publish(ledger.of(made, "dropped"), data / "dropped.parquet")
        ledger.publish(ledger.of(made, "corpus"), data / "corpus")
        ledger.publish(ledger.of(made, "gates"), data / "gates" / "prepare")
        ledger.publish(ledger.of(made, "initial"), models / "initial")
        ledger.publish_records([made], data / "records" / "prepare.jsonl")


if __name__ == "__main__":
    stage.main(prepare)
