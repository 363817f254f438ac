"""Read the trees of a run, one iteration at a time, as the small JSON of its page.

An iteration is a mapping: its number, its questions with nodes, leaves and branching decisions, and
``texts``, the distinct texts of tokens, which nodes name by index. Values of tokens are integers:
the value times its entry of SCALES, one integer instead of a list where all are equal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.analysis import reading
from flows.tracking import traces
from params.run_folders import RunFolders
from params.schema.reinforce import Reinforce
from tasks.ledger.substeps import SubStep
from tasks.rewards.contract import was_scored
from tasks.trees.tree import PROGRAM, TURN, CallResult, calls_of, results_of

SCALES = {"entropy": 100_000, "gap": 10_000, "ratio": 1000, "clipped": 100, "advantage": 1000}
SHARES = (50, 75, 90, 99)  # percentiles of a run's entropies, between which tints change
OF_TOKENS = {"gap": "logprob_gap", "ratio": "ratio", "clipped": "clipped"}  # of tokens.parquet
LARGEST = 2**31  # stands for an infinite value
NEEDED = ("questions", "nodes", "leaves", "rewards", "advantages", "decisions")
OPTIONAL = ("tokens", "steps")
UNUSED = {"nodes": ["logprobs"], "advantages": ["segments", "returns", "values"]}  # by the page
DECISION = ("node", "kind", "initial_entropy", "entropy", "rise", "probability", "wanted", "added")

Tables = Mapping[str, pa.Table]
Rows = Mapping[str, Sequence[Any]]  # question -> its rows of a table
Block = dict[str, Any]  # an iteration as the page has it

log = logging.getLogger(__name__)


def open_tables(recipe: str, root: Path = Path()) -> dict[str, pa.Table]:
    """Return the tables of a run's trees, in the checkout ``root``.

    Raises ValueError with the file and the remedy.
    """
    folder = RunFolders(recipe, root).trees
    tables: dict[str, pa.Table] = {}
    for name in (*NEEDED, *OPTIONAL):
        file = folder / f"{name}.parquet"
        if file.is_file():
            names = pq.read_schema(file).names
            columns = [column for column in names if column not in UNUSED.get(name, ())]
            tables[name] = pq.read_table(file, columns=columns)
        elif name in NEEDED:
            raise reading.missing(recipe, file)
    return tables


def iterations(tables: Tables) -> list[dict[str, int]]:
    """Return the number of each iteration, with how many questions and leaves it has."""
    question_counts, leaf_counts = (
        pc.value_counts(tables[name]["iteration"]) for name in ("questions", "leaves")
    )
    questions, leaves = (
        {entry["values"]: entry["counts"] for entry in counts.to_pylist()}
        for counts in (question_counts, leaf_counts)
    )
    return [
        {"number": number, "questions": questions[number], "leaves": leaves.get(number, 0)}
        for number in sorted(questions)
    ]


def entropy_percentiles(tables: Tables) -> list[float]:
    """Return the SHARES of the entropies of all sampled tokens of a run; [] where there is none.

    A policy that is nearly certain has entropies over decades, with a few high ones: a scale up to
    the largest would show all others alike.
    """
    lists = tables["nodes"]["entropies"]
    values = pc.drop_null(pc.list_flatten(lists)).to_numpy()
    return [float(value) for value in np.percentile(values, SHARES)] if len(values) else []


def iteration(
    recipe: str,
    tables: Tables,
    number: int,
    traced: Mapping[tuple[str, int], str],
    root: Path = Path(),
) -> Block:
    """Return what the page shows of an iteration.

    ``traced``: (question, leaf) -> the id of its trace in MLflow. ``root``: the checkout that has
    the run's policy.
    """
    frames = {name: _of(table, number) for name, table in tables.items()}
    questions: list[dict[str, Any]] = frames["questions"].to_dict("records")  # type: ignore[assignment]
    texts = Texts(recipe, frames["nodes"], root)
    rows = {name: _by_question(frame) for name, frame in frames.items() if name != "questions"}
    called = _calls(recipe, [rows["nodes"][question["id"]] for question in questions], root)
    return {
        "iteration": number,
        "questions": [
            _question(question, rows, texts, calls, traced)
            for question, calls in zip(questions, called, strict=True)
        ],
        "texts": texts.distinct(),
    }


def _of(table: pa.Table, number: int) -> pd.DataFrame:
    return table.filter(pc.equal(table["iteration"], number)).to_pandas()


def _by_question(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the rows of each question as tuples with names."""
    by_question: dict[str, list[Any]] = {}
    row: Any
    for row in frame.itertuples(index=False):
        by_question.setdefault(row.question, []).append(row)
    return by_question


# ---------------------------------------------------------------- a question


def _question(
    question: Mapping[str, Any],
    rows: Mapping[str, Rows],
    texts: Texts,
    calls: Mapping[int, Sequence[CallResult]],
    traced: Mapping[tuple[str, int], str],
) -> dict[str, Any]:
    name = question["id"]
    seen = {row.node: row for row in rows.get("tokens", {}).get(name, ())}
    steps = {row.node: row for row in rows.get("steps", {}).get(name, ())}
    credits = {row.leaf: row for row in rows.get("advantages", {}).get(name, ())}
    rewards = {row.leaf: row for row in rows["rewards"].get(name, ())}
    return {
        "id": name,
        "kind": question["kind"],
        "text": question["text"],
        "before": [[one["role"], one["content"]] for one in question["before"]],
        "answers": list(question["answers"]),
        "nodes": [
            _node(row, texts, seen.get(row.node), steps.get(row.node), calls.get(row.node, ()))
            for row in rows["nodes"][name]
        ],
        "leaves": [
            leaf(row.node, rewards[row.leaf], credits.get(row.leaf), traced.get((name, row.leaf)))
            for row in rows["leaves"].get(name, ())
        ],
        "decisions": [_decision(row) for row in rows["decisions"].get(name, ())],
    }


def _node(
    row: Any, texts: Texts, seen: Any, step: Any, calls: Sequence[CallResult]
) -> dict[str, Any]:
    """Return a node; ``seen``: its row of the table of tokens, ``step``: of that of steps.

    ``calls``: those that it answers. Where they are several, each has its outcome and text.
    """
    node = {"parent": row.parent, "kind": row.kind, "outcome": row.outcome, "size": len(row.tokens)}
    if row.kind != TURN or not texts.known:
        node["text"] = row.text
    if row.parent < 0 and texts.known:
        node["prompt"] = texts.whole(row.tokens)
    if row.kind == TURN:
        node["tokens"] = texts.of(row.tokens)
        node["entropy"] = packed(row.entropies, "entropy")
    if seen:
        node |= {name: packed(getattr(seen, column), name) for name, column in OF_TOKENS.items()}
    if len(calls) == 1:
        node["calls"] = [[calls[0].tool, calls[0].argument]]
    elif calls:
        node["calls"] = [[each.tool, each.argument, each.outcome, each.text] for each in calls]
    if step:
        said = json.loads(step.info).get(PROGRAM)
        of_world = [step.outcome, step.text, step.reward]
        node["step"] = [row.outcome, _returned(said), 0.0, PROGRAM] if said else of_world
    return node


def _returned(said: Mapping[str, Any]) -> str:
    """Return what a program has returned, or how it has failed, as a text."""
    return "\n".join(f"{name}: {value}" for name, value in said.items() if value not in (None, {}))


def leaf(node: int, reward: Any, credit: Any = None, trace: str | None = None) -> dict[str, Any]:
    """Return a leaf from the row of its reward; ``credit``: that of its advantages.

    ``trace``: the id of its trace in MLflow.
    """
    trained = credit is not None and credit.kept and credit.advantages is not None
    scored = was_scored(reward.breakdown)
    return {
        "node": node,
        "reward": round(reward.reward, 4),
        "score": round(reward.score, 4) if scored else None,
        "success": bool(reward.success) if scored else None,
        "outcome": reward.outcome,
        "answer": None if pd.isna(reward.answer) else reward.answer,
        "faults": list(reward.faults),
        "kept": credit is None or bool(credit.kept),
        "advantage": packed(credit.advantages if trained else (), "advantage"),
        **({"trace": trace} if trace else {}),
    }


def _decision(row: Any) -> dict[str, Any]:
    return {name: _short(getattr(row, name)) for name in DECISION}


def _short(value: Any) -> Any:
    """Return a value of a decision with six digits; None for none."""
    if pd.isna(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def packed(values: Any, name: str) -> int | list[int]:
    """Return values of tokens as integers, as the page's script reads them (SCALES)."""
    scaled = np.asarray(values, np.float64) * SCALES[name]
    whole = np.rint(np.nan_to_num(scaled, posinf=LARGEST, neginf=-LARGEST)).astype(np.int64)
    if len(whole) and (whole == whole[0]).all():
        return int(whole[0])
    return list(map(int, whole))


# ---------------------------------------------------------------- texts and calls


class Texts:
    """The distinct texts of an iteration's sampled tokens; nodes name them by index."""

    def __init__(self, recipe: str, nodes: pd.DataFrame, root: Path) -> None:
        """Read the tokenizer of the run's policy; without its file, no text is known."""
        turns = nodes["tokens"][nodes["kind"] == TURN]
        ids = np.unique(np.concatenate([np.zeros(0, np.int32), *turns]))
        decode = self._decode = reading.open_decoder(recipe, root)
        self.known = decode is not None
        self._index: dict[str, int] = {}
        self._of_id: dict[int, int] = {}
        if decode is None:
            return
        for one in ids.tolist():
            text = decode([one])
            # part of a character: its text depends on its neighbours
            self._of_id[one] = -1 if reading.BROKEN in text else self._add(text)

    def of(self, tokens: Any) -> list[int]:
        """Return the index of each token's text; [] where no text is known."""
        if self._decode is None:
            return []
        indices = [self._of_id[one] for one in tokens.tolist()]
        if -1 in indices:
            return [self._add(text) for text in reading.spelled(self._decode, tokens.tolist())]
        return indices

    def whole(self, tokens: Any) -> str:
        """Return the text of all tokens, with marks of turns; "" where no text is known."""
        return "" if self._decode is None else self._decode(tokens.tolist())

    def distinct(self) -> list[str]:
        """Return the texts by their index."""
        return list(self._index)

    def _add(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))


def _calls(
    recipe: str, questions: Iterable[Sequence[Any]], root: Path
) -> list[dict[int, list[CallResult]]]:
    """Return, for each question, the calls by the node that answers them.

    Where nothing can read the only call of a turn, as without the tools of a native chat format, it
    is left out.
    """
    trees = [(nodes, _turns_that_called(nodes)) for nodes in questions]
    texts = [text for _, turns in trees for text in turns.values()]
    try:
        read = reading.call_reader(recipe, texts, root) if texts else None
    except (ValueError, OSError, RuntimeError) as error:
        log.warning("page: calls are shown without tool and argument: %s", error)
        read = None
    found: list[dict[int, list[CallResult]]] = [{} for _ in trees]
    for (nodes, turns), calls_of_tree in zip(trees, found, strict=True):
        by_number = {node.node: node for node in nodes}
        for number, text in turns.items():
            node = by_number[number]
            results = results_of(getattr(by_number[node.parent], "results", None))
            said = read(text) if read else ()
            if len(results) > 1 or said:
                calls_of_tree[number] = calls_of(results, said, node.outcome, "")
    return found


def _turns_that_called(nodes: Sequence[Any]) -> dict[int, str]:
    """Return the text of the whole turn before each node that answers one."""
    texts: list[str] = []  # of the turn up to each node
    for node in nodes:  # parents come before their children
        part = node.parent >= 0 and node.kind == nodes[node.parent].kind == TURN
        texts.append(texts[node.parent] + node.text if part else node.text)
    return {n.node: texts[n.parent] for n in nodes if n.kind != TURN and n.parent >= 0}


# ---------------------------------------------------------------- traces in MLflow


def traced(
    recipe: str, tables: Tables, settings: Reinforce, seed: int
) -> dict[int, dict[tuple[str, int], str]]:
    """Return the ids of the traces that the run has written: iteration -> (question, leaf) -> id.

    They are derived from the ledger's records, as the run derived them.
    """
    file = RunFolders(recipe).records("reinforce")
    if not file.is_file() or not settings.trace_questions:
        return {}
    digests: dict[tuple[int, str], str] = {}  # iteration and artifact -> digest
    for record in map(json.loads, file.read_text().splitlines()):
        if record["stage"] == "reinforce" and record.get("attempt") == 0:
            digests |= {(record["iteration"], n): d for n, d in record["artifacts"].items()}
    questions = tables["questions"].select(["iteration", "id"]).to_pandas()
    leaves = tables["leaves"].select(["iteration", "question", "leaf"]).to_pandas()
    trace_ids: dict[int, dict[tuple[str, int], str]] = {}
    for number in sorted({number for number, _ in digests if number % settings.trace_every == 0}):
        step = SubStep(recipe, "reinforce", number, seed)
        name = partial(traces.trace_id, step, digests[number, "trees"], digests[number, "rewards"])
        shown = questions["id"][questions["iteration"] == number][: settings.trace_questions]
        shown_leaves = leaves[(leaves["iteration"] == number) & leaves["question"].isin(shown)]
        pairs = list(zip(shown_leaves["question"], shown_leaves["leaf"].tolist(), strict=True))
        trace_ids[number] = {pair: name(*pair) for pair in pairs}
    return trace_ids
