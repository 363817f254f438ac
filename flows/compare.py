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
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from prefect import flow

from flows import end_import_phase, exit_fast
from flows.reinforce import (
    Iteration,
    Training,
    exam_of,
    is_asked,
    policy_of,
    published,
    reader_of,
    replaying,
    train,
    validate,
)
from flows.runs import dvc_command, git, ledger_mirror, recipes
from flows.tracking import comparison_report
from flows.tracking.comparison_tables import COLD_START, SPENT, Result
from flows.tracking.progress import Progress
from flows.tracking.reinforce_report import sum_seconds, training_curve
from flows.workers.connection import name_process, prefect_server
from flows.workers.stage import INTERRUPTED
from params import overrides
from params.schema import algorithms
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe
from tasks import settings
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.evaluate import by_question
from tasks.exam import Exam, answer, rewards_of
from tasks.ledger import keys
from tasks.ledger.artifacts import ROOT, Artifact
from tasks.ledger.substeps import Ledger, Step
from tasks.policy.machine import use_machine
from tasks.rewards.scoring import Reader
from tasks.trees import panels
from tasks.trees.metrics import together
from tasks.trees.tables import load_questions, read_rows

BEFORE = ("champion", "prepare", "cold_start")  # stages that all variants share
OWN_SECTIONS = ("reinforce", "lora", "engine")  # what a variant may override
DECIDED = {  # what a comparison sets itself
    "reinforce.algorithm": "name the row with --algorithms",
    "reinforce.iterations": "--budget decides when training ends",
}
STEPS = ("reinforce.update.epochs", "reinforce.update.mini_batches")  # optimizer steps a batch
NOT_DECIDING = {
    "algorithm",
    "keep",
    "trace_every",
    "trace_questions",
    "stop_on",
}  # of ``reinforce``
LONGEST = 20  # times the recipe's iterations, where a variant hardly spends the budget


@dataclass(frozen=True)
class Budget:
    """What each variant may spend in training: an amount of one of SPENT."""

    kind: str
    amount: float

    @staticmethod
    def parse(text: str) -> Budget:
        """Read ``kind=amount``. Raises ValueError."""
        kind, _, amount = text.partition("=")
        try:
            budget = Budget(kind, float(amount))
        except ValueError:
            budget = Budget(kind, 0.0)
        if kind not in SPENT or not 0 < budget.amount < float("inf"):
            raise ValueError(f"--budget {text}: write kind=amount, with a kind of {list(SPENT)}")
        return budget


@dataclass(frozen=True)
class Variant:
    """One line of the table: the recipe with an algorithm and overrides."""

    name: str
    recipe: Recipe
    algorithm: Algorithm

    @property
    def steps(self) -> int:
        """Return the optimizer steps a batch."""
        chosen = self.recipe.reinforce.update
        return chosen.epochs * chosen.mini_batches


def variants(name: str, rows: Sequence[str], changes: Sequence[str]) -> list[Variant]:
    """Return every row with the recipe as it is and with each of ``changes``.

    A change that begins with the name of a row and a colon, ``gagpo: …``, is for that row alone.
    Raises ValueError with all faults: unknown rows, overrides that do not hold or that decide what
    all variants share.
    """
    found, faults = [], []
    for change in dict.fromkeys(("", *changes)):
        only, text = _scope(change)
        if only and only not in rows:
            faults.append(f"--overrides {change}: {only} is none of the compared rows {list(rows)}")
        for row in dict.fromkeys(rows):
            try:
                if only in ("", row):
                    found.append(_variant(name, row, shlex.split(text)))
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))
    order = list(dict.fromkeys(rows))
    return sorted(found, key=lambda variant: order.index(variant.recipe.reinforce.algorithm))


def _scope(change: str) -> tuple[str, str]:
    """Return the row that a change is for, "" for every row, and the change itself."""
    scoped = re.fullmatch(r"([\w.-]+):\s+(.*)", change)
    return (scoped[1], scoped[2]) if scoped else ("", change)


def _variant(name: str, row: str, changes: Sequence[str]) -> Variant:
    for change in changes:
        section = change.split(".")[0].split("=")[0]
        if section not in OWN_SECTIONS and not change.startswith(overrides.OF_ROW):
            raise ValueError(
                f"--overrides {change}: variants share everything but {list(OWN_SECTIONS)} and "
                "the algorithm's choices (algorithm.estimator.lambda=0); "
                "compare recipes by runs of their own instead (python -m flows.retrain)"
            )
        if change.split("=")[0] in DECIDED:
            raise ValueError(f"--overrides {change}: {DECIDED[change.split('=')[0]]}")
    own = [f"reinforce.algorithm={row}"]
    choices = [change for change in changes if change.startswith(overrides.OF_ROW)]
    algorithm = algorithms.load_algorithms(Path("params")).get(row)
    if algorithm and choices:
        algorithm = settings.row_changed(name, [*own, *choices], Path("params"))
    ratio = algorithm.ratio if algorithm else "none"
    if not any(change.startswith(STEPS) for change in changes):
        steps = enough_steps(settings.load(name, Path("params")), ratio)
        own += [f"{STEPS[0]}={steps.epochs}", f"{STEPS[1]}={steps.mini_batches}"]
    chosen = settings.load_changed(name, [*own, *changes], Path("params"))
    assert algorithm, "without its row, a recipe does not load"
    chosen = without_idle_validation(chosen)
    variant = Variant(", ".join([row, *changes]), chosen, algorithm)
    if ratio != "none" and variant.steps < 2:
        raise ValueError(
            f"--overrides {' '.join(changes)}: {row} has a ratio, which is 1 with one optimizer "
            "step a batch: let epochs times mini_batches be two or more"
        )
    return variant


def without_idle_validation(recipe: Recipe) -> Recipe:
    """Return the recipe without validation during training, unless that chooses the policy."""
    validation = recipe.reinforce.validation
    if validation is None or validation.publish == "best":
        return recipe
    chosen = recipe.reinforce.model_copy(update={"validation": None})
    return recipe.model_copy(update={"reinforce": chosen})


def enough_steps(recipe: Recipe, ratio: str) -> Any:
    """Return ``reinforce.update`` with two or more steps a batch for a ratio, and one without."""
    chosen = recipe.reinforce.update
    if ratio == "none":
        return chosen.model_copy(update={"epochs": 1, "mini_batches": 1})
    if chosen.epochs * chosen.mini_batches < 2:
        return chosen.model_copy(update={"mini_batches": 2})
    return chosen


# ---------------------------------------------------------------- what all variants share


@dataclass(frozen=True)
class Common:
    """What all variants share, and the budget of each."""

    name: str
    recipe: Recipe
    budget: Budget
    cold_start: Artifact
    questions: Artifact
    test: Artifact
    panel: Artifact  # of the held-out tasks
    corpus: Artifact
    environment: OpenEnvironment
    reader: Reader
    ledger: Ledger

    def step(self, variant: str, seed: int) -> Step:
        """Return the first step of a variant's training."""
        stage = f"compare/{comparison_report.slug(variant)}/seed-{seed}"
        return Step(self.name, stage, 0, seed, self.ledger)

    def exam(self, variant: Variant) -> Exam | None:
        """Return what a variant's policies are asked during training; None for most variants."""
        shared = (self.name, self.corpus, self.environment, self.reader)
        return exam_of(variant.recipe, *shared)

    def key(self, variant: Variant | None, seed: int) -> str:
        """Return the key of a result: everything that decides it, the sources included."""
        inputs: dict[str, Any] = {
            "seed": seed,
            "artifacts": [self.cold_start, self.questions, self.test, self.panel, self.corpus],
            "exam": [
                *(self.recipe.machine, self.recipe.engine, settings.agent_of(self.recipe)),
                *(self.recipe.evaluation_budget(), self.recipe.reinforce.reward),
                self.recipe.evaluate.model_dump(exclude={"bootstrap", "panel"}),
                settings.reward_sources(self.recipe, Path("params")),
            ],
        }
        if variant:
            inputs |= {
                "algorithm": variant.algorithm,
                "budget": f"{self.budget.kind}={self.budget.amount}",
                "training": variant.recipe.reinforce.model_dump(mode="json", exclude=NOT_DECIDING),
                "engine": [variant.recipe.engine, variant.recipe.lora],
            }
            if exam := self.exam(variant):
                inputs["validation"] = [exam.questions, exam.panel, self.recipe.verdict.measure]
        code = {
            f"source of {name}": keys.source_digest(keys.PROJECT / "tasks" / f"{name}.py")
            for name in ("rollout", "reward", "advantage", "update", "exam")
        } | {
            f"code of {name}": keys.code_digest(keys.PROJECT / "flows" / f"{name}.py")
            for name in ("compare", "reinforce")
        }
        return keys.key_of({name: keys.identity(value) for name, value in inputs.items()} | code)


@flow(name="compare", flow_run_name="compare {name}", on_running=[name_process])
def compare(
    name: str,
    rows: Sequence[str],
    changes: Sequence[str],
    seeds: Sequence[int],
    budget: str,
    baseline: str = "",
) -> None:
    """Write ``reports/<recipe>/comparison.md`` and figures, and a file for each result."""
    for stage in BEFORE:
        dvc_command.reproduce(f"{stage}@{name}")
    chosen = settings.load(name, Path("params"))
    use_machine(chosen.machine)
    data = Path("data", name)
    corpus = Artifact.at(data / "corpus")
    cold_start = Artifact.at(Path("models", name, "cold_start"))
    questions, test = (Artifact.at(data / "questions" / f"{s}.parquet") for s in ("train", "test"))
    with (
        ledger_mirror.opened() as ledger,
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
        )
        found: list[Result] = []
        for result, computed in results(common, variants(name, rows, changes), seeds):
            found.append(result)
            if computed:
                _write(common, found, baseline)
        _write(common, found, baseline)


def _write(common: Common, found: Sequence[Result], baseline: str) -> None:
    resamples = common.recipe.evaluate.bootstrap
    comparison_report.write(common.name, found, resamples, common.budget.kind, baseline)


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
                work = partial(_measured, common, variant, step)
                found = {"variant": name, "seed": seed, "key": key, **replaying(step, work)}
                comparison_report.save(common.name, found)
            common.ledger.beside.append(common.step(name, seed).folder)
            yield found, not known


def _measured(common: Common, variant: Variant | None, step: Step) -> dict[str, Any]:
    """Train a variant and ask it the held-out questions; without one, ask the cold start."""
    recipe = variant.recipe if variant else common.recipe
    policy, trained = common.cold_start, {}
    if variant:
        made = (step, recipe, variant.algorithm, policy, common.questions, common.corpus)
        done, spent = train_until(
            training := Training(*made, common.environment, common.reader, common.exam(variant)),
            common.budget,
            variant.name,
        )
        chosen = published(training, done)
        policy = policy_of(done[chosen])
        trained = {
            "algorithm": variant.algorithm.model_dump(mode="json", by_alias=True),
            "steps_a_batch": variant.steps,
            "iterations": len(done),
            **({"published_iteration": chosen} if training.exam else {}),
            "spent": spent,
            "trained_tokens": sum(one["update"][0]["metrics"]["trained_tokens"] for one in done),
            "curve": curve_of(done),
        }
    asked = replace(step, stage=f"{step.stage}/evaluate")
    held_out = (common.test, common.panel, common.corpus)
    exam = Exam(common.recipe, *held_out, common.environment, common.reader)
    whole = panels.load(Path(common.panel.path))
    rows = read_rows(Path(rewards_of(answer(exam, asked, policy)).path))
    answers = sorted(by_question(rows).items())  # paired by question
    kinds = {one.id: one.kind for one in load_questions(Path(common.test.path))}
    right = [_mean(row["success"] for row in own) for _, own in answers]
    return {
        **trained,
        "commit": git.revision().commit,
        "uncommitted": git.revision().dirty,
        "panel": panels.summary(whole, exam.first, common.recipe.evaluate.questions),
        "success": _mean(right),
        "kinds": [kinds[question] for question, _ in answers],
        "right": right,  # of each question, the share of its answers
        "scores": [_mean(row["score"] * row["sound"] for row in own) for _, own in answers],
    }


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def train_until(
    training: Training, budget: Budget, name: str
) -> tuple[list[Iteration], dict[str, float]]:
    """Train until an iteration has spent the budget; return the iterations and what they spent.

    A variant that hardly spends it ends after LONGEST times the recipe's iterations.
    """
    done: list[Iteration] = []
    total = dict.fromkeys(SPENT, 0.0)
    most = LONGEST * training.recipe.reinforce.iterations
    progress = Progress(f"{name}, seed {training.start.seed}", int(budget.amount))
    with closing(train(training, most)) as iterations:  # ends what was sampled ahead
        for iteration in iterations:
            done.append(iteration)
            total = {kind: total[kind] + amount for kind, amount in spent(iteration).items()}
            now = {"success": iteration["reward"][0]["metrics"]["success"]}
            progress.reach(int(min(total[budget.kind], budget.amount)), now)
            if total[budget.kind] >= budget.amount:
                break
    progress.close()
    if not is_asked(training, len(done)) and len(done) < most:  # the last one is asked, too
        last = validate(training, policy_of(done[-1]), len(done))
        done[-1] = {**done[-1], "validation": [*done[-1].get("validation", ()), *last]}
    return done, total


def curve_of(done: Sequence[Iteration]) -> dict[str, list[float]]:
    """Return the training curve: by measure, and by kind of what was spent so far, a list each."""
    each = [spent(iteration) for iteration in done]
    columns = {kind: list(accumulate(one[kind] for one in each)) for kind in SPENT}
    return {
        name: [float(f"{value:.6g}") for value in values]
        for name, values in (columns | training_curve(done)).items()
    }


def spent(iteration: Iteration) -> dict[str, float]:
    """Return what an iteration has spent of each kind; what branches share counts once."""
    counted = together([record["metrics"] for record in iteration["rollout"]])
    return {
        kind: sum(sum_seconds(iteration).values()) if kind == "seconds" else counted[kind]
        for kind in SPENT
    }


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
        required=True,
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
    return parser


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing that can be started."""
    chosen = _parser().parse_args(arguments)
    try:
        Budget.parse(chosen.budget)
        recipe = settings.load(chosen.recipe, Path("params"))
        own = [recipe.reinforce.algorithm] if chosen.overrides else []
        rows = chosen.algorithms or own or list(algorithms.load_algorithms(Path("params")))
        wanted = variants(chosen.recipe, rows, chosen.overrides)
        known = [COLD_START, *(variant.name for variant in wanted)]
        if chosen.baseline and chosen.baseline not in known:
            raise ValueError(f"--baseline {chosen.baseline} is no variant: choose one of {known}")
        if Budget.parse(chosen.budget).kind == "seconds" and any(
            variant.recipe.reinforce.ahead for variant in wanted
        ):
            raise ValueError(
                "--budget seconds: with reinforce.ahead, sampling and learning overlap, and their "
                "seconds are counted one after the other: choose another budget"
            )
        if recipes.add_to_pipeline(chosen.recipe):
            print(f"compare: added {chosen.recipe} to the recipes in dvc.yaml")
        seeds = list(dict.fromkeys(chosen.seeds or [recipe.seed]))
        with prefect_server():
            given = (chosen.recipe, rows, chosen.overrides, seeds, chosen.budget)
            compare(*given, chosen.baseline)
    except (ValueError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the same call resumes", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{Path('reports', chosen.recipe, 'comparison.md').read_text()}")
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
