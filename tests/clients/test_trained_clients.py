"""Agents of four libraries are trained without a change but their address and key.

Each library is in an environment of its own, which the recipe names. Two iterations of the recipe
smoke: what is learned is not looked at, that all requests are learned from is.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tasks.trees.metrics import program_metrics
from tasks.trees.tables import load_trees
from tests.checkout import ROOT, call, checkout, retrain

PROGRAMS = Path(__file__).with_name("own_programs")
PACKAGES = {  # program: what its environment has
    "plain_openai": ("openai==3.*",),
    "langgraph_react": ("langgraph==1.*", "langchain-openai==1.*"),
    "agents_sdk": ("openai-agents==0.*",),
    "smol": ("smolagents[openai]==1.*",),
}
MORE = {"smol": {"ignored": ["tool_choice"]}}  # it wants a call in each turn
LEAST_CONTINUED = {"smol": 0.0}  # it writes its calls anew, as text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkout")
    checkout(made)
    for file in PROGRAMS.glob("*.py"):
        shutil.copy(file, made / "own")
    return made


def installed(folder, packages):
    """Make an environment with these packages; return its Python."""
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    install.UV.parent.mkdir(exist_ok=True)
    install.provide_uv()
    python = folder / "bin/python"
    with_indexes = os.environ | install.uv_settings(os.environ)
    for step in (
        ("venv", "--quiet", "--python", install.PYTHON_VERSION, folder),
        ("pip", "install", "--quiet", "--compile-bytecode", "--python", python, *packages),
    ):
        subprocess.run([install.UV, *step], env=with_indexes, check=True)
    return python


def recipe(name, python):
    """Return a recipe that trains a program in a Python of its own."""
    settings = {"python": str(python), "prompt_tokens": 8000, "requests": 6, **MORE.get(name, {})}
    return {
        "base": "smoke",
        "program": {f"own/{name}.py:run": settings},
        "prepare": {"policy": {"context": 8192}},
        "dialogue": {"response_tokens": 4000, "tool_calls": 6},
        "reinforce": {
            "algorithm": "grpo",
            "validation": None,
            "rollout": {"leaves": 4},
            "reward": [{"answer": {"weight": 1.0, "wrong": 0.0}}],
        },
        "evaluate": {"questions": 6},
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_is_trained_as_it_is(folder, tmp_path, name):
    python = installed(tmp_path / name, PACKAGES[name])
    file = folder / "params" / f"client-{name.replace('_', '-')}.yaml"
    file.write_text(yaml.safe_dump(recipe(name, python)))
    call(folder, sys.executable, "-m", "flows.recipe", file.stem, "--write")
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *who, "commit", "-qm", name], cwd=folder, check=True)
    done = call(folder, *retrain(file.stem))
    assert done.returncode == 0, done.stdout
    rolled_out = folder.glob(f".beamline/ledger/{file.stem}/reinforce/*-rollout-*/trees")
    trees = [tree for path in rolled_out for tree in load_trees(path)]
    assert len(trees) >= 2 * 4
    outcomes = Counter(tree.nodes[leaf].outcome for tree in trees for leaf in tree.leaves)
    assert set(outcomes) <= {"answer", "no_answer", "program_failed"}, outcomes
    assert outcomes["program_failed"] < 0.5 * outcomes.total(), outcomes
    continued = program_metrics(trees)["requests_continued"]
    assert continued >= LEAST_CONTINUED.get(name, 0.95)
