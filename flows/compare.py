"""Compare algorithms: the same recipe and cold start, one row of the table after the other.

``python -m flows.compare RECIPE --iterations 30`` trains every row of params/algorithms.yaml, asks
each the held-out questions, and writes a table and a figure. An interrupted comparison continues
when it is called again; a finished row is read from the ledger.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from prefect import flow

from flows import end_import_phase, exit_fast
from flows.evaluate import Exam, answer, rewards_of
from flows.host import files
from flows.reinforce import Iteration, Training, policy_of, replaying, train
from flows.runs import dvc_command, ledger_mirror, recipes
from flows.tracking import figures
from flows.tracking.progress import Progress
from flows.tracking.reinforce_report import sum_seconds
from flows.workers.connection import name_process, prefect_server
from flows.workers.stage import INTERRUPTED
from params.schema import algorithms
from params.schema import recipe as schema
from params.schema.evaluate import Evaluate
from params.schema.recipe import Recipe
from tasks import settings
from tasks.environments import open_tools
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step
from tasks.policy.machine import use_machine
from tasks.trees.intervals import bootstrap_interval
from tasks.trees.tables import read_rows

BEFORE = ("prepare", "cold_start")  # stages that all rows share
COLD_START = "cold start"


@flow(name="compare", flow_run_name="compare {recipe}", on_running=[name_process])
def compare(recipe: str, rows: Sequence[str], iterations: int) -> None:
    """Write ``reports/<recipe>/algorithms.md``, ``.json`` and ``.png``."""
    for stage in BEFORE:
        dvc_command.reproduce(f"{stage}@{recipe}")
    chosen = settings.load(recipe, Path("params"))
    use_machine(chosen.machine)
    data = Path("data", recipe)
    cold_start = Artifact.at(Path("models", recipe, "cold_start"))
    corpus = Artifact.at(data / "corpus")
    questions, test = (Artifact.at(data / "questions" / f"{s}.parquet") for s in ("train", "test"))
    with (
        ledger_mirror.opened() as ledger,
        open_tools(chosen.tool_settings, chosen.machine.threads, Path(corpus.path)) as tools,
    ):
        asked = Step(recipe, "compare/cold_start", 0, chosen.seed, ledger)
        exam = Exam(chosen, test, corpus, tools)
        answers = rewards_of(answer(exam, asked, cold_start))
        found = [{"algorithm": COLD_START, **success(answers, chosen.evaluate, chosen.seed)}]
        for name in rows:
            other = with_algorithm(chosen, name)
            step = Step(recipe, f"compare/{name}", 0, chosen.seed, ledger)
            algorithm = schema.algorithm_of(other, Path("params"))
            training = Training(step, other, algorithm, cold_start, questions, corpus, tools)
            found.append(replaying(step, partial(measure, training, iterations, test)))
            report(recipe, found, iterations)


def measure(training: Training, count: int, test: Artifact) -> dict[str, Any]:
    """Train one algorithm and ask it the held-out questions; return its row of the table."""
    recipe = training.recipe
    done = train_row(training, count)
    asked = replace(training.start, stage=f"{training.start.stage}/evaluate")
    exam = Exam(recipe, test, training.corpus, training.tools)
    answers = rewards_of(answer(exam, asked, policy_of(done[-1])))
    tokens = [entry["update"][0]["metrics"]["trained_tokens"] for entry in done]
    return {
        "algorithm": recipe.reinforce.algorithm,
        **success(answers, recipe.evaluate, recipe.seed),
        "seconds": median(sum(sum_seconds(entry).values()) for entry in done),
        "trained_tokens": median(tokens),
    }


def with_algorithm(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with another algorithm."""
    reinforce = recipe.reinforce.model_copy(update={"algorithm": name})
    return recipe.model_copy(update={"reinforce": reinforce})


def train_row(training: Training, count: int) -> list[Iteration]:
    """Train one algorithm from the cold start; return the records of its iterations."""
    done: list[Iteration] = []
    progress = Progress(training.recipe.reinforce.algorithm, count)
    for iteration in train(training, count):
        done.append(iteration)
        progress.note(success=iteration["reward"][0]["metrics"]["success"])
        progress.advance(1)
    progress.close()
    return done


def success(answers: Artifact, settings: Evaluate, seed: int) -> dict[str, float]:
    """Return the share of right answers with its 95 % interval."""
    right = np.array([row["success"] for row in read_rows(Path(answers.path))], np.float64)
    low, high = bootstrap_interval(right, settings.bootstrap, seed)
    return {"success": float(right.mean()), "low": low, "high": high}


def report(recipe: str, found: Sequence[dict[str, Any]], iterations: int) -> None:
    """Write the table so far, as Markdown, as JSON and as a figure."""
    folder = Path("reports", recipe)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(found, indent=1) + "\n", ".md": markdown(found, iterations)}
    for suffix, text in texts.items():
        with files.replaced(folder / f"algorithms{suffix}") as partial:
            partial.write_text(text)
    figures.save(figures.algorithms(found), folder / "algorithms.png")


def markdown(found: Sequence[dict[str, Any]], iterations: int) -> str:
    """Format the table, one row per algorithm."""
    lines = [
        f"| algorithm | success after {iterations} iterations (%) | seconds an iteration "
        "| tokens trained an iteration |",
        "|---|---:|---:|---:|",
    ]
    for entry in found:
        mean, low, high = (100 * entry[name] for name in ("success", "low", "high"))
        cost = (
            f"{entry['seconds']:.2f} | {entry['trained_tokens']:.0f}" if "seconds" in entry else "|"
        )
        lines.append(f"| {entry['algorithm']} | {mean:.1f} [{low:.1f}, {high:.1f}] | {cost} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing that can be started."""
    parser = argparse.ArgumentParser(prog="python -m flows.compare", description=__doc__)
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--iterations", type=int, help="of each algorithm; else the recipe's")
    parser.add_argument("--algorithms", nargs="+", help="rows of the table; else all of them")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.iterations is not None and chosen.iterations < 1:
            raise ValueError(f"--iterations {chosen.iterations}: give at least 1, or leave it out")
        recipe = settings.load(chosen.recipe, Path("params"))
        rows = chosen.algorithms or list(algorithms.load_algorithms(Path("params")))
        for name in rows:
            schema.algorithm_of(with_algorithm(recipe, name), Path("params"))
        if recipes.add_to_pipeline(chosen.recipe):
            print(f"compare: added {chosen.recipe} to the recipes in dvc.yaml")
        with prefect_server():
            compare(chosen.recipe, rows, chosen.iterations or recipe.reinforce.iterations)
    except (ValueError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the same call resumes", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{Path('reports', chosen.recipe, 'algorithms.md').read_text()}")
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
