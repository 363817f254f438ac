"""Bound what a server may answer to a client of httpx2, which openai and mcp ask servers with.

The libraries read a whole answer into memory, and unpack it without a limit. So answers are asked
for unpacked, and counted while they are read. They are read as UTF-8, as JSON and streams of events
are written: a server can name a charset that unpacks (bz2, zlib), or makes the libraries fail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2

UNPACKED = {"Accept-Encoding": "identity"}
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class TooLongError(httpx2.TransportError):
    """An answer is longer than its limit, or packed although it was not to be."""


class Counted(httpx2.AsyncByteStream):
    """The bytes of an answer. Raises TooLongError beyond the limit, for each event of a stream."""

    def __init__(self, stream: Any, most: int, events: bool) -> None:
        self.stream, self.most, self.events = stream, most, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come."""
        count = 0
        async for piece in self.stream:
            count += len(piece)
            if count > self.most:
                raise TooLongError(f"an answer of more than {self.most} bytes")
            if self.events and any(end in piece for end in _EVENT_ENDS):
                count = 0
            yield piece

    async def aclose(self) -> None:
        """End the answer."""
        await self.stream.aclose()


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport whose answers have at most ``most`` bytes."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, most: int) -> None:
        self.inner, self.most = inner, most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; its answer is bounded. Raises TooLongError."""
        response = await self.inner.handle_async_request(request)
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            await response.aclose()
            raise TooLongError("a packed answer, which was not asked for")
        kind = response.headers.get("content-type", "").partition(";")[0]
        response.headers["content-type"] = kind  # without a charset
        response.encoding = "utf-8"
        events = kind.startswith("text/event-stream")
        response.stream = Counted(response.stream, self.most, events)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self.inner.aclose()


def bound(client: httpx2.AsyncClient, most: int) -> httpx2.AsyncClient:
    """Return the client with its answers bounded, those through its proxies included."""
    client._transport = BoundedTransport(client._transport, most)
    client._mounts = {
        pattern: transport and BoundedTransport(transport, most)
        for pattern, transport in client._mounts.items()
    }
    return client
