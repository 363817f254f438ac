"""Draw the papers' figures again, and print where the entropy rises, from what runs have left.

``beamline figures RECIPE`` writes ``reports/<recipe>/figures/*.png``: success against tool
calls, episode length and training dynamics, entropy around tool results by tool, and the
distribution of advantages at two updates, from ``data/<recipe>``. Nothing is computed anew, and no
run is needed. With several recipes, what is printed of them stands side by side: how much the
entropy rises after tool results, and whether it rises where trajectories then end differently.
A comparison's are drawn by ``beamline compare RECIPE --suite NAME --committed``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from flows import end_import_phase, exit_fast
from flows.runs import without_run
from flows.tracking import curve_file, paper_figures, run_figures
from params.run_folders import RunFolders
from params.schema.recipe import Recipe, algorithm_of
from tasks import recipes
from tasks.comparison import figure_data
from tasks.learning.algorithm import CREDITED
from tasks.recipes.opening import open_recipe, reader_of
from tasks.rewards.scoring import Reader
from tasks.trees.profiles import entropy_by_tool, pooled
from tasks.trees.tables import load_trees, read_rows

NEEDED = ("curve.csv", "trees/nodes.parquet", "trees/advantages.parquet")  # that a run leaves


def draw(name: str) -> tuple[list[Path], list[str]]:
    """Write the figures of a recipe's run; return their files, and why others are missing.

    Raises ValueError with the file and the remedy where no run has left its tables.
    """
    recipe, data = recipes.load(name, Path("params")), RunFolders(name).data
    if lacking := [str(data / file) for file in NEEDED if not (data / file).is_file()]:
        raise ValueError(f"{', '.join(lacking)}: no such file: {without_run.remedy(name)}")
    curve = curve_file.of_training(curve_file.read(RunFolders(name).curve))
    iterations = len(next(iter(curve.values()), ()))
    if not iterations:
        raise ValueError(
            f"{RunFolders(name).curve} has no iteration of a training: {without_run.remedy(name)}"
        )
    figures, missing = _of_curve(curve)
    makers: dict[str, Callable[[], Any]] = {
        **{key: partial(_as_it_is, figure) for key, figure in figures.items()},
        "entropy_by_tool": lambda: _entropies(name, recipe, data, iterations),
        "advantages": lambda: _advantages(recipe, data, iterations),
    }
    drawn = []
    for key, make in makers.items():
        file = RunFolders(name).reports / "figures" / f"{key}.png"
        try:
            run_figures.save(make(), file)
            drawn.append(file)
        except ValueError as error:
            missing.append(f"{key}: {error}")
    return drawn, missing


def _as_it_is(figure: Any) -> Any:
    return figure


def _of_curve(curve: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a curve by name, and why others are missing."""
    whole = [kind for kind in paper_figures.SPENT if not any(map(math.isnan, curve.get(kind, ())))]
    spent = {kind: list(accumulate(curve[kind])) for kind in whole if kind in curve}
    numbers = [number + 1.0 for number in range(len(next(iter(curve.values()))))]
    unspent = {name: values for name, values in curve.items() if name not in paper_figures.SPENT}
    figures = paper_figures.of_run({**unspent, **spent, "iteration": numbers})
    missing = [
        f"{name}: curve.csv has no values of {' or '.join(measures)}"
        + ("" if by == curve_file.NUMBER else f", or some iteration has none of {by}")
        for name, (measures, by, _) in paper_figures.OF_RUN.items()
        if name not in figures
    ]
    return figures, missing


def _entropies(name: str, recipe: Recipe, data: Path, iterations: int) -> Any:
    """Draw entropies around tool results in the last iterations."""
    last = range(max(0, iterations - figure_data.ENDS), iterations)
    by_tool: dict[str, list[Any]] = {}
    tool_of = figure_data.tool_named(_reader(name, recipe, data))
    for number in last:
        for tool, profile in entropy_by_tool(load_trees(data / "trees", number), tool_of).items():
            by_tool.setdefault(tool, []).append(profile)
    profiles = {tool: pooled(profiles_of_tool) for tool, profiles_of_tool in by_tool.items()}
    when = f"iterations {last.start + 1} to {iterations}"
    return paper_figures.entropy_by_tool(profiles, 1, when)


def _reader(name: str, recipe: Recipe, data: Path) -> Reader:
    """Return what reads the agent's turns: the recipe's dialect, for its tokenizer."""
    folders = RunFolders(name)
    with open_recipe(recipe, folders.corpus) as environment:
        return reader_of(recipe, folders.trained, environment)


def _advantages(recipe: Recipe, data: Path, iterations: int) -> Any:
    unit = CREDITED[algorithm_of(recipe, Path("params")).estimator.kind]
    file = data / "trees" / "advantages.parquet"
    histograms = [
        figure_data.histogram(number, figure_data.credited(read_rows(file, number), unit))
        for number in figure_data.shown(iterations)
    ]
    return paper_figures.advantages({recipe.reinforce.algorithm: [histograms]})


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing to draw."""
    parser = argparse.ArgumentParser(
        prog="beamline figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipes", nargs="+", metavar="recipe", help="params/<recipe>.yaml")
    names = parser.parse_args(arguments).recipes
    try:
        drawn = {name: draw(name) for name in dict.fromkeys(names)}
    except ValueError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    for files, missing in drawn.values():
        print(*files, *(f"not drawn: {reason}" for reason in missing), sep="\n")
    print("", rises_of([*drawn]), sep="\n")
    return 0


def rises_of(names: Sequence[str]) -> str:
    """Return the table of the entropy after tool results, and why a run has no column in it."""
    from flows.analysis import rises  # with pandas, which no figure waits for

    measured, lines = {}, []
    for name in names:
        try:
            measured[name] = rises.of_run(name)
        except ValueError as error:
            lines.append(str(error))
    return "\n".join([*([rises.table(measured)] if measured else []), *lines])


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
