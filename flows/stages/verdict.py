"""Judge the candidate against the champion on the held-out questions."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.tracking.run_summary import verdict_sentence
from flows.workers import stage, substep_tasks
from params.run_folders import RunFolders
from tasks import recipes
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.verdict import VerdictInputs, verdict


@flow(name="verdict")
def verdict_flow(name: str) -> None:
    """Write ``reports/<recipe>/verdict.json``. A rejected candidate is no failure."""
    recipe = recipes.load(name, Path("params"))
    folders = RunFolders(name)
    inputs = VerdictInputs(
        answers=Artifact.at(folders.evaluation),
        champion=Artifact.at(folders.champion),
        gates=[Artifact.at(folders.gates(stage)) for stage in ("prepare", "reinforce")],
        settings=recipe.verdict,
    )
    with substep_tasks.opened() as ledger:
        record = verdict(SubStep(name, "verdict", 0, recipe.seed, ledger), inputs)
    artifacts.publish(artifacts.output(record, "verdict"), folders.verdict)
    print(f"verdict: {verdict_sentence(record)}")


if __name__ == "__main__":
    stage.main(verdict_flow)
