"""Measure the sampled tokens per second of both engines, in turns, in rollouts of one process.

    .venv-vllm/bin/python -m benchmarks.engines        # after make run, for its cold start

Each repetition rolls out the same training questions of the recipe ``tiny`` from its cold start,
without branching, with a tool that needs no time; the engines draw their own tokens. vLLM is also
measured with questions in four lanes. Before each of its repetitions the weights are loaded again,
which is timed by itself. Writes benchmarks/engines.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from params.run_folders import RunFolders
from params.schema.agent import EngineSettings
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.dialects import open_dialect
from tasks.engines import Engine
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.engines.vllm.vllm_engine import VllmEngine, close_engines, vllm_engine
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import use_machine
from tasks.rollouts.rounds import Setting, grow
from tasks.tools.python import SPEC
from tasks.trees.tables import load_questions
from tasks.trees.tree import Call, Observation, Question, Tree, sampled

FILE = Path(__file__).with_name("engines.json")
REPETITIONS = 5


def answer(calls: Sequence[Call]) -> list[Observation]:
    """Return a result at once."""
    return [Observation("ok", "42") for _ in calls]


def tokens(trees: Sequence[Tree]) -> int:
    """Count sampled tokens; those that leaves share count once."""
    return sum(len(node.tokens) for tree in trees for node in sampled(tree.nodes))


def rolled_out(
    engine: Engine, questions: Sequence[Question], setting: Setting
) -> tuple[float, float]:
    """Return the seconds of one rollout, and its sampled tokens per second."""
    began = time.perf_counter()
    trees = grow(questions, engine, setting)
    seconds = time.perf_counter() - began
    return seconds, tokens(trees) / seconds


def measure(folder: Path, questions: Sequence[Question], recipe: Recipe) -> dict[str, Any]:
    """Return medians of all repetitions, by engine."""
    use_machine(recipe.machine)
    model, tokenizer = load_policy(folder, recipe.machine).eval(), load_tokenizer(folder)

    def vllm(lanes: int) -> VllmEngine:
        settings = EngineSettings(kind="vllm", memory=0.5, servers=(), lanes=lanes)
        return vllm_engine(
            settings,
            recipe.machine,
            recipe.reinforce.rollout.rows,
            model,
            tokenizer,
            lambda: folder,
            "first",
        )

    engines: dict[str, Callable[[], Engine]] = {
        "transformers": lambda: TransformersEngine(model, tokenizer),
        "vllm": lambda: vllm(1),
        "vllm, 4 lanes": lambda: vllm(4),
    }
    by_engine: dict[str, Any] = {}
    for name, opened in engines.items():
        engine, speeds, updates = opened(), [], []
        rolled_out(engine, questions, setting(recipe, tokenizer, -1))  # starts workers and vLLM
        for number in range(REPETITIONS):
            if isinstance(engine, VllmEngine):
                began = time.perf_counter()
                engine.set_policy(model, tokenizer, lambda: folder, str(number))
                engine.connect()
                updates.append(time.perf_counter() - began)
            speeds.append(rolled_out(engine, questions, setting(recipe, tokenizer, number)))
        by_engine[name] = {
            "seconds": median(seconds for seconds, _ in speeds),
            "tokens_a_second": median(speed for _, speed in speeds),
            **({"update_seconds": median(updates)} if updates else {}),
        }
    close_engines()
    return by_engine


def setting(recipe: Recipe, tokenizer: Any, number: int) -> Setting:
    """Return the setting of repetition ``number``, without branching."""
    return Setting(
        tokenizer,
        recipe.dialogue,
        recipe.reinforce.rollout,
        open_dialect(recipe.dialect, tokenizer, recipe.dialogue, [SPEC]),
        OpenEnvironment([SPEC], lambda: nullcontext(Questions(answer))),
        f"0/{number}",
    )


def main() -> None:
    """Measure the recipe that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("recipe", nargs="?", default="tiny", help="a recipe with a cold start")
    parser.add_argument("--questions", type=int, default=32)
    args = parser.parse_args()
    questions = load_questions(RunFolders(args.recipe).split("train"))
    policy = RunFolders(args.recipe).cold_start
    by_engine = measure(policy, questions[: args.questions], recipes.load(args.recipe))
    for name, figures in by_engine.items():
        print(name, {key: round(value, 3) for key, value in figures.items()})
    FILE.write_text(json.dumps(by_engine, indent=1) + "\n")


if __name__ == "__main__":
    main()
