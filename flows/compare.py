"""Compare algorithms, or other choices of a recipe's training, over several seeds.

``python -m flows.compare RECIPE --budget sampled_tokens=500000 --seeds 0 1 2`` trains each row of
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
from functools import partial
from pathlib import Path

from prefect import flow

from flows import end_import_phase, exit_fast
from flows.comparisons import suites
from flows.comparisons.measured import Budget, Common, measured
from flows.comparisons.variants import Variant, variants
from flows.pages.page import write_comparison
from flows.reinforce import reader_of, replaying, reward_model_of
from flows.runs import dvc_command, recipes
from flows.runs.dvc_command import INTERRUPTED
from flows.tracking import comparison_report, suite_report
from flows.tracking.comparison_tables import COLD_START, SPENT, Result
from flows.workers import substep_tasks
from flows.workers.connection import name_process, prefect_server
from params.schema import algorithms
from params.schema.recipe import Recipe
from params.schema.suites import Suite
from tasks import settings
from tasks.environments import open_environment
from tasks.ledger.artifacts import ROOT, Artifact
from tasks.policy.machine import use_machine

BEFORE = ("champion", "prepare", "cold_start", "reward_model")  # stages that all variants share
log = logging.getLogger(__name__)

Write = Callable[[Sequence[Result]], None]  # of the results so far


@flow(name="compare", flow_run_name="compare {name}", on_running=[name_process])
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
    for stage in BEFORE:
        dvc_command.reproduce(f"{stage}@{name}")
    chosen = settings.load(name, Path("params"))
    use_machine(chosen.machine)
    data = Path("data", name)
    corpus = Artifact.at(data / "corpus")
    cold_start = Artifact.at(Path("models", name, "cold_start"))
    questions, test = (Artifact.at(data / "questions" / f"{s}.parquet") for s in ("train", "test"))
    with (
        substep_tasks.opened() as ledger,
        open_environment(
            chosen.tools, chosen.environment, chosen.machine.threads, Path(corpus.path)
        ) as environment,
    ):
        common = Common(
            name=name,
            recipe=chosen,
            budget=Budget.parse(budget),
            cold_start=cold_start,
            questions=questions,
            test=test,
            panel=Artifact.at(data / "panels" / "test.json"),
            corpus=corpus,
            environment=environment,
            reader=reader_of(chosen, cold_start, environment),
            ledger=ledger,
            reward_model=reward_model_of(chosen, name),
        )
        wanted, write = _asked(common, rows, changes, baseline, suite, parts)
        found: list[Result] = []
        for result, computed in results(common, wanted, seeds):
            found.append(result)
            if computed:
                write(found)
        if not computed:  # the last one; else all of them have just been written
            write(found)
        if not suite:
            write_page(common, found, baseline)


def write_page(common: Common, found: Sequence[Result], baseline: str) -> None:
    """Write ``reports/<recipe>/comparison.html``; a failure does not end a comparison."""
    resamples, kind = common.recipe.evaluate.bootstrap, common.budget.kind
    try:
        write_comparison(common.name, found, resamples, kind, baseline)
    except Exception as error:  # whatever it is, the results are there
        log.warning("the page was not written: %s: %s", type(error).__name__, error)


def _asked(
    common: Common,
    rows: Sequence[str],
    changes: Sequence[str],
    baseline: str,
    suite: str,
    parts: Sequence[str],
) -> tuple[list[Variant], Write]:
    """Return the variants that are asked for, and what writes their results."""
    name, resamples = common.name, common.recipe.evaluate.bootstrap
    if not suite:
        kind = common.budget.kind
        return variants(name, rows, changes), lambda found: comparison_report.write(
            name, found, resamples, kind, baseline
        )
    chosen = suites.suite_of(suite, parts)
    found = suites.variants_of(name, chosen)
    names = {label: variant.name for label, variant in found.items()}
    unique = {variant.name: variant for variant in found.values()}
    write = partial(suite_report.write, name, suite, chosen, names, resamples=resamples)
    return list(unique.values()), write


def results(
    common: Common, wanted: Iterable[Variant], seeds: Sequence[int]
) -> Iterator[tuple[Result, bool]]:
    """Yield the result of the cold start and of each variant, for one seed after the other.

    With each comes whether it was computed now, and not read from its file.
    """
    chosen = list(wanted)
    for seed in seeds:
        common.ledger.beside = [ROOT / common.name / "reinforce"]
        for variant in (None, *chosen):
            name = variant.name if variant else COLD_START
            key = common.key(variant, seed)
            known = found = comparison_report.read(common.name, name, seed, key)
            if not found:
                step = common.step(name, seed)
                work = partial(measured, common, variant, step)
                found = {"variant": name, "seed": seed, "key": key, **replaying(step, work)}
                comparison_report.save(common.name, found)
            common.ledger.beside.append(common.step(name, seed).folder)
            yield found, not known


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument(
        "--budget",
        metavar="KIND=AMOUNT",
        help=f"what each variant may spend in training; kinds: {', '.join(SPENT)}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="of training; else the recipe's")
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
    chosen = _parser().parse_args(arguments)
    try:
        recipe = settings.load(chosen.recipe, Path("params"))
        page = _suite(chosen, recipe) if chosen.suite else _comparison(chosen, recipe)
    except (ValueError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the same call resumes", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{page.read_text()}")
    return 0


def _comparison(chosen: argparse.Namespace, recipe: Recipe) -> Path:
    """Check what is asked for, compare, and return the page."""
    if chosen.part or chosen.committed:
        raise ValueError("--part and --committed are for a suite: add --suite <name>")
    own = [recipe.reinforce.algorithm] if chosen.overrides else []
    rows = chosen.algorithms or own or list(algorithms.load_algorithms(Path("params")))
    budget = Budget.parse(chosen.budget or "")
    wanted = variants(chosen.recipe, rows, chosen.overrides)
    known = [COLD_START, *(variant.name for variant in wanted)]
    if chosen.baseline and chosen.baseline not in known:
        raise ValueError(f"--baseline {chosen.baseline} is no variant: choose one of {known}")
    _check_seconds(budget, wanted)
    _run(chosen, recipe, rows)
    return Path("reports", chosen.recipe, "comparison.md")


def _suite(chosen: argparse.Namespace, recipe: Recipe) -> Path:
    """Check what is asked of a suite, compare or report what is there, and return the page."""
    decided = ("algorithms", "overrides", "baseline")
    if given := [f"--{name}" for name in decided if getattr(chosen, name)]:
        raise ValueError(
            f"{' and '.join(given)}: a suite chooses its rows and changes, so that it compares "
            "what the paper does; leave them out, or compare without --suite"
        )
    suite = suites.suite_of(chosen.suite, chosen.part)
    wanted = suites.variants_of(chosen.recipe, suite)
    page = suite_report.place(chosen.recipe, chosen.suite)
    if chosen.committed:
        names = {label: variant.name for label, variant in wanted.items()}
        _report_committed(chosen, recipe, suite, names)
        return page
    _check_seconds(Budget.parse(chosen.budget or ""), wanted.values())
    _run(chosen, recipe, [])
    return page


def _report_committed(
    chosen: argparse.Namespace, recipe: Recipe, suite: Suite, names: dict[str, str]
) -> None:
    """Write the page of a suite from the files of results that are there, whatever their keys."""
    if chosen.budget or chosen.seeds:
        raise ValueError("--committed trains nothing: leave out --budget and --seeds")
    found = comparison_report.committed(chosen.recipe, [COLD_START, *names.values()])
    if not any(one["variant"] != COLD_START for one in found):
        raise ValueError(
            f"--committed: reports/{chosen.recipe}/comparison has no result of this suite's "
            f"variants, such as {next(iter(names.values()))}: call it with --budget instead"
        )
    resamples = recipe.evaluate.bootstrap
    suite_report.write(
        chosen.recipe, chosen.suite, suite, names, found, resamples=resamples, committed=True
    )


def _check_seconds(budget: Budget, wanted: Iterable[Variant]) -> None:
    if budget.kind == "seconds" and any(one.recipe.reinforce.ahead for one in wanted):
        raise ValueError(
            "--budget seconds: with reinforce.ahead, sampling and learning overlap, and their "
            "seconds are counted one after the other: choose another budget"
        )


def _run(chosen: argparse.Namespace, recipe: Recipe, rows: Sequence[str]) -> None:
    if recipes.add_to_pipeline(chosen.recipe):
        print(f"compare: added {chosen.recipe} to the recipes in dvc.yaml")
    seeds = list(dict.fromkeys(chosen.seeds or [recipe.seed]))
    with prefect_server():
        given = (chosen.recipe, rows, chosen.overrides, seeds, chosen.budget)
        compare(*given, chosen.baseline, chosen.suite, chosen.part)


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
