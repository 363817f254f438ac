"""Read what the agents of an evaluation did with its questions, as a block of the run's page.

Their trajectories are in the ledger of the checkout that evaluated. Where it has them no more, the
answers that the run keeps (``evaluation.parquet``) stand alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.pages import beside, forest
from flows.pages.forest import Block
from flows.tracking.traces import EVALUATION
from params.run_folders import RunFolders
from tasks.ledger import artifacts, records
from tasks.trees.tree import PROMPT, TURN

ROLLOUT = "rollout"


def of_run(recipe: str, root: Path = Path()) -> Block | None:
    """Return the evaluation of a run, with its agents beside each other; None without one."""
    agents = by_agent(recipe, root)
    return beside.beside(EVALUATION, list(agents.items())) if agents else None


def by_agent(recipe: str, root: Path = Path()) -> dict[str, Block]:
    """Return what each agent of an evaluation did: agent -> its block; {} without one."""
    file = RunFolders(recipe, root).evaluation
    if not file.is_file():
        return {}
    answers = pq.read_table(file)
    return {
        agent: _block(recipe, agent, answers.filter(pc.equal(answers["agent"], agent)), root)
        for agent in answers["agent"].unique().to_pylist()
    }


def _block(recipe: str, agent: str, answers: pa.Table, root: Path) -> Block:
    folder = _trees(recipe, agent, root)
    if folder is None:
        return _answers_alone(recipe, answers, root)
    tables = {
        name: _numbered(pq.read_table(folder / f"{name}.parquet"))
        for name in (*("questions", "nodes", "leaves", "decisions"), "steps")
        if (folder / f"{name}.parquet").is_file()
    }
    tables["rewards"] = _numbered(answers)
    return forest.iteration(recipe, tables, 0, {}, root=root)


def _numbered(table: pa.Table) -> pa.Table:
    return table.append_column("iteration", pa.array([0] * len(table), pa.int32()))


def _trees(recipe: str, agent: str, root: Path) -> Path | None:
    """Return the folder with an agent's trees in the ledger; None where it is not there."""
    stage = f"evaluate/{agent.replace(' ', '_')}"
    for folder in ledger_folders(recipe, "evaluate", stage, ROLLOUT, root):
        record = records.read(folder)
        if record and (trees := Path(artifacts.output(record, "trees").path)).is_dir():
            return trees
    return None


def ledger_folders(recipe: str, kept: str, stage: str, verb: str, root: Path) -> list[Path]:
    """Return where the ledger has the sub-steps of a run that has kept their records.

    ``kept``: the pipeline's stage that has kept them. The ledger is that of the checkout ``root``,
    or, for a run that was restored from its commit, that of this one. What is gone is left out.
    """
    file = RunFolders(recipe, root).records(kept)
    lines = file.read_text().splitlines() if file.is_file() else []
    known = [record for record in map(json.loads, lines) if record["verb"] == verb]
    names = [
        f"{one['iteration']:04d}-{verb}-{one['key']}" for one in known if one["stage"] == stage
    ]
    ledgers = [checkout / artifacts.ROOT / recipe / stage for checkout in (root, Path())]
    found = [[ledger / name for ledger in ledgers if (ledger / name).is_dir()] for name in names]
    return [places[0] for places in found if places]


def _answers_alone(recipe: str, answers: pa.Table, root: Path) -> Block:
    """Return the block of an agent of which only the answers are there."""
    file = RunFolders(recipe, root).split("test")
    asked = {row["id"]: row for row in pq.read_table(file).to_pylist()} if file.is_file() else {}
    by_question: dict[str, list[Any]] = {}
    for row in answers.to_pandas().itertuples(index=False):
        by_question.setdefault(str(row.question), []).append(row)
    questions = [_question(name, asked.get(name, {}), rows) for name, rows in by_question.items()]
    return {"iteration": 0, "questions": questions, "texts": []}


def _question(name: str, asked: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """Return a question whose leaves are answers without the turns before them."""
    text = asked.get("text", "")
    leaves = [forest.leaf(place, row) for place, row in enumerate(rows, 1)]
    turns = [
        {
            **{"parent": 0, "kind": TURN, "outcome": leaf["outcome"], "size": 1},
            "text": leaf["answer"] or "",
        }
        for leaf in leaves
    ]
    return {
        "id": name,
        "kind": rows[0].kind,
        "text": text,
        "before": [[one["role"], one["content"]] for one in asked.get("before") or ()],
        "answers": list(asked.get("answers") or ()),
        "nodes": [
            {"parent": -1, "kind": PROMPT, "outcome": "", "size": 0, "text": text},
            *turns,
        ],
        "leaves": leaves,
        "decisions": [],
    }
