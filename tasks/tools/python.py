"""The Python tool: model output run in warm sandboxes (design decision 9).

Model output is hostile input. A worker is one sandboxed interpreter without network, environment,
project or home, in which every call gets a fork, a user, a process tree and a /tmp of its own; it
runs python_worker.py. sandbox.py builds its walls. Code can import what the base interpreter has,
not the project's environment.
"""

from __future__ import annotations

import functools
import json
import queue
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from params.schema.base import (
    Frozen,
    Positive,
    PositiveFloat,
)
from tasks.extensions.waiting import is_readable
from tasks.tools import control_group, sandbox
from tasks.tools.contract import Opening, OpenTool, ToolKind, text_spec, text_tool
from tasks.tools.python_worker import MEBIBYTE
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation

GRACE_SECONDS = 10.0  # for a worker to reply, beyond wall_seconds
ATTEMPTS = 3  # to start a worker that is killed while it starts
KILLED_STATUSES = (-9, 128 + 9)  # of a worker, and of bubblewrap or unshare around one
GROUP_MIB = 64  # of a worker's control group, for itself and the kernel's part of its calls
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


def choose_backend(setting: str) -> str:
    """Return the sandbox for ``sandbox: <setting>``: "bubblewrap", "unshare" or "none".

    "auto" takes the first of the two that works; a named one must work; "none" must be named. A
    backend works if a call in its worker does, which is tried until it does (0.2 s). Raises
    RuntimeError with what was tried, the errors, and the remedy; ValueError for an unknown name.
    """
    if setting == "none":
        return setting
    if setting not in ("auto", *sandbox.PROGRAMS):
        raise ValueError(
            f"tools.python.sandbox: '{setting}' is not one of "
            f"{['auto', *sandbox.PROGRAMS, 'none']}: choose one"
        )
    faults = {}
    for backend in sandbox.PROGRAMS if setting == "auto" else (setting,):
        fault = _fault(backend)
        if fault is None:
            return backend
        faults[backend] = fault
    tried = "; ".join(f"{backend}: {fault}" for backend, fault in faults.items())
    raise RuntimeError(
        f"tools.python.sandbox: {setting} does not work here ({tried}). Remedy: {REMEDY}"
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
    team: list[_SandboxWorker | None] = [None] * workers
    idle: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(slot: int) -> None:
        team[slot] = _start(settings, backend)

    def call(code: str) -> Observation:
        slot = idle.get()
        try:
            return _call_or_replace(team, slot, code, settings, backend)
        finally:
            idle.put(slot)

    # A worker dies with the thread that started it (the kernel's parent-death signal), so all are
    # started by the pool's threads, which live as long as the tool.
    with ThreadPoolExecutor(workers, thread_name_prefix="python-tool") as pool:
        try:
            list(pool.map(start, range(workers)))
            for slot in range(workers):
                idle.put(slot)
            yield lambda codes: list(pool.map(call, codes))
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in team:
                if worker is not None:
                    _stop(worker)


SPEC = text_spec(
    "python",
    "Run Python code in a fresh interpreter without network and files of its own. The result is "
    "what the code prints.",
    "code",
    "The Python code. Print what you want to see.",
)


@contextmanager
def _open(settings: PythonTool, opening: Opening) -> Iterator[OpenTool]:
    with python_tool(settings, opening.workers) as run:
        yield text_tool(SPEC, run)


TOOL = ToolKind(PythonTool, _open)


@dataclass(frozen=True)
class _SandboxWorker:
    """A sandbox, the channel to it, and its control group where there is one."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    group: control_group.Group | None


def _call_or_replace(
    team: list[_SandboxWorker | None], slot: int, code: str, settings: PythonTool, backend: str
) -> Observation:
    """Run the code in the worker of ``slot``; where it dies or does not answer, in a new one.

    A worker may be killed from outside, which is no fault of the code: only the second one that
    ends while it runs the code is "killed". A call has no effects outside, so it can be repeated.
    """
    for _ in range(2):
        worker = team[slot]
        if worker is not None and _has_ended(worker):
            team[slot] = None
            _stop(worker)
        worker = team[slot] = team[slot] or _start(settings, backend)
        kills = worker.group.kills() if worker.group else 0
        try:
            return _run_code(worker, code, settings.wall_seconds + GRACE_SECONDS)
        except OSError:
            team[slot] = None
            ended_for_memory = worker.group is not None and worker.group.kills() > kills
            _stop(worker)
            if ended_for_memory:
                return Observation(Outcome.MEMORY, "")
    return Observation(Outcome.KILLED, "")


def _has_ended(worker: _SandboxWorker) -> bool:
    """Return whether an idle worker has closed its channel: it says nothing by itself."""
    return is_readable(worker.channel)


def _run_code(worker: _SandboxWorker, code: str, seconds: float) -> Observation:
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


class WorkerKilledError(RuntimeError):
    """A signal ended a worker while it started."""


def _start(settings: PythonTool, backend: str) -> _SandboxWorker:
    """Start a worker and try it; where it is killed meanwhile, start another one.

    Raises RuntimeError with the last message of a worker that fails.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(WorkerKilledError):
            return _started(settings, backend)
    return _started(settings, backend)


def _started(settings: PythonTool, backend: str) -> _SandboxWorker:
    command = sandbox.command(settings.model_dump(), backend)
    ours, theirs = socket.socketpair()
    limit_mib = settings.memory_mib + settings.file_mib + GROUP_MIB
    group = control_group.make_group(limit_mib * MEBIBYTE)
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", "PWD": "/"},  # bubblewrap sets PWD
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )
    worker = _SandboxWorker(process, ours, group)
    try:
        descriptors = [group.members, group.events] if group else []
        socket.send_fds(ours, [sandbox.greeting(backend)], descriptors)
        observation = _run_code(worker, "", settings.wall_seconds + GRACE_SECONDS)
    except OSError as error:
        message = _stop(worker) or str(error)
    else:
        if observation.outcome == Outcome.OK:
            return worker
        message = f"{observation.outcome} {observation.text} {_stop(worker)}"
    reason = (message.strip().splitlines() or ["no message"])[-1]
    kind = WorkerKilledError if process.returncode in KILLED_STATUSES else RuntimeError
    raise kind(f"a Python sandbox ({backend}) did not start: {reason}")


def _stop(worker: _SandboxWorker) -> str:
    """End a worker and all its processes; return the end of its standard error."""
    worker.channel.close()
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(0.5)  # an idle worker ends by itself
    worker.process.kill()
    message = worker.process.communicate()[1].decode(errors="replace")[-2000:]
    if worker.group:
        worker.group.close()
        worker.group.remove()
    return message


def _fault(backend: str) -> str | None:
    """Return the error of a try of ``backend``, or None."""
    program = shutil.which(sandbox.PROGRAMS[backend])
    if program is None:
        return f"{sandbox.PROGRAMS[backend]} is not installed"
    try:
        _try_backend(backend, program)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


@functools.cache  # of successes: an error is not kept
def _try_backend(backend: str, program: str) -> None:
    _stop(_start(TRIAL, backend))
