"""Measure how the cost of each part of an iteration grows: seconds and memory, with the exponents.

    python -m benchmarks.scaling

A small random policy samples trajectories of four turns and three results of a tool that answers at
once; then rewards, advantages, the update of the weights, and writing and reading the trees. One
size is changed at a time: leaves of a tree, length of a trajectory, questions, vocabulary,
parameters. Each size is a process of its own with one thread. Seconds are processor time, the
median of some repetitions; memory is the highest resident memory while the part runs, less that
before, in a child process that has nothing free to reuse. The exponent of y ~ x^e is fitted over
all sizes, and ``last`` is that between the last two, where constant costs weigh least.

Then sampled tokens and seconds by the number M of leaves, without beaming (row grpo) and with it
(row arpo, branches drawn), of one question. Writes benchmarks/scaling.json and
benchmarks/scaling.png.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flows.tracking import run_figures
from params.schema.algorithms import load_algorithms
from params.schema.base import PARAMS, Machine
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.advantage import AdvantageInputs, advantage
from tasks.dialects.contract import Tokens, Turn
from tasks.dialects.tags import TagsDialect
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.estimators.group import relative
from tasks.learning.packing import Credit, Credited
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import use_machine
from tasks.policy.resident import Learner
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.reward import RewardInputs, reward
from tasks.rollouts.rounds import Setting, grow
from tasks.tools.python import SPEC
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import TURN, Call, Observation, Question, Tree, sampled

FILE = Path(__file__).with_name("scaling.json")
FIGURE = Path(__file__).with_name("scaling.png")
MACHINE = Machine(threads=1, device="cpu", precision="float32")
CALLS = 3  # of each trajectory
TOKENIZER = 448  # tokens of the tokenizer; a larger vocabulary has ids without a text
MIB = 2**20
SECONDS, MEMORY, TOKENS = "seconds", "mib", "tokens"
LEAST = {SECONDS: 1e-4, MEMORY: 1.0, TOKENS: 1.0}  # less cannot be told from nothing
PARTS = ("sampling", "reward", "advantage", "update", "trees")
LATER = (  # modules that libraries and rewards import at their first use
    *("pandas", "torch._dynamo", "transformers.models.qwen2.modeling_qwen2"),
    *("tasks.rewards.answer", "tasks.rewards.many_tools", "tasks.questions.computation"),
)


@dataclass(frozen=True)
class Size:
    """What is sampled and trained at once, and by what policy."""

    leaves: int = 8
    turn: int = 32  # sampled tokens of a turn; a result has half as many
    questions: int = 4
    vocabulary: int = 512
    hidden: int = 64


BASE = Size()
Sweeps = Mapping[str, tuple[str, Sequence[int]]]
SWEEPS: Sweeps = {  # name of x -> field of Size, its values
    "leaves of a tree": ("leaves", (4, 8, 16, 32, 64)),
    "tokens of a trajectory": ("turn", (16, 32, 64, 128, 256)),
    "questions": ("questions", (2, 4, 8, 16, 32)),
    "vocabulary": ("vocabulary", (512, 2048, 8192, 32_768, 131_072)),
    "parameters": ("hidden", (64, 128, 256, 512)),
}
BUDGETS = (4, 8, 16, 32, 64)  # M
WAYS = {  # name -> row of params/algorithms.yaml, and trajectories that start at the prompt
    "without beaming": ("grpo", lambda leaves: leaves),
    "beaming, from M/2": ("arpo", lambda leaves: leaves // 2),
    "beaming, from 2": ("arpo", lambda leaves: 2),
}


# ---------------------------------------------------------------- what is measured


class Calling(TagsDialect):
    """The dialect of tags, in which each turn is a call, whatever its text, until the last."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.stop_strings = ()
        self.result = self.tokenizer.convert_tokens_to_ids("</result>")

    def read(self, prompt: Tokens, turn: Tokens, text: str, stopped: str) -> Turn:
        """Read a turn by the number of results before it."""
        if np.count_nonzero(prompt == self.result) < CALLS:
            return Turn(Outcome.CALL, Call(SPEC.name, text))
        return Turn(Outcome.ANSWER, None, text)


@dataclass(frozen=True)
class Start:
    """A policy of a size, and the recipe that it is sampled and trained with."""

    recipe: Recipe
    learning: Learner
    setting: Setting
    questions: list[Question]
    policy: Artifact


def start_of(size: Size) -> Start:
    """Return random weights and questions of a size, in the working folder."""
    recipe = _recipe_of(size)
    policy = recipe.prepare.policy
    assert isinstance(policy, TinyPolicy)
    texts = [f"What is {a} times {b}?" for a in range(30) for b in range(30)]
    tokenizer = build_tokenizer(texts, policy.model_copy(update={"vocabulary": TOKENIZER}))
    model = build_policy(policy, tokenizer, seed=0)
    model.resize_token_embeddings(size.vocabulary)
    model.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    learning = Learner(
        Path("policy"), load_policy(Path("policy"), MACHINE), load_tokenizer(Path("policy"))
    )
    checkpoint.prepare_optimizer(learning, recipe.reinforce.update)
    questions = [Question(str(i), "toy", text, ("1",)) for i, text in enumerate(texts)]
    result = "7" * (size.turn // 2)  # a digit is a token

    def respond(calls: Sequence[Call]) -> list[Observation]:
        return [Observation(Outcome.OK, result) for _ in calls]

    setting = Setting(
        learning.tokenizer,
        recipe.dialogue,
        recipe.reinforce.rollout,
        Calling(learning.tokenizer, recipe.dialogue, [SPEC]),
        OpenEnvironment([SPEC], lambda: nullcontext(Questions(respond))),
        "0/0",
    )
    return Start(
        recipe, learning, setting, questions[: size.questions], Artifact.at(Path("policy"))
    )


def _recipe_of(size: Size) -> Recipe:
    """Return the recipe ``tiny`` with the sizes."""
    tiny = recipes.load("tiny", PARAMS)
    length = (CALLS + 1) * size.turn + CALLS * (size.turn // 2 + 4)
    dialogue = {
        "turn_tokens": size.turn,
        "result_tokens": size.turn // 2 + 4,
        "response_tokens": length,
        "tool_calls": CALLS,
    }
    shape = {
        "hidden": size.hidden,
        "layers": 2,
        "heads": 4,
        "key_value_heads": 2,
        "feed_forward": 4 * size.hidden,
        "context": length + 64,
    }
    rows = size.leaves * size.questions
    budget = {"leaves": size.leaves, "initial": size.leaves, "rows": rows, "draw": True}
    rollout = tiny.reinforce.rollout.model_copy(update=budget)
    policy = tiny.prepare.policy.model_copy(update=shape)
    return tiny.model_copy(
        update={
            "dialogue": tiny.dialogue.model_copy(update=dialogue),
            "prepare": tiny.prepare.model_copy(update={"policy": policy}),
            "reinforce": tiny.reinforce.model_copy(update={"rollout": rollout}),
            "machine": MACHINE,
        }
    )


def sample(start: Start) -> list[Tree]:
    """Roll out the questions."""
    engine = TransformersEngine(start.learning.model, start.learning.tokenizer)
    return grow(start.questions, engine, start.setting)


def credited(trees: Sequence[Tree]) -> list[Credited]:
    """Put advantages of drawn rewards on every sampled token, so that all trees are trained."""
    draw = np.random.default_rng(0)
    batch = []
    for tree in trees:
        paths = [sampled(path) for path in tree.trajectories()]
        values = relative(draw.normal(size=len(paths)), np.zeros(len(paths), np.int64), std=True)
        lengths = [sum(len(node.tokens) for node in path) for path in paths]
        credits = [
            Credit(np.full(length, value, np.float32), np.zeros(length, np.int64))
            for length, value in zip(lengths, values, strict=True)
        ]
        batch.append(Credited(tree, credits))
    return batch


def optimize(start: Start, batch: Sequence[Credited]) -> None:
    """Do one update of the weights (row grpo)."""
    recipe = start.recipe
    loss = assemble(load_algorithms()["grpo"], recipe.dialogue.response_tokens).loss
    learner.optimize(start.learning, batch, loss, recipe.reinforce.update, 1.0, MACHINE, 0)


class Work:
    """The parts of an iteration of one size; each call of a part does its work anew."""

    def __init__(self, start: Start, name: str) -> None:
        self.start, self.name = start, name
        self.trees = sample(start)
        self.batch = credited(self.trees)
        self.calls = 0
        save_trees(self.trees, Path(name))
        self.stored = Artifact.at(Path(name))
        self.rewards = artifacts.output(self.reward(), "rewards")

    def _step(self, stage: str) -> SubStep:
        """Return a step that the ledger does not know."""
        self.calls += 1
        return SubStep(self.name, stage, self.calls, 0)

    def sampling(self) -> None:
        """Sample; the tool takes no time."""
        sample(self.start)

    def reward(self) -> dict[str, Any]:
        """Score all leaves: trees are read, and a table is written."""
        recipe = self.start.recipe
        inputs = RewardInputs(
            self.stored, recipe.reinforce.reward, None, recipe.dialogue.response_tokens
        )
        return reward(self._step("reward"), inputs)

    def advantage(self) -> None:
        """Estimate advantages: trees and rewards are read, and a table is written."""
        recipe, policy = self.start.recipe, self.start.policy
        inputs = AdvantageInputs(
            policy=policy,
            samplers={0: policy},
            critic=None,
            reference=None,
            trees=[self.stored],
            rewards=[self.rewards],
            algorithm=load_algorithms()["grpo"],
            questions=len(self.start.questions),
            settings=recipe.reinforce.update,
            temperature=1.0,
            response_tokens=recipe.dialogue.response_tokens,
            machine=MACHINE,
        )
        advantage(self._step("advantage"), inputs)

    def update(self) -> None:
        """Do one update of the weights."""
        optimize(self.start, self.batch)

    def trees_on_disk(self) -> None:
        """Write the tables of the trees, digest and read them."""
        folder = Path(f"{self.name}-written")
        save_trees(self.trees, folder)
        Artifact.at(folder)
        load_trees(folder)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Return the parts by their names."""
        done = (self.sampling, self.reward, self.advantage, self.update, self.trees_on_disk)
        return dict(zip(PARTS, done, strict=True))


# ---------------------------------------------------------------- one measurement


def measure(size: Size, repetitions: int) -> dict[str, Any]:
    """Return the parts' seconds and memory of a size, and the values of x. Needs a new process."""
    use_machine(MACHINE)
    work = Work(start_of(size), "whole")
    few = work.start.setting.rollout.model_copy(update={"leaves": 2, "initial": 2})
    setting = replace(work.start.setting, rollout=few)
    small = Work(replace(work.start, setting=setting, questions=work.start.questions[:1]), "small")
    paths = [path for tree in work.trees for path in tree.trajectories()]
    point: dict[str, Any] = {
        "leaves": size.leaves,
        "turn": float(np.mean([sum(len(node.tokens) for node in path) for path in paths])),
        "questions": size.questions,
        "vocabulary": size.vocabulary,
        "hidden": sum(weight.numel() for weight in work.start.learning.model.parameters()),
    }
    parts = work.parts()
    # Children first: no child may use autograd once this process has done so.
    point[MEMORY] = {name: _memory_apart(part, small.parts()[name]) for name, part in parts.items()}
    point[SECONDS] = {name: _seconds(part, repetitions) for name, part in parts.items()}
    return point


def _seconds(part: Callable[[], Any], repetitions: int) -> float:
    part()
    taken = []
    for _ in range(repetitions):
        began = time.process_time()
        part()
        taken.append(time.process_time() - began)
    return median(taken)


def _memory_apart(part: Callable[[], Any], small: Callable[[], Any]) -> float:
    """Return the MiB that a part adds at its peak, in a child process that has done ``small``.

    Then libraries are in memory, and so are gradients and the optimizer's state.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            small()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what is free is not to be used again
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            part()
            os.write(writer, str((_status("VmHWM") - before) / MIB).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    if not said:
        raise RuntimeError("a child that measures memory has failed: see its error above")
    return float(said)


def _status(name: str) -> int:
    """Return a number of bytes from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure_beaming(size: Size, repetitions: int) -> dict[str, Any]:
    """Return sampled tokens and seconds of each way to sample the leaves: means."""
    use_machine(MACHINE)
    start = start_of(size)
    rows = load_algorithms()
    point: dict[str, Any] = {"leaves": size.leaves}
    for name, (row, initial) in WAYS.items():
        rollout = start.setting.rollout.model_copy(update={"initial": initial(size.leaves)})
        tokens, seconds = [], []
        for number in range(-1, repetitions):
            setting = replace(
                start.setting, rollout=rollout, seed=f"0/{number}", branching=rows[row].branching
            )
            began = time.process_time()
            trees = sample(replace(start, setting=setting))
            if number >= 0:  # the first is there to get ready
                seconds.append(time.process_time() - began)
                tokens.append(sum(len(n.tokens) for t in trees for n in t.nodes if n.kind == TURN))
        point[name] = {TOKENS: float(np.mean(tokens)), SECONDS: float(np.mean(seconds))}
    return point


MEASURES = {"parts": measure, "beaming": measure_beaming}


# ---------------------------------------------------------------- exponents


def exponent(x_N: ArrayLike, y_N: ArrayLike) -> float:
    """Return the e of y ~ x^e with the least squared error of log y."""
    return float(np.polyfit(np.log(x_N), np.log(y_N), 1)[0])


def curve(x_N: Sequence[float], y_N: Sequence[float], least: float) -> dict[str, Any]:
    """Return a curve with its exponents. For these, ``least`` stands for all that is smaller."""
    floor: NDArray[np.float64] = np.maximum(y_N, least)
    return {
        "x": list(x_N),
        "y": [float(f"{value:.4g}") for value in y_N],
        "exponent": round(exponent(x_N, floor), 2),
        "last": round(exponent(x_N[-2:], floor[-2:]), 2),
    }


def curves(field: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of each part in seconds and MiB, of one sweep."""
    x_N = [point[field] for point in points]
    return {
        unit: {
            part: curve(x_N, [point[unit][part] for point in points], LEAST[unit]) for part in PARTS
        }
        for unit in (SECONDS, MEMORY)
    }


def beaming_curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves of each way to sample, in tokens and seconds."""
    x_N = [point["leaves"] for point in points]
    return {
        unit: {way: curve(x_N, [point[way][unit] for point in points], LEAST[unit]) for way in WAYS}
        for unit in (TOKENS, SECONDS)
    }


# ---------------------------------------------------------------- all of them


def apart(what: str, size: Size, repetitions: int) -> dict[str, Any]:
    """Call ``measure`` or ``measure_beaming`` in a new process, with a folder of its own.

    It is a fork of one that has imported all and computed nothing.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore::RuntimeWarning:runpy"  # this module is also imported
    context = get_context("forkserver")
    context.set_forkserver_preload([__spec__.name, *LATER])
    with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
        point = pool.apply(_in_folder, (Path(folder), MEASURES[what], size, repetitions))
    print(json.dumps(point), file=sys.stderr, flush=True)
    return point


def _in_folder(folder: Path, work: Callable[..., Any], *given: Any) -> Any:
    os.chdir(folder)
    return work(*given)


def everything(
    sweeps: Sweeps, budgets: Sequence[int], repetitions: int, base: Size = BASE
) -> dict[str, Any]:
    """Make all measurements; equal sizes are measured once."""
    sizes = {
        name: [replace(base, **{field: value}) for value in values]
        for name, (field, values) in sweeps.items()
    }
    known: dict[Size, dict[str, Any]] = {}
    for size in (size for of_sweep in sizes.values() for size in of_sweep):
        if size not in known:
            known[size] = apart("parts", size, repetitions)
    of_beaming = [
        apart("beaming", replace(base, leaves=m, questions=1), 4 * repetitions) for m in budgets
    ]
    return {
        "base": vars(base),
        "repetitions": repetitions,
        "sweeps": {
            name: curves(field, [known[size] for size in sizes[name]])
            for name, (field, _) in sweeps.items()
        },
        "beaming": beaming_curves(of_beaming),
    }


def table(measurements: Mapping[str, Any]) -> str:
    """Return the exponents in Markdown: over all sizes, and between the last two."""
    lines = [
        f"| grows with | unit | {' | '.join(PARTS)} |",
        f"|---|---|{'---:|' * len(PARTS)}",
    ]
    for name, of_sweep in measurements["sweeps"].items():
        for unit, of_parts in of_sweep.items():
            cells = [f"{of_parts[p]['exponent']:.2f} ({of_parts[p]['last']:.2f})" for p in PARTS]
            lines.append(f"| {name} | {unit} | {' | '.join(cells)} |")
    lines += ["", f"| sampling by M | {' | '.join(WAYS)} |", f"|---|{'---:|' * len(WAYS)}"]
    for unit, of_ways in measurements["beaming"].items():
        cells = [f"{of_ways[way]['exponent']:.2f} ({of_ways[way]['last']:.2f})" for way in WAYS]
        lines.append(f"| {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measurements: Mapping[str, Any]) -> Any:
    """Draw small multiples: a column for each sweep, seconds above memory; beaming last."""
    from matplotlib.figure import Figure

    columns = [*measurements["sweeps"].items(), ("leaves of a tree (M)", measurements["beaming"])]
    figure = Figure(
        figsize=(3.1 * len(columns), 6.2), dpi=run_figures.DOTS_PER_INCH, layout="constrained"
    )
    grid = figure.subplots(2, len(columns), squeeze=False)
    colors = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555")
    for column, (name, units) in enumerate(columns):
        for line, (unit, of_names) in enumerate(units.items()):
            axes = grid[line][column]
            for color, (label, one) in zip(colors, of_names.items(), strict=False):
                axes.plot(
                    one["x"],
                    np.maximum(one["y"], LEAST[unit]),
                    "o-",
                    color=color,
                    markersize=3,
                    linewidth=1,
                    label=f"{label}: {one['exponent']:.2f}",
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{unit.replace('mib', 'MiB')} by {name}", fontsize=8)
            axes.tick_params(labelsize=7)
            axes.grid(color=run_figures.PALE, linewidth=0.6)
            axes.legend(fontsize=6, title="exponent", title_fontsize=6, edgecolor="none")
    return figure


def main() -> None:
    """Make all measurements, or the one that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    measurements = everything(SWEEPS, BUDGETS, arguments.repetitions)
    write(measurements, FILE, FIGURE)
    print(table(measurements))


def write(measurements: Mapping[str, Any], file: Path, figure: Path) -> None:
    """Write the measurements and their picture."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(measurements, indent=2) + "\n")
    temporary.replace(file)
    run_figures.save(draw(measurements), figure)


if __name__ == "__main__":
    main()
