"""A server that samples, and one before it that passes calls on and spoils some of the answers.

Both listen on loopback, in threads. ``WAYS`` has the ways in which answers are spoilt.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn

from params.schema.base import Machine
from tasks.engines.servers.token_guard import GENERATE, NAMES, RPC, TOKEN, Guard
from tasks.engines.servers.uploads import FOLDER, POLICIES, VERSION_HEADER
from tasks.engines.transformers.serve import Served, app_of

DRIP = 0.02  # seconds between the bytes of a server that drips
DEEP = 200_000  # arrays in one another
EVERYWHERE = ("/",)  # the beginnings of the paths of all calls


@contextmanager
def listening(app: Any) -> Iterator[int]:
    """Serve an application in a thread; its port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as opened:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield opened.getsockname()[1]
        server.should_exit = True
        thread.join()


Answer = tuple[int, Mapping[str, str], bytes]  # status, headers, content


class RightServer:
    """A server of the transformers engine. It computes the answer to each different call once."""

    def __init__(self, port: int) -> None:
        self.port, self.lock = port, threading.Lock()
        self.known: dict[tuple[str, str, bytes], Answer] = {}

    def answer(self, method: str, path: str, headers: Any, content: bytes) -> Answer:
        """Return the answer to a call."""
        call = method, path, content
        with self.lock:
            if call not in self.known:
                self.known[call] = self._computed(method, path, headers, content)
            return self.known[call]

    def _computed(self, method: str, path: str, headers: Any, content: bytes) -> Answer:
        asked = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            asked.request(method, path, content, headers)
            answer = asked.getresponse()
            version = answer.headers.get(VERSION_HEADER, "")
            return answer.status, {VERSION_HEADER: version}, answer.read()
        finally:
            asked.close()


@contextmanager
def sampling(policy: Path, home: Path, token: str) -> Iterator[RightServer]:
    """Serve a policy with the transformers engine, in a thread. ``home``: for what is sent."""
    os.environ |= {TOKEN: token, NAMES: "localhost", FOLDER: str(home)}
    machine = Machine(threads=1, device="cpu", precision="float32")
    with listening(Guard(app_of(Served(machine, policy)))) as port:
        yield RightServer(port)


# ---------------------------------------------------------------- what goes wrong


@dataclass(frozen=True)
class Way:
    """A way to answer: ``spoil`` gets the right answer and writes another one."""

    spoil: Callable[[Spoiler, int, Mapping[str, str], bytes], None]
    where: tuple[str, ...] = (GENERATE,)  # beginnings of the paths of the calls
    says: str = ""  # a part of what the run says of it
    after: int = 1  # requests for turns that are answered rightly before
    times: float = math.inf  # how often it answers wrongly, and rightly again then


class Spoiler(BaseHTTPRequestHandler):
    """Answers as the right server does, but for the calls that a way spoils."""

    protocol_version = "HTTP/1.1"
    server: SpoilingServer
    asked: bytes  # the content of the call

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self) -> None:
        """Answer a call."""
        length = int(self.headers.get("Content-Length", 0))
        self.asked = content = self.rfile.read(length)
        if len(content) < length:  # the connection was ended meanwhile; the right server would wait
            self.close()
            return
        right = self.server.right.answer(self.command, self.path, self.headers, content)
        with suppress(OSError):  # the one who asks may have left
            if self.server.is_spoilt(self.path):
                self.server.way.spoil(self, *right)
            else:
                self.send(*right)

    do_GET = do_PUT = do_POST = answer  # noqa: N815 - names of the base class

    def send(self, status: int, headers: Mapping[str, object], content: bytes) -> None:
        """Send an answer; a header with the value None is left out."""
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | dict(headers)).items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def close(self) -> None:
        """Close the connection after this call."""
        self.close_connection = True


class SpoilingServer(ThreadingHTTPServer):
    """The server of a ``Spoiler``."""

    daemon_threads, block_on_close = True, False

    def __init__(self, right: RightServer, way: Way) -> None:
        super().__init__(("127.0.0.1", 0), Spoiler)
        self.right, self.way, self.left, self.times = right, way, way.after, way.times
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.connected: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection, which ``server_close`` ends."""
        connection, address = super().get_request()
        with self.lock:
            self.connected.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self.lock:
            self.connected.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """End the connections, too: their threads would wait for the next call."""
        super().server_close()
        with self.lock:
            for connection in self.connected:
                with suppress(OSError):  # it has ended already
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """Say nothing where a connection breaks."""

    def is_spoilt(self, path: str) -> bool:
        """Count a call; return whether its answer is to be spoilt."""
        with self.lock:
            right = self.left > 0 and GENERATE in self.way.where
            self.left -= path == GENERATE
            spoilt = path.startswith(self.way.where) and not right and self.times > 0
            self.times -= spoilt
            return spoilt


@contextmanager
def spoiling(right: RightServer, way: Way) -> Iterator[str]:
    """Answer in a way; the address."""
    server = SpoilingServer(right, way)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


# ---------------------------------------------------------------- connections


def hang(to: Spoiler, *_: Any) -> None:
    to.close()
    to.server.ended.wait()


def leave(to: Spoiler, *_: Any) -> None:
    to.close()


def stop_midway(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.send(status, {**headers, "Content-Length": len(content)}, content[: len(content) // 2])


def promise_more(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.send(status, {**headers, "Content-Length": len(content) + 9}, content)


def promise_less(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.send(status, {**headers, "Content-Length": len(content) - 9}, content)


def promise_much(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.send(status, {**headers, "Content-Length": 2**40}, content)


def drip(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.send(status, {**headers, "Content-Length": 10**6}, b"")
    while not to.server.ended.wait(DRIP):
        to.wfile.write(b" ")


def drip_headers(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not to.server.ended.wait(DRIP):
        to.wfile.write(b"x")


def never_end(to: Spoiler, status: int, headers: Mapping[str, str], content: bytes) -> None:
    to.close()
    to.send(status, {**headers, "Content-Length": None}, b'{"choices": [')
    while not to.server.ended.is_set():
        to.wfile.write(b'"x",' * 2**14)


def never_end_chunks(to: Spoiler, status: int, headers: Mapping[str, str], _: bytes) -> None:
    to.close()
    chunked = {**headers, "Content-Length": None, "Transfer-Encoding": "chunked"}
    to.send(status, chunked, b"")
    while not to.server.ended.is_set():
        to.wfile.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")


def negative_chunk(to: Spoiler, status: int, headers: Mapping[str, str], _: bytes) -> None:
    to.close()
    chunked = {**headers, "Content-Length": None, "Transfer-Encoding": "chunked"}
    to.send(status, chunked, b"-1\r\n")
    while not to.server.ended.is_set():
        to.wfile.write(b" " * 2**16)


def go_on(to: Spoiler, *_: Any) -> None:
    to.close()
    while not to.server.ended.wait(DRIP):
        to.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def no_http(to: Spoiler, *_: Any) -> None:
    to.close()
    to.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")


def status(number: int, text: str = "no", **more: str) -> Way:
    """Answer with a status."""

    def spoil(to: Spoiler, _: int, headers: Mapping[str, str], __: bytes) -> None:
        to.send(
            number, {**headers, **{k.replace("_", "-"): v for k, v in more.items()}}, text.encode()
        )

    return Way(spoil, says=str(number))


def body(content: bytes, says: str) -> Way:
    """Answer with another body."""

    def spoil(to: Spoiler, number: int, headers: Mapping[str, str], _: bytes) -> None:
        to.send(number, headers, content)

    return Way(spoil, says=says)


def version(given: str | None) -> Way:
    """Answer with another version of the weights."""

    def spoil(to: Spoiler, number: int, headers: Mapping[str, str], content: bytes) -> None:
        to.send(number, {**headers, VERSION_HEADER: given}, content)

    return Way(spoil, says="instead of")


def choices(change: Callable[[list[Any]], Any], says: str) -> Way:
    """Answer with changed choices; ``change`` returns others, or changes them in place."""

    def spoil(to: Spoiler, number: int, headers: Mapping[str, str], content: bytes) -> None:
        answer = json.loads(content)
        changed = change(answer["choices"])
        answer["choices"] = answer["choices"] if changed is None else changed
        to.send(number, headers, json.dumps(answer).encode())

    return Way(spoil, says=says)


def last(change: Callable[[dict[str, Any]], Any], says: str) -> Way:
    """Answer with the last choice changed in place."""
    return choices(lambda all_choices: [*all_choices, change(all_choices[-1])][:-1], says)


def token(value: Any) -> Way:
    """Answer with a token that is none."""
    return last(lambda choice: choice["token_ids"].__setitem__(-1, value), "no token")


def measure(value: Any, says: str = "no log-probability") -> Way:
    """Answer with a log-probability that is none."""
    return last(lambda choice: _content(choice)[-1].__setitem__("logprob", value), says)


def entropy(value: Any) -> Way:
    """Answer with an entropy that is none."""

    def change(choice: dict[str, Any]) -> None:
        _content(choice)[-1]["top_logprobs"][1]["logprob"] = value

    return last(change, "no entropy")


def _content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = choice["logprobs"]["content"]
    return content


def _lengthen(choice: dict[str, Any]) -> None:
    choice["token_ids"] = choice["token_ids"][:1] * 601
    choice["logprobs"]["content"] = _content(choice)[:1] * 601


def _empty(choice: dict[str, Any]) -> None:
    choice["token_ids"], choice["logprobs"]["content"] = [], []


def _cut(choice: dict[str, Any]) -> None:
    """End a turn of several tokens with a token that ends none."""
    if len(choice["token_ids"]) > 1:
        choice["token_ids"] = [5]
        choice["logprobs"]["content"] = _content(choice)[:1]
    else:
        choice["finish_reason"] = "abort"


def _lower(given: list[dict[str, Any]]) -> None:
    for choice in given:
        _content(choice)[0]["logprob"] -= 1.0


def other_missing(to: Spoiler, number: int, headers: Mapping[str, str], _: bytes) -> None:
    answer = {"missing": ["../../secret"], "folder": None}
    to.send(number, headers, json.dumps(answer).encode())


def no_results(to: Spoiler, number: int, headers: Mapping[str, str], _: bytes) -> None:
    to.send(number, headers, b'{"results": 7}')


def other_digests(to: Spoiler, number: int, headers: Mapping[str, str], content: bytes) -> None:
    changed = b'{"results": ["0123456789abcdef"]}' if b"weight_digest" in to.asked else content
    to.send(number, headers, changed)


def no_leaving_out(to: Spoiler, number: int, headers: Mapping[str, str], content: bytes) -> None:
    """As a server of an earlier version, whose worker has no such method."""
    asked = b"draw_from" in to.asked
    to.send(404 if asked else number, headers, b'{"error": "no method"}' if asked else content)


LATE = "in time"
RIGHT = Way(Spoiler.send)
WAYS: dict[str, Way] = {
    "hangs": Way(hang, says=LATE),
    "hangs at each call": Way(hang, EVERYWHERE, says=LATE),
    "closes without an answer": Way(leave, says="closed"),
    "stops in the middle": Way(stop_midway, says="IncompleteRead"),
    "promises more bytes": Way(promise_more, says="IncompleteRead"),
    "promises fewer bytes": Way(promise_less, says="no JSON"),
    "promises a terabyte": Way(promise_much, says="bytes"),
    "drips": Way(drip, says=LATE),
    "drips a header": Way(drip_headers, says=LATE),
    "never ends": Way(never_end, says="bytes"),
    "never ends, in chunks": Way(never_end_chunks, says="bytes"),
    "a chunk of -1 bytes": Way(negative_chunk, says="bytes"),
    "says 100 for ever": Way(go_on, says=LATE),
    "speaks no HTTP": Way(no_http, says="SSH"),
    "500": status(500, "Internal Server Error"),
    "502 at each call": Way(status(502).spoil, EVERYWHERE, says="502"),
    "503, in a day": status(503, "busy", Retry_After="86400"),
    "429": status(429, "slow down", Retry_After="0"),
    "400": status(400, '{"error": "too long"}'),
    "401": status(401, "who are you?"),
    "404": status(404, "not found"),
    "204": status(204, ""),
    "redirects": status(307, "", Location="http://127.0.0.1:9/elsewhere"),
    "HTML": body(b"<html>\x1b[31mA page</html>", "no JSON"),
    "no body": body(b"", "no list of choices"),
    "half a JSON": body(b'{"choices": [{"token_ids": [1, 2', "no JSON"),
    "deep JSON": body(b"[" * DEEP, "too deep"),
    "a number of a million digits": body(b'{"choices": ' + b"9" * 10**6 + b"}", "no JSON"),
    "no UTF-8": body(b'{"choices": "\xff\xfe"}', "no JSON"),
    "a JSON array": body(b"[]", "no list of choices"),
    "no choices": choices(lambda _: "none", "no list of choices"),
    "fewer choices": choices(lambda given: given[:-1], "choices instead of"),
    "more choices": choices(lambda given: [*given, given[0]], "choices instead of"),
    "a choice that is null": choices(lambda given: [*given[:-1], None], "no object"),
    "a token beyond the vocabulary": token(10**6),
    "token -1": token(-1),
    "a token as text": token("7"),
    "a token as a fraction": token(7.0),
    "a token that is true": token(True),
    "601 tokens": last(_lengthen, "601 tokens"),
    "no tokens": last(_empty, "0 tokens"),
    "a turn cut short": last(_cut, "ends after|finish_reason"),
    "NaN": measure(float("nan")),
    "minus infinity": measure(float("-inf")),
    "log-probability 0.5": measure(0.5),
    "a log-probability as text": measure("-0.5"),
    "a log-probability of 400 digits": measure(10**400),
    "no log-probabilities": last(lambda choice: choice.pop("logprobs"), "log-probabilities"),
    "a log-probability too few": last(lambda choice: _content(choice).pop(), "log-probabilities"),
    "no entropy": last(lambda choice: _content(choice)[0].pop("top_logprobs"), "its entropy"),
    "entropy 7": entropy(7.0),
    "entropy null": entropy(None),
    "another finish_reason": last(
        lambda choice: choice.update(finish_reason="abort"), "finish_reason"
    ),
    "another version": version("of another run"),
    "no version": version(None),
    "log-probabilities of another policy": replace(choices(_lower, "nats"), after=0),
    "weights of another policy": Way(other_digests, (RPC,), says="by its digest"),
    "padded rows are drawn": Way(no_leaving_out, (RPC,), says="cannot leave out ids"),
    "a file to send that is none": Way(other_missing, (POLICIES,), says="which files"),
    "results that are none": Way(no_results, (RPC,), says="results"),
}
