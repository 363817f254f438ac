"""HTTP calls that end: at a time, whatever the server sends, and with an answer of bounded size."""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, BinaryIO
from urllib.parse import SplitResult

CONNECT_TIMEOUT = 10.0  # seconds for a server to take a connection
LONGEST_SLEEP = 1.0  # seconds until the end of a call is looked at again: it may have moved
HEAD_BYTES = 2**17  # of an answer before its content, about: twice those of the longest header
BLOCK = 2**20  # bytes of a file that are read and sent at once
KEEPALIVE = {  # probe after 30 idle seconds, 3 times, every 10 seconds
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 30,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


@dataclass(frozen=True)
class HttpAnswer:
    """What a server has answered."""

    status: int
    content: bytes
    headers: Message


class TimedSocket:
    """A socket whose calls raise TimeoutError at a time, and OSError after ``room`` bytes.

    A timeout of the socket alone begins anew with each byte that comes in.
    """

    def __init__(self, opened: socket.socket) -> None:
        self.opened, self.reading, self.closing = opened, False, False
        self.room = 0  # bytes that may still come in
        # When a call ends, by time.monotonic; it may move while a call waits.
        self.ends: Callable[[], float] = time.monotonic

    def sendall(self, data: Any) -> None:
        """Send bytes."""
        self.opened.settimeout(self._left())
        self.opened.sendall(data)

    def receive(self, buffer: Any) -> int:
        """Read bytes into a buffer; return how many."""
        if self.room <= 0:
            raise OSError("an answer of too many bytes")
        while True:
            self.opened.settimeout(min(self._left(), LONGEST_SLEEP))
            try:
                count = self.opened.recv_into(buffer)
            except TimeoutError:
                self._left()
            else:
                self.room -= count
                return count

    def makefile(self, mode: str) -> BinaryIO:
        """Return a file that reads from the socket, as http.client asks for it."""
        self.reading = True
        return io.BufferedReader(SocketReader(self))

    def close(self) -> None:
        """Close the socket, once nothing reads from it."""
        self.closing = True
        if not self.reading:
            self.opened.close()

    def _left(self) -> float:
        left = self.ends() - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer came in time")
        return left


class SocketReader(io.RawIOBase):
    """The file of a ``TimedSocket``."""

    def __init__(self, timed: TimedSocket) -> None:
        self.timed = timed

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer; return how many."""
        return self.timed.receive(buffer)

    def close(self) -> None:
        """Close the file, and the socket if its connection has been closed before."""
        if not self.closed:
            self.timed.reading = False
            if self.timed.closing:
                self.timed.opened.close()
        super().close()


def connect(address: SplitResult) -> http.client.HTTPConnection:
    """Open a connection. Raises OSError or HTTPException where there is none."""
    connection = CONNECTIONS[address.scheme](
        address.netloc, timeout=CONNECT_TIMEOUT, blocksize=BLOCK
    )
    connection.connect()
    for option, value in KEEPALIVE.items():  # notices a machine that lost power
        connection.sock.setsockopt(*option, value)
    connection.sock = TimedSocket(connection.sock)
    return connection


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    content: Any,
    headers: Mapping[str, str],
    ends: Callable[[], float],
    limit: int,
) -> HttpAnswer:
    """Return the answer to a request; ``limit``: bytes of its content, at most.

    ``ends`` returns when it must be there, by ``time.monotonic``. Raises OSError or HTTPException
    where there is no whole answer by then, and for a longer one, after which the connection is of
    no use.
    """
    timed: Any = connection.sock
    if timed is None:  # the last answer has closed it
        raise http.client.RemoteDisconnected("the connection is closed")
    # Each chunk has a few bytes beside its content. http.client reads to the end for a size of -1.
    timed.ends, timed.room = ends, 2 * limit + HEAD_BYTES
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    if (answer.length or 0) > limit:
        raise http.client.HTTPException(f"an answer of {answer.length} bytes, {limit} at most")
    text = answer.read(limit + 1)
    if len(text) > limit:
        raise http.client.HTTPException(f"an answer of more than {limit} bytes")
    if answer.length:
        raise http.client.IncompleteRead(text, answer.length)
    return HttpAnswer(answer.status, text, answer.headers)
