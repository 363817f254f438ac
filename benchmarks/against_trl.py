"""Measure Beamline against TRL's GRPOTrainer: sampling, update and whole step, on one machine.

``make bench`` runs it; benchmarks/README.md describes the measurements and the keys of its file.
Weights are put back after every step, so all repetitions do equal work.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from benchmarks.cases import (
    BEAMLINE,
    BRANCHING,
    CASES,
    SEED,
    TRL,
    Case,
    Start,
    batch_of,
    begin,
    cold_started,
    drawn_rewards,
    first_case,
    load_recipe,
    require_package,
)
from benchmarks.floors import add_floors, counts, matrix_rate, needed_operations
from params.schema import algorithms
from params.schema.algorithms import Algorithm
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.estimators.group import relative
from tasks.learning.packing import Credit, Credited
from tasks.policy import checkpoint
from tasks.policy.machine import use_machine
from tasks.policy.parallel import lanes
from tasks.policy.resident import Learner, to_sample
from tasks.rewards.scoring import score_trees
from tasks.rollouts.rounds import Setting, grow
from tasks.tools.python import PythonTool, python_tool
from tasks.trees.tree import PROMPT, TURN, Question, Tree, response_tokens, sampled

FILE = Path(__file__).with_name("against_trl.json")
ROWS = {BEAMLINE: "grpo", BRANCHING: "arpo"}  # of params/algorithms.yaml
HEADLINE = "tiny-16"  # the case whose ratios are the file's first keys
FIRST_KEYS = ("step", "step_branching", "sampling", "update")


@dataclass(frozen=True)
class Measured:
    """One repetition of one side. Seconds of ``sampling`` are without those of the tools."""

    step: float
    sampling: float
    tools: float
    rest: float  # rewards, and with TRL the layout of rows and advantages
    update: float
    sampled_tokens: int
    response_tokens: int
    other: dict[str, float] = field(default_factory=dict)


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
    row: Algorithm,
    number: int,
) -> list[Tree]:
    """Roll out a batch, as tasks/rollout.py does."""
    recipe, tools = start.recipe, start.tools
    setting = Setting(
        learning.tokenizer,
        recipe.dialogue,
        recipe.reinforce.rollout,
        start.dialect,
        OpenEnvironment([tools.spec], lambda: nullcontext(Questions(tools.beamline))),
        f"{SEED}/{number}",
        row.branching,
        row.marks,
    )
    actor = to_sample(learning.model, recipe.machine)
    return grow(questions, TransformersEngine(actor, learning.tokenizer), setting)


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
    start: Start, case: Case, learning: Learner, row: Algorithm, number: int
) -> tuple[Measured, list[Tree], list[float]]:
    """Do one whole step; return it with its trees and their rewards."""
    questions = batch_of(start, case, number)
    start.tools.take()
    with deterministic(True):
        began = time.perf_counter()
        trees = beamline_sample(start, learning, questions, row, number)
        sampling = time.perf_counter()
        rewards = rewards_of(start, case, trees, number)
        scored = time.perf_counter()
        beamline_update(start, learning, trees, rewards, row)
        ended = time.perf_counter()
    # Lanes wait for their tools in parallel: the mean over lanes.
    tool_seconds = start.tools.take() / lanes(start.recipe.machine.device, len(questions))
    measured = Measured(
        step=ended - began,
        sampling=sampling - began - tool_seconds,
        tools=tool_seconds,
        rest=scored - sampling,
        update=ended - scored,
        sampled_tokens=_tokens(trees, lambda node: node.kind == TURN),
        response_tokens=_tokens(trees, lambda node: node.kind != PROMPT),
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
        "unique_tokens": counts(trees)[0],
        "mean_leaf_response_tokens": float(np.mean([response_tokens(row) for row in rows])),
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
def deterministic(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels for Beamline, and not for TRL."""
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- TRL


def trl_peer(start: Start, case: Case, micro_batches: int, path: str) -> Any:
    """Return TRL's trainer in one of its shapes."""
    from benchmarks import peer

    shape = peer.Shape(case.questions, case.group, micro_batches, path)
    game = peer.Game(start.dialect, start.recipe.dialogue, start.tools.trl)
    return peer.peer(start.model(), start.tokenizer, start.recipe, shape, start.questions, game)


def trl_step(
    start: Start, case: Case, trainer: Any, number: int, trees: Sequence[Tree] | None = None
) -> Measured:
    """Do one whole step; with ``trees``, one that samples their leaves."""
    from benchmarks import peer

    questions = [each for each in batch_of(start, case, number) for _ in range(case.group)]
    trainer.rewards = drawn_rewards(case, number) if start.draws_rewards else None
    start.tools.take()
    with deterministic(False), peer.scripted(trainer, trees):
        step = peer.steps_of(start.recipe.dialogue)(trainer, questions)
    tool_seconds = start.tools.take()
    trainer.rewards = None
    contexts = [context for trajectory in step.trajectories for context in trajectory]
    response_tokens = sum(len(context.response) for context in contexts)
    return Measured(
        step=step.sampling + step.rest + step.update,
        sampling=step.sampling - tool_seconds,
        tools=tool_seconds,
        rest=step.rest,
        update=step.update,
        sampled_tokens=sum(sum(context.own) for context in contexts),
        response_tokens=response_tokens,
        other={
            "reward": trainer._metrics["train"]["reward"][-1],
            "mean_leaf_response_tokens": response_tokens / len(questions),
        },
    )


def trl_sample(
    start: Start, case: Case, trainer: Any, number: int, trees: Sequence[Tree] | None = None
) -> float:
    """Measure the seconds of TRL's sampling of a batch, with its tools.

    With ``trees``, of the leaves of these, whose questions are the batch.
    """
    from benchmarks import peer

    questions = [each for each in batch_of(start, case, number) for _ in range(case.group)]
    with deterministic(False), peer.scripted(trainer, trees):
        return peer.sample(trainer, questions)


def trl_update(trainer: Any, trees: Sequence[Tree], rewards: Sequence[float]) -> float:
    """Measure the seconds of TRL's update on Beamline's trajectories."""
    from benchmarks import peer

    with deterministic(False):
        return peer.update(trainer, *peer.trajectories_of(trees), rewards)


def best_peer(
    start: Start, case: Case, trees: Sequence[Tree], rewards: Sequence[float]
) -> tuple[Any, dict[str, float]]:
    """Find TRL's fastest shape: how it samples, then its micro-batches by update.

    Returns the trainer, and the seconds of every shape that was tried.
    """
    from benchmarks import peer

    trainer, tried = best_sampler(start, case, trees if case.scripted else None)
    seconds = {}
    for parts in case.peer_micro_batches:
        peer.reshape(trainer, replace(trainer.shape, micro_batches=parts))
        seconds[parts] = settled(trl_update(trainer, trees, rewards) for _ in range(case.tries))
        tried[f"update, {parts} micro-batches"] = seconds[parts]
    best = min(seconds, key=lambda parts: seconds[parts])
    peer.reshape(trainer, replace(trainer.shape, micro_batches=best))
    return trainer, tried


def best_sampler(
    start: Start, case: Case, trees: Sequence[Tree] | None
) -> tuple[Any, dict[str, float]]:
    """Find the tool calls and the cache with which TRL samples fastest, if there is a choice.

    Returns the trainer, and the seconds of each way. One of a real model takes gigabytes, so each
    is changed for as many ways as it can. ``trees``, of the first batch: the leaves to sample.
    """
    from benchmarks import peer

    several = len(case.peer_caches) > 1
    tries = case.tries - 1 or int(several or len(case.peer_paths) > 1)
    found: list[tuple[float, Any, peer.Shape]] = []
    tried: dict[str, float] = {}
    for path in case.peer_paths:
        trainer = trl_peer(start, case, case.peer_micro_batches[0], path)
        for cache in case.peer_caches:
            peer.reshape(trainer, replace(trainer.shape, cache=cache))
            numbers = [0] * tries if trees else range(tries)
            seconds = settled(trl_sample(start, case, trainer, n, trees) for n in numbers)
            found.append((seconds, trainer, trainer.shape))
            tried |= {f"sampling, {path}" + f", {cache} cache" * several: seconds} if tries else {}
    _, best, shape = min(found, key=lambda one: one[0])
    peer.reshape(best, shape)
    return best, tried


def settled(tries: Iterable[float]) -> float:
    """Return the least seconds of some tries, the first of which only warms up; 0 of none."""
    seconds = list(tries)
    return min(seconds[1:] or seconds, default=0.0)


# ---------------------------------------------------------------- measuring


def run_case(start: Start, case: Case, repetitions: int) -> dict[str, Any]:
    """Do all repetitions of a case, the sides in turns; return its entry of the file."""
    rows = {side: algorithms.load_algorithms()[name] for side, name in ROWS.items()}
    learning = beamline_learner(start)
    weights = [weight.detach().clone() for weight in learning.model.parameters()]
    _, trees, rewards = beamline_step(start, case, learning, rows[BEAMLINE], 0)
    trainer, tried = best_peer(start, case, trees, rewards)
    done: dict[str, list[Measured]] = {name: [] for name in case.contestants}
    for number in range(1, repetitions + 1):
        for name in case.contestants:
            restore(weights, learning.model)
            restore(weights, trainer.model)
            if name == TRL:
                given = trees if case.scripted else None  # of Beamline's step right before
                measured = trl_step(start, case, trainer, number, given)
            else:
                measured, trees, rewards = beamline_step(start, case, learning, rows[name], number)
                more = needed_operations(learning.model.config, trees, rewards)
                if not (case.scripted and name == BEAMLINE):  # TRL's step is of the same leaves
                    more["peers_update"] = trl_update(trainer, trees, rewards)
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
        same = "peers_update" not in sides[side]
        peers_update = of(TRL, "update") if same else of(side, "peers_update")
        return {
            "step": of(TRL, "step") / of(side, "step"),
            "step_without_tools": of(TRL, "step_without_tools") / of(side, "step_without_tools"),
            "sampling": of(side, "sampled_tokens_a_second") / of(TRL, "sampled_tokens_a_second"),
            "update": peers_update / of(side, "update"),
        }

    result = speeds(BEAMLINE)
    result["tokens_shared"] = 1 - of(BEAMLINE, "unique_tokens") / of(BEAMLINE, "leaf_tokens")
    result["sampled_tokens"] = of(BEAMLINE, "sampled_tokens") / of(TRL, "sampled_tokens")
    length = "mean_leaf_response_tokens"
    result["length"] = of(BEAMLINE, length) / of(TRL, length)
    if BRANCHING in sides:  # as many leaves on both sides: per leaf is per step
        branching = speeds(BRANCHING)
        result["step_branching"] = branching["step"]
        result["sampling_branching"] = branching["sampling"]
        result["update_branching"] = branching["update"]
        result["length_branching"] = of(BRANCHING, length) / of(TRL, length)
        result["tokens_shared_branching"] = 1 - (
            of(BRANCHING, "unique_tokens") / of(BRANCHING, "leaf_tokens")
        )
        result["tokens_shared_by_branching"] = 1 - (
            of(BRANCHING, "unique_tokens") / of(BEAMLINE, "unique_tokens")
        )
        result["update_saved_by_branching"] = 1 - of(BRANCHING, "update") / of(BEAMLINE, "update")
    return result


# ---------------------------------------------------------------- memory


def peak_memory(case: Case, contestant: str, folder: Path, questions: Path) -> dict[str, float]:
    """Measure the peak memory of some steps of one side in a process of its own, in MiB."""
    command = [sys.executable, "-m", "benchmarks.against_trl", "--memory-of", case.name, contestant]
    command += ["--policy", str(folder), "--questions", str(questions)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def memory_of(start: Start, case: Case, contestant: str) -> dict[str, float]:
    """Do the steps of ``peak_memory``, in its process."""
    if contestant == TRL:
        trainer = trl_peer(start, case, case.peer_micro_batches[0], case.peer_paths[0])
        before = resident_mib("VmRSS")
        for number in range(case.tries):
            trl_step(start, case, trainer, number)
    else:
        learning, row = beamline_learner(start), algorithms.load_algorithms()[ROWS[contestant]]
        before = resident_mib("VmRSS")
        for number in range(case.tries):
            beamline_step(start, case, learning, row, number)
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


def profile(start: Start, case: Case) -> None:
    """Print torch's profile of Beamline's sampling, with and without branching, and update."""
    learning = beamline_learner(start)
    questions = batch_of(start, case, 1)
    for name in ROWS.values():
        row = algorithms.load_algorithms()[name]
        beamline_step(start, case, learning, row, 0)
        sample = partial(beamline_sample, start, learning, questions, row, 1)
        trees = profiled(f"sampling, row {name}", sample)
        rewards = rewards_of(start, case, trees, 1)
        update = partial(beamline_update, start, learning, trees, rewards, row)
        profiled(f"update, row {name}", update)


def profiled(title: str, work: Callable[[], Any]) -> Any:
    """Do the work once under torch's profiler and once under Python's; print the top of both."""
    with deterministic(True), torch.profiler.profile() as seen:
        result = work()
    print(f"\n{title}: operators")
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    stats = cProfile.Profile()
    with deterministic(True):
        stats.runcall(work)
    print(f"{title}: functions")
    pstats.Stats(stats).sort_stats("tottime").print_stats(20)
    return result


# ---------------------------------------------------------------- the whole


def main() -> None:
    """Run the cases of the command line."""
    options = parse()
    use_machine(load_recipe(CASES[options.cases[0]]).machine)
    files = files_of(options)
    if options.memory_of:
        case, contestant = CASES[options.cases[0]], options.memory_of[1]
        with ready(case, files) as start:
            print(json.dumps(memory_of(start, case, contestant)))
    elif options.profile:
        case = CASES[options.cases[0]]
        with ready(case, files) as start:
            profile(start, case)
    else:
        report(measure(options, files), options.output)


Files = Mapping[str, tuple[Path, Path]]  # recipe -> folder of a policy, its training questions


def files_of(options: argparse.Namespace) -> Files:
    """Return those of the command line, or make them for each recipe of its cases."""
    names = dict.fromkeys(CASES[name].recipe for name in options.cases)
    if options.policy:
        return dict.fromkeys(names, (options.policy, options.questions))
    recipes = {name: load_recipe(first_case(name)) for name in names}
    for recipe in recipes.values():
        require_package(recipe)
    return {name: cold_started(name, recipe) for name, recipe in recipes.items()}


@contextmanager
def ready(case: Case, files: Files) -> Iterator[Start]:
    """Open the tool of a case's recipe; yield the start of both sides."""
    recipe = load_recipe(case)
    limits = recipe.tools["python"]
    assert isinstance(limits, PythonTool)
    with python_tool(limits, recipe.machine.threads) as run:
        yield begin(case, *files[case.recipe], run)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl", description=__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to compare (all)")
    add("--repetitions", type=int, help="steps of each side (5; 3 where a step takes a minute)")
    add("--no-memory", action="store_true", help="leave out the peak memory of each side")
    add("--output", type=Path, default=FILE, help="the file to write; its other cases stay in it")
    add("--profile", action="store_true", help="only show where Beamline's time goes, first case")
    add("--policy", type=Path, help="folder of a cold-started policy, instead of making one")
    add("--questions", type=Path, help="its training questions (train.parquet)")
    add("--memory-of", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.policy is None) != (options.questions is None):
        parser.error("--policy and --questions belong together: give both, or neither")
    if options.memory_of:
        options.cases = options.memory_of[:1]
    recipes = sorted({CASES[name].recipe for name in options.cases})
    if options.policy and len(recipes) > 1:
        parser.error(
            f"--policy is of one recipe, the cases are of {' and '.join(recipes)}: name --cases of "
            "one, or leave out --policy"
        )
    if options.repetitions is not None and options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions}: ask for at least one")
    return options


def measure(options: argparse.Namespace, files: Files) -> dict[str, Any]:
    """Return all measurements, as they go into the file."""
    memory = {
        (name, side): peak_memory(CASES[name], side, *files[CASES[name].recipe])
        for name in options.cases
        for side in CASES[name].contestants
        if not options.no_memory
    }
    rates = dict.fromkeys(sorted({CASES[name].precision for name in options.cases}), 0.0)
    entries: dict[str, Any] = {}
    for name in options.cases:
        case = CASES[name]
        rates[case.precision] = max(rates[case.precision], matrix_rate(case.precision))
        with ready(case, files) as start:
            entry = run_case(start, case, options.repetitions or case.repetitions)
        rates[case.precision] = max(rates[case.precision], matrix_rate(case.precision))
        for side in case.contestants:
            if (name, side) in memory:
                entry[side]["memory"] = memory[name, side]
        entries[name] = entry
    for name, entry in entries.items():
        add_floors(entry, rates[CASES[name].precision])
    headline = entries.get(HEADLINE, {}).get("ratios", {})
    return {
        **{key: headline.get(key) for key in FIRST_KEYS},
        "machine": machine(rates),
        "cases": entries,
    }


def machine(rates: Mapping[str, float]) -> dict[str, Any]:
    """Return what the figures depend on beside the code."""
    allocator = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    waiting = os.environ.get("OMP_WAIT_POLICY", "as OpenMP does by default")
    return {
        "matrix_operations_a_second": rates.get("float32"),
        "bfloat16_operations_a_second": rates.get("bfloat16"),
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


def report(measurements: dict[str, Any], file: Path) -> None:
    """Write the file under a temporary name, then rename; print the new figures."""
    contents = merged(measurements, json.loads(file.read_text()) if file.is_file() else None)
    partial_file = file.with_name(f".{file.name}.partial")
    partial_file.write_text(json.dumps(rounded(contents), indent=1) + "\n")
    partial_file.replace(file)
    for name, entry in measurements["cases"].items():
        print(f"\n{name}: {entry['questions']} questions x {entry['group']}", end="")
        print(f", median of {entry['repetitions']}")
        print(table(entry))
        for ratio, value in entry["ratios"].items():
            print(f"  {ratio:<28}{value:6.2f}")
    print(f"\n{file} has been written")


def merged(measurements: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return measurements of all cases as they are, those of some with the others of ``before``.

    What describes the machine of the new ones alone stands in them.
    """
    new = measurements["cases"]
    if before is None or set(new) == set(CASES):
        return measurements
    new = {name: {"machine": measurements["machine"], **entry} for name, entry in new.items()}
    entries = {**before["cases"], **new}
    order = [*CASES, *entries]  # with cases of before that are no more
    headline = measurements if HEADLINE in new else before
    return {
        **before,
        **{key: headline[key] for key in FIRST_KEYS},
        "cases": {name: entries[name] for name in dict.fromkeys(order) if name in entries},
    }


LINES = {  # a line of the printed table -> the keys of its number in a side's entry
    "step (s)": ("step", "median"),
    "sampling (s)": ("sampling", "median"),
    "tools (s)": ("tools", "median"),
    "rest (s)": ("rest", "median"),
    "update (s)": ("update", "median"),
    "TRL's update of the same (s)": ("peers_update", "median"),
    "sampled tokens": ("sampled_tokens", "median"),
    "sampled tokens a second": ("sampled_tokens_a_second", "median"),
    "tokens of all leaves": ("leaf_tokens", "median"),
    "unique tokens": ("unique_tokens", "median"),
    "response tokens of a leaf": ("mean_leaf_response_tokens", "median"),
    "leaves with a gradient": ("leaves_with_gradient", "median"),
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
