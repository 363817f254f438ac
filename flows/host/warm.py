"""Import the libraries of a run once, in a process that forks for each of its programs.

A run starts some fifteen programs, ``python -m flows.<program>``: DVC and each stage. Each would
import torch, transformers, Prefect and MLflow anew, which takes longer than the work of a small
run. ``parent`` starts one process that has these libraries, and names its socket in BEAMLINE_WARM.
A program that finds the name in its environment hands its work over (``hand_over``, which
flows/__init__.py calls before anything else is imported): the parent forks, and the child runs the
program with the arguments, environment, working folder and open files of the one that asked.

Only libraries are shared. The child imports flows, tasks and params itself, from where the program
would have found them. The program waits for the child: it passes on signals, ends with the child's
exit status, and where it is killed the child is killed, too. Where nothing can be handed over, the
program runs as if there were no parent. The standard library's forkserver does the same for the
children of one process only.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flows.host.parents import PARENT, PR_SET_PDEATHSIG, die_with_parent

VARIABLE = "BEAMLINE_WARM"  # environment variable: the parent's socket, or OFF
FORKED = "BEAMLINE_FORKED"  # environment variable: id of a child, which hands nothing over itself
OFF = "off"
LENGTH = struct.Struct("!I")
MOST_FILES = 253  # that one message of a socket may carry (SCM_MAX_FD of Linux)
PATIENCE = 60.0  # seconds that a program waits for the parent to take its work
ACCEPTED, REFUSED = b"+", b"-"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Libraries read these when they are imported, so they must be equal in parent and program. What
# libraries set themselves (KMP_…, TORCHINDUCTOR_…) is not among them.
READ_AT_IMPORT = (
    *("OMP_", "MKL_", "OPENBLAS_", "GOMP_", "MALLOC_", "LD_", "PYTHON", "HF_", "HUGGINGFACE_"),
    *("TRANSFORMERS_", "XDG_", "HOME", "LANG", "LC_"),
)
OURS = ("flows", "tasks", "params", "beamline", "own")
LIBRARIES = (  # in the order in which a run needs them
    *("dvc.cli", "dvc.commands.repro", "dvc.repo.reproduce", "dvc.stage.run"),
    *("prefect", "prefect.flow_engine", "prefect.task_engine", "prefect.events.worker"),
    *("mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"),
    *("numpy", "pyarrow.parquet", "torch", "tasks.policy.lean_transformers"),
    *("transformers.models.qwen2.modeling_qwen2", "great_expectations"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)
LIGHT = (  # programs that start before all libraries are there: they need the first few alone
    *("flows.runs.dvc_command", "flows.workers.server"),
    *("flows.champion", "flows.retrain", "flows.verdict"),
)


@dataclass(frozen=True)
class ProgramRequest:
    """A program to run, as the process that asks sees it."""

    interpreter: str  # sys.executable
    command: Sequence[str]  # sys.orig_argv
    path: Sequence[str]  # sys.path
    folder: str
    environment: Mapping[str, str]
    umask: int
    files: Sequence[int]  # numbers of its open files


# ---------------------------------------------------------------- who starts a parent


@contextmanager
def parent(libraries: Sequence[str] = LIBRARIES) -> Iterator[None]:
    """Have the programs that are started in the block forked from a process with ``libraries``.

    The parent ends with the block, and with this process. There is none where BEAMLINE_WARM is set:
    this program has one, or "off".
    """
    if VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="beamline-") as folder:  # a short path, for a socket
        address = f"{folder}/warm"
        process = start(address, libraries)
        os.environ[VARIABLE] = address
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            process.kill()
            process.wait()


def start(address: str, libraries: Sequence[str] = LIBRARIES) -> subprocess.Popen[bytes]:
    """Start a parent whose socket is the file ``address``; it ends with the calling thread."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)  # programs may ask at once, and wait while it imports
        listening.listen(64)
        descriptor = listening.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "flows.host.warm", str(descriptor), *libraries],
            env=os.environ | {PARENT: str(os.getpid()), VARIABLE: OFF},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


# ---------------------------------------------------------------- the program that asks


def hand_over() -> None:
    """Have the parent run this program, and exit as it does; return where there is none."""
    address = os.environ.get(VARIABLE, OFF)
    if address == OFF or os.environ.get(FORKED) == str(os.getpid()):
        return
    if sys.orig_argv[1] != "-m" and sys.orig_argv[1].startswith("-"):  # other options of Python
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(address)
        _ask(connection)
        accepted = connection.recv(1) == ACCEPTED
        connection.settimeout(None)
    except OSError:  # no parent any more
        accepted = False
    if accepted:
        if PARENT in os.environ:
            die_with_parent()
        _wait(connection)
    connection.close()


def _ask(connection: socket.socket) -> None:
    files = _open_files(connection.fileno())
    if len(files) > MOST_FILES:
        raise OSError("more open files than a message can carry")
    os.umask(umask := os.umask(0o077))
    python = (sys.executable, sys.orig_argv, sys.path)
    about = (*python, str(Path.cwd()), dict(os.environ), umask, files)
    text = json.dumps(asdict(ProgramRequest(*about))).encode()
    socket.send_fds(connection, [LENGTH.pack(len(text))], files)
    connection.sendall(text)


def _open_files(but: int) -> list[int]:
    """Return the numbers of the files that this program was given: those that it may inherit."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    descriptors = []
    for number in sorted(numbers):
        with suppress(OSError):  # the folder that was listed
            if number != but and os.get_inheritable(number):
                descriptors.append(number)
    return descriptors


def _wait(connection: socket.socket) -> NoReturn:
    """Wait for the child, passing on signals, and end as it has ended."""
    for number in PASSED_ON:
        signal.signal(number, lambda sent, _: connection.sendall(bytes([sent])))
    status = b""
    while len(status) < LENGTH.size:
        received = connection.recv(LENGTH.size - len(status))
        if not received:  # the parent was killed, and the child with it
            _end_by(signal.SIGKILL)
        status += received
    code = os.waitstatus_to_exitcode(LENGTH.unpack(status)[0])
    if code < 0:
        _end_by(-code)
    os._exit(code)


def _end_by(number: int) -> NoReturn:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


# ---------------------------------------------------------------- the parent


def main(descriptor: int, libraries: Sequence[str]) -> None:
    """Be a parent that listens at ``descriptor``; in each child, run its program and return."""
    die_with_parent()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # or its import starts a thread
    request, files = Parent(socket.socket(fileno=descriptor), libraries).serve()
    _become(request, files)
    _run(request.command)


class Parent:
    """A process that imports libraries and forks for each request; it ends by a signal only."""

    def __init__(self, listening: socket.socket, libraries: Sequence[str]) -> None:
        self.listening = listening
        self.libraries = list(libraries)  # that are still to be imported
        self.at_import = _read_at_import(os.environ)
        self.events = selectors.DefaultSelector()
        self.events.register(listening, selectors.EVENT_READ)
        self.children: dict[socket.socket, int] = {}  # connection of a program -> its child's id

    def serve(self) -> tuple[ProgramRequest, list[int]]:
        """Serve until a fork, and return in the child: its request, and the files received.

        A program of LIGHT that asks before all libraries are there waits for one of them only.
        """
        while True:
            for event, _ in self.events.select(0 if self.libraries else None):
                if event.fileobj is self.listening:
                    if taken := self._take():
                        return taken
                elif isinstance(event.fileobj, socket.socket):
                    self._pass_on(event.fileobj)
                else:
                    self._report(event.fd, *event.data)
            if self.libraries:
                _import(self.libraries.pop(0))

    def _take(self) -> tuple[ProgramRequest, list[int]] | None:
        """Take a request and fork; return it in the child, and None in the parent."""
        connection, _ = self.listening.accept()
        connection.settimeout(PATIENCE)
        files: list[int] = []
        try:
            request, files = _receive(connection)
            fits = request.interpreter == sys.executable
            fits = fits and _read_at_import(request.environment) == self.at_import
            if fits and not set(LIGHT).intersection(request.command):
                while self.libraries:  # or the child would import the rest as well
                    _import(self.libraries.pop(0))
            fits = fits and threading.active_count() == 1  # a fork would lack a library's thread
            connection.sendall(ACCEPTED if fits else REFUSED)
        except (OSError, ValueError, TypeError):  # the program was killed while it asked
            fits = False
        if fits:
            parent = os.getpid()
            if not (child := os.fork()):
                self._leave(connection)
                _end_with(parent)
                return request, files
            with suppress(OSError):  # the child does the same, and may have ended
                os.setpgid(child, child)
            self.children[connection] = child
            self.events.register(connection, selectors.EVENT_READ)
            ended = os.pidfd_open(child)
            self.events.register(ended, selectors.EVENT_READ, (connection, child))
        else:
            connection.close()
        for number in files:
            os.close(number)
        return None

    def _leave(self, connection: socket.socket) -> None:
        """Close in a child what is the parent's."""
        for event in list(self.events.get_map().values()):
            os.close(event.fd)
        self.events.close()
        os.close(connection.detach())
        for other in (self.listening, *self.children):
            other.detach()

    def _pass_on(self, connection: socket.socket) -> None:
        """Send a program's signals to its child; where the program has ended, kill the child.

        An interrupt is for all of the program's process group, and so for all of the child's.
        """
        if connection not in self.children:  # the child has ended in the same moment
            return
        try:
            signals = list(connection.recv(16))
        except OSError:
            signals = []
        child = self.children[connection]
        with suppress(ProcessLookupError):
            for number in signals:
                (os.killpg if number == signal.SIGINT else os.kill)(child, number)
            if not signals:
                os.killpg(child, signal.SIGKILL)
        if not signals:
            self._forget(connection)

    def _report(self, ended: int, connection: socket.socket, child: int) -> None:
        """Tell a program how its child has ended, unless the program itself has ended."""
        self.events.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(child, 0)
        if connection in self.children:
            with suppress(OSError):
                connection.sendall(LENGTH.pack(status))
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self.events.unregister(connection)
        del self.children[connection]
        connection.close()


def _import(name: str) -> None:
    gc.disable()  # what is imported stays
    with suppress(ImportError):  # an optional library
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(READ_AT_IMPORT) and name != "PYTHONPATH"  # a request has the path itself
    }


def _receive(connection: socket.socket) -> tuple[ProgramRequest, list[int]]:
    """Return a request, and the files that came with it."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, MOST_FILES)
    try:
        text = b""
        while len(text) < LENGTH.unpack(head)[0]:
            if not (received := connection.recv(1 << 16)):
                raise OSError("the program has ended")
            text += received
        return ProgramRequest(**json.loads(text)), files
    except (OSError, ValueError, TypeError, struct.error):
        for number in files:
            os.close(number)
        raise OSError("no whole request") from None


# ---------------------------------------------------------------- the child


def _end_with(parent: int) -> None:
    """Have a child killed when its parent ends, and give it a process group of its own."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    os.setpgid(0, 0)


def _become(request: ProgramRequest, files: Sequence[int]) -> None:
    """Give this process what the program that asked has, and nothing of the parent's."""
    above = max((*request.files, *files)) + 1
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files]
    for number in files:
        os.close(number)
    for copy, number in zip(copies, request.files, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[FORKED] = str(os.getpid())
    if PARENT in os.environ:  # the program that asked ends with that one
        os.environ[PARENT] = str(os.getppid())
    sys.path[:], sys.orig_argv[:] = request.path, request.command
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.stdin = open(0, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _output(1, sys.stdout.errors), _output(2, sys.stderr.errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _read_again()


def _output(number: int, errors: str | None) -> io.TextIOWrapper:
    """Return what Python writes to a file that is open: the parent's may be of another kind."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    file = open(number, "wb", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        file,
        errors=errors,
        line_buffering=number == 2 or os.isatty(number),
        write_through=at_once,
    )


def _read_again() -> None:
    """Have libraries read again what they keep of the environment, or of chance."""
    tempfile.tempdir = None
    time.tzset()
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()
    if "prefect.context" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def _run(command: Sequence[str]) -> None:
    """Run what ``python -m MODULE`` or ``python FILE`` runs."""
    if command[1] == "-m":
        sys.argv[:] = ["-m", *command[3:]]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = command[1:]
    file = Path(command[1]).absolute()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(file)
    exec(compile(file.read_bytes(), file, "exec"), main.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
