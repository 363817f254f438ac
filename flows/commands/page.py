"""Write the page of a run: results, curves and trees in one HTML file that opens offline.

``beamline page RECIPE`` writes ``reports/<recipe>/page.html`` from what the last run has
left in ``data/<recipe>`` and ``reports/<recipe>``; a run writes it at its end, too. With
``--comparison``, ``reports/<recipe>/comparison.html`` is written from the results in
``reports/<recipe>/comparison``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.pages import page_file, results
from flows.workers.server import ui_address
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
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="whose trees are in the page; by default all that fit",
    )
    parser.add_argument("--comparison", action="store_true", help="the page of a comparison")
    args = parser.parse_args(arguments)
    try:
        print(write(args.recipe, args.iteration, args.comparison))
    except ValueError as error:
        print(f"page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
