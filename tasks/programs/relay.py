"""Carry connections from the loopback of a sandbox to the socket of the gateway outside it.

A sandbox has no network but its own loopback. Standard library alone: it runs beside programs.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import suppress

from tasks.extensions import descendants

BLOCK = 65536
MOST_FILES = 2**16


def allow_connections() -> None:
    """Let this process have as many files open as connections need: two each, in the relay."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def start(path: str, port: int) -> int:
    """Start the relay as a child of this process, and return its id; it listens then."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(512)
    host = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            descendants.signal_at_parents_end(signal.SIGKILL, host)
            allow_connections()
            asyncio.run(_serve(listening, path))
        finally:
            os._exit(1)
    listening.close()
    return process


async def _serve(listening: socket.socket, path: str) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, to_there = await asyncio.open_unix_connection(path)
            await asyncio.gather(_copy(reader, to_there), _copy(there, writer))
        with suppress(OSError):
            writer.close()

    server = await asyncio.start_server(carry, sock=listening)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(BLOCK):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.close()
