"""The import rules of the house, proved over every project file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "params")
VERBS = {
    "prepare",
    "cold_start",
    "rollout",
    "reward",
    "advantage",
    "update",
    "evaluate",
    "collect",
    "verdict",
}
COMPUTING = {"sampler", "learner"}

# who -> whom. A file of a drawer may also import the other files of that drawer.
MAY_IMPORT = {
    "flow": {"flow", "verb", "helper", "trajectory", "schema"},
    "verb": {"computing", "drawer", "helper", "trajectory", "schema"},
    "computing": {"drawer", "helper", "trajectory", "schema"},
    "drawer": {"helper", "trajectory", "schema"},
    "helper": {"helper", "trajectory", "schema"},
    "trajectory": {"schema"},
    "schema": {"schema"},
}
# Two helpers turn names into what lies in a drawer: those in a row, and those of a recipe's tools.
EXCEPTIONS = {
    ("tasks/algorithm.py", "tasks/estimators/"),
    ("tasks/toolbox.py", "tasks/environments/"),
    ("tasks/toolbox.py", "tasks/tools/"),
}

# What moves the alias of a champion, so that neither a stage nor a reproduction can.
RESERVED = {"tasks/registry.py": "flows/retrain.py"}

# What runs in vLLM's own processes; the trainer never imports them.
IN_VLLM = ("tasks/engines/vllm_process.py", "tasks/engines/vllm_worker.py")

VERB_FILES = tuple(f"tasks/{verb}.py" for verb in sorted(VERBS))
OWNERS = {  # package -> where it may be imported
    "prefect": ("flows/", *VERB_FILES),
    "mlflow": ("tasks/track.py", "tasks/registry.py"),
    "dvc": ("tasks/version.py",),
    "git": ("tasks/commits.py",),
    "great_expectations": ("tasks/gate.py", "tasks/expectations/"),
    "vllm": IN_VLLM,
    "peft": ("tasks/adapter.py",),
    "bm25s": ("tasks/tools/search.py",),
    "math_verify": ("tasks/scorers/",),
    "huggingface_hub": ("tasks/questions/benchmarks.py",),
}
COMMANDS = {"git": OWNERS["git"], "dvc": OWNERS["dvc"]}
WITHOUT_TORCH = (
    *("tasks/tools/", "tasks/scorers/", "tasks/environments/", "tasks/questions/"),
    *("tasks/overlap.py", "tasks/records.py"),
)
COMPUTE = (
    "tasks/engines/",
    "tasks/estimators/",
    *(
        f"tasks/{name}.py"
        for name in (
            "losses",
            "attention",
            "lanes",
            "packing",
            "learner",
            "checkpoint",
            "adapter",
            "policy",
            "sampler",
            "branching",
            "segment",
            "dialogue",
            "trajectory",
            "algorithm",
            "plan",
        )
    ),
)
MACHINERY = {"prefect", "mlflow", "dvc", "great_expectations"}


def project_files(root):
    return sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))


def kind(name):
    """Which line of MAY_IMPORT a file, such as "tasks/reward.py", stands in."""
    room, *inner = Path(name).with_suffix("").parts
    if room == "flows":
        return "flow"
    if room == "params":
        return "schema"
    if len(inner) > 1:
        return "drawer"
    for known, stems in (("verb", VERBS), ("computing", COMPUTING), ("trajectory", {"trajectory"})):
        if inner[0] in stems:
            return known
    return "helper"


def imports(root, file):
    """What a file imports anywhere in its source: project files, and names of other packages."""
    project, foreign = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        for candidates in _candidates(root, file, node):
            found = next((path for name in candidates if (path := _file_of(root, name))), None)
            if found:
                project.add(str(found.relative_to(root)))
            else:
                foreign.add(candidates[-1].split(".")[0])
    return project, foreign


def _candidates(root, file, node) -> Iterator[list[str]]:
    """For each imported name the modules that it may mean, the most specific one first."""
    if isinstance(node, ast.Import):
        yield from ([alias.name] for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        parts = list(file.relative_to(root).parts[: -node.level]) if node.level else []
        module = ".".join([*parts, *([node.module] if node.module else [])])
        yield from ([f"{module}.{alias.name}", module] for alias in node.names)


def _file_of(root, name):
    path = root.joinpath(*name.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in found if candidate.is_file()), None)


def commands(file):
    """Programs that a file starts by name: the first word of a command, or what follows -m."""
    for node in ast.walk(ast.parse(file.read_text())):
        words: list[Any] = []
        if isinstance(node, ast.List | ast.Tuple):
            words = [part.value if isinstance(part, ast.Constant) else "" for part in node.elts]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            words = str(node.args[0].value).split()[:1]
        yield from words[:1]
        yield from (words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m")


def closure(root, name):
    """A file and all project files that it imports, directly or not."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports(root, root / name)[0]
    return found


def offences(root):
    """Every breach of a rule, a line each."""
    return [
        f"{name}: {fault}"
        for file in project_files(root)
        for name in [str(file.relative_to(root))]
        for fault in sorted(_faults(root, file, name))
    ]


def _faults(root, file, name):
    project, foreign = imports(root, file)
    for other in project:
        allowed = (
            kind(other) in MAY_IMPORT[kind(name)]
            or (kind(name) == "drawer" and Path(other).parent == Path(name).parent)
            or any(name == who and other.startswith(whom) for who, whom in EXCEPTIONS)
        )
        if not allowed:
            yield f"a {kind(name)} imports the {kind(other)} {other}"
        if RESERVED.get(other, name) != name:
            yield f"imports {other}, which only {RESERVED[other]} may"
    for package in foreign & set(OWNERS):
        if not name.startswith(OWNERS[package]):
            yield f"imports {package}, which belongs to {', '.join(OWNERS[package])}"
    for command in set(commands(file)) & set(COMMANDS):
        if not name.startswith(COMMANDS[command]):
            yield f"runs {command}, which belongs to {', '.join(COMMANDS[command])}"
    yield from _forbidden_below(root, name, WITHOUT_TORCH, {"torch"})
    yield from _forbidden_below(root, name, COMPUTE, MACHINERY)


def _forbidden_below(root, name, places, packages):
    """Packages that a file in ``places`` must not be made of, not even at second hand."""
    if name.startswith(places):
        for other in closure(root, name):
            for package in imports(root, root / other)[1] & packages:
                yield f"is made of {other}, which imports {package}"


def test_the_house_keeps_its_rules():
    found = offences(ROOT)
    assert not found, "\n".join(found)


def test_every_verb_and_every_rule_speaks_of_files_that_are_there():
    names = {str(file.relative_to(ROOT)) for file in project_files(ROOT)}
    places = {
        *VERB_FILES,
        *COMPUTE,
        *WITHOUT_TORCH,
        *RESERVED,
        *RESERVED.values(),
        *(p for owner in OWNERS.values() for p in owner),
    }
    assert [p for p in places if not any(name.startswith(p) for name in names)] == []


GOOD = {
    "params/schema.py": "import yaml",
    "tasks/__init__.py": "",
    "tasks/trajectory.py": "import numpy",
    "tasks/losses.py": "import torch",
    "tasks/attention.py": "import torch",
    "tasks/ledger.py": "",
    "tasks/track.py": "def f():\n    import mlflow",
    "tasks/registry.py": "import mlflow\nfrom tasks import track, version",
    "tasks/version.py": "import dvc.repo\nfrom tasks import commits",
    "tasks/commits.py": "import subprocess\nsubprocess.run(['git', 'log'])",
    "tasks/gate.py": "import great_expectations as gx",
    "tasks/learner.py": "import torch\nfrom tasks import losses",
    "tasks/engines/__init__.py": "",
    "tasks/engines/vllm_worker.py": "import vllm",
    "tasks/engines/vllm_process.py": "import vllm",
    "tasks/engines/vllm.py": "from tasks.engines import Request",
    "tasks/tools/python.py": "from tasks.trajectory import Call",
    "tasks/tools/search.py": "def f():\n    import bm25s",
    "tasks/overlap.py": "import re",
    "tasks/records.py": "import pyarrow",
    "tasks/questions/script.py": "from tasks.trajectory import Call",
    "tasks/questions/benchmarks.py": "from tasks import overlap, records\n"
    "from tasks.questions import script",
    "tasks/scorers/answer.py": "",
    "tasks/estimators/group.py": "",
    "tasks/algorithm.py": "from tasks.estimators import group",
    "tasks/reward.py": "import prefect, tasks.scorers.answer\nfrom tasks import ledger",
    "tasks/update.py": "from prefect import task\nfrom tasks import learner",
    "flows/reinforce.py": "import prefect, tasks.reward\nfrom tasks.update import update",
    "flows/retrain.py": "from tasks import registry",
}

BAD = [
    (
        "tasks/update.py",
        "from tasks.reward import score",
        "a verb imports the verb tasks/reward.py",
    ),
    ("tasks/update.py", "import tasks.reward", "a verb imports the verb tasks/reward.py"),
    ("tasks/update.py", "from . import reward", "a verb imports the verb tasks/reward.py"),
    ("tasks/update.py", "import flows.reinforce", "a verb imports the flow flows/reinforce.py"),
    ("tasks/tools/python.py", "from tasks.scorers import answer", "a drawer imports the drawer"),
    ("tasks/tools/python.py", "from tasks.engines import Request", "a drawer imports the drawer"),
    ("tasks/tools/python.py", "from tasks import learner", "a drawer imports the computing"),
    ("tasks/tools/python.py", "from tasks import reward", "a drawer imports the verb"),
    ("tasks/tools/python.py", "def f():\n    import torch", "tools/python.py, which imports torch"),
    ("tasks/tools/python.py", "from tasks import losses", "tasks/losses.py, which imports torch"),
    ("tasks/trajectory.py", "from tasks import ledger", "a trajectory imports the helper"),
    ("tasks/ledger.py", "from tasks import learner", "a helper imports the computing"),
    ("tasks/overlap.py", "from tasks.questions import script", "a helper imports the drawer"),
    ("tasks/records.py", "from tasks.questions import script", "a helper imports the drawer"),
    ("tasks/records.py", "from tasks import losses", "tasks/losses.py, which imports torch"),
    ("tasks/questions/script.py", "from tasks.tools import python", "a drawer imports the drawer"),
    ("tasks/questions/script.py", "from tasks import losses", "losses.py, which imports torch"),
    ("tasks/questions/script.py", "import tasks.reward", "a drawer imports the verb"),
    ("tasks/losses.py", "from tasks.estimators import group", "a helper imports the drawer"),
    ("tasks/algorithm.py", "from tasks.tools import python", "a helper imports the drawer"),
    ("flows/reinforce.py", "from tasks.engines import vllm", "a flow imports the drawer"),
    ("flows/reinforce.py", "from tasks import learner", "a flow imports the computing"),
    ("params/schema.py", "from tasks import ledger", "a schema imports the helper"),
    ("tasks/ledger.py", "def f():\n    from prefect.tasks import Task", "imports prefect, which"),
    ("tasks/learner.py", "import mlflow.tracking", "imports mlflow, which belongs to"),
    ("tasks/reward.py", "import great_expectations", "imports great_expectations, which"),
    ("tasks/reward.py", "from dvc import api", "imports dvc, which belongs to"),
    ("tasks/update.py", "import vllm", "imports vllm, which belongs to"),
    ("tasks/reward.py", "from bm25s import BM25", "imports bm25s, which belongs to"),
    ("tasks/reward.py", "import math_verify", "imports math_verify, which belongs to"),
    ("tasks/records.py", "import huggingface_hub", "imports huggingface_hub, which belongs to"),
    ("flows/reinforce.py", "run(['git', 'status'])", "runs git, which belongs to"),
    ("flows/reinforce.py", "run('git status', shell=True)", "runs git, which belongs to"),
    ("flows/reinforce.py", "run([sys.executable, '-m', 'dvc'])", "runs dvc, which belongs to"),
    ("tasks/losses.py", "from tasks import track", "tasks/track.py, which imports mlflow"),
    ("tasks/attention.py", "from tasks import track", "tasks/track.py, which imports mlflow"),
    ("tasks/attention.py", "from tasks.estimators import group", "a helper imports the drawer"),
    ("flows/reinforce.py", "from tasks import registry", "which only flows/retrain.py may"),
    ("tasks/version.py", "import tasks.registry", "which only flows/retrain.py may"),
]


def write(root, files):
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def test_a_small_house_in_order_has_no_offences(tmp_path):
    write(tmp_path, GOOD)
    assert offences(tmp_path) == []


@pytest.mark.parametrize(("name", "source", "said"), BAD)
def test_an_offence_is_found_and_named(tmp_path, name, source, said):
    write(tmp_path, GOOD)
    write(tmp_path, {name: f"{GOOD[name]}\n{source}\n"})
    found = offences(tmp_path)
    assert any(line.startswith(name) and said in line for line in found), found


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
    ("places", "refused", "refusable"),
    [
        (COMPUTE, MACHINERY, "tasks.update"),
        (WITHOUT_TORCH, MACHINERY | {"torch", "transformers"}, "tasks.losses"),
    ],
    ids=["computing without the machinery", "tools, scorers, questions without torch"],
)
def test_what_may_not_be_needed_is_not_needed(places, refused, refusable):
    names = [str(file.relative_to(ROOT)) for file in project_files(ROOT)]
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names
        if name.startswith(places) and name not in IN_VLLM
    ]
    code = REFUSING.format(refused=sorted(refused), modules=modules, refusable=refusable)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.returncode) == ("all but the last\n", 0), ran.stderr
