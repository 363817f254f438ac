"""A scripted OpenAI-compatible server on loopback, in threads of the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Response:
    """What the server sends: a status, headers, and a body after some seconds."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    after: float = 0.0  # seconds
    dropped: bool = False  # the connection closes in the middle of the body


def said(text: str | None, prompt: int = 10, completion: int = 5, **others: Any) -> Response:
    """Return a good response with a text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    body = {
        **{"id": "1", "object": "chat.completion", "created": 0, "model": "scripted"},
        "choices": [{**choice, "finish_reason": "stop"}],
        "usage": {**usage, "total_tokens": prompt + completion},
    }
    return Response(body=json.dumps(body), **others)


def refused(status: int, **others: Any) -> Response:
    """Return an error as servers of this protocol send it."""
    return Response(status, json.dumps({"error": {"message": f"no: {status}"}}), **others)


Script = Callable[[dict[str, Any], int], Response]  # request, its number from 0 -> response


@dataclass
class ChatServer:
    """A server, what it was asked, and its answers so far. ``script`` may be replaced."""

    script: Script
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)  # with the status 200, in whole
    side_by_side: int = 0  # most requests at a time
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        asked = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number = len(self.requests)
            self.requests.append(asked)
            self.keys.append(handler.headers.get("Authorization"))
            self.now += 1
            self.side_by_side = max(self.side_by_side, self.now)
        response = self.script(asked, number)
        time.sleep(response.after)
        with self.lock:
            self.now -= 1
        send(handler, response)
        if response.status == 200 and not response.dropped:
            self.answered.append(asked)


def send(handler: BaseHTTPRequestHandler, response: Response) -> None:
    """Send a response, or its first half."""
    body = response.body.encode()
    handler.send_response(response.status)
    for name, value in {"Content-Type": "application/json", **response.headers}.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2] if response.dropped else body)
    handler.close_connection = True


@contextmanager
def open_chat_server(script: Script, port: int = 0):
    """Yield a running ChatServer; on the given port, or on a free one."""
    state = ChatServer(script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                state.serve(self)
            except (BrokenPipeError, ConnectionResetError, json.JSONDecodeError):
                self.close_connection = True  # the client did not wait

        def log_message(self, *values):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
