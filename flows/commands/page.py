"""Write the page of a run: results, curves and trees in one HTML file that opens offline.

``beamline page RECIPE`` writes ``reports/<recipe>/page.html`` from what the last run has
left in ``data/<recipe>`` and ``reports/<recipe>``; a run writes it at its end, too. With
``--comparison``, ``reports/<recipe>/comparison.html`` is written from the results in
``reports/<recipe>/comparison``.

``--against OTHER`` writes ``reports/<recipe>/against-<other>.html``: this run beside another one,
question by question. OTHER is a recipe, the folder of another checkout, or the commit of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.pages import against, page_file, results
from flows.runs import git
from flows.runs.restoring import SHORT, restore
from flows.workers.server import ui_address
from params.given_numbers import from_zero
from tasks import recipes


def write(name: str, numbers: Sequence[int], comparison: bool) -> Path:
    """Write a recipe's page and return its file. Raises ValueError where there are no results."""
    recipe = recipes.load(name, Path("params"))
    if not comparison:
        return page_file.write_run(
            name, recipe, page_file.links_to_last(name, ui_address()), numbers
        )
    if numbers:
        raise ValueError("--iteration is for a run's page: leave it out with --comparison")
    comparison_results = results.committed(name)
    return page_file.write_comparison(
        name, comparison_results, recipe.evaluate.bootstrap, "sampled_tokens"
    )


def write_against(name: str, other: str) -> Path:
    """Write the page of a recipe's run beside another run; return its file.

    Raises ValueError for what is no run, and RuntimeError where a commit's run cannot be restored.
    """
    recipe = recipes.load(name, Path("params"))
    if Path("params", f"{other}.yaml").is_file():
        return against.write_against(
            against.PastRun(name, name, Path()), against.PastRun(other, other, Path()), recipe
        )
    here = against.PastRun(f"{name} here", name, Path())
    if (folder := Path(other)).is_dir():
        title = folder.resolve().name
        return against.write_against(here, against.PastRun(title, name, folder), recipe)
    try:
        commit = git.resolve(other)
    except ValueError as error:
        raise ValueError(f"--against: there is no recipe or folder {other}, and {error}") from None
    restored = restore(commit, name)
    return against.write_against(here, against.PastRun(commit[:SHORT], name, restored), recipe)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog="beamline page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument(
        "--iteration",
        type=from_zero,
        nargs="+",
        default=[],
        metavar="N",
        help="whose trees are in the page; by default all that fit",
    )
    parser.add_argument("--comparison", action="store_true", help="the page of a comparison")
    parser.add_argument("--against", metavar="OTHER", help="another run: recipe, folder or commit")
    args = parser.parse_args(arguments)
    if args.against and (args.comparison or args.iteration):
        parser.error("--against takes neither --comparison nor --iteration")
    try:
        if args.against:
            print(write_against(args.recipe, args.against))
        else:
            print(write(args.recipe, args.iteration, args.comparison))
    except (ValueError, RuntimeError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
