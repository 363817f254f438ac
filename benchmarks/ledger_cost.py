"""Measure the cost of the ledger and its checkpoints, as a share of a training iteration.

    python -m benchmarks.ledger_cost

The iterations are those of the recipe ``tiny`` without Prefect and MLflow, for policies of 1 and of
100 million random weights. Responses are cut at 40 tokens, about as long as a trained agent's, and
call no tool, which makes an iteration cheaper than a real one; rewards are drawn, so that every
group has a gradient. The first iteration, in which the machine finds memory for the files, does not
count. The clock runs in everything that is there to survive a kill: writing checkpoints, digests
and records, finding finished sub-steps, dropping old artifacts; with a store (a folder), also in
sending them there. Shares are given of wall time and of this process's CPU time: other work on the
machine disturbs the former, and the latter lacks the sampling worker, a process of its own. Writes
benchmarks/ledger.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flows.runs import ledger_mirror
from params.schema.base import PARAMS
from params.schema.prepare import TinyPolicy
from params.schema.recipe import TABLES, Recipe, algorithm_of
from tasks import recipes
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, resident
from tasks.policy.machine import use_machine
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.recipes.opening import reader_of
from tasks.rewards import scoring
from tasks.rewards.contract import Ending
from tasks.tools.python import SPEC
from tasks.tools.search import save_corpus
from tasks.training.loop import train
from tasks.training.setup import Training
from tasks.trees.tables import save_questions
from tasks.trees.tree import Call, Observation, Question

FILE = Path(__file__).with_name("ledger.json")
TOKENS = 40  # of a response, at most
POLICIES = {  # name -> shape; 1.0 and 100 million parameters
    "1 M": {"hidden": 128, "layers": 4, "heads": 4, "key_value_heads": 2, "feed_forward": 512},
    "100 M": {"hidden": 768, "layers": 15, "heads": 12, "key_value_heads": 4, "feed_forward": 2240},
}
ITERATIONS = {"1 M": 20, "100 M": 4}  # measured, after the first
TIMED = (  # the functions that are there to survive a kill
    *((substeps.Ledger, name) for name in ("find", "finish", "retire", "explain")),
    (substeps, "need"),
    (checkpoint, "save"),
)


def recipe_of(shape: dict[str, int]) -> Recipe:
    """Return the recipe ``tiny`` with another policy and short responses."""
    tiny = recipes.load("tiny", PARAMS)
    dialogue = {"turn_tokens": TOKENS, "response_tokens": TOKENS, "tool_calls": 0}
    policy = tiny.prepare.policy.model_copy(update=shape)
    return tiny.model_copy(
        update={
            "dialogue": tiny.dialogue.model_copy(update=dialogue),
            "prepare": tiny.prepare.model_copy(update={"policy": policy}),
        }
    )


def answer(calls: Sequence[Call]) -> list[Observation]:
    """Return a result at once."""
    return [Observation("ok", "1") for _ in calls]


def prepare(recipe: Recipe) -> Training:
    """Write random weights and simple questions to the working folder."""
    policy = recipe.prepare.policy
    assert isinstance(policy, TinyPolicy)
    texts = [f"What is {a} times {b}?" for a in range(30) for b in range(30)]
    tokenizer = build_tokenizer(texts, policy)
    build_policy(policy, tokenizer, seed=0).save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    questions = [Question(str(i), "toy", text, ("1",)) for i, text in enumerate(texts)]
    save_questions(questions, Path("questions.parquet"))
    save_corpus([], Path("corpus"))
    Path("params").mkdir()  # where an iteration looks for the tables of its recipe
    for table in TABLES:
        shutil.copy(PARAMS / f"{table}.yaml", "params")
    policy_made = Artifact.at(Path("policy"))
    environment = OpenEnvironment([SPEC], lambda: contextlib.nullcontext(Questions(answer)))
    return Training(
        start=SubStep("bench", "reinforce", 0, 0),
        recipe=recipe,
        algorithm=algorithm_of(recipe),
        policy=policy_made,
        questions=Artifact.at(Path("questions.parquet")),
        corpus=Artifact.at(Path("corpus")),
        environment=environment,
        reader=reader_of(recipe, policy_made.path, environment),
    )


def drawn(score: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return the score function with a reward of 0 or 1 drawn from the trajectory's tokens."""

    def call(ending: Ending, values: Mapping[str, float]) -> dict[str, Any]:
        reward = sum(int(node.tokens.sum()) for node in ending.trajectory) % 2
        return {**score(ending, values), "reward": float(reward)}

    return call


def now() -> np.ndarray:
    """Return wall time and this process's CPU time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


@contextlib.contextmanager
def clock() -> Iterator[np.ndarray]:
    """Yield the seconds spent in TIMED, wall and CPU; nested calls count once."""
    spent, depth = np.zeros(2), [0]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **rest: Any) -> Any:
            depth[0] += 1
            began = now()
            try:
                return work(*arguments, **rest)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[:] += now() - began

        return call

    originals = [(module, name, getattr(module, name)) for module, name in TIMED]
    for module, name, work in originals:
        setattr(module, name, timed(work))
    try:
        yield spent
    finally:
        for module, name, work in originals:
            setattr(module, name, work)


def measure(shape: dict[str, int], iterations: int, shared: bool) -> dict[str, Any]:
    """Return median seconds of an iteration and of the ledger in it, and the share."""
    with tempfile.TemporaryDirectory(dir=".") as folder, contextlib.chdir(folder):
        if shared:
            os.environ[ledger_mirror.VARIABLE] = "shared"
        recipe = recipe_of(shape)
        use_machine(recipe.machine)
        training = prepare(recipe)
        whole, ours = [], []
        with ledger_mirror.opened() as ledger, clock() as spent:
            start = replace(training.start, ledger=ledger)
            steps = train(replace(training, start=start, most_iterations=iterations + 1))
            next(steps)
            for _ in range(iterations):
                began, before = now(), spent.copy()
                done = next(steps)
                whole.append(now() - began)
                ours.append(spent - before)
        size = sum(file.stat().st_size for file in Path("policy").glob("*.safetensors"))
        written = _size(Path(artifacts.output(done["update"][0], "policy").path).parent)
    iteration, ledger_seconds = np.median(whole, 0).tolist(), np.median(ours, 0).tolist()
    return {
        "parameters": size // 4,
        "wall": {"iteration": iteration[0], "ledger": ledger_seconds[0]},
        "processor": {"iteration": iteration[1], "ledger": ledger_seconds[1]},
        "share": {
            "wall": ledger_seconds[0] / iteration[0],
            "processor": ledger_seconds[1] / iteration[1],
        },
        "bytes": written,
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Measure the cases of the command line, and add them to the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_cost", description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--store", action="store_true", help="also send to a store, a folder")
    args = parser.parse_args()
    scoring.score = drawn(scoring.score)
    by_case = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in args.policies:
        case = f"{name}, with a store" if args.store else name
        by_case[case] = measure(POLICIES[name], ITERATIONS[name], args.store)
        resident.POLICIES.clear()
        by_case[case]["threads"] = torch.get_num_threads()
        print(f"{case}: {by_case[case]}")
        FILE.write_text(json.dumps(by_case, indent=1) + "\n")


if __name__ == "__main__":
    main()
