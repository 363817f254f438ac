"""Start the programs of episodes, and read how they have ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import certifi

from tasks.extensions import descendants
from tasks.programs import relay, walls
from tasks.programs.contract import ProgramKind, ProgramSettings, ResultError, result_of, task_of
from tasks.programs.episodes import ProgramEpisode
from tasks.trees.outcomes import Outcome

LONGEST_FOLDER = 60  # bytes, of the folder for temporary files
CERTIFICATE_END = "-----END CERTIFICATE-----"
SOCKET = "socket"  # of the gateway, in its folder
STARTS = 3  # of a host in a row that ends before any episode has
LOAD_SECONDS = 120.0  # to import the program, on a busy machine
PROCESSES = 64  # of an episode, at most, on average
KILL_SECONDS = 10.0  # for an episode that is told to end, before its host is killed
SHOWN = 500  # characters of what a program has printed
STAGED = {  # files of a host, which runs without the checkout
    "tasks/extensions/descendants.py": Path(descendants.__file__),
    "tasks/programs/relay.py": Path(relay.__file__),
    "tasks/programs/program_host.py": Path(__file__).with_name("program_host.py"),
}


class Launcher:
    """A host process for episodes, kept between batches, and started anew where it has ended."""

    def __init__(
        self, kind: ProgramKind, settings: ProgramSettings, folders: tuple[Path, Path]
    ) -> None:
        """``folders``: of the host's files, and of the gateway's socket."""
        self.kind, self.settings = kind, settings
        self.stage, self.sockets = folders
        self.keeps_warm = bool(kind.job(settings).get("keep_warm"))
        self.endpoint: Callable[[ProgramEpisode], Mapping[str, Any]] = lambda episode: {}
        self.started: Callable[[ProgramEpisode], None] = lambda episode: None
        self.ended: Callable[[ProgramEpisode], None] = lambda episode: None
        self.running: dict[int, ProgramEpisode] = {}
        self.late: dict[int, float] = {}  # since when each is told to end
        self.orders: list[bytes] = []  # that no host has been given
        self.number = 0
        self.fruitless = 0  # starts of a host since an episode has ended
        self.broken = ""  # why no episode can be run
        self.said = ""  # by the last host that has ended
        self.lock = threading.RLock()
        self.host: subprocess.Popen[bytes] | None = None
        self.loading: float | None = None  # since when the host loads the program
        self.closed = False
        # A process is ended with the thread that has started it.
        self.spawner = ThreadPoolExecutor(1, "program-host")

    def serve(
        self,
        endpoint: Callable[[ProgramEpisode], Mapping[str, Any]],
        started: Callable[[ProgramEpisode], None],
        ended: Callable[[ProgramEpisode], None],
    ) -> None:
        """Begin a batch: ``endpoint`` says where an episode asks; the others are told of it."""
        with self.lock:
            self.endpoint, self.started, self.ended = endpoint, started, ended
            self.fruitless = 0

    def warm(self) -> None:
        """Start the host, so that it loads while other things do."""
        with self.lock:
            self.host = self.spawner.submit(self._spawn).result()
            self.loading = time.monotonic()
            threading.Thread(target=self._listen, args=(self.host,), daemon=True).start()

    def start(self, episode: ProgramEpisode) -> None:
        """Start the program of an episode."""
        with self.lock:
            self.number += 1
            number = self.number
            self.running[number] = episode
            order = {
                "id": number,
                "task": task_of(episode.question),
                "endpoint": dict(self.endpoint(episode)),
                "variables": self.settings.variables,
            }
            self.orders.append(json.dumps(order).encode() + b"\n")
            if self.host is not None:
                self._send(self.host)

    def look(self) -> None:
        """Start a host where episodes wait for one. Raises RuntimeError where none can be run."""
        with self.lock:
            if self.orders and self.host is None and not self.broken:
                if self.fruitless == STARTS:
                    raise RuntimeError(
                        f"the host of the programs has ended {STARTS} times before any episode "
                        f"has: {self.said}"
                    )
                self.fruitless += 1
                self.warm()
                assert self.host
                self._send(self.host)
            if self.loading is not None and time.monotonic() - self.loading > LOAD_SECONDS:
                self.broken = f"the program takes longer than {LOAD_SECONDS:g} seconds to load"
            if self.broken:
                raise RuntimeError(self.broken)
            self._kill_stopped_host()

    def _kill_stopped_host(self) -> None:
        """Kill the host where an episode does not end: a program can stop what would end it."""
        first = min(self.late.values(), default=time.monotonic())
        if self.host and time.monotonic() - first > KILL_SECONDS:
            with suppress(OSError):
                os.killpg(self.host.pid, signal.SIGKILL)

    def _send(self, host: subprocess.Popen[bytes]) -> None:
        """Send the orders that wait; where the host has ended, its listener says so."""
        waiting, self.orders = self.orders, []
        with suppress(OSError):
            assert host.stdin
            host.stdin.write(b"".join(waiting))
            host.stdin.flush()

    def kill(self, episode: ProgramEpisode) -> None:
        """End the program of an episode, which has worked too long."""
        with self.lock:
            for number, other in self.running.items():
                if other is episode and number not in self.late and self.host:
                    self.late[number] = time.monotonic()
                    with suppress(OSError):
                        assert self.host.stdin
                        self.host.stdin.write(json.dumps({"kill": number}).encode() + b"\n")
                        self.host.stdin.flush()

    def close(self) -> None:
        """End all programs."""
        with self.lock:
            self.closed = True
            host, self.host = self.host, None
        if host:
            end(host)
        self.spawner.shutdown()

    # ------------------------------------------------------------ the host

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = self.settings
        job: dict[str, Any] = {**self.kind.job(settings), "memory_mib": settings.memory_mib}
        python = walls.interpreter(self.kind.python(settings))
        environment: dict[str, str] = dict(os.environ)
        if settings.trusted:
            command, stage = [], str(self.stage)
        else:
            built = walls.around(python, Path.cwd(), self.stage, self.sockets, settings.shown)
            command, stage = built.command, walls.STAGE
            job |= {"user": built.user, "processes": PROCESSES * settings.lanes}
            job |= {"socket": f"{walls.SOCKETS}/{SOCKET}", "port": walls.PORT}
        command = [*command, python, "-u", "-X", "utf8"]
        command += [f"{stage}/start.py", json.dumps(job)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=descendants.owned(environment) | {"PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C at the terminal is for the trainer only
        )

    def _listen(self, host: subprocess.Popen[bytes]) -> None:
        """Read what the host says, until it ends."""
        assert host.stdout and host.stderr
        said: list[bytes] = []
        errors = threading.Thread(target=_keep_last, args=(host.stderr, said), daemon=True)
        errors.start()
        for line in host.stdout:
            with suppress(ValueError, KeyError, TypeError):
                self._hear(json.loads(line))
        status = host.wait()
        errors.join(timeout=1)
        with self.lock:
            if self.closed or self.host is not host:
                return
            self.host, self.loading = None, None
            printed = b"".join(said).decode(errors="replace").strip()[-SHOWN:]
            self.said = f"status {status}: {printed}"
            why = f"the host of the programs has ended with {self.said}"
            for number in list(self.running):
                self._failed(number, Outcome.PROGRAM_DIED, why)

    def _hear(self, reply: dict[str, Any]) -> None:
        with self.lock:
            if "broken" in reply:
                self.broken = str(reply["broken"])
            elif "ready" in reply:
                self.loading = None
            elif "started" in reply:
                self.started(self.running[reply["started"]])
            elif "id" in reply and reply["id"] in self.running:
                self.fruitless = 0
                self._ended(int(reply["id"]), reply)

    def _ended(self, number: int, reply: Mapping[str, Any]) -> None:
        """Read how an episode has ended."""
        status, printed = int(reply["status"]), str(reply["printed"]).strip()[-SHOWN:]
        seconds = self.settings.seconds
        if number in self.late:
            self._failed(number, Outcome.PROGRAM_TIMEOUT, f"it worked for over {seconds:g} s")
        elif 128 < status <= 192 or status < 0:
            number_of_signal = status - 128 if status > 0 else -status
            self._failed(number, Outcome.PROGRAM_DIED, f"signal {number_of_signal}: {printed}")
        elif status:
            how = f"exit status {status}, before a line with the id of its task"
            said = how if self.keeps_warm else f"exit status {status}"
            self._failed(number, Outcome.PROGRAM_FAILED, printed or said)
        else:
            self._returned(number, reply, printed)

    def _returned(self, number: int, reply: Mapping[str, Any], printed: str) -> None:
        episode = self.running[number]
        try:
            if "too_long" in reply:
                raise ResultError(f"it returned over {reply['too_long']} bytes")
            returned = json.loads(last_line(str(reply["returned"])) or "null")
            if isinstance(returned, dict) and self.keeps_warm:
                returned.pop("id", None)
            episode.result = result_of(returned, self.settings.bounds)
        except Exception as error:  # of any kind: it is a stranger's, and the episode has to end
            self._failed(number, Outcome.PROGRAM_FAILED, f"{error}; {printed}")
            return
        self._finish(number)

    def _failed(self, number: int, outcome: Outcome, fault: str) -> None:
        episode = self.running[number]
        episode.outcome, episode.fault = outcome, fault
        self._finish(number)

    def _finish(self, number: int) -> None:
        episode = self.running.pop(number)
        self.late.pop(number, None)
        self.ended(episode)


def last_line(text: str) -> str:
    """Return the last line of a text that has something in it.

    JSON may hold the other characters at which ``str.splitlines`` would split.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else ""


def _keep_last(stream: Any, kept: list[bytes]) -> None:
    """Read a stream to its end, and keep what it said last."""
    for line in stream:
        kept.append(line)
        del kept[:-20]


def end(host: subprocess.Popen[bytes]) -> None:
    """End a host and all that it has started."""
    with suppress(OSError):
        assert host.stdin
        host.stdin.close()
    with suppress(OSError):
        os.killpg(host.pid, 15)
    with suppress(subprocess.TimeoutExpired):
        host.wait(timeout=5)
    with suppress(OSError):
        os.killpg(host.pid, 9)
    host.wait()


@contextmanager
def staged() -> Iterator[tuple[Path, Path]]:
    """Make the folders of a host's files and of the gateway's socket, open to every user."""
    # The path of a socket has at most 107 bytes.
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="beamline-program-", dir=None if short else "/tmp"))
    try:
        folder.chmod(0o755)
        stage, sockets = folder / "host", folder / "gateway"
        sockets.mkdir(mode=0o755)
        for name, source in STAGED.items():
            target = stage / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        start = "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n"
        start += "from tasks.programs.program_host import main\nmain()\n"
        (stage / "start.py").write_text(start)
        bundle = Path(certifi.where()).read_text()
        first, mark, _ = bundle.partition(CERTIFICATE_END)
        (stage / walls.CERTIFICATES).write_text(first[first.rindex("-----BEGIN") :] + mark + "\n")
        for path in (stage, *stage.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield stage, sockets
    finally:
        shutil.rmtree(folder, ignore_errors=True)
