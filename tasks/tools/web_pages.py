"""Fetch pages politely, and only from where an agent may look.

- A site's robots.txt is respected (RFC 9309: what it forbids is not fetched, nor is anything while
  it cannot be read; no robots.txt forbids nothing). ``Crawl-delay`` is respected up to a limit.
- A host gets one request at a time, with a pause between two.
- Every redirect is checked like a first address, and so is robots.txt itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.robotparser import RobotFileParser

import anyio
import httpx

from tasks.tools import web_proxy
from tasks.tools.web_client import (
    ENCODINGS,
    NoConnectionError,
    RequestBudget,
    WaitBudget,
    WebAnswer,
    WebError,
    exchange,
    retrying,
)
from tasks.tools.web_guard import parse_url, resolve
from tasks.trees.outcomes import Outcome

AGENT = "beamline"  # how robots.txt calls this client
REDIRECTS = (301, 302, 303, 307, 308)
ROBOTS_BYTES = 500 * 1024  # the least that RFC 9309 wants to be read
LONGEST_DELAY = 30.0  # seconds; a longer Crawl-delay counts as this
TYPES = {"text/html": "html", "application/xhtml+xml": "html", "text/plain": "plain"}


@dataclass(frozen=True)
class Page:
    """A fetched page."""

    kind: str  # "html" or "plain"
    charset: str  # as the server names it; "" where it does not
    body: bytes


@dataclass(frozen=True)
class Manners:
    """What the client may do; the browser's settings say more (browser.py)."""

    contact: str | None
    private_hosts: Sequence[str]
    seconds: float
    retries: int
    delay_seconds: float
    bytes: int
    redirects: int


@dataclass
class _Host:
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    asking: anyio.Lock = field(default_factory=anyio.Lock)  # for its robots.txt
    free_at: float = -math.inf  # on the event loop's clock
    delay: float = 0.0


@dataclass
class Fetcher:
    """A client with manners. It is used by the thread of one event loop only."""

    client: httpx.AsyncClient
    manners: Manners
    budget: RequestBudget
    turns: anyio.CapacityLimiter
    proxied: Mapping[str, httpx.AsyncClient] = field(default_factory=dict)  # by scheme
    hosts: defaultdict[str, _Host] = field(default_factory=lambda: defaultdict(_Host))
    rules: dict[str, RobotFileParser] = field(default_factory=dict)
    unread: dict[str, WebError] = field(default_factory=dict)  # why there are no rules of a site

    async def fetch(self, text: str) -> Page:
        """Return the page at an address. Raises WebError."""
        url = parse_url(text)
        waits = WaitBudget.of(self.manners.seconds, self.manners.retries)
        for _ in range(self.manners.redirects + 1):
            self.budget.spend()
            await self._check_robots(url, waits)
            answer = await self._get(url, self.manners.bytes, waits)
            if answer.status not in REDIRECTS or "location" not in answer.headers:
                return _page(url, answer)
            url = _redirected(url, answer)
        raise WebError(Outcome.UNAVAILABLE, f"more than {self.manners.redirects} redirects")

    async def _get(self, url: httpx.URL, most: int, waits: WaitBudget) -> WebAnswer:
        return await retrying(partial(self._once, url, most), self.manners.retries, waits)

    async def _once(self, url: httpx.URL, most: int) -> WebAnswer:
        """Send one request when it is this host's turn."""
        host = self.hosts[url.raw_host.decode()]
        async with host.turn:
            await anyio.sleep_until(host.free_at)
            try:
                async with self.turns:
                    return await self._connected(url, most)
            finally:
                pause = max(self.manners.delay_seconds, host.delay)
                host.free_at = anyio.current_time() + pause

    async def _connected(self, url: httpx.URL, most: int) -> WebAnswer:
        """Send one request to the first address of the host that takes a connection."""
        manners, host = self.manners, url.raw_host.decode()
        if web_proxy.goes_through(url, self.proxied):
            await web_proxy.check(url, manners.private_hosts, manners.seconds)
            client = self.proxied[url.scheme]
            request = client.build_request("GET", url, headers=self._headers(url))
            try:
                return await exchange(client, request, host, manners.seconds, most)
            except NoConnectionError:
                reason = f"no connection to the proxy that {host} is reached through"
                raise WebError(Outcome.UNAVAILABLE, reason, 0) from None
        for address in await resolve(url, manners.private_hosts, manners.seconds):
            # To the checked address; name and certificate are those of the host.
            request = self.client.build_request(
                "GET",
                url.copy_with(host=address),
                headers=self._headers(url),
                extensions={"sni_hostname": host},
            )
            try:
                return await exchange(self.client, request, host, manners.seconds, most)
            except NoConnectionError as error:
                refused = error
        raise refused

    def _headers(self, url: httpx.URL) -> dict[str, str]:
        contact = f"; {self.manners.contact}" if self.manners.contact else ""
        return {
            **ENCODINGS,
            "Host": url.netloc.decode(),
            "User-Agent": f"{AGENT}/1.0 (a research agent that reads single pages{contact})",
            "Accept": "text/html, application/xhtml+xml, text/plain;q=0.9",
        }

    async def _check_robots(self, url: httpx.URL, waits: WaitBudget) -> None:
        """Raise WebError where the site's robots.txt forbids a page."""
        origin, host = f"{url.scheme}://{url.netloc.decode()}", self.hosts[url.raw_host.decode()]
        before = self.unread.get(origin)
        async with host.asking:
            if (fault := self.unread.get(origin)) is not before and fault:
                raise WebError(fault.outcome, fault.reason)  # of a call that this one waited for
            if origin not in self.rules:
                try:
                    self.rules[origin] = await self._read_robots(url, waits)
                except WebError as error:
                    self.unread[origin] = error
                    raise
                crawl_delay = self.rules[origin].crawl_delay(AGENT)
                host.delay = max(host.delay, float(min(int(crawl_delay or 0), LONGEST_DELAY)))
        if not self.rules[origin].can_fetch(AGENT, str(url)):
            reason = f"robots.txt of {url.raw_host.decode()} does not allow this page"
            raise WebError(Outcome.REFUSED, reason)

    async def _read_robots(self, url: httpx.URL, waits: WaitBudget) -> RobotFileParser:
        """Return the rules of a site."""
        robots_url = url.copy_with(raw_path=b"/robots.txt")
        for _ in range(self.manners.redirects + 1):
            answer = await self._get(robots_url, ROBOTS_BYTES, waits)
            if answer.status not in REDIRECTS or "location" not in answer.headers:
                break
            robots_url = _redirected(robots_url, answer)
        rules = RobotFileParser()
        lines = answer.body.decode("utf-8", "replace").splitlines() if answer.status == 200 else []
        try:
            rules.parse(lines)
        except ValueError:  # the library reads "²" and "//[" as a number and an address
            reason = f"robots.txt of {url.raw_host.decode()} cannot be read"
            raise WebError(Outcome.REFUSED, reason) from None
        return rules


def _redirected(url: httpx.URL, answer: WebAnswer) -> httpx.URL:
    """Return where an answer redirects to. Raises WebError where that is no address of the web."""
    try:
        return parse_url(str(url.join(answer.headers["location"])))
    except (httpx.InvalidURL, ValueError, WebError):
        reason = f"{url.raw_host.decode()} redirects to no address of the web"
        raise WebError(Outcome.UNAVAILABLE, reason) from None


def _page(url: httpx.URL, answer: WebAnswer) -> Page:
    host = url.raw_host.decode()
    if answer.status != 200:
        reason = f"{host} answered with the status {answer.status}"
        raise WebError(Outcome.UNAVAILABLE, reason)
    kind, _, rest = answer.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind not in TYPES:
        raise WebError(Outcome.UNAVAILABLE, f"this is no page of text ({kind[:80] or 'no type'})")
    name, _, charset = rest.strip().partition("=")
    named = charset.strip("\"' ").lower() if name.strip().lower() == "charset" else ""
    return Page(
        TYPES[kind], named if named.replace("-", "").replace("_", "").isalnum() else "", answer.body
    )
