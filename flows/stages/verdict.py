"""Judge the candidate against the champion on the held-out questions."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.workers import stage, substep_tasks
from tasks import recipes
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.verdict import VerdictInputs
from tasks.verdict import verdict as judge


@flow(name="verdict")
def verdict(name: str) -> None:
    """Write ``reports/<recipe>/verdict.json``. A rejected candidate is no failure."""
    recipe = recipes.load(name, Path("params"))
    data = Path("data", name)
    inputs = VerdictInputs(
        answers=Artifact.at(data / "evaluation.parquet"),
        champion=Artifact.at(Path("models", name, "champion")),
        gates=[Artifact.at(data / "gates" / stage_name) for stage_name in ("prepare", "reinforce")],
        settings=recipe.verdict,
    )
    with substep_tasks.opened() as ledger:
        record = judge(SubStep(name, "verdict", 0, recipe.seed, ledger), inputs)
    artifacts.publish(artifacts.output(record, "verdict"), Path("reports", name, "verdict.json"))
    print(f"verdict: {'promote' if record['promote'] else 'reject'}: {record['reason']}")


if __name__ == "__main__":
    stage.main(verdict)
