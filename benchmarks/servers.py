"""Measure the sampled tokens per second of one server and of two, in turns, on one machine.

    beamline prepare tiny; python -m benchmarks.servers                  # transformers
    .venv-vllm/bin/python -m benchmarks.servers --kind vllm

Each repetition rolls out the same training questions from the same weights, without branching, with
a tool that needs no time. A server has one thread, and all of them share this machine's cores with
the process that asks, so two servers on two cores show what the way there costs, and not what two
machines give. Prints medians: tokens per second, and per second of processor time of all processes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from params.run_folders import RunFolders
from params.schema.base import Machine
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.dialects import open_dialect
from tasks.engines import Engine
from tasks.engines.servers.client import EngineServer
from tasks.engines.servers.fleet import Fleet
from tasks.engines.servers.servers_engine import ServersEngine
from tasks.engines.servers.token_guard import TOKEN
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.engines.turns import EngineDiedError
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import use_machine
from tasks.rollouts.rounds import Setting, grow
from tasks.tools.python import SPEC
from tasks.trees.tables import load_questions
from tasks.trees.tree import Call, Observation, Question, Tree, sampled

OPTIONS = {"transformers": ("--threads", "1"), "vllm": ("--memory", "0.25")}
START = 300.0  # seconds for a server to start


@contextmanager
def serving(kind: str, policy: Path, count: int) -> Iterator[list[str]]:
    """Start servers, one thread each, and yield their addresses; end them with the block."""
    os.environ[TOKEN] = secrets.token_urlsafe(32)
    addresses, started = [], []
    for number in range(count):
        port = _free_port()
        words = ["--port", str(port), "--precision", "float32", *OPTIONS[kind]]
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(number)}
        command = [sys.executable, "-m", f"tasks.engines.{kind}.serve", str(policy), *words]
        started.append(
            subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.DEVNULL)
        )
        addresses.append(f"http://127.0.0.1:{port}")
    try:
        for address in addresses:
            _await(EngineServer(address, kind))
        yield addresses
    finally:
        for server in started:
            for process in _tree(server.pid):
                process.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _await(server: EngineServer) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        with suppress(EngineDiedError):
            return server.check()
        time.sleep(0.5)
    raise TimeoutError(f"{server.name} has not started in {START:.0f} seconds")


def _tree(root: int) -> list[psutil.Process]:
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def processor_seconds() -> float:
    """Return the processor time of this process and all below it."""
    times = [process.cpu_times() for process in _tree(os.getpid())]
    return sum(time.user + time.system for time in times)


def answer(calls: Sequence[Call]) -> list[Observation]:
    """Return a result at once."""
    return [Observation("ok", "42") for _ in calls]


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


def tokens(trees: Sequence[Tree]) -> int:
    """Count sampled tokens; those that leaves share count once."""
    return sum(len(node.tokens) for tree in trees for node in sampled(tree.nodes))


def rolled_out(
    engine: Engine, questions: Sequence[Question], recipe: Recipe, number: int
) -> tuple[float, float, float]:
    """Return sampled tokens, seconds and processor seconds of one rollout."""
    rollout_setting = setting(recipe, engine.tokenizer, number)  # type: ignore[attr-defined]
    began, used = time.perf_counter(), processor_seconds()
    trees = grow(questions, engine, rollout_setting)
    return tokens(trees), time.perf_counter() - began, processor_seconds() - used


def measure(
    kind: str, policy: Path, questions: Sequence[Question], recipe: Recipe, repetitions: int
) -> dict[str, tuple[float, float]]:
    """Return tokens per second, and per second of processor time, by what samples."""
    machine = Machine(threads=1, device="cpu", precision="float32")
    use_machine(machine)
    model, tokenizer = load_policy(policy, machine).eval(), load_tokenizer(policy)
    with serving(kind, policy, 2) as addresses:
        engines: dict[str, Engine] = {
            f"{count} server{'s' * (count > 1)}": ServersEngine(
                Fleet(addresses[:count], kind), 1, model, tokenizer, lambda: policy, "start"
            )
            for count in (1, 2)
        }
        if kind == "transformers":
            engines["in this process"] = TransformersEngine(model, tokenizer)
        runs_by_engine: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
        for number in range(-1, repetitions):  # the first one warms up
            for name, engine in engines.items():
                runs_by_engine[name].append(rolled_out(engine, questions, recipe, number))
    return {
        name: (
            median(count / seconds for count, seconds, _ in runs[1:]),
            median(count / used for count, _, used in runs[1:]),
        )
        for name, runs in runs_by_engine.items()
    }


def main() -> None:
    """Measure the kind of engine that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("--kind", choices=list(OPTIONS), default="transformers")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    questions = load_questions(RunFolders(args.recipe).split("train"))
    policy, recipe = RunFolders(args.recipe).initial, recipes.load(args.recipe)
    speeds = measure(args.kind, policy, questions[: args.questions], recipe, args.repetitions)
    for name, (wall, processor) in speeds.items():
        print(f"{args.kind}, {name}: {wall:,.0f} tokens/s, {processor:,.0f} per processor second")


if __name__ == "__main__":
    main()
