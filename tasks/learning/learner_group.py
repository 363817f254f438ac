"""Where a policy learns: in this process, or in several that torchrun starts for it.

A stage stays one process, which samples and keeps the ledger. Where the recipe has
``machine.processes``, its verbs hand what learns to that many processes (learner_process.py),
which keep the policy in memory, sharded, from one iteration to the next. They end with the stage.
When one of them dies, all are started again, and what they were doing is repeated from the
checkpoint.

torchrun starts them on this machine. For several machines, the environment variable BEAMLINE_LAUNCH
has the command to start them with, such as torchrun under Slurm's srun, and BEAMLINE_HOST a name or
an address of this machine that all of them reach. They read and write the folders of the run, so
the machines share its working folder.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from params.schema.base import Machine
from tasks.learning.channel import (
    ADDRESS,
    LOG,
    SECRET,
    ProcessesDiedError,
    die_with_parent,
    receive,
    send,
)

if TYPE_CHECKING:  # learner processes run it: imported for the ledger's keys alone
    from tasks.learning import learner_process  # noqa: F401

ROOT = Path(__file__).parents[2]  # of the project, where the processes find their modules
LAUNCH, HOST = "BEAMLINE_LAUNCH", "BEAMLINE_HOST"  # environment variables of the user
RESTARTS = 3  # of processes that die during one piece of work
START_WAIT, END_WAIT = 600.0, 10.0  # seconds to start, and to see who has ended

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Learners(Protocol):
    """Where a policy learns."""

    def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Return ``work(...)``, a function of this package, computed where the policy learns.

        Raises what it raises.
        """


class Here:
    """This process learns."""

    def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        return work(*arguments, **named)


HERE = Here()


@contextmanager
def open_learners(machine: Machine) -> Iterator[Learners]:
    """Yield where policies learn on this machine. Processes start when they are first needed."""
    if machine.processes == 1:
        yield HERE
        return
    learners = Processes(machine)
    try:
        yield learners
    finally:
        learners.close()


class Processes:
    """The learner processes of a stage."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.launched: subprocess.Popen[bytes] | None = None
        self.channels: list[Connection] = []  # by rank

    def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Return what ``work`` returns in rank 0; all processes call it.

        Raises ProcessesDiedError where processes die again and again.
        """
        for _ in range(RESTARTS):
            try:
                return self._ask((work, arguments, named))
            except ProcessesDiedError as error:
                print(f"{error}: they are started again, and repeat their work", flush=True)
        return self._ask((work, arguments, named))

    def close(self) -> None:
        """End the processes, if there are any."""
        for channel in self.channels:
            channel.close()
        self.channels = []
        if self.launched:
            _end(self.launched)
        self.launched = None

    def _ask(self, message: Any) -> Any:
        """Send a message to all processes and return rank 0's answer; any failure ends them."""
        try:
            if not self.channels:
                self._start()
            for channel in self.channels:
                send(channel, message)
            return self._answers()[0]
        except BaseException:
            self.close()
            raise

    def _answers(self) -> list[Any]:
        """Return the answers of all ranks; raise the exception that is the answer of one.

        Raises ProcessesDiedError where one has ended: the others' errors are about its silence.
        """
        answers: dict[int, Any] = {}
        failed: Exception | None = None
        deadline: float | None = None
        while len(answers) < len(self.channels):
            waiting = [c for rank, c in enumerate(self.channels) if rank not in answers]
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(waiting, patience)
            if not ready:
                break  # the others wait for the failed one
            for channel in ready:
                assert isinstance(channel, Connection)
                answer = receive(channel)
                answers[self.channels.index(channel)] = answer
                if isinstance(answer, Exception):
                    failed = failed or answer
                    deadline = deadline or time.monotonic() + END_WAIT
        if failed:
            raise failed
        return [answers[rank] for rank in range(len(self.channels))]

    def _start(self) -> None:
        """Start the processes, and wait until all have connected."""
        host, key = os.environ.get(HOST, "127.0.0.1"), secrets.token_bytes(32)
        with Listener((host, 0), backlog=self.machine.processes, authkey=key) as listener:
            address = f"{host}:{listener.address[1]}"
            self.launched = _launch(self.machine, address, key)
            self.channels = self._connected(listener)
        for channel in self.channels:
            send(channel, self.machine)
        self._answers()

    def _connected(self, listener: Listener) -> list[Connection]:
        """Return the channels of all processes, by rank."""
        assert self.launched
        channels: dict[int, Connection] = {}
        listening: Any = listener._listener._socket  # type: ignore[attr-defined]  # to wait a while
        deadline = time.monotonic() + START_WAIT
        listening.settimeout(1.0)
        while len(channels) < self.machine.processes:
            if self.launched.poll() is not None or time.monotonic() > deadline:
                raise ProcessesDiedError(
                    f"{len(channels)} of {self.machine.processes} learner processes have started "
                    f"(status {self.launched.poll()}): their output is in {LOG}"
                )
            with suppress(TimeoutError, AuthenticationError, ProcessesDiedError, EOFError):
                channel = listener.accept()
                channels[receive(channel)] = channel
        return [channels[rank] for rank in range(self.machine.processes)]


def _launch(machine: Machine, address: str, key: bytes) -> subprocess.Popen[bytes]:
    """Start what starts the processes; it ends with this process."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, machine.threads // machine.processes))
    variables = {ADDRESS: address, SECRET: key.hex(), "PYTHONPATH": str(ROOT)}
    with LOG.open("wb") as log:
        return subprocess.Popen(
            [*launch_command(machine.processes), "-m", "tasks.learning.learner_process"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": threads} | os.environ | variables,
            start_new_session=True,  # Ctrl-C at the terminal is for the stage only
            preexec_fn=die_with_parent,
        )


def launch_command(processes: int) -> list[str]:
    """Return the command that starts learner processes, without the module that they run."""
    if command := os.environ.get(LAUNCH):
        return shlex.split(command)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, "--standalone", f"--nproc-per-node={processes}"]


def _end(launched: subprocess.Popen[bytes]) -> None:
    """End a launcher with its processes: they end when their channels close."""
    with suppress(subprocess.TimeoutExpired):
        launched.wait(END_WAIT)
    if launched.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)
        launched.wait()
