"""Run the episodes of a program: a process that each trainer starts once, maybe in a sandbox.

It loads a user's function once and forks for each episode, or starts a command for each. Standard
library alone: it also runs in a Python of the program's own. Lines of JSON come in,
``{"id": 3, "task": ..., "endpoint": ..., "variables": ...}`` or ``{"kill": 3}``, and go out: first
``{"ready": true}`` or ``{"broken": ...}``, then one for each episode that has ended.

An episode is a process that looks after it, and the program below that. When the program ends or is
killed, all that it has started ends, in other sessions, too. A command that is kept warm works for
one episode after the other: it reads a line for each, and its line with the same id ends it.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import resource
import selectors
import signal
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tasks.extensions import descendants
from tasks.programs import relay

KEPT = 4000  # bytes at the end of what a program prints
RETURNED = 2**18  # bytes of what it returns, at most
FILE_BYTES = 2**26  # of a file that it writes, at most
SURROGATE = re.compile("[\ud800-\udfff]")


class Watched:
    """A program that runs for an episode: its processes, and what they have written."""

    def __init__(self, process: int, returned: int, printed: int, tasks: int) -> None:
        """``tasks``: the pipe of a command that is kept warm, -1 for others."""
        self.order: dict[str, Any] | None = None  # of its episode; None: it has none
        self.served = 0  # episodes that it has ended
        self.process, self.tasks, self.unsent = process, tasks, bytearray()
        self.pipes = {returned: bytearray(), printed: bytearray()}
        self.returned, self.printed = self.pipes[returned], self.pipes[printed]
        self.too_long = self.told_to_end = self.reads_no_more = False

    @property
    def name(self) -> Any:
        """Return the id of its episode, or None."""
        return None if self.order is None else self.order["id"]

    def open_pipes(self) -> list[int]:
        """Return the pipes that are open."""
        return [*self.pipes, *([self.tasks] if self.tasks >= 0 else [])]

    def read(self, pipe: int) -> bool:
        """Read what a pipe holds; return whether it has ended."""
        with suppress(BlockingIOError):
            chunk = os.read(pipe, 65536)
            held = self.pipes[pipe]
            held += chunk
            most = RETURNED if held is self.returned else KEPT
            kept_warm = held is self.returned and self.tasks >= 0  # `hear` cuts its lines
            if len(held) > most and not kept_warm:
                self.too_long = self.too_long or held is self.returned
                del held[:-most]
            return not chunk
        return False


class Host:
    """The loop of the process."""

    def __init__(self, job: dict[str, Any], orders: int, replies: int, kept: set[int]) -> None:
        """``kept``: processes below this one that are no episode's."""
        self.job, self.orders, self.replies, self.kept = job, orders, replies, kept
        self.selector = selectors.DefaultSelector()
        self.episodes: dict[Any, Watched] = {}
        self.running: list[Watched] = []
        self.idle: list[Watched] = []  # of those, the ones that wait for an episode
        self.unread, self.unsaid = bytearray(), bytearray()
        self.function: Any = None
        # What episodes import by themselves has been imported here; until then one runs alone.
        self.warmed = "function" not in job
        self.waiting: list[dict[str, Any]] = []

    def run(self) -> None:
        """Serve until the orders end."""
        try:
            if "function" in self.job:
                self.function = loaded(**self.job["function"])
        except BaseException as error:
            self.say({"broken": f"{described(error)}{place(error)}"})
            return
        self.say({"ready": True})
        os.set_blocking(self.orders, False)
        os.set_blocking(self.replies, False)
        for process in self.kept:  # without its relay, no episode reaches the gateway
            self.selector.register(os.pidfd_open(process), selectors.EVENT_READ, lambda fd: False)
        self.selector.register(self.orders, selectors.EVENT_READ, self.obey)
        while self.selector.get_map():
            for key, _ in self.selector.select():
                known = self.selector.get_map().get(key.fd) is key  # else it was closed just now
                if known and key.data(key.fd) is False:
                    return

    def say(self, reply: dict[str, Any]) -> None:
        """Write a reply, or keep it until the pipe has room: the trainer may be writing orders."""
        waits = bool(self.unsaid)
        self.unsaid += json.dumps(reply).encode() + b"\n"
        if not waits:
            self.tell(self.replies)
            if self.unsaid:
                self.selector.register(self.replies, selectors.EVENT_WRITE, self.tell_rest)

    def tell(self, pipe: int) -> None:
        """Write as much of what is kept as the pipe takes now."""
        with suppress(BlockingIOError):
            while self.unsaid:
                del self.unsaid[: os.write(pipe, self.unsaid)]

    def tell_rest(self, pipe: int) -> None:
        """Write on, since the pipe has room again."""
        self.tell(pipe)
        if not self.unsaid:
            self.selector.unregister(pipe)

    def obey(self, pipe: int) -> bool:
        """Read orders; return False at their end."""
        chunk = os.read(pipe, 2**20)
        if not chunk:
            return False
        self.unread += chunk
        *lines, rest = self.unread.split(b"\n")
        self.unread = bytearray(rest)
        for line in lines:
            order = json.loads(line)
            if "kill" in order:
                if watched := self.episodes.get(order["kill"]):
                    watched.told_to_end = True
                    os.kill(watched.process, signal.SIGTERM)
            elif self.warmed or not self.episodes:
                self.start(order)
            else:
                self.waiting.append(order)
        return True

    def warm(self, said: bytes | bytearray) -> None:
        """Import what the first episode has imported by itself, once for all that follow."""
        if self.warmed:
            return
        self.warmed = True
        with suppress(ValueError, TypeError, AttributeError):
            for name in json.loads(said)["modules"]:
                with suppress(BaseException):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # collections of its children touch, and so copy, none of what is here
        waiting, self.waiting = self.waiting, []
        for order in waiting:
            self.start(order)

    def start(self, order: dict[str, Any]) -> None:
        """Start an episode, and say so."""
        self.say({"started": order["id"]})
        self.give(order, self.idle.pop() if self.idle else self.begin(order))

    def give(self, order: dict[str, Any], watched: Watched) -> None:
        """Give an episode to a program, and to a command that is kept warm its task."""
        watched.order = order
        self.episodes[watched.name] = watched
        if watched.tasks >= 0:
            watched.printed.clear()  # what it says between two episodes is of neither
            watched.returned.clear()
            waits, send = bool(watched.unsent), lambda fd: self.send(watched)
            given = {name: order[name] for name in ("id", "task", "endpoint")}
            watched.unsent += json.dumps(given).encode() + b"\n"
            if not waits:
                self.selector.register(watched.tasks, selectors.EVENT_WRITE, send)

    def begin(self, order: dict[str, Any]) -> Watched:
        """Start a program, for an episode or, where it is kept warm, for several."""
        returned, to_return = os.pipe()
        printed, to_print = os.pipe()
        to_read, tasks = os.pipe() if self.job.get("keep_warm") else (-1, -1)
        me = os.getpid()
        process = os.fork()
        if process == 0:
            close([returned, printed, tasks])
            look_after(self, me, order, (to_read, to_return, to_print))
        close([to_read, to_return, to_print])
        watched = Watched(process, returned, printed, tasks)
        self.running.append(watched)
        for pipe in watched.open_pipes():
            os.set_blocking(pipe, False)
        for pipe in (returned, printed):
            self.selector.register(pipe, selectors.EVENT_READ, lambda fd: self.drain(watched, fd))
        ended = os.pidfd_open(process)
        self.selector.register(ended, selectors.EVENT_READ, lambda fd: self.end(watched, fd))
        return watched

    def send(self, watched: Watched) -> None:
        """Write as much of a task as the pipe of a command takes now."""
        with suppress(BlockingIOError):
            try:
                while watched.unsent:
                    del watched.unsent[: os.write(watched.tasks, watched.unsent)]
            except BrokenPipeError:
                watched.reads_no_more = True
                watched.unsent.clear()
        if not watched.unsent:
            self.selector.unregister(watched.tasks)

    def drain(self, watched: Watched, pipe: int) -> None:
        held = watched.pipes.get(pipe)
        if held is None:
            return
        if watched.read(pipe):
            self.selector.unregister(pipe)
            del watched.pipes[pipe]
            os.close(pipe)
        if watched.tasks >= 0 and held is watched.returned:
            self.hear(watched)
        if held is watched.returned:
            self.take_modules(watched)

    def take_modules(self, watched: Watched) -> None:
        """Take from what the first episode returns the line that says what it has imported."""
        line, end, rest = watched.returned.partition(b"\n")
        if not self.warmed and end:
            watched.returned[:] = rest
            self.warm(line)

    def hear(self, watched: Watched) -> None:
        """End the episode of a command that is kept warm where it has said what came of it."""
        *lines, rest = watched.returned.split(b"\n")
        # A long line that cannot be a result is a log, maybe the last of the episode before.
        watched.returned[:] = rest if could_be_result(rest) else rest.lstrip()[:1]
        for line in lines:
            if watched.name is not None and is_result(line, watched.name):
                self.reply(watched, 0, line)
                self.idle.append(watched)
        if watched.name is not None and len(watched.returned) > RETURNED:
            watched.too_long = True
            self.reply(watched, 0, b"")
            os.kill(watched.process, signal.SIGTERM)

    def end(self, watched: Watched, ended: int) -> None:
        """Say how the episode of a program that has ended has ended, unless that is said."""
        self.selector.unregister(ended)
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(watched.process, 0)[1])
        if status < 0:  # its guard was killed, and has ended nothing that may still print
            self.end_orphans()
        for pipe in list(watched.pipes):
            while pipe in watched.pipes and not watched.read(pipe) and pending(pipe):
                pass
            self.selector.unregister(pipe)
            os.close(pipe)
        untouched = self.has_not_read(watched)
        if watched.tasks >= 0:
            if watched.unsent:
                self.selector.unregister(watched.tasks)
            os.close(watched.tasks)
            watched.returned += b"\n"
            self.hear(watched)
            status = status or 1  # it has to go on, or to be killed
        self.running.remove(watched)
        if watched in self.idle:
            self.idle.remove(watched)
        if watched.order is not None and untouched:
            self.give(watched.order, self.begin(watched.order))
        elif watched.order is not None:
            self.take_modules(watched)
            self.reply(watched, status, watched.returned)
            self.warm(b"")

    def has_not_read(self, watched: Watched) -> bool:
        """Return whether a warm command ended after its last episode, before it read this task."""
        if watched.tasks < 0 or not watched.served or watched.told_to_end:
            return False
        return watched.reads_no_more or bool(watched.unsent) or unread(watched.tasks) > 0

    def reply(self, watched: Watched, status: int, returned: bytes | bytearray) -> None:
        """Say how an episode has ended; its program has none now."""
        del self.episodes[watched.name]
        if not self.running and self.kept:  # in a sandbox, whose /tmp has a limit of bytes
            empty(Path("/tmp"), Path("/tmp").stat().st_dev)
        printed = SURROGATE.sub("\ufffd", watched.printed.decode(errors="replace"))
        reply = {"id": watched.name, "status": status, "printed": printed[-KEPT:]}
        if watched.too_long and b"\n" not in returned.strip():
            reply["too_long"] = RETURNED
        else:
            reply["returned"] = returned.decode(errors="replace")
        watched.order = None
        watched.served += 1
        self.say(reply)

    def end_orphans(self) -> None:
        """Kill what an episode has left behind when its own guard was killed."""
        ours = {watched.process for watched in self.running} | self.kept
        me = os.getpid()
        for process in descendants.descendants():
            with suppress(OSError, IndexError, ValueError):
                parent = descendants._parent(process)[0]
                if parent == me and process not in ours:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)


def empty(folder: Path, device: int) -> None:
    """Remove what episodes have left in a folder of a file system, and nothing of another one.

    A sandbox can show folders of the user below /tmp.
    """
    for entry in folder.iterdir():
        with suppress(OSError):
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
            elif entry.stat().st_dev == device:
                empty(entry, device)
                entry.rmdir()


def could_be_result(line: bytes | bytearray) -> bool:
    """Return whether a line begins as a JSON object does."""
    return line.lstrip()[:1] in (b"", b"{")


def is_result(line: bytes | bytearray, name: Any) -> bool:
    """Return whether a line is what came of an episode: a JSON object with its id."""
    with suppress(ValueError, RecursionError):
        said = json.loads(line)
        return isinstance(said, dict) and said.get("id") == name
    return False


def close(pipes: Iterable[int]) -> None:
    """Close those of the pipes that there are."""
    for pipe in pipes:
        if pipe >= 0:
            os.close(pipe)


def unread(pipe: int) -> int:
    """Return how many bytes have been written into a pipe that nobody has read."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def pending(pipe: int) -> bool:
    """Return whether a pipe holds something to read, or has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0))


# ---------------------------------------------------------------- the processes of an episode


def look_after(host: Host, parent: int, order: dict[str, Any], pipes: tuple[int, int, int]) -> None:
    """Start the program of an episode; when it ends, end all that it has started, and this.

    ``parent``: the process of the host.
    ``pipes``: the program's standard input (-1: none yet), and where it returns and prints.
    """
    status = 1
    try:
        descendants.signal_at_parents_end(signal.SIGTERM, parent)
        os.setsid()
        descendants.adopt_orphans()
        for pipe in [
            host.orders,
            host.replies,
            *(pipe for watched in host.running for pipe in watched.open_pipes()),
        ]:
            with suppress(OSError):
                os.close(pipe)
        signal.signal(signal.SIGTERM, lambda *_: killed())
        me = os.getpid()
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            act(host, me, order, pipes)
        close(pipes)
        while True:
            ended, how = os.waitpid(-1, 0)
            if ended == process:
                break
        status = os.waitstatus_to_exitcode(how)
        status = 128 - status if status < 0 else status
        with suppress(ChildProcessError):  # there are none: to look for them takes longer
            os.waitpid(-1, os.WNOHANG)
            descendants.end_descendants()
    finally:
        os._exit(status & 0xFF)


def killed() -> None:
    """End an episode that its trainer ends."""
    descendants.end_descendants()
    os._exit(128 + signal.SIGKILL)


def act(host: Host, guard: int, order: dict[str, Any], pipes: tuple[int, int, int]) -> None:
    """Be the program: call the function, or become the command."""
    to_read, to_return, to_print = pipes
    try:
        descendants.signal_at_parents_end(signal.SIGKILL, guard)
        limit(host.job)
        endpoint = order["endpoint"]
        os.environ |= {
            "OPENAI_BASE_URL": endpoint["base_url"],
            "OPENAI_MODEL": endpoint["model"],
            **({} if to_read >= 0 else {"OPENAI_API_KEY": endpoint["key"]}),  # one episode's alone
            **order["variables"],
        }
        os.dup2(to_print, 2)
        if to_read >= 0:
            os.dup2(to_read, 0)
        else:
            given = tempfile.TemporaryFile()  # noqa: SIM115
            given.write(json.dumps({"task": order["task"], "endpoint": endpoint}).encode() + b"\n")
            given.seek(0)
            os.dup2(given.fileno(), 0)
        if "command" in host.job:
            os.dup2(to_return, 1)
            command = host.job["command"]
            os.execvp(command[0], command)
        os.dup2(to_print, 1)
        if not host.warmed:
            tell_modules(to_return)
        ours = os.getpid()
        returned = called(host.function, order)
        if os.getpid() != ours:  # a process that the function has forked, and that went on here
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(to_return, "wb") as channel:
            channel.write(json.dumps(returned).encode())
    except BaseException as error:
        with suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    os._exit(0)


def tell_modules(pipe: int) -> None:
    """Tell the host what this process has imported, when it first connects to anything."""
    known = set(sys.modules)
    told: list[bool] = []

    def hear(event: str, _: Any) -> None:
        if event == "socket.connect" and not told:
            told.append(True)
            modules = [name for name in sys.modules if name not in known]
            os.write(pipe, json.dumps({"modules": modules}).encode() + b"\n")

    sys.addaudithook(hear)


def limit(job: dict[str, Any]) -> None:
    """Limit memory, files and processes of an episode."""
    memory = job["memory_mib"] * 2**20
    for kind, value in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def called(function: Any, order: dict[str, Any]) -> Any:
    """Return what a function returns for a task, as JSON can hold it."""
    task, endpoint = SimpleNamespace(**order["task"]), SimpleNamespace(**order["endpoint"])
    returned = function(task, endpoint)
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    if returned is None or isinstance(returned, str | int | float | dict):
        return returned
    fields = {name: getattr(returned, name, None) for name in ("answer", "reward", "parts")}
    if all(value is None for value in fields.values()):
        raise TypeError(
            f"it returned a {type(returned).__name__}: return a text, a number, None, or a mapping "
            "with answer, reward and parts"
        )
    return {name: value for name, value in fields.items() if value is not None}


async def _awaited(returned: Any) -> Any:
    return await returned


# ---------------------------------------------------------------- the start


def loaded(file: str, name: str) -> Any:
    """Import a user's function."""
    sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(".".join(Path(file).with_suffix("").parts))
    return getattr(module, name)


def described(error: BaseException) -> str:
    """Return type and message of an error in one short text."""
    return SURROGATE.sub("\ufffd", f"{type(error).__name__}: {error}")[:1000]


def place(error: BaseException) -> str:
    """Return where in a file an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def main() -> None:
    """Begin: keep the channels, drop rights, start the relay, and serve."""
    job = json.loads(sys.argv[1])
    orders, replies = os.dup(0), os.dup(1)
    for pipe in (orders, replies):
        os.set_inheritable(pipe, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what a user's file prints at its import disturbs nothing
    descendants.adopt_orphans()
    descendants.signal_at_parents_end(signal.SIGKILL)
    if job.get("user"):
        os.setgroups([])
        os.setgid(job["user"])
        os.setuid(job["user"])
        most = job["processes"]
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    kept = {relay.start(job["socket"], job["port"])} if job.get("socket") else set()
    hide()
    Host(job, orders, replies, kept).run()


def hide() -> None:
    """Forget where this file lies, so that a program imports its own modules and not these."""
    here = str(Path(__file__).resolve().parents[2])
    sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tasks"]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
