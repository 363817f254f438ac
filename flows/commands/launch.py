"""Print what a run would start, and on which machine, without starting it.

``beamline launch RECIPE`` lists the stages, learner processes and servers of a recipe with
their commands and environment variables, as the environment has it: under Slurm that of the
allocation (``DRY=1 sbatch … deploy/slurm/run.sbatch RECIPE``). What can be seen to be wrong is
listed at once: too few GPUs, a server that does not answer, a missing token, a folder that the
machines do not share. The exit status is 1 then, and 2 for a recipe that does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows import end_import_phase, exit_fast
from flows.host import gpu, requirements
from flows.runs import pipeline
from params.schema.addresses import LOOPBACK
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.engines.servers.token_guard import SHORTEST, TOKEN
from tasks.learning.channel import ADDRESS, SECRET
from tasks.learning.learner_group import HOST, LAUNCH, launch_command

ANSWER = 3.0  # seconds that a server has to accept a connection
# file systems of one machine; what is on another one is taken for shared
LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
NODES, PER_NODE = (re.compile(rf"--{name}[= ](\d+)") for name in ("nnodes", "nproc[-_]per[-_]node"))


@dataclass(frozen=True)
class Program:
    """Processes that a run starts, or that have to be there for it."""

    title: str
    machine: str
    command: str
    variables: Sequence[str] = ()  # of its environment; secrets by their names alone


# ---------------------------------------------------------------- what would start


def programs(
    name: str,
    recipe: Recipe,
    environment: Mapping[str, str],
    pools: Mapping[str, str],
    changes: Sequence[str] = (),
) -> list[Program]:
    """Return the programs of a run, in the order in which they have to be there.

    ``pools``: the pool of each stage that has one (dvc.yaml); ``changes``: those of ``--set``.
    """
    return [
        *(_server(name, recipe.engine.kind, address) for address in servers(recipe)),
        *_stages(name, environment, pools, changes),
        *_learners(recipe, environment),
        *_own_engine(recipe),
    ]


def servers(recipe: Recipe) -> list[str]:
    """Return the addresses of the servers that sample for a recipe, here. Raises ValueError."""
    return list(recipe.engine.addresses)


def _server(name: str, kind: str, address: str) -> Program:
    host, port = _place(address)
    serve = f"python -m tasks.engines.{kind}.serve models/{name}/initial"
    command = f"{serve} --host {host} --port {port}"
    return Program("a server that samples", host, command, [f"{TOKEN}=(secret)"])


def _stages(
    name: str, environment: Mapping[str, str], pools: Mapping[str, str], changes: Sequence[str]
) -> Iterator[Program]:
    here = environment.get(HOST) or socket.gethostname()
    how = ["--set", *changes] if changes else ["--here"]
    command = shlex.join(["beamline", "retrain", name, *how])
    yield Program("the stages, one after the other", here, command)
    for stage, pool in pools.items():
        there = f"a worker of the pool {pool}, else {here}"
        module, _, recipe = stage.partition("@")
        yield Program(f"of these {stage}", there, f"beamline {module} {recipe}")


def _learners(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Program]:
    count = recipe.machine.processes
    if count == 1:
        return
    launcher = environment.get(LAUNCH)
    where = "the machines of the command" if launcher else "beside the stage"
    threads = max(1, recipe.machine.threads // count)
    yield Program(
        f"{count} learner processes, while cold_start or reinforce runs",
        where,
        (launcher or shlex.join(launch_command(count))) + " -m tasks.learning.learner_process",
        [f"OMP_NUM_THREADS={threads}", f"{ADDRESS}=(the stage's)", f"{SECRET}=(secret)"],
    )


def _own_engine(recipe: Recipe) -> Iterator[Program]:
    if not servers(recipe) and recipe.engine.kind == "vllm":
        command = "(started by the stage; its output is in .beamline/vllm.log)"
        yield Program("a vLLM that samples", "beside the stage", command)


def _place(address: str) -> tuple[str, int]:
    """Return host and port of a server's address."""
    parsed = urlsplit(address)
    return parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)


# ---------------------------------------------------------------- what is wrong


def faults(
    recipe: Recipe, environment: Mapping[str, str], folder: Path, starting: bool = False
) -> list[str]:
    """Return everything that is seen to be wrong without a start, with its remedy.

    ``starting``: the servers start with the run, so that only their names are looked up.
    """
    return [
        *requirements.faults(recipe, environment),
        *_of_servers(recipe, environment, _unknown if starting else _silence),
        *_of_gpus(recipe, environment),
        *_of_processes(recipe, environment, folder),
    ]


def _of_servers(
    recipe: Recipe, environment: Mapping[str, str], ask: Callable[[str], str]
) -> Iterator[str]:
    addresses = servers(recipe)
    if not addresses:
        return
    if len(environment.get(TOKEN, "").strip()) < SHORTEST:
        yield (
            f"{TOKEN} is not set, or shorter than {SHORTEST} characters: give it the servers' "
            "token, which they keep in .beamline/server.token"
        )
    with ThreadPoolExecutor(len(addresses)) as pool:
        for address, why in zip(addresses, pool.map(ask, addresses), strict=True):
            if why:
                yield f"the server {address} does not answer ({why}): start it, or correct it"


def _silence(address: str) -> str:
    """Return why no connection to a server's port can be made, or ""."""
    try:
        socket.create_connection(_place(address), ANSWER).close()
    except OSError as error:
        return str(error)
    return ""


def _unknown(address: str) -> str:
    """Return why the name of a server's machine is not known here, or ""."""
    try:
        socket.getaddrinfo(*_place(address))
    except OSError as error:
        return str(error)
    return ""


def _of_gpus(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[str]:
    if recipe.machine.device != "cuda" or LAUNCH not in environment:
        return
    count, gpu_count = _per_node(environment) or 1, len(gpu.visible())
    if gpu_count < count:
        yield (
            f"'machine.device' = 'cuda', and {LAUNCH} starts {count} learner processes on this "
            f"machine, which has {gpu_count} GPUs: lower {count}, or take a larger machine"
        )


def _of_processes(recipe: Recipe, environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    launcher, count = environment.get(LAUNCH), recipe.machine.processes
    if not launcher:
        return
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        yield f"{LAUNCH} is no command ({error}): {launcher}"
        return
    if not words or not shutil.which(words[0], path=environment.get("PATH")):
        yield f"{LAUNCH} begins with {''.join(words[:1])!r}, which is no program here: correct it"
    nodes, each = _number(NODES, launcher) or 1, _per_node(environment)
    if each and nodes * each != count:
        yield (
            f"{LAUNCH} starts {nodes} x {each} processes, and machine.processes is {count}: make "
            "them equal"
        )
    if nodes > 1:
        if environment.get(HOST, "127.0.0.1") in LOOPBACK:
            yield (
                f"{HOST} is not set to an address that the other {nodes - 1} machines reach: set "
                "it to this machine's name"
            )
        if (kind := file_system(folder)) in LOCAL:
            yield (
                f"{folder} is on {kind}, a file system of this machine alone, and {nodes} machines "
                "read and write there: run from a folder that they share (NFS, Lustre)"
            )


def _per_node(environment: Mapping[str, str]) -> int | None:
    return _number(PER_NODE, environment.get(LAUNCH, ""))


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    matched = pattern.search(text)
    return int(matched[1]) if matched else None


def file_system(folder: Path) -> str:
    """Return the kind of the file system that a folder is on, "" where it is not known."""
    mounts = [(Path(part.mountpoint), part.fstype) for part in psutil.disk_partitions(all=True)]
    holding = [
        (mount_point, kind) for mount_point, kind in mounts if folder.is_relative_to(mount_point)
    ]
    return max(holding, key=lambda mount: len(mount[0].parts), default=(folder, ""))[1]


# ---------------------------------------------------------------- output


def report(name: str, started: Sequence[Program], wrong: Sequence[str]) -> str:
    """Format programs and faults."""
    lines = [f"{name}: what would start where; nothing is started", ""]
    for one in started:
        lines += [f"{one.title}: {one.machine}", f"    {one.command}"]
        lines += [f"    with {variable}" for variable in one.variables]
    lines += ["", *(f"wrong: {fault}" for fault in wrong)] if wrong else ["", "no fault was seen"]
    return "\n".join(lines)


def _pools(name: str) -> dict[str, str]:
    """Return the pool of each stage that has one; a recipe that is new in dvc.yaml has none."""
    try:
        return {stage.name: stage.pool for stage in pipeline.stages(name) if stage.pool}
    except ValueError:
        return {}


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="beamline launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="section.key=value",
        help="values of the recipe for this run, as of flows.retrain",
    )
    parser.add_argument(
        "--starting", action="store_true", help="the servers start with the run: ask none of them"
    )
    args = parser.parse_args(arguments)
    try:
        recipe = recipes.load_changed(args.recipe, args.set, Path("params"))
        wrong = faults(recipe, os.environ, Path.cwd(), args.starting)
        started = programs(args.recipe, recipe, os.environ, _pools(args.recipe), args.set)
    except (ValueError, RuntimeError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    print(report(args.recipe, started, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
