"""What import-linter (pyproject.toml) cannot say: commands, imports at run time, registries."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from params.schema import agent, algorithms
from tasks import recipes
from tasks.engines import ENGINES
from tasks.extensions import named
from tasks.learning import algorithm, losses
from tasks.trees.dialogue import TOOL_TAGS

ROOT = Path(__file__).parents[1]
COMMANDS = {"git": "flows/runs/git.py", "dvc": "flows/runs/dvc_command.py"}  # who runs which
MACHINERY = ["dvc", "great_expectations", "mlflow", "prefect"]


def starts(call):
    """Return whether a call starts a program, by the name of what is called."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return bool(call.args) and name in (
        "run",
        "Popen",
        "call",
        "check_call",
        "check_output",
        "system",
    )


def commands(source):
    """Yield programs that a source starts by name: a command's first word, or what follows -m."""
    for node in ast.walk(ast.parse(source)):
        words = []
        if isinstance(node, ast.List | ast.Tuple):
            words = [part.value if isinstance(part, ast.Constant) else "" for part in node.elts]
        elif isinstance(node, ast.Call) and starts(node) and isinstance(node.args[0], ast.Constant):
            words = str(node.args[0].value).split()[:1]
        yield from words[:1]
        yield from (words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m")


def test_each_command_is_run_in_one_file():
    found = {
        (command, file.relative_to(ROOT).as_posix())
        for room in ("flows", "tasks", "params", "beamline", "benchmarks", ".ci")
        for file in (ROOT / room).rglob("*.py")
        for command in set(commands(file.read_text())) & set(COMMANDS)
    }
    assert found <= set(COMMANDS.items())
    assert ("git", COMMANDS["git"]) in found


@pytest.mark.parametrize(
    "source", ["run(['git', 'log'])", "run('git log', shell=True)", "[python, '-m', 'git']"]
)
def test_a_command_is_seen(source):
    assert "git" in commands(source)


def test_git_is_started_in_one_place():
    """Each call has the environment and the settings of flows/runs/git.py's ``run_git``."""
    tree = ast.parse((ROOT / COMMANDS["git"]).read_text())
    starting = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and starts(node)
    ]
    assert starting == ["run_git"]
    recipes_of_make = [
        line
        for file in ("Makefile", ".ci/run")
        for line in (ROOT / file).read_text().splitlines()
        if re.search(r"(^|[\s@(;&|`])git\s", line.partition("#")[0])
    ]
    assert recipes_of_make == []


def modules(*rooms):
    files = [file for room in rooms for file in (ROOT / "tasks" / room).rglob("*.py")]
    names = [file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in files]
    engines = "tasks.engines"
    import_vllm = (
        *(
            f"{engines}.vllm.engine_process",
            f"{engines}.vllm.policy_worker",
        ),  # vLLM's own processes
        f"{engines}.servers.nccl_transfer",
    )
    return [name.removesuffix(".__init__") for name in names if name not in import_vllm]


REFUSING = """
import importlib, sys
for package in {refused}:
    sys.modules[package] = None  # any import of it is now a ModuleNotFoundError
for module in {modules}:
    importlib.import_module(module)
try:
    importlib.import_module({refusable!r})
except ModuleNotFoundError:
    print("all but the last")
"""


@pytest.mark.parametrize(
    ("rooms", "refused", "refusable"),
    [
        ((".",), MACHINERY, "flows.stages.prepare"),
        (
            ("tools", "scorers", "rewards", "environments", "questions"),
            [*MACHINERY, "torch", "transformers"],
            "tasks.learning.losses",
        ),
    ],
    ids=["without the machinery", "without torch"],
)
def test_a_room_loads_without(rooms, refused, refusable):
    code = REFUSING.format(refused=refused, modules=modules(*rooms), refusable=refusable)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (ran.stdout, ran.returncode) == ("all but the last\n", 0), ran.stderr


def kinds(model, field):
    """Return the values that a Literal field of a section may have."""
    return set(get_args(model.model_fields[field].annotation))


def test_schema_and_registries_name_the_same_kinds():
    estimators = get_args(get_args(algorithms.Estimator)[0])
    assert {kind for e in estimators for kind in kinds(e, "kind")} == set(algorithm.ESTIMATORS)
    assert kinds(algorithms.Algorithm, "ratio") == set(losses.RATIOS)
    assert kinds(algorithms.Algorithm, "averaging") == set(losses.AVERAGINGS)
    assert kinds(agent.EngineSettings, "kind") == set(ENGINES)
    assert set(TOOL_TAGS) <= set(named.names("tools"))
    assert set(recipes.SECTIONS) - {"program"} <= set(named.ROOMS)  # a program is a user's own
    assert all(named.names(room) for room in named.ROOMS)
