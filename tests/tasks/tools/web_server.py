"""A web server on loopback that answers as a test says, and remembers what it was asked."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One answer; ``pause``: seconds before it."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0


@dataclass
class Server:
    """``answer(path, body)`` makes replies; ``asked`` has (path, headers, body) of each request."""

    answer: object
    port: int = 0
    asked: list = field(default_factory=list)
    at: list = field(default_factory=list)  # when requests came
    busy: int = 0
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]


@contextmanager
def serving(answer, certificate=None) -> Iterator[Server]:
    """Run a server on a free port during the block; over TLS with a certificate."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with server.lock:
                server.asked.append((self.path, dict(self.headers), body))
                server.at.append(time.monotonic())
                server.busy += 1
                server.most_busy = max(server.busy, server.most_busy)
            try:
                reply = server.answer(self.path, body)
                time.sleep(reply.pause)
            finally:  # before the answer, which lets the client send its next request
                with server.lock:
                    server.busy -= 1
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                    self.flush_headers()
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client had enough

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = http.server_address[1]
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def in_turn(*replies):
    """Answer with these replies, one after the other; the last one stays."""
    left = list(replies)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]


def as_json(value, **others) -> Reply:
    return Reply(json.dumps(value).encode(), headers={"Content-Type": "application/json"}, **others)
