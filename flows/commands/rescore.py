"""Score the stored trajectories of a run again, by another scorer, reward or judge.

``beamline rescore RECIPE --scorer f1`` compares answers with another scorer of tasks/scorers, or
one of your own (own/mine.py:name); ``--as OTHER`` takes reward and judge of the recipe OTHER. Both
may be given. Nothing is sampled or trained. Printed, and written to ``reports/<recipe>``, are both
scorings by iteration, the trend of their difference (a reward that rises while a stricter one falls
is being exploited), and trajectories on which they differ (``rescored.md``); ``rescored.csv`` has
every leaf.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows import end_import_phase, exit_fast
from flows.host import files
from flows.runs import without_run
from flows.tracking import curve_file
from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.recipes.opening import open_recipe, reader_of
from tasks.rewards import judging, rescoring, scoring
from tasks.rewards.rescoring import VALUES, Trend
from tasks.scorers import judge, scorer_fault
from tasks.trees.tables import load_trees, read_rows
from tasks.trees.words import printable

PARAMS = Path("params")
BLOCKS = 6  # rows of the table; iterations are shown in so many runs of equal length
SHOWN = 5  # trajectories on which the two differ
Pair = Mapping[str, Any]


def rescored(name: str, other: Recipe, scorer: str | None) -> list[list[dict[str, Any]]]:
    """Return iteration -> leaves with both scorings.

    Raises ValueError where no run has left its trees, or for a reward or scorer that cannot be
    used; RuntimeError where the judge cannot be asked.
    """
    folders = RunFolders(name)
    file = folders.data / "trees" / "rewards.parquet"
    if faults := list(_faults(name, file, other, scorer)):
        raise ValueError("\n".join(faults))
    iterations = len(curve_file.of_training(curve_file.read(folders.curve)).get("reward", ()))
    if not iterations:
        raise ValueError(f"{folders.curve} has no iteration: {without_run.remedy(name)}")
    with ExitStack() as stack:
        environment = stack.enter_context(open_recipe(other, folders.corpus))
        reader = reader_of(recipes.load(name, PARAMS), folders.trained, environment)
        opened = _judge(stack, other, name) if other.judge else None
        return [
            rescoring.paired(
                read_rows(file, number),
                _scored(folders.data / "trees", number, other, scorer, reader, opened),
            )
            for number in range(iterations)
        ]


def _faults(name: str, file: Path, other: Recipe, scorer: str | None) -> Iterator[str]:
    """Yield why a run cannot be scored again in this way."""
    if not file.is_file():
        yield f"{file}: no such file: {without_run.remedy(name)}"
    if scorer and (fault := scorer_fault(scorer)):
        yield f"--scorer {scorer}: {fault}"
    if any(part.name == "model" for part in other.reinforce.reward):
        yield (
            "reinforce.reward has the part model, whose estimates are not stored: score by the "
            "rule, with a recipe that has no such part"
        )


def _judge(stack: ExitStack, recipe: Recipe, name: str) -> judging.OpenJudge:
    from tasks.evaluation.exam import judges_of  # with torch

    assert recipe.judge
    template = judge.load_prompt(PARAMS / recipe.judge.prompt)
    opened = judging.open_judge(recipe.judge, template, name, judges_of(recipe))
    return stack.enter_context(opened)


def _scored(
    folder: Path,
    iteration: int,
    other: Recipe,
    scorer: str | None,
    reader: scoring.Reader,
    opened: judging.OpenJudge | None,
) -> list[dict[str, Any]]:
    trees = load_trees(folder, iteration)
    if scorer:
        trees = [replace(one, question=replace(one.question, scorer=scorer)) for one in trees]
    return scoring.score_trees(trees, other.reinforce.reward, reader=reader, judge=opened)


def report(title: str, iterations: Sequence[Sequence[Pair]]) -> str:
    """Return the comparison as Markdown."""
    heads = [f"{word}{value}" for value in VALUES for word in ("", "other ")]
    lines = [
        f"# {title}",
        "",
        f"| iterations | trajectories | {' | '.join(heads)} | differ (%) |",
        "|---|" + "---:|" * (len(heads) + 2),
        *_blocks(iterations),
        "",
        *_trends(iterations),
        "",
        *_examples([row for rows in iterations for row in rows]),
    ]
    return "\n".join(lines) + "\n"


def _blocks(iterations: Sequence[Sequence[Pair]]) -> Iterator[str]:
    """Yield a row for each run of iterations, and one for all."""
    size = -(-len(iterations) // BLOCKS)
    starts = range(0, len(iterations), size)
    blocks = [(f"{start + 1}-{min(start + size, len(iterations))}", start) for start in starts]
    for label, some in [
        *((label, iterations[start : start + size]) for label, start in blocks),
        ("all", iterations),
    ]:
        rows = [row for of_iteration in some for row in of_iteration]
        found = rescoring.means(rows)
        numbers = [found[word + value] for value in VALUES for word in ("", "other_")]
        cells = " | ".join(f"{number:.3f}" for number in numbers)
        yield f"| {label} | {len(rows)} | {cells} | {100 * found['parted']:.1f} |"


def _trends(iterations: Sequence[Sequence[Pair]]) -> Iterator[str]:
    by_iteration = [rescoring.means(rows) for rows in iterations]
    for value in VALUES:
        found = rescoring.trend(by_iteration, value)
        if found is None:
            yield f"- {value}: too few iterations for a trend"
        else:
            yield f"- {value}: {_sentence(found)}"


def _sentence(found: Trend) -> str:
    numbers = f"{10 * found.slope:+.3f} [{10 * found.low:+.3f}, {10 * found.high:+.3f}]"
    what = f"the other scoring minus the run's own changes by {numbers} in ten iterations"
    if not found.is_told:
        return f"{what}: it cannot be told from no change"
    if found.slope > 0:
        return f"{what}: the reward of the run falls behind"
    return f"{what}: the reward of the run rises faster, which may be exploitation of it"


def _examples(rows: Sequence[Pair]) -> Iterator[str]:
    """Yield the trajectories on which the two differ most."""
    found = rescoring.parted(rows, SHOWN)
    yield "Where they differ most:" if found else "They differ nowhere."
    for row in found:
        answer = printable(str(row["answer"]))[:80]
        yield (
            f"- question {row['question']}, leaf {row['leaf']}: reward {row['reward']:.2f}, "
            f"other {row['other_reward']:.2f}; answer {answer!r}"
        )


def run(name: str, other_name: str | None, scorer: str | None) -> str:
    """Score a run again; write the report and the table of leaves; return the report."""
    recipe = recipes.load(name, PARAMS)
    other = recipes.load(other_name, PARAMS) if other_name else recipe
    found = rescored(name, other, scorer)
    how = " and ".join(
        [*([f"the scorer {scorer}"] if scorer else []), *([other_name] if other_name else [])]
    )
    text = report(f"The run of {name}, scored again by {how}", found)
    rows = [{"iteration": number, **row} for number, rows in enumerate(found) for row in rows]
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    for file, content in (("rescored.md", text), ("rescored.csv", table.getvalue())):
        with files.replaced(RunFolders(name).reports / file) as partial:
            partial.write_text(content)
    return text


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: a recipe, run or scorer with faults."""
    parser = argparse.ArgumentParser(
        prog="beamline rescore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe with a run in this checkout")
    parser.add_argument("--scorer", metavar="NAME", help="compares answers in place of each one's")
    parser.add_argument("--as", dest="other", metavar="OTHER", help="whose reward and judge count")
    args = parser.parse_args(arguments)
    if not (args.scorer or args.other):
        parser.error("give --scorer, --as, or both: with neither, nothing would differ")
    try:
        print(run(args.recipe, args.other, args.scorer))
    except (ValueError, RuntimeError) as error:
        print(f"rescore: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
