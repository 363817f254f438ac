"""The console script: it has every command, and hands over all arguments."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows import command_line

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


def test_unknown_command_is_refused():
    done = CliRunner().invoke(command_line.beamline, ["trian", "tiny"])
    assert done.exit_code == 2 and "trian" in done.output


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
