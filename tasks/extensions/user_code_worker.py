"""A process that runs a user's code; pool.py starts it.

``python -m tasks.extensions.user_code_worker`` is two processes. The first one, the guard, holds no
user code: it ends the second one, and all that this one has started, in other sessions, too, as
soon as the trainer ends or the user's code does. The second one imports what the trainer names and
answers requests, one after the other.

A message is a length of four bytes, big endian, and that many bytes of JSON. The channel is a
socket of its own, so what the user's code prints disturbs nothing; the guard keeps its last lines.
A reply repeats the number of its request. A process that the user's code forks has the channel,
too, and would go on here when the code returns in it: it never answers, but ends there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tasks.extensions import descendants
from tasks.extensions.plain_values import plain
from tasks.trees.outcomes import UnavailableError

KEPT = 4000  # bytes at the end of what the code has printed
SHOWN = 1000  # characters of an error

RAISED = "raised"  # the code raised an exception
AWAY = "away"  # the code raised UnavailableError: what it needs is away
TIMEOUT = "timeout"  # the code did not return within its seconds, and its process was killed
DIED = "died"  # the process ended while it ran the code, or could not start
TOO_LARGE = "too_large"  # the code returned more than a reply may hold
NOT_JSON = "not_json"  # the code returned what JSON cannot hold

_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """Return a text with U+FFFD in place of each lone surrogate, which UTF-8 cannot hold."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def load(reference: str) -> Any:
    """Import what ``<file>:<name>`` stands for. The file's path starts at a folder of imports."""
    path, _, name = reference.partition(":")
    return getattr(importlib.import_module(".".join(Path(path).with_suffix("").parts)), name)


def make(held: Any, settings: Mapping[str, Any]) -> Any:
    """Return an object of a class with these settings; a function is returned as it is.

    A class with a nested class ``Settings`` gets an object of that; another one gets the mapping,
    or nothing where there are no settings.
    """
    if not isinstance(held, type):
        return held
    if hasattr(held, "Settings"):
        return held(held.Settings(**settings))
    return held(settings) if settings else held()


def describe(error: BaseException) -> str:
    """Return type and message of an error, which may be a user's own, in one short text."""
    try:
        message = str(error)
    except Exception:
        message = ""
    name = type(error).__name__
    return well_formed(f"{name}: {message}" if message else name)[:SHOWN]


# ---------------------------------------------------------------- messages


def send(channel: socket.socket, message: bytes) -> None:
    """Write one message."""
    channel.sendall(struct.pack(">I", len(message)) + message)


def receive(stream: BinaryIO) -> Any:
    """Read one message; None at the end of the channel."""
    head = stream.read(4)
    return json.loads(stream.read(struct.unpack(">I", head)[0])) if len(head) == 4 else None


# ---------------------------------------------------------------- the process of the user's code


def serve(channel: socket.socket) -> None:
    """Load what the first message names; then answer requests until the channel ends."""
    ours = os.getpid()
    stream = channel.makefile("rb")
    order = receive(stream)
    if order is None:
        return
    number, order = order
    try:
        target = make(load(order["reference"]), order["settings"])
    except BaseException as error:
        leave_if_forked(ours, error)
        send(channel, _failure(number, RAISED, f"{describe(error)}{_place(error)}"))
        return
    leave_if_forked(ours)
    send(channel, _value(number, b"null"))
    while (request := receive(stream)) is not None:
        number, (method, arguments) = request
        send(channel, answer(target, method, arguments, order["limit"], number))


def leave_if_forked(ours: int, error: BaseException | None = None) -> None:
    """End this process, as Python would after ``error``, if it was forked from process ``ours``."""
    if os.getpid() == ours:
        return
    status: Any = 0
    try:
        if isinstance(error, SystemExit):
            status = error.code
        elif error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
        sys.stdout.flush()
    finally:
        os._exit(int(status or 0) & 0xFF)


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """End at the block's end a process that was forked in it, or it would do all that follows."""
    ours = os.getpid()
    try:
        yield
    except BaseException as error:
        leave_if_forked(ours, error)
        raise
    leave_if_forked(ours)


def answer(target: Any, method: str, arguments: list[Any], limit: int, number: int) -> bytes:
    """Call a method of the target, or the target itself for ""; return the reply."""
    ours = os.getpid()
    try:
        value = (getattr(target, method) if method else target)(*arguments)
    except BaseException as error:
        leave_if_forked(ours, error)
        kind = AWAY if isinstance(error, UnavailableError) else RAISED
        return _failure(number, kind, describe(error))
    leave_if_forked(ours)
    try:
        text = well_formed(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))
    except BaseException as error:  # also of a user's own mapping
        leave_if_forked(ours, error)
        returned = type(value).__name__
        message = f"returned {returned}, which is no JSON: {describe(error)}"[:SHOWN]
        return _failure(number, NOT_JSON, message)
    leave_if_forked(ours)
    body = text.encode()
    if len(body) > limit:
        message = f"returned {len(body)} bytes, more than {limit}"
        return _failure(number, TOO_LARGE, message)
    return _value(number, body)


def _value(number: int, body: bytes) -> bytes:
    return b'{"number": %d, "value": %b}' % (number, body)


def _failure(number: int, name: str, message: str) -> bytes:
    return json.dumps({"number": number, "failure": name, "message": message}).encode()


def _place(error: BaseException) -> str:
    """Return the last location of an error that is no library's."""
    here, location, frame = str(Path.cwd()), "", error.__traceback__
    while frame:
        file = frame.tb_frame.f_code.co_filename
        if file.startswith(here) and "site-packages" not in file and file != __file__:
            location = f" ({os.path.relpath(file, here)}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return location


# ---------------------------------------------------------------- the guard


def guard(child: int, output: int) -> None:
    """Wait until the child or the trainer ends, end the child's group, and report.

    The report is a line of JSON on standard output: the child's exit status, and what was printed.
    """
    printed = bytearray()

    def await_trainer() -> None:
        os.read(0, 1)  # the trainer never writes: this is the end of the pipe
        _end_group(child)

    def keep_output() -> None:
        while chunk := os.read(output, 65536):
            printed.extend(chunk)
            del printed[:-KEPT]

    keeper = threading.Thread(target=keep_output, daemon=True)
    threading.Thread(target=await_trainer, daemon=True).start()
    keeper.start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped: its group stays its own
    _end_group(child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    descendants.end_descendants()
    keeper.join(0.5)  # a process that could not be ended may hold the pipe
    report = {"status": status, "printed": printed.decode(errors="replace")}
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(report).encode() + b"\n")
    os._exit(0)


def _end_group(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Start the process of the user's code, and guard it."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    output, printed = os.pipe()
    first = os.getpid()
    descendants.adopt_orphans()
    child = os.fork()
    if child == 0:
        _live(channel, printed, first)
    with contextlib.suppress(OSError):  # the child may have done it
        os.setpgid(child, child)
    os.close(printed)
    channel.close()
    # Sent when the thread that started this process ends, in case the pipe is held elsewhere.
    signal.signal(signal.SIGTERM, lambda *_: _end_group(child))
    descendants.signal_at_parents_end(signal.SIGTERM)
    guard(child, output)


def _live(channel: socket.socket, printed: int, first: int) -> None:
    """Answer requests; this process always ends here."""
    status = 1
    try:
        os.setpgid(0, 0)
        descendants.signal_at_parents_end(signal.SIGKILL, first)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        faulthandler.enable()
        sys.stdout = os.fdopen(1, "w", 1, errors="backslashreplace", closefd=False)
        serve(channel)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
