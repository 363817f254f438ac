"""Measure Beamline against TRL's GRPOTrainer: sampling, update and whole step, on one machine.

``make bench`` runs it; benchmarks/README.md describes the measurements and the keys of its file.
Weights are put back after every step, so all repetitions do equal work.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from params.schema import algorithms
from params.schema.algorithms import Algorithm
from params.schema.base import PARAMS
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from tasks.dialects import open_dialect
from tasks.engines.transformers.engine import TransformersEngine
from tasks.environments import Respond, open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions, answer
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.estimators.group import relative
from tasks.learning.packing import Credit, Credited
from tasks.ledger import artifacts
from tasks.ledger.substeps import Step
from tasks.policy import checkpoint
from tasks.policy.machine import use_machine
from tasks.policy.model import load_policy, load_tokenizer
from tasks.policy.parallel import lanes
from tasks.policy.resident import Learner
from tasks.policy.tiny import build_policy
from tasks.rewards.scoring import score_trees
from tasks.rollouts.rounds import Setting, grow
from tasks.settings import agent_of, scorer_sources
from tasks.settings import load as load_settings
from tasks.tools.contract import text_tool
from tasks.tools.python import SPEC, PythonTool, Run, python_tool
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_questions
from tasks.trees.tree import TURN, Call, Observation, Question, Tree, sampled

RECIPE = "tiny"
FILE = Path(__file__).with_name("against_trl.json")
PEER_PATHS = ("rollout_func", "tools")  # as benchmarks/peer.py has them
MATRICES = (512, 768, 1024)  # sizes of the multiplications that measure the machine
SEED = 0

TRL, BEAMLINE, BRANCHING = "trl", "beamline", "beamline_branching"
ROWS = {BEAMLINE: "grpo", BRANCHING: "arpo"}  # of params/algorithms.yaml


@dataclass(frozen=True)
class Case:
    """One comparison: the policy, and the size of a batch."""

    name: str
    policy: str  # a key of POLICIES
    questions: int  # a step
    group: int  # rollouts a question
    contestants: tuple[str, ...]
    peer_paths: tuple[str, ...]  # TRL's ways to make tool calls; the fastest is taken
    peer_micro_batches: tuple[int, ...]  # a step of TRL; the fastest is taken


CASES = {
    case.name: case
    for case in (
        Case("tiny-8", "tiny", 8, 8, (TRL, BEAMLINE, BRANCHING), PEER_PATHS, (1, 2, 4)),
        Case("tiny-16", "tiny", 8, 16, (TRL, BEAMLINE, BRANCHING), PEER_PATHS, (1, 2, 4)),
        Case("25m-16", "25m", 2, 16, (TRL, BEAMLINE), PEER_PATHS[:1], (1, 4)),
    )
}
HEADLINE = "tiny-16"  # the case whose ratios are the file's first keys


@dataclass(frozen=True)
class Start:
    """The start of both sides. Each side reads the files itself, since it changes its own copy."""

    recipe: Recipe
    model: Callable[[], Any]  # a fresh copy of the policy
    tokenizer: Any
    questions: list[Question]
    draws_rewards: bool  # random rewards, for a policy that has learned nothing


@dataclass
class Tools:
    """The sandboxed tool of both sides, and the seconds of its calls since the last ``take``."""

    run: Run  # Python, a round's programs side by side
    seconds: float = 0.0

    def beamline(self, calls: Sequence[Call]) -> list[Observation]:
        """Run identical calls of a round once, as Beamline's environment does."""
        return self._timed(lambda: answer([text_tool(SPEC, self.run)], calls))

    def trl(self, calls: Sequence[Call]) -> list[Observation]:
        """Run every call: TRL leaves tools to its user."""
        return self._timed(lambda: self._each(calls))

    def _each(self, calls: Sequence[Call]) -> list[Observation]:
        answers = iter(self.run([call.argument for call in calls if call.tool == "python"]))
        unknown = Observation(Outcome.NO_SUCH_TOOL, "")
        return [next(answers) if call.tool == "python" else unknown for call in calls]

    def _timed(self, work: Callable[[], list[Observation]]) -> list[Observation]:
        began = time.perf_counter()
        observations = work()
        self.seconds += time.perf_counter() - began
        return observations

    def take(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


@dataclass(frozen=True)
class Measured:
    """One repetition of one side. Seconds of ``sampling`` are without those of the tools."""

    step: float
    sampling: float
    tools: float
    update: float
    sampled_tokens: int
    response_tokens: int
    other: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- where both sides begin


def cold_started(recipe: Recipe) -> tuple[Path, Path]:
    """Return the folder of the cold-started policy and the file of its training questions.

    They are made by the pipeline's own sub-steps, once (some three minutes): the ledger keeps them.
    """
    from tasks.cold_start import ColdStartInputs, cold_start
    from tasks.prepare import PrepareInputs, prepare
    from tasks.questions.sources import source_files

    assert recipe.cold_start, "both sides begin with a cold start"
    tools = recipe.tools
    inputs = PrepareInputs(
        settings=recipe.prepare,
        sets={},
        sources=source_files(recipe.prepare, tools, {}),
        dialogue=recipe.dialogue,
        tools=tools,
        machine=recipe.machine,
        dialect=recipe.dialect,
        named=agent_of(recipe).sources,
        scorers=scorer_sources(recipe),
    )
    opening = partial(open_environment, tools, {}, recipe.machine.threads)
    made = prepare.fn(Step("bench", "prepare", 0, recipe.seed), inputs, open_environment=opening)
    initial, traces = (artifacts.output(made, name) for name in ("initial", "traces"))
    assert recipe.cold_start, f"the recipe {RECIPE} has a cold start"
    tuning = ColdStartInputs(initial, traces, recipe.cold_start, recipe.machine)
    trained = cold_start.fn(Step("bench", "cold_start", 0, recipe.seed), tuning)
    questions = Path(artifacts.output(made, "questions").path, "train.parquet")
    return Path(artifacts.output(trained, "policy").path), questions


def tiny(recipe: Recipe, folder: Path, questions: list[Question]) -> Start:
    """Return a start with the cold-started policy, which calls its tool."""
    tokenizer = load_tokenizer(folder)
    return Start(
        recipe,
        lambda: load_policy(folder, recipe.machine),
        tokenizer,
        questions,
        draws_rewards=False,
    )


def medium(recipe: Recipe, folder: Path, questions: list[Question]) -> Start:
    """Return a start with 25 million random weights; turns end by chance, and call no tool."""
    sizes = {"hidden": 512, "layers": 8, "heads": 8, "key_value_heads": 4, "feed_forward": 1536}
    settings = TinyPolicy.model_validate({**recipe.prepare.policy.model_dump(), **sizes})
    tokenizer = load_tokenizer(folder)
    model = build_policy(settings, tokenizer, recipe.seed)
    model.set_attn_implementation("sdpa")
    return Start(recipe, lambda: copy.deepcopy(model), tokenizer, questions, draws_rewards=True)


POLICIES: dict[str, Callable[[Recipe, Path, list[Question]], Start]] = {
    "tiny": tiny,
    "25m": medium,
}


def load_recipe(group: int) -> Recipe:
    """Return the recipe with groups of a size, of which half start at the prompt (ARPO)."""
    recipe = load_settings(RECIPE, PARAMS)
    threads = int(os.environ.get("OMP_NUM_THREADS") or recipe.machine.threads)
    # Drawn as in the ARPO authors' code: the entropy of so young a policy hardly rises after a tool
    # result, so the paper's rule would hardly branch.
    budget = {"leaves": group, "initial": group // 2, "draw": True}
    rollout = recipe.reinforce.rollout.model_copy(update=budget)
    return recipe.model_copy(
        update={
            "reinforce": recipe.reinforce.model_copy(update={"rollout": rollout}),
            "machine": recipe.machine.model_copy(update={"threads": threads}),
        }
    )


def batch_of(start: Start, case: Case, number: int) -> list[Question]:
    """Return the questions of one repetition."""
    places = range(number * case.questions, (number + 1) * case.questions)
    return [start.questions[place % len(start.questions)] for place in places]


def drawn_rewards(case: Case, number: int) -> list[float]:
    """Draw a standard normal reward for each rollout of a repetition."""
    return np.random.default_rng((SEED, number)).normal(size=case.questions * case.group).tolist()


# ---------------------------------------------------------------- Beamline


def beamline_learner(start: Start) -> Learner:
    """Return a policy with its optimizer."""
    learning = Learner(Path("bench"), start.model(), start.tokenizer)
    checkpoint.prepare_optimizer(learning, start.recipe.reinforce.update)
    return learning


def beamline_sample(
    start: Start,
    learning: Learner,
    questions: Sequence[Question],
    tools: Respond,
    row: Algorithm,
    number: int,
) -> list[Tree]:
    """Roll out a batch, as tasks/rollout.py does."""
    recipe, tokenizer = start.recipe, learning.tokenizer
    setting = Setting(
        tokenizer,
        recipe.dialogue,
        recipe.reinforce.rollout,
        open_dialect(recipe.dialect, tokenizer, recipe.dialogue, [SPEC]),
        OpenEnvironment([SPEC], lambda: nullcontext(Questions(tools))),
        f"{SEED}/{number}",
        row.branching,
        row.marks,
    )
    return grow(questions, TransformersEngine(learning.model, learning.tokenizer), setting)


def rewards_of(start: Start, case: Case, trees: Sequence[Tree], number: int) -> list[float]:
    """Return the rewards of all leaves, as tasks/reward.py computes them, or random ones."""
    if start.draws_rewards:
        return drawn_rewards(case, number)
    settings = start.recipe.reinforce.reward
    return [row["reward"] for row in score_trees(trees, settings)]


def credited(trees: Sequence[Tree], rewards: Sequence[float]) -> list[Credited]:
    """Put group-relative advantages on every sampled token (rows grpo and arpo)."""
    rest = iter(rewards)
    batch = []
    for tree in trees:
        group = np.array([next(rest) for _ in tree.leaves])
        values = relative(group, np.zeros(len(group), np.int64), std=True)
        lengths = [sum(len(n.tokens) for n in sampled(path)) for path in tree.trajectories()]
        credits = [
            Credit(np.full(length, value, np.float32), np.zeros(length, np.int64))
            for value, length in zip(values, lengths, strict=True)
        ]
        batch.append(Credited(tree, credits))
    return batch


def beamline_update(
    start: Start, learning: Learner, trees: Sequence[Tree], rewards: Sequence[float], row: Algorithm
) -> dict[str, float]:
    """Compute credit and do one optimizer step, as tasks/advantage.py and tasks/update.py do."""
    settings = start.recipe.reinforce
    return learner.optimize(
        learning,
        credited(trees, rewards),
        assemble(row, start.recipe.dialogue.response_tokens).loss,
        settings.update,
        settings.rollout.temperature,
        start.recipe.machine,
        SEED,
    )


def beamline_step(
    start: Start, case: Case, learning: Learner, tools: Tools, row: Algorithm, number: int
) -> tuple[Measured, list[Tree], list[float]]:
    """Do one whole step; return it with its trees and their rewards."""
    questions = batch_of(start, case, number)
    tools.take()
    with deterministic(True):
        began = time.perf_counter()
        trees = beamline_sample(start, learning, questions, tools.beamline, row, number)
        sampling = time.perf_counter()
        rewards = rewards_of(start, case, trees, number)
        scored = time.perf_counter()
        beamline_update(start, learning, trees, rewards, row)
        ended = time.perf_counter()
    # Lanes wait for their tools in parallel: the mean over lanes.
    tool_seconds = tools.take() / lanes(start.recipe.machine.device, len(questions))
    measured = Measured(
        step=ended - began,
        sampling=sampling - began - tool_seconds,
        tools=tool_seconds,
        update=ended - scored,
        sampled_tokens=_tokens(trees, lambda node: node.kind == TURN),
        response_tokens=_tokens(trees, lambda node: node.parent >= 0),
        other=sharing(trees, rewards),
    )
    return measured, trees, rewards


def _tokens(trees: Sequence[Tree], counts: Callable[[Any], bool]) -> int:
    """Count tokens over the trees' nodes for which ``counts`` is true."""
    return sum(len(node.tokens) for tree in trees for node in tree.nodes if counts(node))


def sharing(trees: Sequence[Tree], rewards: Sequence[float]) -> dict[str, float]:
    """Count the tokens of all leaves with their prompts, and the different tokens."""
    rows = [path for tree in trees for path in tree.trajectories()]
    return {
        "leaf_tokens": sum(len(node.tokens) for row in rows for node in row),
        "unique_tokens": _tokens(trees, lambda node: True),
        "mean_leaf_response_tokens": float(
            np.mean([sum(len(node.tokens) for node in row[1:]) for row in rows])
        ),
        "branches": sum(decision.added for tree in trees for decision in tree.decisions),
        "leaves_with_gradient": _with_gradient(trees, rewards),
        "reward": float(np.mean(rewards)),
    }


def _with_gradient(trees: Sequence[Tree], rewards: Sequence[float]) -> float:
    """Return the leaves whose group has different rewards."""
    return sum(
        len(tree.tree.leaves)
        for tree in credited(trees, rewards)
        if any(credit.advantages.any() for credit in tree.credits)
    )


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels for Beamline, and not for TRL."""
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- TRL


def trl_peer(start: Start, case: Case, tools: Tools, micro_batches: int, path: str) -> Any:
    """Return TRL's trainer in one of its shapes."""
    from benchmarks import peer

    shape = peer.Shape(case.questions, case.group, micro_batches, path)
    model, tokenizer = start.model(), start.tokenizer
    return peer.peer(model, tokenizer, start.recipe, shape, start.questions, tools.trl)


def trl_step(start: Start, case: Case, trainer: Any, tools: Tools, number: int) -> Measured:
    """Do one whole step."""
    from benchmarks import peer

    examples = peer.batch(batch_of(start, case, number), case.group)
    trainer.rewards = drawn_rewards(case, number) if start.draws_rewards else None
    tools.take()
    with deterministic(False):
        seconds = peer.step(trainer, examples)
    tool_seconds = tools.take()
    trainer.rewards = None
    _, responses, own = trainer.sampled
    return Measured(
        step=seconds,
        sampling=trainer.seconds_sampling - tool_seconds,
        tools=tool_seconds,
        update=seconds - trainer.seconds_sampling,
        sampled_tokens=sum(sum(mask) for mask in own),
        response_tokens=sum(len(tokens) for tokens in responses),
        other={"reward": trainer._metrics["train"]["reward"][-1]},
    )


def trl_update(trainer: Any, trees: Sequence[Tree], rewards: Sequence[float]) -> float:
    """Measure the seconds of TRL's update on Beamline's trajectories."""
    from benchmarks import peer

    with deterministic(False):
        return peer.update(trainer, trees, rewards)


def best_peer(
    start: Start, case: Case, tools: Tools, trees: Sequence[Tree], rewards: Sequence[float]
) -> tuple[Any, dict[str, float]]:
    """Find TRL's fastest shape: its tool calls by sampling, its micro-batches by update.

    Returns the trainer, and the seconds of every shape that was tried.
    """
    tried: dict[str, float] = {}
    trainers: dict[tuple[str, int], Any] = {}
    for path in case.peer_paths:
        trainer = trainers[path, 1] = trl_peer(start, case, tools, 1, path)
        steps = [trl_step(start, case, trainer, tools, number) for number in range(2)]
        tried[f"sampling, {path}"] = steps[-1].sampling + steps[-1].tools
    path = min(case.peer_paths, key=lambda path: tried[f"sampling, {path}"])
    for parts in case.peer_micro_batches:
        if (path, parts) not in trainers:
            trainers[path, parts] = trl_peer(start, case, tools, parts, path)
        seconds = [trl_update(trainers[path, parts], trees, rewards) for _ in range(3)]
        tried[f"update, {parts} micro-batches"] = min(seconds[1:])
    best = min(case.peer_micro_batches, key=lambda parts: tried[f"update, {parts} micro-batches"])
    return trainers[path, best], tried


# ---------------------------------------------------------------- measuring


def run_case(start: Start, case: Case, repetitions: int, tools: Tools) -> dict[str, Any]:
    """Do all repetitions of a case, the sides in turns; return its entry of the file."""
    rows = {side: algorithms.load_algorithms()[name] for side, name in ROWS.items()}
    learning = beamline_learner(start)
    weights = [weight.detach().clone() for weight in learning.model.parameters()]
    _, trees, rewards = beamline_step(start, case, learning, tools, rows[BEAMLINE], 0)
    trainer, tried = best_peer(start, case, tools, trees, rewards)
    done: dict[str, list[Measured]] = {name: [] for name in case.contestants}
    for number in range(1, repetitions + 1):
        for name in case.contestants:
            restore(weights, learning.model)
            restore(weights, trainer.model)
            if name == TRL:
                measured = trl_step(start, case, trainer, tools, number)
            else:
                measured, trees, rewards = beamline_step(
                    start, case, learning, tools, rows[name], number
                )
                peers_update = trl_update(trainer, trees, rewards)
                operations = needed_operations(learning.model.config, trees, rewards)
                more = {"peers_update": peers_update, **operations}
                measured = replace(measured, other=measured.other | more)
            done[name].append(measured)
            print(
                f"{case.name} {number}/{repetitions} {name:<19}{measured.step:7.2f} s", flush=True
            )
    return {"repetitions": repetitions, "tried": tried, **summary(case, done)}


def restore(weights: Sequence[Tensor], model: Any) -> None:
    """Set the weights back to ``weights``."""
    with torch.no_grad():
        for weight, before in zip(model.parameters(), weights, strict=True):
            weight.copy_(before)


def summary(case: Case, done: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Return ratios and medians of one case."""
    sides = {name: side_summary(all_of) for name, all_of in done.items()}
    return {"ratios": ratios(sides), "questions": case.questions, "group": case.group, **sides}


def side_summary(all_of: Sequence[Measured]) -> dict[str, Any]:
    """Return median, least and greatest of every measurement of one side."""
    rows = [
        {
            **{name: value for name, value in vars(one).items() if name != "other"},
            **one.other,
            "step_without_tools": one.step - one.tools,
            "sampled_tokens_a_second": one.sampled_tokens / one.sampling,
        }
        for one in all_of
    ]
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": median(values), "least": min(values), "greatest": max(values)}


def ratios(sides: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return the speeds of Beamline over TRL; see benchmarks/README.md for each."""

    def of(side: str, name: str) -> float:
        return sides[side][name]["median"]

    def speeds(side: str) -> dict[str, float]:
        return {
            "step": of(TRL, "step") / of(side, "step"),
            "step_without_tools": of(TRL, "step_without_tools") / of(side, "step_without_tools"),
            "sampling": of(side, "sampled_tokens_a_second") / of(TRL, "sampled_tokens_a_second"),
            "update": of(side, "peers_update") / of(side, "update"),
        }

    found = speeds(BEAMLINE)
    found["sampled_tokens"] = of(BEAMLINE, "sampled_tokens") / of(TRL, "sampled_tokens")
    if BRANCHING in sides:  # as many leaves on both sides: per leaf is per step
        branching = speeds(BRANCHING)
        found["step_branching"] = branching["step"]
        found["update_branching"] = branching["update"]
        found["tokens_shared_by_branching"] = 1 - (
            of(BRANCHING, "unique_tokens") / of(BEAMLINE, "unique_tokens")
        )
        found["update_saved_by_branching"] = 1 - of(BRANCHING, "update") / of(BEAMLINE, "update")
    return found


# ---------------------------------------------------------------- the floor


def matrix_rate() -> float:
    """Measure the floating-point operations a second of the fastest float32 matrix product here."""
    best = 0.0
    for size in MATRICES:
        left, right = torch.randn(size, size), torch.randn(size, size)
        for _ in range(12):
            began = time.perf_counter()
            torch.mm(left, right)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def forward_operations(config: Any, tokens: int, pairs: int, predicted: int) -> float:
    """Count operations of a forward pass: each token in the layers, each (query, visible
    key) pair in attention, each predicted token in the head; a multiplication and its addition are
    two. Norms, rotations and softmaxes are left out."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = hidden // heads
    attention = 2 * hidden * size * (heads + config.num_key_value_heads)
    layer = 2 * (attention + 3 * hidden * config.intermediate_size)
    head = 2 * hidden * config.vocab_size
    return float(
        config.num_hidden_layers * (tokens * layer + pairs * 4 * heads * size) + predicted * head
    )


def needed_operations(
    config: Any, trees: Sequence[Tree], rewards: Sequence[float]
) -> dict[str, float]:
    """Count operations without which the trees cannot be sampled (each token once), nor the policy
    updated on them (the same of the leaves with a gradient, times three for the backward pass)."""
    rest = iter(rewards)
    with_spread = [tree for tree in trees if len({next(rest) for _ in tree.leaves}) > 1]
    return {
        "floor_sampling_operations": forward_operations(config, *counts(trees)),
        "floor_update_operations": 3 * forward_operations(config, *counts(with_spread)),
    }


def counts(trees: Sequence[Tree]) -> tuple[int, int, int]:
    """Count unique tokens of trees, their (query, visible key) pairs, and sampled tokens."""
    tokens = pairs = predicted = 0
    for tree in trees:
        ends: list[int] = []
        for node in tree.nodes:
            begin, length = (ends[node.parent] if node.parent >= 0 else 0), len(node.tokens)
            ends.append(begin + length)
            tokens += length
            pairs += begin * length + length * (length + 1) // 2
            predicted += length * (node.kind == TURN)
    return tokens, pairs, predicted


def add_floors(entry: dict[str, Any], rate: float) -> None:
    """Return seconds at the machine's matrix rate, and the share of it that a side reaches.

    TRL's floor is Beamline's without branching: the same task.
    """
    for name in (BEAMLINE, BRANCHING):
        if name in entry:
            side = entry[name]
            floors = {
                part: side.pop(f"floor_{part}_operations")["median"] / rate
                for part in ("sampling", "update")
            }
            side["floor"] = {**floors, "step": sum(floors.values())}
    entry[TRL]["floor"] = entry[BEAMLINE]["floor"]
    for name in (TRL, BEAMLINE, BRANCHING):
        if name in entry:
            side = entry[name]
            side["share_of_floor"] = {
                part: seconds / side[part]["median"] for part, seconds in side["floor"].items()
            }


# ---------------------------------------------------------------- memory


def peak_memory(case: Case, contestant: str, folder: Path, questions: Path) -> dict[str, float]:
    """Measure the peak memory of three steps of one side in a process of its own, in MiB."""
    command = [sys.executable, "-m", "benchmarks.against_trl", "--memory-of", case.name, contestant]
    command += ["--policy", str(folder), "--questions", str(questions)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def memory_of(start: Start, case: Case, contestant: str, tools: Tools) -> dict[str, float]:
    """Do the steps of ``peak_memory``, in its process."""
    if contestant == TRL:
        trainer = trl_peer(start, case, tools, 1, PEER_PATHS[0])
        before = resident_mib("VmRSS")
        for number in range(3):
            trl_step(start, case, trainer, tools, number)
    else:
        learning, row = beamline_learner(start), algorithms.load_algorithms()[ROWS[contestant]]
        before = resident_mib("VmRSS")
        for number in range(3):
            beamline_step(start, case, learning, tools, row, number)
    peak = resident_mib("VmHWM")
    return {"peak_mib": peak, "of_the_steps_mib": peak - before}


def resident_mib(name: str) -> float:
    """Return the memory of this process and of all that it has started: sandboxes, workers.

    Not ru_maxrss, in which a child inherits its parent's peak.
    """
    return sum(_status(process, name) for process in _family(os.getpid())) / 1024


def _family(process: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{process}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return [process, *(member for child in children for member in _family(child))]


def _status(process: int, name: str) -> int:
    """Return a number in KiB from a process's status."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


# ---------------------------------------------------------------- where Beamline's time goes


def profile(start: Start, case: Case, tools: Tools) -> None:
    """Print torch's profile of Beamline's sampling, with and without branching, and update."""
    learning = beamline_learner(start)
    questions = batch_of(start, case, 1)
    for name in ROWS.values():
        row = algorithms.load_algorithms()[name]
        beamline_step(start, case, learning, tools, row, 0)
        sample = partial(beamline_sample, start, learning, questions, tools.beamline, row, 1)
        trees = profiled(f"sampling, row {name}", sample)
        rewards = rewards_of(start, case, trees, 1)
        update = partial(beamline_update, start, learning, trees, rewards, row)
        profiled(f"update, row {name}", update)


def profiled(title: str, work: Callable[[], Any]) -> Any:
    """Do the work once under torch's profiler and once under Python's; print the top of both."""
    with deterministic(True), torch.profiler.profile() as seen:
        made = work()
    print(f"\n{title}: operators")
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    stats = cProfile.Profile()
    with deterministic(True):
        stats.runcall(work)
    print(f"{title}: functions")
    pstats.Stats(stats).sort_stats("tottime").print_stats(20)
    return made


# ---------------------------------------------------------------- the whole


def main() -> None:
    """Run the cases of the command line."""
    options = parse()
    recipe = load_recipe(CASES[HEADLINE].group)
    use_machine(recipe.machine)
    given = (options.policy, options.questions)
    files = given if options.policy else cold_started(recipe)
    limits = recipe.tools["python"]
    assert isinstance(limits, PythonTool)
    with python_tool(limits, recipe.machine.threads) as run:
        tools = Tools(run)
        if options.memory_of:
            case, contestant = CASES[options.memory_of[0]], options.memory_of[1]
            print(json.dumps(memory_of(begin(case, *files), case, contestant, tools)))
        elif options.profile:
            case = CASES[options.cases[0]]
            profile(begin(case, *files), case, tools)
        else:
            report(measure(options, files, tools), options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl", description=__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to compare")
    add("--repetitions", type=int, default=5, help="steps of each side (5)")
    add("--no-memory", action="store_true", help="leave out the peak memory of each side")
    add("--output", type=Path, default=FILE, help="the file to write")
    add("--profile", action="store_true", help="only show where Beamline's time goes, first case")
    add("--policy", type=Path, help="folder of a cold-started policy, instead of making one")
    add("--questions", type=Path, help="its training questions (train.parquet)")
    add("--memory-of", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.policy is None) != (options.questions is None):
        parser.error("--policy and --questions belong together: give both, or neither")
    if options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions}: ask for at least one")
    return options


def begin(case: Case, folder: Path, questions: Path) -> Start:
    """Return the start of both sides of a case."""
    return POLICIES[case.policy](load_recipe(case.group), folder, load_questions(questions))


def measure(options: argparse.Namespace, files: tuple[Path, Path], tools: Tools) -> dict[str, Any]:
    """Return all measurements, as they go into the file."""
    memory = {
        (name, side): peak_memory(CASES[name], side, *files)
        for name in options.cases
        for side in CASES[name].contestants
        if not options.no_memory
    }
    rate = matrix_rate()
    entries: dict[str, Any] = {}
    for name in options.cases:
        entry = run_case(begin(CASES[name], *files), CASES[name], options.repetitions, tools)
        rate = max(rate, matrix_rate())
        for side in CASES[name].contestants:
            if (name, side) in memory:
                entry[side]["memory"] = memory[name, side]
        entries[name] = entry
    for entry in entries.values():
        add_floors(entry, rate)
    headline = entries.get(HEADLINE, {}).get("ratios", {})
    keys = ("step", "step_branching", "sampling", "update")
    return {
        **{key: headline.get(key) for key in keys},
        "machine": machine(rate),
        "cases": entries,
    }


def machine(rate: float) -> dict[str, Any]:
    """Return what the figures depend on beside the code."""
    allocator = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    waiting = os.environ.get("OMP_WAIT_POLICY", "as OpenMP does by default")
    return {
        "matrix_operations_a_second": rate,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": processor(),
        "load_at_the_end": os.getloadavg()[0],
        "allocator": allocator,
        "threads_wait": waiting,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def report(found: dict[str, Any], file: Path) -> None:
    """Write the file under a temporary name, then rename; print its figures."""
    partial_file = file.with_name(f".{file.name}.partial")
    partial_file.write_text(json.dumps(rounded(found), indent=1) + "\n")
    partial_file.replace(file)
    for name, entry in found["cases"].items():
        print(f"\n{name}: {entry['questions']} questions x {entry['group']}", end="")
        print(f", median of {entry['repetitions']}")
        print(table(entry))
        for ratio, value in entry["ratios"].items():
            print(f"  {ratio:<28}{value:6.2f}")
    print(f"\n{file} has been written")


LINES = {  # a line of the printed table -> the keys of its number in a side's entry
    "step (s)": ("step", "median"),
    "sampling (s)": ("sampling", "median"),
    "tools (s)": ("tools", "median"),
    "update (s)": ("update", "median"),
    "TRL's update of the same (s)": ("peers_update", "median"),
    "sampled tokens": ("sampled_tokens", "median"),
    "sampled tokens a second": ("sampled_tokens_a_second", "median"),
    "tokens of all leaves": ("leaf_tokens", "median"),
    "unique tokens": ("unique_tokens", "median"),
    "floor of the step (s)": ("floor", "step"),
    "share of the floor": ("share_of_floor", "step"),
    "peak memory (MiB)": ("memory", "peak_mib"),
    "of the steps (MiB)": ("memory", "of_the_steps_mib"),
}


def table(entry: Mapping[str, Any]) -> str:
    """Return a table of the sides of a case."""
    sides = [name for name in (TRL, BEAMLINE, BRANCHING) if name in entry]
    lines = ["  " + " " * 29 + "".join(f"{name:>20}" for name in sides)]
    for title, (name, key) in LINES.items():
        numbers = [entry[side].get(name, {}).get(key) for side in sides]
        shown = ["" if number is None else f"{number:.4g}" for number in numbers]
        lines.append(f"  {title:<29}" + "".join(f"{number:>20}" for number in shown))
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Round numbers to four significant digits, more than the spread allows."""
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
