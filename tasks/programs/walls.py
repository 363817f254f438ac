"""The walls of a program: a sandbox without a network, but for the way to the gateway's socket.

It shows the folders of programs and libraries, the Python that the program runs in, ``own/``, and
what the recipe shows of others, all read-only; ``/tmp`` is its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks.tools.sandbox import UNUSED_USERS, Entry, is_real_root, root_entries

PORT = 8765  # of the loopback in a sandbox, on which the gateway answers
SOCKETS = "/run/gateway"  # where the folder of the gateway's socket is mounted
STAGE = "/run/host"  # where the host's own files are mounted
# A sandbox reaches nothing that has a certificate. To read all of them takes a client 17 ms
# in each episode, so there is a single one.
CERTIFICATES = "certificate.pem"
TMP_BYTES = 2**28
MISSING = (
    "programs run in bubblewrap, which is not here or may not make a sandbox ({reason}): install "
    "bubblewrap, or set 'trusted: true', with which the program may do what its user may"
)


@dataclass(frozen=True)
class Walls:
    """A sandbox around a host: the command before the host's own, and the user it becomes."""

    command: list[str]
    user: int | None


def around(python: str, folder: Path, stage: Path, sockets: Path, shown: Sequence[str]) -> Walls:
    """Return the sandbox of a program that runs in the interpreter ``python``.

    ``folder``: the checkout, whose ``own/`` is shown; ``stage``: the host's files. Raises
    RuntimeError where there can be no sandbox, and for a folder to be shown that is not there.
    """
    if fault := unable():
        raise RuntimeError(MISSING.format(reason=fault))
    entries = root_entries()
    there = {target for _, _, target in entries}
    pairs = [(str(stage), STAGE), (str(sockets), SOCKETS)]
    own = folder / "own"
    pairs += [(str(own), str(own))] if own.is_dir() else []
    seen = [*prefixes(python), *(str(Path(each).resolve()) for each in shown)]
    for each in dict.fromkeys(seen):
        if not Path(each).is_dir():
            raise RuntimeError(f"the program is to be shown {each}, which is no folder here")
        if not any(Path(target).is_relative_to(each) for target in there):
            pairs.append((each, each))
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    command += ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    command += ["--hostname", "program", "--clearenv", *_mounts(entries, pairs, folder)]
    user = None
    if is_real_root():
        user = UNUSED_USERS.start + int.from_bytes(os.urandom(4)) % len(UNUSED_USERS)
        for capability in ("CAP_SETUID", "CAP_SETGID"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user"]
    for name, value in _environment(python).items():
        command += ["--setenv", name, value]
    command += ["--proc", "/proc", "--remount-ro", "/", "--chdir", str(folder)]
    return Walls(command, user)


def _mounts(entries: Sequence[Entry], pairs: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    """Return what bubblewrap mounts: the system's ``entries``, and ``pairs`` of source and target.

    ``folder``: the one that a program works in.
    """
    options = {"bind": "--ro-bind", "device": "--dev-bind", "symlink": "--symlink"}
    command: list[str] = []
    for parent in _parents([*(t for _, _, t in entries), *(t for _, t in pairs), str(folder)]):
        command += ["--dir", parent]
    for kind, source, target in entries:
        if target == "/tmp":
            command += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
        elif kind == "directory":
            command += ["--dir", target]
        elif kind == "cover":
            command += ["--tmpfs", target, "--remount-ro", target]
        else:
            command += [options[kind], source, target]
    for parent in _parents([*(target for _, target in pairs), f"{folder}/own"]):
        command += ["--dir", parent]  # again, where a folder has been mounted above it
    for source, target in pairs:
        command += ["--ro-bind", source, target]
    return command


def _environment(python: str) -> dict[str, str]:
    """Return the variables of a sandbox."""
    return {
        "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "SSL_CERT_FILE": f"{STAGE}/{CERTIFICATES}",
    }


def _parents(targets: Sequence[str]) -> list[str]:
    """Return every folder above an entry, outermost first."""
    folders = {str(folder) for target in targets for folder in Path(target).parents}
    return sorted(folders - {"/"})


@cache
def prefixes(python: str) -> tuple[str, ...]:
    """Return the folders that an interpreter runs from: its environment, and what that is made of.

    Raises RuntimeError for one that does not start.
    """
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    try:
        said = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the program's Python {python} does not start: {error}") from None
    folders = [str(Path(line).resolve()) for line in said.stdout.splitlines()]
    return tuple(folder for folder in dict.fromkeys(folders) if folder != "/usr")


@cache
def unable() -> str | None:
    """Return why no sandbox can be made here, or None."""
    program = shutil.which("bwrap")
    if program is None:
        return "there is no bwrap"
    test = [program, "--unshare-net", "--unshare-pid", "--ro-bind", "/", "/", "/bin/true"]
    if not is_real_root():
        test.insert(1, "--unshare-user")
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()[:200] or "it failed"


def interpreter(python: str) -> str:
    """Return the path by which an interpreter is started; "" is the trainer's own."""
    if not python:
        return str(Path(sys.prefix).resolve() / "bin" / "python")
    path = Path(python)
    return str(path.parent.resolve() / path.name)
