"""A project of two quick stages in a folder of its own, with git and DVC, to test the flows on."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from tests.checkout import warm_parent

ROOT = Path(__file__).parents[1]

RECIPE = yaml.safe_load("""
seed: 3
start: scratch
champion: null
machine: {threads: 1, device: cpu, precision: float32}
prepare:
  policy: {kind: tiny, vocabulary: 64, hidden: 8, layers: 1, heads: 1, key_value_heads: 1,
           feed_forward: 8, context: 64}
  questions: {source: computation, train: 1, validation: 1, test: 1, largest_operand: 9,
              largest_arithmetic_operand: 9, largest_test_operand: 19}
  intake: null
  expert: {kind: computation, traces: 1, wrong_operator: 0, wrong_digit: 0, wrong_answer: 0,
           missing_call: 0}
  faulty: stop
  overlap_words: 9
dialogue: {system: "", turn_tokens: 8, result_tokens: 8, response_tokens: 16,
           tool_calls: 1}
tools:
  python: {sandbox: none, cpu_seconds: 1, wall_seconds: 1, memory_mib: 64, processes: 1,
           file_mib: 1, output_characters: 64}
environment: null
dialect: {tags: {}}
judge: null
engine: {kind: transformers, memory: 1, servers: [], lanes: 1}
lora: null
cold_start: {steps: 1, batch: 1, micro_batch: 1, learning_rate: 0.1, warmup_steps: 0,
             weight_decay: 0, save_every: 1}
reward_model: null
reinforce:
  algorithm: grpo
  iterations: 1
  questions: 1
  rollout: {leaves: 1, initial: 1, branch: 0, marks_per_rollout: 1, entropy_window: 1,
            base_probability: 0, entropy_weight: 0, threshold: 0, draw: false, temperature: 1,
            rows: 1}
  reward: [answer: {wrong: 0}, format: {broken: 0}, many_tools: {bonus: 0}]
  update: {learning_rate: 0.1, warmup_updates: 0, weight_decay: 0, adam_betas: [0.9, 0.99],
           gradient_clip: 1, epochs: 1, mini_batches: 1, micro_batch_tokens: 64,
           critic_learning_rate: 0.1, recompute: false}
  ahead: 0
  keep: {weights_every: 1, optimizer_last: 1}
  trace_every: 1
  trace_questions: 0
  stop_on: []
  validation: null
evaluate: {panel: null, questions: 1, samples: 1, temperature: 1, top_p: 1, bootstrap: 1,
           protocol: verified}
verdict: {measure: success, confidence: 0.95, margin: 0, bootstrap: 1}
""")

# `later` stands before `first`, so that the order comes from the graph.
PIPELINE = """
vars:
  - recipes:
      toy: params/toy.yaml
stages:
  later:
    foreach: ${recipes}
    do:
      cmd: exec python later.py ${key}
      deps:
        - later.py
        - data/${key}/first
      params:
        - ${item}:
            - evaluate.questions
      outs:
        - data/${key}/later
      metrics:
        - reports/${key}/table.md:
            cache: false
      meta:
        timeout_seconds: 60
  first:
    foreach: ${recipes}
    do:
      cmd: exec python first.py ${key}
      deps:
        - first.py
      params:
        - ${item}:
            - seed
      outs:
        - data/${key}/first
"""

# What a stage does before it writes its outs is left to a test.
PLAIN = """
import sys
from contextlib import suppress
from pathlib import Path

def stage(recipe):
    {before}
    print("{name} has run")
    for out in {outs}:
        out = Path(out.format(recipe))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("{name}\\n")
"""
OUTS = {"first": ["data/{}/first"], "later": ["data/{}/later", "reports/{}/table.md"]}

BARE = """
from flows.host.parents import die_with_parent

die_with_parent()
stage(sys.argv[1])
"""
FLOW = """
from flows.host.warm import hand_over
hand_over()
from prefect import flow, task
from flows.workers.stage import main

@task
def work(recipe: str) -> None:
    stage(recipe)

@flow
def {name}(recipe: str) -> None:
    work(recipe)

main({name})
"""


def create(folder: Path, flows: bool) -> None:
    """Make the project; ``flows``: its stages are Prefect flows, else bare scripts."""
    (folder / "params").mkdir()
    write_recipe(folder)
    table = "params/algorithms.yaml"
    (folder / table).write_text((ROOT / table).read_text())
    (folder / "dvc.yaml").write_text(PIPELINE)
    (folder / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    for name in OUTS:
        write_stage(folder, name, flows)
    (folder / ".dvc/tmp").mkdir(parents=True)
    for name in ("config", ".gitignore"):
        (folder / ".dvc" / name).write_text((ROOT / ".dvc" / name).read_text())
    run(folder, "git", "init", "--quiet")


def commit(folder: Path, message: str = "all") -> str:
    """Commit everything that is not ignored; the commit."""
    for key, value in {"name": "test", "email": "test@example.org"}.items():
        run(folder, "git", "config", f"user.{key}", value)
    run(folder, "git", "add", "--all")
    said = run(folder, "git", "commit", "--quiet", "--message", message)
    assert said.returncode == 0, said.stdout
    return git(folder, "rev-parse", "HEAD")


def git(folder: Path, *arguments: str) -> str:
    """What a git command prints."""
    return run(folder, "git", *arguments).stdout.strip()


def write_recipe(folder: Path, **changes: object) -> None:
    """Write ``params/toy.yaml``; ``section__key=value`` changes a value."""
    recipe = yaml.safe_load(yaml.safe_dump(RECIPE))
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = recipe
        for section in sections:
            place = place[section]
        place[key] = value
    (folder / "params/toy.yaml").write_text(yaml.safe_dump(recipe))


def give_base(folder: Path) -> None:
    """Have the recipe of a toy project name a base, which says everything."""
    recipe, pipeline = folder / "params/toy.yaml", folder / "dvc.yaml"
    recipe.rename(folder / "params/whole.yaml")
    recipe.write_text("base: whole\n")
    listed = pipeline.read_text().replace("toy: params/toy", "toy: params/resolved/toy")
    pipeline.write_text(listed)


def write_stage(folder: Path, name: str, flows: bool, before: str = "pass") -> None:
    """Write a stage that runs the statement ``before`` and then makes its outs."""
    text = PLAIN.format(name=name, before=before, outs=OUTS[name])
    (folder / f"{name}.py").write_text(text + (FLOW.format(name=name) if flows else BARE))


def give_pool(folder: Path, pool: str = "gpu") -> None:
    """Have the stage `later` of a toy project ask for a pool."""
    pipeline = yaml.safe_load((folder / "dvc.yaml").read_text())
    # the limit covers the way to the worker and back, which takes long on a loaded machine
    pipeline["stages"]["later"]["do"]["meta"] = {"pool": pool, "timeout_seconds": 3600}
    (folder / "dvc.yaml").write_text(yaml.safe_dump(pipeline, sort_keys=False))


def environment(**changes: str) -> dict[str, str]:
    """What a user's shell would have: the virtual environment and nothing of a run."""
    theirs = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("BEAMLINE_", "PREFECT_", "MLFLOW_", "DVC_"))
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), theirs["PATH"]])
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}
    return theirs | warm_parent() | ours | changes


def run(folder: Path, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project; standard output and error come as one text, ``stdout``."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**changes),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,  # for a run that hangs; a busy machine takes minutes
    )


def repro(folder: Path, *stages: str, **changes: str) -> list[str]:
    """Run these stages, or all, as ``dvc repro`` does, without a process for DVC itself.

    Return what has run.
    """
    with patch.dict(os.environ, environment(**changes), clear=True), _dvc(folder) as repository:
        return [stage.addressing for stage in repository.reproduce(list(stages) or None)]


def dvc_add(folder: Path, path: str, remote: str | None = None) -> None:
    """Track a file or folder with DVC; push it where a default remote is given."""
    if remote:
        set_remote(folder, remote)
    with _dvc(folder) as repository:
        repository.add(path)
        if remote:
            repository.push()


@contextmanager
def _dvc(folder: Path) -> Iterator[Any]:
    from dvc.repo import Repo

    logging.disable(logging.ERROR)  # DVC's handlers may hold the closed output of an earlier test
    try:
        with chdir(folder), Repo() as repository:
            yield repository
    finally:
        logging.disable(logging.NOTSET)


def set_remote(folder: Path, url: str) -> None:
    """Set DVC's default remote; a relative address is relative to the project."""
    from dvc.config import Config

    with Config(str(folder / ".dvc")).edit() as settings:
        settings["remote"] = {"store": {"url": url if "://" in url else str(folder / url)}}
        settings["core"]["remote"] = "store"


def processes(folder: Path) -> list[str]:
    """Command lines of the other processes whose working folder is the project's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            zombie = "State:\tZ" in (process / "status").read_text()
            if (process / "cwd").readlink() == folder and not zombie:
                found.append((process.name, (process / "cmdline").read_text().replace("\0", " ")))
    return [line for number, line in found if number != str(os.getpid())]
