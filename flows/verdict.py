"""Judge the candidate against the champion on the held-out questions."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.workers import stage, substep_tasks
from tasks import settings
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step
from tasks.verdict import VerdictInputs
from tasks.verdict import verdict as judge


@flow(name="verdict")
def verdict(recipe: str) -> None:
    """Write ``reports/<recipe>/verdict.json``. A rejected candidate is no failure."""
    chosen = settings.load(recipe, Path("params"))
    data = Path("data", recipe)
    inputs = VerdictInputs(
        answers=Artifact.at(data / "evaluation.parquet"),
        champion=Artifact.at(Path("models", recipe, "champion")),
        gates=[Artifact.at(data / "gates" / name) for name in ("prepare", "reinforce")],
        settings=chosen.verdict,
    )
    with substep_tasks.opened() as ledger:
        made = judge(Step(recipe, "verdict", 0, chosen.seed, ledger), inputs)
    artifacts.publish(artifacts.output(made, "verdict"), Path("reports", recipe, "verdict.json"))
    print(f"verdict: {'promote' if made['promote'] else 'reject'}: {made['reason']}")


if __name__ == "__main__":
    stage.main(verdict)
