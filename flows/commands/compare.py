"""Compare algorithms, or other choices of a recipe's training, over several seeds.

``beamline compare RECIPE --budget sampled_tokens=500000 --seeds 0 1 2`` trains each row of
params/algorithms.yaml from the recipe's cold start until the budget is spent, asks each the
held-out questions, and writes tables and figures. ``--algorithms`` chooses rows; each
``--overrides "reinforce.ahead=1 …"`` is a variant of its own beside the recipe as it is, and
``--overrides "algorithm.estimator.lambda=0"`` changes the row.

Variants of one seed start from the same policy and see the same questions in the same order. Rows
with an importance ratio take at least two optimizer steps a batch, since with one every ratio is 1;
rows without one take one. What variants have in common is computed once.

Variants train without validation during training, unless one publishes the best policy by it
(``--overrides reinforce.validation.publish=best``): what it asks for that spends nothing of the
budget, and the policy that it publishes answers the held-out questions.

Each finished variant and seed leaves a small file in ``reports/<recipe>/comparison/``, which can be
committed: while nothing that decides it changes, it is not trained again, here or in a clone. An
interrupted comparison resumes when it is called again.

``--suite arpo``, ``gpg`` or ``gagpo`` compares what a paper compares (params/suites.yaml), and
writes the paper's figures beside ours to ``reports/<recipe>/suite-<name>.md``; ``--part`` chooses
one of its tables, and ``--committed`` reports from the files that are there, without training.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import end_import_phase, exit_fast
from flows.runs import dvc_command, git, recipe_list
from flows.runs.dvc_command import INTERRUPTED
from flows.tracking import comparison_report
from flows.tracking.comparison_tables import COLD_START, Result
from flows.tracking.progress import Progress
from flows.workers import configured_server
from params import recipe_files, suggestions
from params.given_numbers import from_zero
from params.run_folders import RunFolders
from params.schema import algorithms
from params.schema.recipe import Recipe, row_for
from params.schema.suites import Suite, load_suites
from tasks import recipes
from tasks.comparison.budget import SPENT, Budget
from tasks.ledger.artifacts import ROOT, Artifact
from tasks.ledger.substeps import Ledger, SubStep

# torch, transformers, Prefect and pandas are imported where they are used, after the checks
if TYPE_CHECKING:
    from flows.tracking.alarms import History
    from tasks.comparison.comparison import Comparison, Variant
    from tasks.comparison.measure import Report, Spent
    from tasks.training.iteration import Iteration

BEFORE = ("champion", "prepare", "cold_start", "reward_model")  # stages that all variants share
log = logging.getLogger(__name__)

Write = Callable[[Sequence[Result]], None]  # of the results so far


def compare(
    name: str,
    rows: Sequence[str],
    changes: Sequence[str],
    seeds: Sequence[int],
    budget: str,
    baseline: str = "",
    suite: str = "",
    parts: Sequence[str] = (),
) -> None:
    """Write ``reports/<recipe>/comparison.md`` and figures, and a file for each result.

    With a suite, of which ``parts`` are asked for, its page is written instead.
    """
    from flows.workers import substep_tasks
    from tasks.policy.machine import use_machine

    for stage in BEFORE:
        dvc_command.reproduce(f"{stage}@{name}")
    recipe = recipes.load(name, Path("params"))
    use_machine(recipe.machine)
    with substep_tasks.opened() as ledger, opened(name, recipe, budget) as comparison:
        compared, write = _asked(comparison, rows, changes, baseline, suite, parts)
        results_so_far: list[Result] = []
        for result, computed in results(comparison, ledger, compared, seeds):
            results_so_far.append(result)
            if computed:
                write(results_so_far)
        if not computed:  # the last one; else all of them have just been written
            write(results_so_far)
        if not suite:
            write_page(comparison, results_so_far, baseline)


@contextmanager
def opened(name: str, recipe: Recipe, budget: str) -> Iterator[Comparison]:
    """Yield what all variants share; their environment stays open until the end of the block."""
    from tasks.comparison.comparison import Comparison
    from tasks.policy import teacher
    from tasks.recipes.opening import open_recipe, reader_of
    from tasks.training.setup import reward_model_of

    folders = RunFolders(name)
    with open_recipe(recipe, folders.corpus) as environment:
        yield Comparison(
            name=name,
            recipe=recipe,
            budget=Budget.parse(budget),
            cold_start=Artifact.at(folders.cold_start),
            questions=Artifact.at(folders.split("train")),
            test=Artifact.at(folders.split("test")),
            panel=Artifact.at(folders.panel("test")),
            corpus=Artifact.at(folders.corpus),
            environment=environment,
            reader=reader_of(recipe, folders.cold_start, environment),
            reward_model=reward_model_of(recipe, name),
            teacher=teacher.of(folders.teacher, recipe.teacher) if recipe.teacher else None,
        )


def write_page(comparison: Comparison, results: Sequence[Result], baseline: str) -> None:
    """Write ``reports/<recipe>/comparison.html``; a failure does not end a comparison."""
    resamples, kind = comparison.recipe.evaluate.bootstrap, comparison.budget.kind
    try:
        from flows.pages.page_file import write_comparison

        write_comparison(comparison.name, results, resamples, kind, baseline)
    except Exception as error:  # whatever it is, the results are there
        log.warning("the page was not written: %s: %s", type(error).__name__, error)


def _asked(
    comparison: Comparison,
    rows: Sequence[str],
    changes: Sequence[str],
    baseline: str,
    suite: str,
    parts: Sequence[str],
) -> tuple[list[Variant], Write]:
    """Return the variants that are asked for, and what writes their results."""
    from flows.tracking import suite_report
    from tasks.comparison import suites
    from tasks.comparison.variants import variants

    name, resamples = comparison.name, comparison.recipe.evaluate.bootstrap
    if not suite:
        kind = comparison.budget.kind
        return variants(name, rows, changes), lambda results: comparison_report.write(
            name, results, resamples, kind, baseline
        )
    row = suites.suite_of(suite, parts)
    by_label = suites.variants_of(name, row)
    names = {label: variant.name for label, variant in by_label.items()}
    unique = {variant.name: variant for variant in by_label.values()}
    write = partial(suite_report.write, name, suite, row, names, resamples=resamples)
    return list(unique.values()), write


def results(
    comparison: Comparison, ledger: Ledger, variants: Sequence[Variant], seeds: Sequence[int]
) -> Iterator[tuple[Result, bool]]:
    """Yield the result of the cold start and of each variant, for one seed after the other.

    With each comes whether it was computed now, and not read from its file.
    """
    from tasks.comparison.measure import key_of
    from tasks.training.loop import replaying

    name = comparison.name
    for seed in seeds:
        ledger.beside = [ROOT / name / "reinforce"]
        for variant in (None, *variants):
            label = variant.name if variant else COLD_START
            key = key_of(comparison, variant, seed)
            stage = f"compare/{comparison_report.slug(label)}/seed-{seed}"
            step = SubStep(name, stage, 0, seed, ledger)
            result = known = comparison_report.read(name, label, seed, key)
            if result is None:
                measurement = replaying(step, partial(_measured, comparison, variant, step))
                result = {"variant": label, "seed": seed, "key": key, **measurement}
                comparison_report.save(name, result)
            ledger.beside.append(step.folder)
            yield result, known is None


def _measured(comparison: Comparison, variant: Variant | None, step: SubStep) -> dict[str, Any]:
    """Measure a variant with a progress bar; return the result and the commit that made it."""
    from flows.tracking.alarms import History
    from tasks.comparison.measure import measure

    revision = git.revision()
    made_by = {"commit": revision.commit, "uncommitted": revision.dirty}
    if variant is None:
        return {**measure(comparison, None, step), **made_by}
    progress = Progress(
        f"{variant.name}, seed {step.seed}",
        int(comparison.budget.amount),
        unit=comparison.budget.kind.replace("_", " "),
    )
    history = History(variant.recipe.reinforce.questions)
    advance = _advance(progress, comparison.budget, history)
    result = measure(comparison, variant, step, advance)
    progress.close()
    alarms = {alarm.name: alarm.iteration for alarm in history.raised.values()}
    return {**result, "alarms": alarms, **made_by}


def _advance(progress: Progress, budget: Budget, history: History) -> Report:
    """Return what moves a progress bar to the share of the budget that is spent.

    It also prints the alarms that an iteration raises.
    """
    from flows.tracking.alarm_report import sentence
    from flows.tracking.reinforce_report import metrics_of
    from tasks.training.iteration import validated_in

    def report(iteration: Iteration, spent: Spent) -> None:
        for alarm in history.add(metrics_of(iteration), validated_in([iteration])):
            progress.write(sentence(alarm))
        now = {"success": iteration["reward"][0]["metrics"]["success"]}
        progress.reach(int(min(spent[budget.kind], budget.amount)), now)

    return report


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="beamline compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument(
        "--budget",
        metavar="KIND=AMOUNT",
        help=f"what each variant may spend in training; kinds: {', '.join(SPENT)}",
    )
    parser.add_argument("--seeds", nargs="+", type=from_zero, help="of training; else the recipe's")
    parser.add_argument("--algorithms", nargs="+", metavar="ROW", help="else every row")
    parser.add_argument(
        "--overrides",
        nargs="+",
        default=[],
        metavar="CHANGES",
        help="variants: each a quoted list of section.key=value, for one row alone after 'ROW: '; "
        "the recipe's algorithm unless --algorithms names others",
    )
    parser.add_argument(
        "--baseline",
        default="",
        metavar="VARIANT",
        help="that the others are compared with, named as in the table; else the best",
    )
    parser.add_argument("--suite", default="", metavar="NAME", help="of params/suites.yaml")
    parser.add_argument("--part", nargs="+", default=[], metavar="NAME", help="of the suite, alone")
    parser.add_argument(
        "--committed",
        action="store_true",
        help="report a suite from the results that are there, whatever their key; train nothing",
    )
    return parser


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing that can be started."""
    args = _parser().parse_args(arguments)
    try:
        recipe = recipes.load(args.recipe, Path("params"))
        _check_arguments(args)
        page = _suite(args, recipe) if args.suite else _comparison(args, recipe)
    except (ValueError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the same call resumes", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{page.read_text()}")
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for what is refused without the libraries, which take seconds to import."""
    rows, every = args.algorithms or [], algorithms.load_algorithms(Path("params"))
    if unknown := [row for row in rows if row not in every]:
        raise ValueError(
            f"--algorithms: {', '.join(map(repr, unknown))} is no row of params/algorithms.yaml"
            f"{suggestions.meant(unknown[0], every)}: choose of {list(every)}"
        )
    if not args.suite and (args.part or args.committed):
        raise ValueError("--part and --committed are for a suite: add --suite <name>")
    if args.suite and args.suite not in (named := load_suites(Path("params"))):
        raise ValueError(
            f"--suite {args.suite}: params/suites.yaml has no such row"
            f"{suggestions.meant(args.suite, named)}: choose one of {list(named)}"
        )
    if not args.suite:
        Budget.parse(args.budget or "")
    elif args.committed and not list(
        (RunFolders(args.recipe).reports / "comparison").glob("*/seed-*.json")
    ):
        raise ValueError(_no_results(args.recipe, " of this suite's variants"))


def _no_results(recipe: str, which: str) -> str:
    return (
        f"--committed: reports/{recipe}/comparison has no result{which}: call it with --budget "
        "instead"
    )


def _comparison(args: argparse.Namespace, recipe: Recipe) -> Path:
    """Check what is asked for, compare, and return the page."""
    from tasks.comparison.variants import variants

    recipe_rows = [recipe.reinforce.algorithm] if args.overrides else []
    rows = args.algorithms or recipe_rows or _fitting(recipe)
    budget = Budget.parse(args.budget or "")
    all_variants = variants(args.recipe, rows, args.overrides)
    known = [COLD_START, *(variant.name for variant in all_variants)]
    if args.baseline and args.baseline not in known:
        meant = suggestions.meant(args.baseline, known)
        raise ValueError(f"--baseline {args.baseline} is no variant{meant}: choose one of {known}")
    _check_seconds(budget, all_variants)
    _run(args, recipe, rows)
    return Path("reports", args.recipe, "comparison.md")


def _fitting(recipe: Recipe) -> list[str]:
    """Return the rows that fit a recipe; say which do not, and why."""
    fitting = []
    for name in algorithms.load_algorithms(Path("params")):
        try:
            row_for(recipe, name, Path("params"))
            fitting.append(name)
        except ValueError as error:
            print(f"compare: left out: {error}")
    return fitting


def _suite(args: argparse.Namespace, recipe: Recipe) -> Path:
    """Check what is asked of a suite, compare or report what is there, and return the page."""
    decided = ("algorithms", "overrides", "baseline")
    if given := [f"--{name}" for name in decided if getattr(args, name)]:
        raise ValueError(
            f"{' and '.join(given)}: a suite chooses its rows and changes, so that it compares "
            "what the paper does; leave them out, or compare without --suite"
        )
    from flows.tracking import suite_report
    from tasks.comparison import suites

    suite = suites.suite_of(args.suite, args.part)
    by_label = suites.variants_of(args.recipe, suite)
    page = suite_report.place(args.recipe, args.suite)
    if args.committed:
        names = {label: variant.name for label, variant in by_label.items()}
        _report_committed(args, recipe, suite, names)
        return page
    _check_seconds(Budget.parse(args.budget or ""), by_label.values())
    _run(args, recipe, [])
    return page


def _report_committed(
    args: argparse.Namespace, recipe: Recipe, suite: Suite, names: dict[str, str]
) -> None:
    """Write the page of a suite from the files of results that are there, whatever their keys."""
    from flows.tracking import suite_report

    if args.budget or args.seeds:
        raise ValueError("--committed trains nothing: leave out --budget and --seeds")
    results = comparison_report.committed(args.recipe, [COLD_START, *names.values()])
    if not any(one["variant"] != COLD_START for one in results):
        which = f" of this suite's variants, such as {next(iter(names.values()))}"
        raise ValueError(_no_results(args.recipe, which))
    resamples = recipe.evaluate.bootstrap
    suite_report.write(
        args.recipe, args.suite, suite, names, results, resamples=resamples, committed=True
    )


def _check_seconds(budget: Budget, variants: Iterable[Variant]) -> None:
    if budget.kind == "seconds" and any(one.recipe.reinforce.ahead for one in variants):
        raise ValueError(
            "--budget seconds: with reinforce.ahead, sampling and learning overlap, and their "
            "seconds are counted one after the other: choose another budget"
        )


def _run(args: argparse.Namespace, recipe: Recipe, rows: Sequence[str]) -> None:
    configured_server.check()
    from prefect import flow

    from flows.workers.connection import name_process, prefect_server
    from flows.workers.stage import check_machine

    if listed := recipe_list.add_to_pipeline(args.recipe):
        print(f"compare: added {args.recipe} to the recipes in {listed}")
    recipe_files.refresh(args.recipe, Path("params"))
    seeds = list(dict.fromkeys(args.seeds or [recipe.seed]))
    check_machine(args.recipe)
    with prefect_server():
        given = (args.recipe, rows, args.overrides, seeds, args.budget)
        shown = flow(name="compare", flow_run_name="compare {name}", on_running=[name_process])
        shown(compare)(*given, args.baseline, args.suite, args.part)


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
