"""verdict: decide whether a candidate takes the place of the champion.

It does where it is better by more than the recipe's margin in the measure that the recipe names,
beyond the doubt of a paired bootstrap over the held-out questions, and every gate of its run has
passed. Where there is no champion, it
must be better than its own cold start. Nothing else is asked: no registry, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.verdict import Verdict
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import champion as champions
from tasks.trees import panels
from tasks.trees.intervals import Difference, paired_bootstrap
from tasks.trees.tables import read_rows

CANDIDATE, BEGINNING, CHAMPION = "trained", "cold start", "champion"  # agents of evaluate's answers


@dataclass(frozen=True)
class VerdictInputs:
    """What a verdict is made from."""

    answers: Artifact  # of the stage evaluate
    champion: Artifact
    gates: list[Artifact]  # folders of gate verdicts, a JSON file a table
    settings: Verdict


@substeps.recorded
def verdict(step: SubStep, inputs: VerdictInputs) -> Record:
    """Judge the candidate; artifact ``verdict`` (JSON): promote, reason, panel and the figures."""
    reigning = champions.read(Path(inputs.champion.path))
    answers = Path(inputs.answers.path)
    judged = judge(
        values(read_rows(answers), inputs.settings.measure),
        reigning,
        [verdict for artifact in inputs.gates for verdict in gate_verdicts(Path(artifact.path))],
        inputs.settings,
    )
    judged["panel"] = panels.of_answers(answers)
    (step.out / "verdict.json").write_text(json.dumps(judged, indent=1) + "\n")
    return {"promote": judged["promote"], "reason": judged["reason"]}


def values(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, dict[str, float]]:
    """Return the measure, "success" or "score", by agent and question; a broken format scores 0.

    A question with several answers has their mean.
    """
    values_by_agent: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        sound = measure == "success" or row["sound"]
        answered = values_by_agent.setdefault(row["agent"], {}).setdefault(row["question"], [])
        answered.append(float(row[measure]) if sound else 0.0)
    return {
        agent: {
            question: sum(values_of_answers) / len(values_of_answers)
            for question, values_of_answers in answered.items()
        }
        for agent, answered in values_by_agent.items()
    }


def gate_verdicts(folder: Path) -> list[tuple[str, bool]]:
    """Return each gate's table in ``folder`` and whether it passed."""
    records = [json.loads(file.read_text()) for file in sorted(folder.rglob("*.json"))]
    return [(record["table"], record["passed"]) for record in records]


def judge(
    measured: Mapping[str, Mapping[str, float]],
    champion: Mapping[str, Any] | None,
    gates: Sequence[tuple[str, bool]],
    settings: Verdict,
) -> dict[str, Any]:
    """Return whether the candidate is promoted, the reason, and the figures.

    ``measured``: agent -> question -> value of the measure. ``champion`` is its version, commit and
    digest. ``chance_of_a_false_promotion`` is that of this verdict alone, for a candidate that is
    exactly the margin better: half of what lies outside of the interval.
    """
    against = CHAMPION if champion else BEGINNING
    candidate, other = measured[CANDIDATE], measured.get(against, {})
    difference = _difference(candidate, other, settings)
    faults = _faults(candidate, other, against, difference, gates, settings)
    words = f"{_describe(difference, settings.measure)} {against}" if difference else ""
    return {
        "promote": not faults,
        "reason": "; ".join(faults) or f"every gate passed, and the candidate is {words}",
        "against": against,
        "champion": champion,
        "questions": len(candidate),
        "means": {
            agent: sum(values_by_question.values()) / len(values_by_question)
            for agent, values_by_question in measured.items()
        },
        "difference": asdict(difference) if difference else None,
        "chance_of_a_false_promotion": (1 - settings.confidence) / 2,
        **settings.model_dump(),
        "gates": [{"table": table, "passed": passed} for table, passed in gates],
    }


def _difference(
    candidate: Mapping[str, float], other: Mapping[str, float], settings: Verdict
) -> Difference | None:
    """Return the paired difference; None where the two did not answer the same questions."""
    if not candidate or set(candidate) != set(other):
        return None
    questions = sorted(candidate)
    return paired_bootstrap(
        _values(candidate, questions),
        _values(other, questions),
        settings.confidence,
        settings.bootstrap,
    )


def _values(measured: Mapping[str, float], questions: Sequence[str]) -> NDArray[np.float64]:
    return np.array([measured[question] for question in questions], np.float64)


def _faults(
    candidate: Mapping[str, float],
    other: Mapping[str, float],
    against: str,
    difference: Difference | None,
    gates: Sequence[tuple[str, bool]],
    settings: Verdict,
) -> list[str]:
    """Return the reasons against a promotion; empty where there are none."""
    faults = [f"the gate of the table {table} failed" for table, passed in gates if not passed]
    if not gates:
        faults.append("the run has no gate's verdict")
    if difference is None:
        shared = len(set(candidate) & set(other))
        faults.append(
            f"the questions are not the same: the candidate answered {len(candidate)}, the "
            f"{against} {len(other)}, of which {shared} are shared"
        )
    elif difference.low <= settings.margin:
        faults.append(
            f"the candidate is {_describe(difference, settings.measure)} {against}, and the "
            f"interval does not lie above the margin of {100 * settings.margin:.1f}"
        )
    return faults


def _describe(difference: Difference, measure: str) -> str:
    low, high, mean = (100 * value for value in (difference.low, difference.high, difference.mean))
    side = "above" if mean >= 0 else "below"
    return f"{abs(mean):.1f} points of {measure} [{low:.1f}, {high:.1f}] {side} the"
