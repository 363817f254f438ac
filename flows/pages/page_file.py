"""Write the page of a run, while it trains and when it is finished, or of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.pages import answers, beside, facts, forest, opening, results
from flows.pages.html_file import bounded_block, write
from flows.tracking import store
from flows.tracking.alarms import Alarm
from flows.tracking.comparison_tables import Result
from flows.tracking.traces import EVALUATION, PAGE
from params.schema.recipe import Recipe

COMPARISON = "reports/{}/comparison.html"
MOST_BYTES = 24 * 2**20  # of the blocks of all iterations; plotly and the rest are 3 MB
MOST_EVALUATED = MOST_BYTES // 3  # of that of the evaluation, beside them
TRACES = "/traces?selectedEvaluationId="  # of MLflow's UI, before the id of a trace

Links = dict[str, str]  # "run" and "traces": addresses in MLflow


def write_run(
    name: str,
    recipe: Recipe,
    links: Links | None = None,
    numbers: Collection[int] = (),
    before: facts.Row | None = None,
) -> Path:
    """Write ``reports/<recipe>/page.html`` and return it; ``before``: see ``facts.of_run``.

    ``numbers``: iterations whose trees are in the page, all by default. Where they take more than
    MOST_BYTES, iterations in between are left out, and the page says which.
    Raises ValueError where the run has left no trees, or no such iteration.
    """
    tables = forest.open_tables(name)
    every = forest.iterations(tables)
    known = [one["number"] for one in every]
    if unknown := sorted(set(numbers) - set(known)):
        raise ValueError(
            f"--iteration {unknown[0]}: {name} has iterations {known[0]} to {known[-1]}"
        )
    traced = forest.traced(name, tables, recipe.reinforce, recipe.seed)

    blocks = fitting(
        sorted(numbers) or known,
        lambda number: forest.iteration(name, tables, number, traced.get(number, {})),
    )
    data = _of_training(name, recipe, tables, blocks) | {
        **facts.of_run(name, recipe, finished=True, before=before),
        "iterations": [{**one, "there": one["number"] in blocks} for one in every],
        "links": links or {},
        "rises": [*results.rises_of(name).items()],
        "runs": [facts.curve_of(name, name, recipe.reinforce.questions)],
        **results.outcome(name),
    }
    shown = {str(number): block for number, block in blocks.items()}
    if evaluated := answers.of_run(name):
        data["changed"] = beside.changed(evaluated)
        data["iterations"].append(entry(evaluated))
        shown[EVALUATION] = bounded_block(evaluated, MOST_EVALUATED)
    return write(Path(PAGE.format(name)), data, shown)


def write_live(
    name: str,
    recipe: Recipe,
    tables: forest.Tables,
    curve: Mapping[str, Sequence[float | None]],
    alarms: Sequence[Alarm],
) -> Path:
    """Write the page of a training that goes on; return it.

    ``tables``: the trees of some of its iterations, which the page has. ``curve``: of all so far.
    """
    blocks = [
        forest.iteration(name, tables, one["number"], {}) for one in forest.iterations(tables)
    ]
    there = {block["iteration"]: entry(block) for block in blocks}
    missing = {"questions": 0, "leaves": 0, "there": False}
    numbers = sorted(int(number) for number in curve["iteration"] if number is not None)
    data = _of_training(name, recipe, tables, there) | {
        **facts.of_run(name, recipe, finished=False),
        "iterations": [there.get(one, {"number": one, **missing}) for one in numbers],
        "links": {},
        "runs": [{"title": name, "curve": curve, "alarms": facts.listed(alarms)}],
        "rises": [],
        **results.NO_OUTCOME,
    }
    shown = {str(block["iteration"]): bounded_block(block, MOST_BYTES) for block in blocks}
    return write(Path(PAGE.format(name)), data, shown)


def _of_training(
    name: str, recipe: Recipe, tables: forest.Tables, numbers: Collection[int]
) -> dict[str, Any]:
    """Return what a page has of a training with the trees of these iterations."""
    return {
        "kind": "run",
        "recipe": name,
        "opening": opening.opening(tables, numbers),
        "changed": {},
        "scales": forest.SCALES,
        "percentiles": [*zip(forest.SHARES, forest.entropy_percentiles(tables), strict=False)],
        **results.settings(name, recipe),
    }


def entry(block: forest.Block) -> dict[str, Any]:
    """Return what the list of iterations has of a block that is in the page."""
    leaves = sum(len(question["leaves"]) for question in block["questions"])
    counts = {"questions": len(block["questions"]), "leaves": leaves}
    return {"number": block["iteration"], **counts, "there": True}


def write_comparison(
    name: str, variant_results: Sequence[Result], resamples: int, budget: str, baseline: str = ""
) -> Path:
    """Write ``reports/<recipe>/comparison.html`` and return it; see ``results.of_comparison``."""
    data = results.of_comparison(variant_results, resamples, budget, baseline)
    return write(Path(COMPARISON.format(name)), {"kind": "comparison", "recipe": name, **data}, {})


def links_to(run: str | None, address: str) -> Links:
    """Return where a run and its traces are in the MLflow UI at ``address``; {} for no such run."""
    page = store.page_of(address, run) if run else None
    if not page:
        return {}
    return {"run": page, "traces": page.partition("/runs/")[0] + TRACES}


def links_to_last(recipe: str, address: str) -> Links:
    """Return the links to the newest run of a recipe's pipeline that the store has."""
    try:
        runs = store.runs_tagged("recipe", recipe)
    except ConnectionError:  # links are a convenience
        return {}
    whole = [run["id"] for run in runs if run.get(store.KIND_TAG) == store.PIPELINE]
    return links_to(whole[-1], address) if whole else {}


def fitting(numbers: Sequence[int], make_block: Callable[[int], forest.Block]) -> dict[int, str]:
    """Make blocks while MOST_BYTES hold them: of the last iteration, the first, those between."""
    blocks: dict[int, str] = {}
    size = 0
    for number in spread(numbers):
        block = bounded_block(make_block(number), MOST_BYTES)
        size += len(block)
        if blocks and size > MOST_BYTES:
            break
        blocks[number] = block
    return dict(sorted(blocks.items()))


def spread(numbers: Sequence[int]) -> list[int]:
    """Order numbers so that any beginning of the list is spread over them: the last comes first."""
    order = {len(numbers) - 1: None, 0: None} if numbers else {}
    pieces = len(numbers) - 1
    while pieces > 0 and len(order) < len(numbers):
        order |= dict.fromkeys(range(0, len(numbers), pieces))
        pieces //= 2
    return [numbers[index] for index in order]
