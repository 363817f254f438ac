"""The Python tool: model output run in warm sandboxes (design decision 9).

Model output is hostile input. A worker is one sandboxed interpreter without network, environment,
project or home, in which every call gets a fork, a user, a process tree and a /tmp of its own; it
runs python_worker.py. Two backends build the sandbox, bubblewrap and util-linux's unshare; ``none``
keeps only the limits. Code can import what the base interpreter has, not the project's environment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from params.schema.base import (
    Frozen,
    Positive,
    PositiveFloat,
)
from tasks.tools import python_worker
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation

BACKENDS = ("bubblewrap", "unshare")  # in the order that "auto" tries them
PROGRAMS = {"bubblewrap": "bwrap", "unshare": "unshare"}
SOURCE = Path(python_worker.__file__)  # imported, so that the ledger's keys see its edits
PROJECT = Path(__file__).resolve().parents[2]
# In the command line of a sandbox: names its checkout without the path (flows/host/processes.py).
OWNER = hashlib.blake2b(str(PROJECT).encode(), digest_size=8).hexdigest()
GRACE_SECONDS = 10.0  # for a worker to reply, beyond wall_seconds
UNUSED_USER = 4_000_000_000  # no account has this id; the code's user where the tool runs as root
DEVICES = ("null", "zero", "full", "random", "urandom")
REMEDY = (
    "install bubblewrap; or enable unprivileged user namespaces (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; the seccomp "
    "profile of a container; Linux 5.14 or newer); or set `tools.python.sandbox: none` in the "
    "recipe, at your own risk: model output then runs with the rights of this user"
)


class PythonTool(Frozen):
    """Limits of one call of the Python tool (design decision 9)."""

    sandbox: Literal["auto", "bubblewrap", "unshare", "none"]
    cpu_seconds: Positive
    wall_seconds: PositiveFloat  # backstop only: outcomes must not depend on load
    memory_mib: Positive
    processes: Positive
    file_mib: Positive
    output_characters: Positive


TRIAL = PythonTool(
    sandbox="auto",
    cpu_seconds=5,
    wall_seconds=20.0,
    memory_mib=256,
    processes=4,
    file_mib=1,
    output_characters=1000,
)

Run = Callable[[Sequence[str]], list[Observation]]


def choose_backend(wanted: str) -> str:
    """Return the sandbox for ``sandbox: <wanted>``: "bubblewrap", "unshare" or "none".

    "auto" takes the first of the two that works; a named one must work; "none" must be named. A
    backend works if a call in its worker does, which is tried once per process (0.2 s). Raises
    RuntimeError with what was tried, the errors, and the remedy; ValueError for an unknown name.
    """
    if wanted == "none":
        return wanted
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(
            f"tools.python.sandbox: '{wanted}' is not one of {['auto', *BACKENDS, 'none']}: "
            "choose one"
        )
    faults = {}
    for backend in BACKENDS if wanted == "auto" else (wanted,):
        fault = _fault(backend, shutil.which(PROGRAMS[backend]))
        if fault is None:
            return backend
        faults[backend] = fault
    tried = "; ".join(f"{backend}: {fault}" for backend, fault in faults.items())
    raise RuntimeError(
        f"tools.python.sandbox: {wanted} does not work here ({tried}). Remedy: {REMEDY}"
    )


@contextmanager
def python_tool(settings: PythonTool, workers: int) -> Iterator[Run]:
    """Start ``workers`` warm sandboxes; yield ``run(codes) -> observations``, in order.

    ``run`` may be called from several threads. Outcomes: "ok"; "error" (an exception; the text ends
    with the traceback's last line); "timeout" (CPU seconds); "wall_timeout"; "memory";
    "output_limit" (the text is the first ``output_characters``); "killed" (a signal or os._exit
    ended the code, or two workers that were asked). The text is standard output and error together,
    without line breaks at the end. Leaving the context ends every process. Raises RuntimeError
    where the sandbox does not work or a worker cannot be replaced, ValueError for fewer than one
    worker.
    """
    if workers < 1:
        raise ValueError(f"the Python tool needs at least one worker, got {workers}: raise it")
    backend = choose_backend(settings.sandbox)
    team: list[_Worker | None] = [None] * workers
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(place: int) -> None:
        team[place] = _start(settings, backend)

    def call(code: str) -> Observation:
        place = idle.get()
        try:
            return _call_or_replace(team, place, code, settings, backend)
        finally:
            idle.put(place)

    # A worker dies with the thread that started it (the kernel's parent-death signal), so all are
    # started by the pool's threads, which live as long as the tool.
    with ThreadPoolExecutor(workers, thread_name_prefix="python-tool") as pool:
        try:
            list(pool.map(start, range(workers)))
            for place in range(workers):
                idle.put(place)
            yield lambda codes: list(pool.map(call, codes))
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in team:
                if worker is not None:
                    _stop(worker)


@dataclass(frozen=True)
class _Worker:
    """A sandbox, and the channel to it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket


def _call_or_replace(
    team: list[_Worker | None], place: int, code: str, settings: PythonTool, backend: str
) -> Observation:
    """Run the code in the worker at ``place``; where it dies or does not answer, in a new one.

    A worker may have died while it was idle, which is no fault of the code: only the second one
    that the code's call loses is "killed". A call has no effects outside, so it can be repeated.
    """
    for _ in range(2):
        worker = team[place] or _start(settings, backend)
        team[place] = worker
        try:
            return _run_code(worker, code, settings.wall_seconds + GRACE_SECONDS)
        except OSError:
            team[place] = None
            _stop(worker)
    return Observation(Outcome.KILLED, "")


def _run_code(worker: _Worker, code: str, seconds: float) -> Observation:
    """Send one call and return the reply. Raises OSError where none comes within ``seconds``."""
    worker.channel.settimeout(seconds)
    payload = code.encode("utf-8", errors="replace")
    worker.channel.sendall(struct.pack(">I", len(payload)) + payload)
    (length,) = struct.unpack(">I", _receive(worker.channel, 4))
    outcome, text = json.loads(_receive(worker.channel, length))
    return Observation(outcome, text)


def _receive(channel: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises ConnectionResetError where the channel ends before."""
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the worker has ended")
        data += chunk
    return bytes(data)


def _start(settings: PythonTool, backend: str) -> _Worker:
    """Start a worker and try it. Raises RuntimeError with its last message where it fails."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            _command(settings, backend),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )
    worker = _Worker(process, ours)
    try:
        observation = _run_code(worker, "", settings.wall_seconds + GRACE_SECONDS)
    except OSError as error:
        message = _stop(worker) or str(error)
    else:
        if observation.outcome == Outcome.OK:
            return worker
        message = f"{observation.outcome} {observation.text} {_stop(worker)}"
    reason = (message.strip().splitlines() or ["no message"])[-1]
    raise RuntimeError(f"a Python sandbox ({backend}) did not start: {reason}")


def _stop(worker: _Worker) -> str:
    """End a worker and all its processes; return the end of its standard error."""
    worker.channel.close()
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(0.5)  # an idle worker ends by itself
    worker.process.kill()
    return worker.process.communicate()[1].decode(errors="replace")[-2000:]


@functools.cache
def _fault(backend: str, program: str | None) -> str | None:
    """Return the error of a try of ``backend``, or None; ``program`` is its path or None."""
    if program is None:
        return f"{PROGRAMS[backend]} is not installed"
    try:
        _stop(_start(TRIAL, backend))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _command(settings: PythonTool, backend: str) -> list[str]:
    """Return the command line of a worker."""
    root = _root_entries()
    config = settings.model_dump() | {
        "namespaces": backend != "none",
        "root": root if backend == "unshare" else [],  # bubblewrap builds its own
        "user": UNUSED_USER if _is_real_root() else None,
        "owner": OWNER,
    }
    # The base interpreter's real path: a shim may not start inside. UTF-8 in any locale, no site,
    # no working directory on the import path, no byte code written.
    python = [os.path.realpath(getattr(sys, "_base_executable", sys.executable))]
    python += ["-X", "utf8", "-S", "-P", "-B", "-c", SOURCE.read_text(), json.dumps(config)]
    outside = {"bubblewrap": _bubblewrap, "unshare": _unshare}
    return (outside[backend](root) if backend in outside else []) + python


def _bubblewrap(root: list[tuple[str, str, str]]) -> list[str]:
    """Return the command that starts a program in bubblewrap, without the program."""
    options = {"bind": "--ro-bind", "device": "--dev-bind", "symlink": "--symlink"}
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--hostname", "sandbox"]
    command += ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    for parent in _parents(root):  # bubblewrap's own would be closed to other users
        command += ["--dir", parent]
    for kind, source, target in root:
        command += ["--dir", target] if kind == "directory" else [options[kind], source, target]
    if _is_real_root():  # no --proc: bubblewrap would cover parts of it, which forbids a nested one
        for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--proc", "/proc"]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def _parents(root: list[tuple[str, str, str]]) -> list[str]:
    """Return every folder above an entry, outermost first."""
    folders = {str(folder) for _, _, target in root for folder in Path(target).parents}
    return sorted(folders - {"/"})


def _unshare(root: list[tuple[str, str, str]]) -> list[str]:
    """Return the command that starts a program in unshare; the worker builds the root itself."""
    command = [shutil.which("unshare") or "unshare", "--net", "--pid", "--fork", "--kill-child"]
    command += ["--mount", "--ipc", "--uts"]
    return command if _is_real_root() else [*command, "--user", "--map-root-user"]


def _is_real_root() -> bool:
    """Return whether this is root of the machine, not of a user namespace (rootless container)."""
    everyone = ["0", "0", str(2**32 - 1)]
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == everyone


def _root_entries() -> list[tuple[str, str, str]]:
    """Return the entries of a sandbox's root, in the order of mounting: (kind, source, target)."""
    entries = [("bind", "/usr", "/usr")]
    for path in (Path("/bin"), *sorted(Path("/").glob("lib*"))):
        kind = "symlink" if path.is_symlink() else "bind"
        entries.append((kind, str(path.readlink()) if kind == "symlink" else str(path), str(path)))
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        entries.append(("bind", str(prefix), str(prefix)))
    entries += [("directory", "", "/proc"), ("directory", "", "/tmp")]
    entries += [("device", f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    return [*entries, ("symlink", "/proc/self/fd", "/dev/fd"), ("symlink", "/tmp", "/dev/shm")]
