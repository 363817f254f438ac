"""A user's program: a function in a file of ``own/``, or a command that a recipe writes.

The file is not imported here: it may be written for a Python of its own, with other libraries.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from params import suggestions
from tasks.extensions.named import OWN
from tasks.programs.contract import ProgramKind, ProgramSettings
from tasks.programs.walls import interpreter

COMMAND = "command"  # in place of a file


class OwnProgram(ProgramSettings):
    """The settings of a function."""

    python: str = ""  # the interpreter that it runs in, where that is not Beamline's


class CommandProgram(ProgramSettings):
    """The settings of a command."""

    run: tuple[str, ...]  # the words of the command
    # one for each lane is kept: it reads {"id", "task", "endpoint"} in a line for each episode, and
    # a line of it that is an object with the same id is what it returns
    keep_warm: bool = False


def program_kind(name: str) -> ProgramKind:
    """Return the kind of program that a recipe names: ``command``, or ``own/<file>.py:<function>``.

    Raises ValueError with name, reason and remedy.
    """
    if name == COMMAND:
        return ProgramKind(CommandProgram, _command_job, faults=_command_faults)
    path, _, function = name.partition(":")
    file = Path(path)
    if file.suffix != ".py" or not function.isidentifier():
        raise ValueError(
            f"'{name}' is no program: name a function of yours, such as own/agent.py:run, or write "
            f"{COMMAND} with the words of a command"
        )
    if file.is_absolute() or ".." in file.parts or not file.is_relative_to(OWN):
        raise ValueError(
            f"{path} is outside the folder {OWN}/, so a run would not commit it: move it there"
        )
    if not file.is_file():
        there = [str(other) for other in OWN.rglob("*.py")]
        raise ValueError(
            f"{path} does not exist{suggestions.meant(path, there)}: put your file there, or "
            "correct the path"
        )
    if fault := _function_fault(file, function):
        raise ValueError(fault)
    return ProgramKind(
        OwnProgram,
        partial(_function_job, str(file), function),
        lambda settings: str(settings.python),
        _function_faults,
    )


def program_sources() -> str:
    """Digest all files of ``own/``, any of which a program may use."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(OWN.rglob("*")):
        if file.is_file() and file.suffix != ".pyc" and file != OWN / "README.md":
            digest.update(f"{file}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _function_fault(file: Path, function: str) -> str | None:
    """Return why a file does not define a function that takes a task and an endpoint, or None."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, ValueError) as error:
        return f"{file}: cannot be read: {error}"
    definitions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if function not in definitions:
        names = [name for name in definitions if not name.startswith("_")]
        return (
            f"{file} defines no function '{function}'{suggestions.meant(function, names)}: it has "
            f"{', '.join(names) or 'none'}"
        )
    arguments = definitions[function].args
    count = len(arguments.posonlyargs) + len(arguments.args)
    needed = count - len(arguments.defaults)
    if not (needed <= 2 <= count or arguments.vararg):
        return f"{file}: {function} takes {needed} arguments: write {function}(task, endpoint)"
    return None


def _function_job(file: str, function: str, settings: Any) -> Mapping[str, Any]:
    return {"function": {"file": file, "name": function}}


def _command_job(settings: Any) -> Mapping[str, Any]:
    return {"command": list(settings.run), "keep_warm": settings.keep_warm}


def _function_faults(settings: Any) -> list[str]:
    if settings.python and not Path(interpreter(settings.python)).is_file():
        return [
            f"program: its python {settings.python} does not exist: make its environment, or leave "
            "the key out"
        ]
    return common_faults(settings)


def _command_faults(settings: Any) -> list[str]:
    if not settings.run:
        return ["program.command.run is empty: write the words of a command"]
    if shutil.which(settings.run[0]) is None and not Path(settings.run[0]).is_file():
        return [f"program.command.run: there is no program {settings.run[0]} here"]
    return common_faults(settings)


def common_faults(settings: ProgramSettings) -> list[str]:
    """Return a line for each setting that cannot work."""
    faults = []
    if settings.listen != "127.0.0.1" and not settings.trusted:
        faults.append(
            f"program: listen is {settings.listen}, and a program in a sandbox asks on its own "
            "loopback: set trusted to true, or leave listen out"
        )
    low, high = settings.bounds
    if low >= high:
        faults.append(f"program: bounds are {low:g} and {high:g}: write the lower one first")
    return faults
