"""The console script: it has every command, and hands over all arguments."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from flows import command_line
from tests import made_run

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("beamline")
ROOMS = ("stages", "commands")
MODULES = {
    file.stem
    for room in ROOMS
    for file in (ROOT / "flows" / room).glob("*.py")
    if file.stem != "__init__"
}


def test_each_module_is_a_command_with_a_sentence():
    names = command_line.beamline.list_commands(None)
    assert sorted(names) == sorted(MODULES | set(command_line.SHORT_FORMS))
    shown = CliRunner().invoke(command_line.beamline, ["--help"]).output
    for name in names:
        assert f"  {name}  " in shown
        assert len(command_line.summary(name)) > 20


def test_arguments_and_help_reach_the_module(tmp_path):
    started = [sys.executable, "-m", "flows.plan"]
    for arguments in (["--help"], ["tiny", "--card", "24"], ["tiny", "--no-such-option"]):
        direct, script = (
            subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
            for command in (started, [SCRIPT, "plan"])
        )
        assert (script.returncode, script.stdout) == (direct.returncode, direct.stdout)
        assert script.stderr == direct.stderr
    assert "--no-such-option" in script.stderr


def test_run_is_retrain_here(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    CliRunner().invoke(command_line.beamline, ["run", "tiny"])
    assert started == [[sys.executable, "-m", "flows.retrain", "tiny", "--here"]]


def test_version_is_that_of_the_checkout_here_with_its_commit(tmp_path):
    """Commands run the code of the folder in which they are called, so that is what counts."""

    def shown(folder):
        return subprocess.run(
            [SCRIPT, "--version"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    def git(*arguments):
        command = ["git", "-C", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (tmp_path / "elsewhere").mkdir()
    assert shown(tmp_path / "elsewhere").startswith(f"beamline {number}, ")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "9.8.7"\n')
    assert shown(tmp_path) == "beamline 9.8.7, no commit"
    git("init")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    commit = f"beamline 9.8.7, commit {git('rev-parse', 'HEAD')[:12]}"
    assert shown(tmp_path) == commit
    (tmp_path / "own.py").touch()
    assert shown(tmp_path) == f"{commit}, with changes"


def test_version_is_the_newest_one_of_the_changelog():
    """Each has a day, not before the one below it, and says what its owners of recipes did."""
    text = (ROOT / "CHANGELOG.md").read_text()
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    _, *parts = re.split(r"^## \[", text.split("## [Unreleased]\n")[-1], flags=re.MULTILINE)
    heads = [re.match(r"(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)\n", part) for part in parts]
    assert all(heads), "write ## [number] - day"
    versions = [tuple(int(digits) for digits in head.groups()[:3]) for head in heads]
    assert ".".join(str(digits) for digits in versions[0]) == number
    assert versions == sorted(set(versions), reverse=True)
    days = [head[4] for head in heads]
    assert days == sorted(days, reverse=True)
    assert all("**Recipes:**" in part for part in parts[:-1])  # the first had none before it


def test_restored_run_of_an_older_version_is_shown_by_the_installed_code(tmp_path, tokenizer):
    """Its own code, which has no page, is not run; the recipe and files of own/ are its own."""

    def call(*arguments):
        command = [SCRIPT, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    random = np.random.default_rng(0)
    trees = [[made_run.tree(lambda text: tokenizer.encode(text), random, "question")]]
    made_run.write(tmp_path, "older", trees, tokenizer)
    shutil.copytree(ROOT / "params", tmp_path / "params", ignore=lambda *_: ["schema"])
    own_tool = "tools:\n  own/shelf.py:shelf: {}\n"
    recipe = (ROOT / "params/tiny.yaml").read_text().replace("tools:\n", own_tool)
    (tmp_path / "params/older.yaml").write_text(recipe)
    (tmp_path / "own").mkdir()
    tool = 'def shelf(letter: str) -> str:\n    """Tell.\n\n    letter: Which.\n    """\n'
    (tmp_path / "own/shelf.py").write_text(f"{tool}    return letter\n")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/__init__.py").write_text("raise SystemExit('older code was run')\n")
    (tmp_path / "pyproject.toml").touch()
    shown = call("page", "older")
    assert (shown.returncode, shown.stdout) == (0, "reports/older/page.html\n"), shown.stderr
    assert "question" in (tmp_path / "reports/older/page.html").read_text()
    refused = call("judge", "older")
    assert refused.returncode == 2
    assert "older version and has no command judge" in refused.stderr


def test_unknown_command_is_refused():
    done = CliRunner().invoke(command_line.beamline, ["trian", "tiny"])
    assert done.exit_code == 2 and "No such command 'trian'" in done.output
    done = CliRunner().invoke(command_line.beamline, ["plna", "tiny"])
    assert done.exit_code == 2 and "did you mean 'plan'?" in done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [("beamline pl", {"plan"}), ("beamline plan shop", {"shop"}), ("beamline ask none", {""})],
)
def test_shell_completes_commands_and_recipes(words, expected):
    where = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [SCRIPT],
        cwd=ROOT,
        env=os.environ | where | {"_BEAMLINE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
    )
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == expected


def test_code_imports_programs_by_their_whole_names():
    short = {f"flows.{name}" for name in MODULES}
    found = []
    for room in ("flows", "tasks", "params", "tests", "benchmarks", "examples"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [node.module, *(f"{node.module}.{name}" for name in names)]
                if short & set(names):
                    found.append(f"{file}:{node.lineno}")
    assert not found


HEAPS = """
import flows, ctypes, threading
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
threads = [threading.Thread(target=libc.malloc, args=(1000,)) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.parametrize(("own", "one"), [({}, True), ({"MALLOC_ARENA_TEST": "8"}, False)])
def test_all_threads_of_a_program_share_one_heap(own, one):
    """A heap of its own keeps what a thread has freed; the user's settings win."""
    plain = {name: value for name, value in os.environ.items() if "MALLOC_" not in name}
    command = [sys.executable, "-c", HEAPS]
    told = subprocess.check_output(command, cwd=ROOT, env=plain | own, text=True)
    assert (told.count("<heap nr=") == 1) == one
