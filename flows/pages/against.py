"""Write the page of two runs: their results, and what each did with the same questions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flows.pages import answers, beside, facts, forest, results
from flows.pages.forest import Block, Tables
from flows.pages.html_file import bounded_block, write
from flows.pages.page_file import MOST_EVALUATED, entry, fitting
from flows.tracking import curve_file
from flows.tracking.run import flatten
from flows.tracking.run_summary import differing
from flows.tracking.traces import EVALUATION
from params import recipe_files
from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from tasks.evaluate import CANDIDATE, differences

FILE = "reports/{}/against-{}.html"
Row = dict[str, Any]


@dataclass(frozen=True)
class PastRun:
    """A finished run whose files are in the checkout ``root``."""

    title: str  # how the page calls it
    recipe: str
    root: Path

    @property
    def folders(self) -> RunFolders:
        """Return where its files lie."""
        return RunFolders(self.recipe, self.root)


def write_against(one: PastRun, other: PastRun, recipe: Recipe) -> Path:
    """Write the page of a run beside another one; return its file.

    ``recipe``: that of the first. Questions that only one of them was asked are left out. Raises
    ValueError where the other has left no trees, or where they were asked no common question.
    """
    if one.title == other.title:
        raise ValueError(f"{other.title} is this run itself: name another one")
    runs = (other, one)  # what changed is told from the other to this one
    tables = {run.title: forest.open_tables(run.recipe, run.root) for run in runs}
    pairs = _iterations(tables[other.title], tables[one.title])
    blocks = fitting(sorted(pairs), lambda number: _training(runs, tables, pairs, number))
    evaluated = _evaluation(runs)
    if not blocks and not evaluated["questions"]:
        raise ValueError(
            f"{one.title} and {other.title} were asked no common question: take runs whose "
            "recipes have the same questions and the same seed"
        )
    counts = {each["number"]: each for each in forest.iterations(tables[one.title])}
    listed = [{**counts[number], "there": number in blocks} for number in sorted(pairs)]
    data = {
        "kind": "runs",
        "recipe": f"{one.title} and {other.title}",
        "iterations": [*listed, entry(evaluated)],
        "opening": {"iteration": EVALUATION, "leaf": 0} if evaluated["questions"] else None,
        "changed": beside.changed(evaluated),
        "scales": forest.SCALES,
        "percentiles": [],
        "links": {},
        "finished": True,
        "about": [_about(run) for run in (one, other)],
        "policy_check": "",
        "runs": [
            facts.curve_of(run.title, run.recipe, _questions(run), run.root) for run in (one, other)
        ],
        "rises": [],
        "before": None,
        **_outcome(one, other, recipe),
        **results.settings(one.recipe, recipe),
        "recipe_changed": facts.change_lines(differing(_flat(other), _flat(one))),
    }
    shown = {str(number): block for number, block in blocks.items()}
    shown[EVALUATION] = bounded_block(evaluated, MOST_EVALUATED)
    return write(Path(FILE.format(one.recipe, re.sub(r"[^\w.-]+", "-", other.title))), data, shown)


def _iterations(other: Tables, one: Tables) -> dict[int, int]:
    """Return, by iteration of one run, the other's with most of its questions; none without any.

    Of equal ones it is the iteration with the nearest number.
    """
    asked, again = (
        tables["questions"].select(["iteration", "id"]).to_pandas().groupby("iteration")["id"]
        for tables in (one, other)
    )
    sets = {number: set(ids) for number, ids in again}
    pairs: dict[int, int] = {}
    for number, ids in asked:
        common = {place: len(set(ids) & known) for place, known in sets.items()}
        best = max(common, key=lambda place: (common[place], -abs(place - number)))
        if common[best]:
            pairs[int(number)] = int(best)
    return pairs


def _training(
    runs: Sequence[PastRun], tables: Mapping[str, Tables], pairs: Mapping[int, int], number: int
) -> Block:
    """Return an iteration of this run beside that of the other one."""
    places = (pairs[number], number)
    blocks = [
        (run.title, forest.iteration(run.recipe, tables[run.title], place, {}, root=run.root))
        for run, place in zip(runs, places, strict=True)
    ]
    return beside.beside(number, blocks)


def _evaluation(runs: Sequence[PastRun]) -> Block:
    """Return what the trained policies of both did with the questions of the evaluation."""
    empty: Block = {"questions": [], "texts": []}
    trained = [answers.by_agent(run.recipe, run.root).get(CANDIDATE, empty) for run in runs]
    return beside.beside(EVALUATION, list(zip([run.title for run in runs], trained, strict=True)))


def _about(run: PastRun) -> str:
    curve = curve_file.read(run.folders.curve)
    values = _values(run)
    return (
        f"{run.title}: recipe {run.recipe}, algorithm {values['reinforce']['algorithm']}, "
        f"{len(curve_file.of_training(curve).get(curve_file.NUMBER, []))} iterations, "
        f"seed {values['seed']}"
    )


def _questions(run: PastRun) -> int:
    """Return how many questions an iteration of a run asks."""
    return int(_values(run)["reinforce"]["questions"])


def _flat(run: PastRun) -> dict[str, str]:
    return flatten(_values(run))


def _values(run: PastRun) -> dict[str, Any]:
    return recipe_files.resolve(run.recipe, run.root / "params").values


def _outcome(one: PastRun, other: PastRun, recipe: Recipe) -> dict[str, Any]:
    """Return the results of both trained policies, and their paired difference."""
    measured = {run.title: _measures(run) for run in (other, one)}
    both = [name for name in measured[one.title] if name in measured[other.title]]
    rows = [
        results.measure_row(name, {title: own[name] for title, own in measured.items()})
        for name in both
    ]
    tested = _differences(one, other, recipe)
    common = tested[0]["questions"] if tested else 0
    return {
        "results": rows,
        "differences": [
            {
                **row,
                "agent": other.title,
                "measure": ", ".join(filter(None, (row["measure"], row["set"]))),
            }
            for row in tested
        ],
        "verdict": "",
        "panel": f"Paired over the questions that both were asked: {common}.",
    }


def _measures(run: PastRun) -> dict[str, Any]:
    """Return the measures of a run's trained policy: name -> mean with its interval."""
    file = run.folders.metrics
    measured = json.loads(file.read_text()) if file.is_file() else {}
    return {
        name: agents[CANDIDATE]
        for name, agents in measured.items()
        if name not in ("panel", "differences") and CANDIDATE in agents
    }


def _differences(one: PastRun, other: PastRun, recipe: Recipe) -> list[Row]:
    """Return how far this run's trained policy is above the other's, as ``evaluate`` tells it."""
    rows = [_answers(run) for run in (one, other)]
    common = {row["question"] for row in rows[0]} & {row["question"] for row in rows[1]}
    own, others = ([row for row in each if row["question"] in common] for each in rows)
    if not common:
        return []
    return differences({CANDIDATE: own, other.title: others}, recipe.verdict, recipe.seed)


def _answers(run: PastRun) -> list[Row]:
    file = run.folders.evaluation
    rows = pq.read_table(file).to_pylist() if file.is_file() else []
    return [row for row in rows if row["agent"] == CANDIDATE]
