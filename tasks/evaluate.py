"""evaluate: compare the scored rollouts of several policies, with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from params.schema.evaluate import Evaluate
from params.schema.verdict import Verdict
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.scorers import is_graded, project_scorers
from tasks.trees import panels
from tasks.trees.intervals import bootstrap_interval, paired_bootstrap
from tasks.trees.outcomes import ENDED_BY_WORLD, INFRASTRUCTURE, Outcome
from tasks.trees.paired import holm, permutation_test
from tasks.trees.repeats import all_right, any_right, majority_right
from tasks.trees.tables import write_table

Row = dict[str, Any]
Rows = list[Row]
AGENTS = ("cold start", "trained", "champion")  # the last one where there is one
CANDIDATE = "trained"  # whose differences from the others are tested
TESTED = ("success", "score")  # measures
FIGURES = ("questions", "mean", "low", "high", "p", "p_holm")  # of a difference

KS = (3, 5)  # of pass@k and pass^k, beside the number of answers
# beside the strict success, whatever the format (tasks/scorers/lenient.py)
LENIENT = {"lenient": "lenient", "last number": "last_number"}  # label -> column of the answers
BY_SET = ("success", "score", "pass@", "pass^", "maj@")  # measures that the table has by set, too

JUDGED = "answers without a verdict"  # measured where a judge scores them

OfAnswer = Callable[[Row], float]
OfQuestion = Callable[[Rows], float | None]
# what is measured of one answer or episode: label, value, unit
Measure = tuple[str, OfAnswer, str]
ANSWERED: Measure = ("answer rate", lambda row: row["answer"] is not None, "%")
ENDED: Measure = ("episodes that ended", lambda row: row["outcome"] == Outcome.TERMINATED, "%")
FAILED: Measure = ("infrastructure failed", lambda row: row["outcome"] in INFRASTRUCTURE, "%")
MEASURES: tuple[Measure, ...] = (
    ("tool calls a question", lambda row: row["tool_calls"], ""),
    ("tool errors a question", lambda row: row["tool_errors"], ""),
    ("response length", lambda row: row["response_tokens"], "tokens"),
)


@dataclass(frozen=True)
class EvaluateInputs:
    """The scored answers of each agent, and how they are compared."""

    cold_start: Artifact
    trained: Artifact
    settings: Evaluate
    verdict: Verdict  # whose intervals differences have
    panel: Mapping[str, Any]  # what they were asked: panels.summary
    champion: Artifact | None = None


@substeps.recorded
def evaluate(step: SubStep, inputs: EvaluateInputs) -> Record:
    """Aggregate the rewards of the agents on the same questions.

    Artifacts ``answers`` (a row an answer), ``metrics`` (JSON) and ``table`` (Markdown, with the
    paired differences), each with the panel. Intervals are 95 % percentile bootstrap over
    questions; those of differences are the verdict's.
    """
    rewards = zip(AGENTS, (inputs.cold_start, inputs.trained, inputs.champion), strict=True)
    tables = {agent: pq.read_table(artifact.path) for agent, artifact in rewards if artifact}
    answers = {agent: table.to_pylist() for agent, table in tables.items()}
    rows = compare(answers, inputs.settings.bootstrap, step.seed)
    paired = differences(answers, inputs.verdict, step.seed)
    labelled = [
        table.add_column(0, "agent", pa.array([agent] * len(table)))
        for agent, table in tables.items()
    ]
    said = {panels.METADATA: json.dumps(inputs.panel)}
    answer_table = pa.concat_tables(labelled).replace_schema_metadata(said)
    write_table(answer_table, step.out / "answers.parquet")
    metrics = {"panel": inputs.panel, "differences": nested_differences(paired), **_nested(rows)}
    (step.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    parts = (markdown(rows), difference_markdown(paired), f"{panels.sentence(inputs.panel)}\n")
    (step.out / "table.md").write_text("\n".join(parts))
    return {"rows": rows}


def compare(answers: Mapping[str, Rows], resamples: int, seed: int) -> list[Row]:
    """Return a row a measure, and one a measure and set: each agent's mean with its interval.

    A row has the keys measure, set ("" for all), questions, unit, and the agents. A question counts
    once, with the mean of its answers, so intervals are clustered by question. Sets are the kinds
    of the questions.
    """
    by_agent = {agent: by_question(rows) for agent, rows in answers.items()}
    rows = []
    for name, value, unit in measures(answers):
        values = {
            agent: _values(rows_by_question, value) for agent, rows_by_question in by_agent.items()
        }
        if not all(values.values()):
            continue
        kinds = sorted({kind for pairs in values.values() for kind, _ in pairs})
        for kind in ("", *kinds):
            numbers = {
                agent: [number for of, number in pairs if kind in ("", of)]
                for agent, pairs in values.items()
            }
            rows.append(_measure(name, kind, unit, numbers, resamples, seed))
    return rows


def measures(answers: Mapping[str, Rows]) -> list[tuple[str, OfQuestion, str]]:
    """Return what is measured of a question's answers: label, value, unit."""
    samples = max(
        len(rows_of_question)
        for rows in answers.values()
        for rows_of_question in by_question(rows).values()
    )
    world = in_a_world(answers)
    ended = ENDED if world else ANSWERED
    return [
        ("success", partial(_mean_of, lambda row: row["success"]), "%"),
        *_repeated(samples, votes=not world),
        *((label, partial(_mean_where_known, name), "%") for label, name in LENIENT.items()),
        ("score", partial(_score_of, graded_scorers(answers)), "%"),
        *((name, partial(_mean_of, value), unit) for name, value, unit in (ended, *MEASURES)),
        (JUDGED, _without_verdict, "%"),
        *_failures(answers),
    ]


def _failures(answers: Mapping[str, Rows]) -> list[tuple[str, OfQuestion, str]]:
    """Return the measure of failures that no agent brought about; [] where there are none.

    They count as wrong, after a second attempt.
    """
    if not any(FAILED[1](row) for rows in answers.values() for row in rows):
        return []
    return [(FAILED[0], partial(_mean_of, FAILED[1]), FAILED[2])]


def _repeated(samples: int, votes: bool) -> list[tuple[str, OfQuestion, str]]:
    """Return the measures over several answers to a question; none for one answer.

    ``votes``: whether there are answers that a majority can give.
    """
    repeated_measures: list[tuple[str, OfQuestion, str]] = []
    for k in sorted({k for k in (*KS, samples) if 1 < k <= samples}):
        repeated_measures.append((f"pass@{k}", partial(_right_of, partial(any_right, k=k)), "%"))
        repeated_measures.append((f"pass^{k}", partial(_right_of, partial(all_right, k=k)), "%"))
    if votes and samples > 1:
        repeated_measures.append((f"maj@{samples}", _majority_of, "%"))
    return repeated_measures


def _mean_of(value: OfAnswer, rows: Rows) -> float:
    return sum(float(value(row)) for row in rows) / len(rows)


def _right_of(estimate: Callable[[Sequence[bool]], float], rows: Rows) -> float:
    return estimate([row["success"] for row in rows])


def _majority_of(rows: Rows) -> float:
    answers, right = ([row[name] for row in rows] for name in ("answer", "success"))
    return majority_right(answers, right, partial(_same_value, rows[0]["scorer"]))


def _same_value(scorer: str, one: str, other: str) -> bool:
    """Return whether a scorer of this project that does not grade calls two answers equal."""
    if is_graded(scorer) or scorer not in (known := project_scorers()):
        return False
    return any(known[scorer](*pair)["score"] >= 1 for pair in ((one, [other]), (other, [one])))


def _score_of(graded: Collection[str], rows: Rows) -> float | None:
    """Return the mean score, where a broken format scores 0; None where it is not graded."""
    if rows[0]["scorer"] not in graded:
        return None
    return _mean_of(lambda row: row["score"] * row["sound"], rows)


def _mean_where_known(column: str, rows: Rows) -> float | None:
    """Return the mean of a column; None where it means nothing, or the table is an older one."""
    known = [value for row in rows if (value := row.get(column)) is not None]
    return sum(known) / len(known) if known else None


def _without_verdict(rows: Rows) -> float | None:
    """Return the share of answers that a judge gave no verdict on; None where none was judged."""
    counts = [dict(row["breakdown"]).get("without_verdict") for row in rows]
    lacking = [count > 0 for count in counts if count is not None]
    return sum(lacking) / len(lacking) if lacking else None


def _values(rows_by_question: Mapping[str, Rows], value: OfQuestion) -> list[tuple[str, float]]:
    """Return the kind and the value of each question that has one."""
    pairs = [(rows[0]["kind"], value(rows)) for rows in rows_by_question.values()]
    return [(kind, number) for kind, number in pairs if number is not None]


def by_question(rows: Rows) -> dict[str, Rows]:
    """Return the answers to each question, in the order of the questions' first answers."""
    rows_by_question: dict[str, Rows] = {}
    for row in rows:
        rows_by_question.setdefault(row["question"], []).append(row)
    return rows_by_question


def differences(answers: Mapping[str, Rows], settings: Verdict, seed: int) -> list[Row]:
    """Return how far the trained policy is above each other agent, paired by question.

    A row has measure ("success", and "score" where it is graded), set ("" for all), against,
    questions, mean, low and high (the verdict's bootstrap), and p (paired permutation test,
    two-sided, whose permutations ``seed`` draws).
    Rows of sets, where there are several, also have p_holm: p adjusted for their number.
    """
    rows = []
    by_agent = {agent: by_question(rows_of_agent) for agent, rows_of_agent in answers.items()}
    for name, value, _ in measures(answers):
        for against in (agent for agent in by_agent if agent != CANDIDATE):
            if name in TESTED and (
                paired_rows := _paired(by_agent, value, against, settings, seed)
            ):
                rows += [{"measure": name, "against": against, **row} for row in paired_rows]
    return rows


def _paired(
    by_agent: Mapping[str, Mapping[str, Rows]],
    value: OfQuestion,
    against: str,
    settings: Verdict,
    seed: int,
) -> list[Row]:
    """Return the rows of one measure and one other agent: all questions, then each set."""
    candidate, other = by_agent[CANDIDATE], by_agent[against]
    pairs: dict[str, list[tuple[float, float]]] = {}
    for question, rows in candidate.items():
        one, two = value(rows), value(other[question])
        if one is not None and two is not None:
            for kind in ("", rows[0]["kind"]):
                pairs.setdefault(kind, []).append((one, two))
    tested: list[Row] = []
    for kind in sorted(pairs) if len(pairs) > 2 else [""][: len(pairs)]:
        one_Q, two_Q = np.array(pairs[kind], np.float64).T
        difference = paired_bootstrap(one_Q, two_Q, settings.confidence, settings.bootstrap)
        p = permutation_test(one_Q, two_Q, seed)
        bounds = {"mean": difference.mean, "low": difference.low, "high": difference.high}
        tested.append({"set": kind, "questions": len(one_Q), **bounds, "p": p})
    for row, adjusted in zip(tested[1:], holm([row["p"] for row in tested[1:]]), strict=True):
        row["p_holm"] = adjusted
    return tested


def nested_differences(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the differences as DVC reads them: measure, with its set -> other agent -> figures."""
    result: dict[str, Any] = {}
    for row in rows:
        figures = {name: row[name] for name in FIGURES if name in row}
        result.setdefault(_label(row["measure"], row["set"]), {})[row["against"]] = figures
    return result


def _label(measure: str, kind: str) -> str:
    return f"{measure}, {kind}" if kind else measure


def in_a_world(answers: Mapping[str, Rows]) -> bool:
    """Return whether an environment ended episodes and no agent gave an answer."""
    rows = [row for entries in answers.values() for row in entries]
    answered = any(row["answer"] is not None for row in rows)
    return not answered and any(row["outcome"] in ENDED_BY_WORLD for row in rows)


def graded_scorers(answers: Mapping[str, Rows]) -> set[str]:
    """Return the scorers that grade: they say so, or have given a score between 0 and 1."""
    every = [row for rows in answers.values() for row in rows]
    between = {row["scorer"] for row in every if row["score"] not in (0, 1)}
    return between | {name for name in {row["scorer"] for row in every} if is_graded(name)}


def _measure(
    name: str,
    kind: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    resamples: int,
    seed: int,
) -> Row:
    count = len(next(iter(values.values())))
    means = {agent: _mean(entries, resamples, seed) for agent, entries in values.items()}
    return {"measure": _label(name, kind), "set": kind, "questions": count, "unit": unit, **means}


def _mean(values: Sequence[float], resamples: int, seed: int) -> dict[str, float]:
    array = np.array(values, np.float64)
    low, high = bootstrap_interval(array, resamples, seed)
    return {"mean": float(array.mean()), "low": low, "high": high}


def _nested(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics as DVC reads them: measure -> agent -> mean, low, high."""
    return {row["measure"]: {agent: row[agent] for agent in _agents(row)} for row in rows}


def _agents(row: Mapping[str, Any]) -> list[str]:
    return [agent for agent in AGENTS if agent in row]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparison as flat rows, one a measure and agent."""
    return [
        {"measure": row["measure"], "questions": row["questions"], "agent": agent, **row[agent]}
        for row in rows
        for agent in _agents(row)
    ]


def success_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return success by kind, a row a kind and agent; the first kind is "all"."""
    return [
        {
            "kind": row["set"] or "all",
            "agent": agent,
            "success": row[agent]["mean"],
            "low": row[agent]["low"],
            "high": row[agent]["high"],
        }
        for row in rows
        if row["measure"].removesuffix(f", {row['set']}") == "success"
        for agent in _agents(row)
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison as a Markdown table, without sets where they would make it long."""
    agents = _agents(rows[0])
    lines = [f"| | questions | {' | '.join(agents)} |", f"|---|{'---:|' * (1 + len(agents))}"]
    for row in rows:
        if row["set"] and not row["measure"].startswith(BY_SET):
            continue
        cells = " | ".join(_cell(row[agent], row["unit"]) for agent in agents)
        lines.append(f"| {row['measure']}{_unit(row['unit'])} | {row['questions']} | {cells} |")
    return "\n".join(lines) + "\n"


def _unit(unit: str) -> str:
    return f" ({unit})" if unit else ""


def _cell(value: Mapping[str, float], unit: str) -> str:
    scale, digits = (100, 1) if unit == "%" else (1, 2)
    mean, low, high = (scale * value[name] for name in ("mean", "low", "high"))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def difference_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the paired differences as a Markdown table."""
    head = ("trained, paired by question", "questions", "points", "p", "p for all sets (Holm)")
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        label = _label(row["measure"], row["set"])
        cells = [f"{label}, less {row['against']}", str(row["questions"]), _cell(row, "%")]
        lines.append(f"| {' | '.join([*cells, _p_value(row['p']), _p_value(row.get('p_holm'))])} |")
    return "\n".join(lines) + "\n"


def _p_value(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
