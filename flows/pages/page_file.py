"""Write the page of a run or of a comparison: one HTML file that opens offline.

Scripts, styles and data are in the file. The trees of each iteration are one compressed block,
which the browser unpacks when the iteration is asked for. The page's content security policy allows
its own scripts by their digests, and no network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flows.host import files
from flows.pages import answers, beside, facts, forest, opening, results
from flows.tracking import store
from flows.tracking.comparison_tables import Result
from flows.tracking.traces import PAGE
from params.schema.recipe import Recipe

COMPARISON = "reports/{}/comparison.html"
MOST_BYTES = 24 * 2**20  # of the blocks of all iterations; plotly and the rest are 3 MB
SCRIPTS = {
    "run": ("common.js", "run.js", "conversation.js", "tree.js"),
    "comparison": ("common.js", "comparison.js"),
}

TRACES = "/traces?selectedEvaluationId="  # of MLflow's UI, before the id of a trace

Links = dict[str, str]  # "run" and "traces": addresses in MLflow


def write_run(
    name: str, recipe: Recipe, links: Links | None = None, numbers: Collection[int] = ()
) -> Path:
    """Write ``reports/<recipe>/page.html`` and return it.

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

    def made(number: int) -> str:
        """Return an iteration's block, with half of its questions as often as it is too large."""
        most = -1
        while True:
            shown = forest.iteration(name, tables, number, traced.get(number, {}), most)
            block = compressed(as_json(shown))
            if len(block) <= MOST_BYTES or len(shown["questions"]) < 2:
                return block
            most = len(shown["questions"]) // 2

    blocks = _fitting(sorted(numbers) or known, made)
    evaluated = answers.of_run(name)
    data = {
        "kind": "run",
        "recipe": name,
        "iterations": [{**one, "there": one["number"] in blocks} for one in every],
        "opening": opening.opening(tables, blocks),
        "changed": beside.changed(evaluated) if evaluated else {},
        "scales": forest.SCALES,
        "percentiles": [*zip(forest.SHARES, forest.entropy_percentiles(tables), strict=False)],
        "links": links or {},
        "finished": True,
        **facts.of_run(name, recipe),
        **results.of_run(name, recipe),
    }
    shown = {str(number): block for number, block in blocks.items()}
    if evaluated:
        data["iterations"].append(_entry(evaluated))
        shown[answers.EVALUATION] = compressed(as_json(evaluated))
    return _write(Path(PAGE.format(name)), data, shown)


def _entry(block: forest.Block) -> dict[str, Any]:
    """Return what the list of iterations has of a block that is in the page."""
    leaves = sum(len(question["leaves"]) for question in block["questions"])
    counts = {"questions": len(block["questions"]), "leaves": leaves}
    return {"number": block["iteration"], **counts, "there": True}


def write_comparison(
    name: str, variant_results: Sequence[Result], resamples: int, budget: str, baseline: str = ""
) -> Path:
    """Write ``reports/<recipe>/comparison.html`` and return it; see ``results.of_comparison``."""
    data = results.of_comparison(variant_results, resamples, budget, baseline)
    return _write(Path(COMPARISON.format(name)), {"kind": "comparison", "recipe": name, **data}, {})


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


def _fitting(numbers: Sequence[int], make_block: Callable[[int], str]) -> dict[int, str]:
    """Make blocks of iterations while they fit: the last, the first, then those between."""
    blocks: dict[int, str] = {}
    size = 0
    for number in spread(numbers):
        block = make_block(number)
        size += len(block)
        if blocks and size > MOST_BYTES:
            break
        blocks[number] = block
    return dict(sorted(blocks.items()))


def spread(numbers: Sequence[int]) -> list[int]:
    """Order numbers so that any beginning of the list is spread over them: the last comes first."""
    order = {len(numbers) - 1: None, 0: None}
    pieces = len(numbers) - 1
    while pieces > 0 and len(order) < len(numbers):
        order |= dict.fromkeys(range(0, len(numbers), pieces))
        pieces //= 2
    return [numbers[index] for index in order]


# ---------------------------------------------------------------- HTML


def _write(file: Path, data: dict[str, Any], blocks: dict[str, str]) -> Path:
    script = "\n".join(_source(part) for part in SCRIPTS[data["kind"]])
    text = (
        _environment()
        .get_template("page.html")
        .render(
            data=results.rounded(data),
            blocks=blocks,
            plotly=compressed(plotly_source()),
            script=script,
            style=_source("page.css"),
            digests=[digest_of(script), digest_of(plotly_source())],
        )
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")
    return file


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flows.pages", "."), autoescape=True, undefined=StrictUndefined
    )


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def plotly_source() -> str:
    """Return the source of plotly.js, which draws in the page."""
    from plotly.offline import get_plotlyjs  # it takes a second to import

    return str(get_plotlyjs())


def digest_of(script: str) -> str:
    """Return a script's digest as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def as_json(value: Any) -> str:
    """Return compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def compressed(text: str) -> str:
    """Return a text as base64 of gzip, equal for equal texts."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
