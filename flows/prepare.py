"""Generate or read questions, corpus, SFT traces and the first policy, and check them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prefect import flow

from flows.runs import ledger_mirror
from flows.tracking import gate_report
from flows.tracking.run import stage_run
from flows.workers import stage
from params.schema import recipe as schema
from tasks import settings
from tasks.environments import open_tools
from tasks.ledger import artifacts, keys
from tasks.ledger.substeps import Step
from tasks.prepare import PrepareInputs
from tasks.prepare import prepare as prepare_data
from tasks.questions.sources import source_files


@flow(name="prepare")
def prepare(recipe: str) -> None:
    """Fill ``data/<recipe>`` (questions, corpus, traces) and ``models/<recipe>/initial``."""
    chosen = settings.load(recipe, Path("params"))
    sets = schema.named_sets(chosen, Path("params"))
    sources = source_files(chosen.prepare, chosen.tool_settings, sets)
    inputs = PrepareInputs(
        settings=chosen.prepare,
        sets=sets,
        sources=sources,
        dialogue=chosen.dialogue,
        tools=chosen.tool_settings,
        machine=chosen.machine,
    )
    key = keys.stage_key(chosen, *sources)
    with (
        ledger_mirror.opened() as ledger,
        stage_run(recipe, "prepare", key, stage.run_tags()) as run,
        gate_report.pages(recipe),
    ):
        step = Step(recipe, "prepare", 0, chosen.seed, ledger)
        tools = partial(open_tools, chosen.tool_settings, chosen.machine.threads)
        made = prepare_data(step, inputs, open_tools=tools)
        run.log_metrics(made["metrics"], step=0, at=made["finished"])
        data, models = Path("data", recipe), Path("models", recipe)
        artifacts.publish(artifacts.output(made, "questions"), data / "questions")
        artifacts.publish(artifacts.output(made, "traces"), data / "traces.parquet")
        artifacts.publish(artifacts.output(made, "dropped"), data / "dropped.parquet")
        artifacts.publish(artifacts.output(made, "corpus"), data / "corpus")
        artifacts.publish(artifacts.output(made, "gates"), data / "gates" / "prepare")
        artifacts.publish(artifacts.output(made, "initial"), models / "initial")
        artifacts.publish_records([made], data / "records" / "prepare.jsonl")


if __name__ == "__main__":
    stage.main(prepare)
