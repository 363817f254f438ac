"""Candidate against champion on the held-out questions: promoted or not, and why."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.workers import stage
from params.schema import recipe as schema
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact, Step
from tasks.verdict import verdict as judge


@flow(name="verdict")
def verdict(recipe: str) -> None:
    """Write ``reports/<recipe>/verdict.json``. A rejected candidate is no failure."""
    chosen = schema.load(recipe, Path("params"))
    data = Path("data", recipe)
    made = judge(
        step=Step(recipe, "verdict", 0, chosen.seed),
        answers=Artifact.at(data / "evaluation.parquet"),
        champion=Artifact.at(Path("models", recipe, "champion")),
        gates=[Artifact.at(data / "gates" / name) for name in ("prepare", "reinforce")],
        settings=chosen.verdict,
    )
    artifacts.publish(artifacts.output(made, "verdict"), Path("reports", recipe, "verdict.json"))
    print(f"verdict: {'promote' if made['promote'] else 'reject'}: {made['reason']}")


if __name__ == "__main__":
    stage.main(verdict)
