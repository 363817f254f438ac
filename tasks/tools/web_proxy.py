"""Send the pages' requests through a proxy where the user's environment names one.

Without a proxy, a name is resolved here and the connection is made to an address that was checked
(web_guard.py). A proxy resolves names itself, so this machine cannot hold it to a checked address:
what is known here is checked, and the rest is left to the rules of the proxy.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Collection, Mapping

import httpx

from tasks.tools.web_client import WebError
from tasks.tools.web_guard import may_be_private, resolve
from tasks.trees.outcomes import Outcome

# Names that lead into a private network, or to no host at all (RFC 6761, 6762, 8375).
PRIVATE_NAMES = ("local", "localhost", "localdomain", "internal", "intranet", "lan", "home", "corp")
PRIVATE_DOMAINS = ("home.arpa", "in-addr.arpa", "ip6.arpa")
_PUBLIC_NAME = re.compile(r"(?:[\w-]+\.)+[a-z][\w-]*\.?", re.IGNORECASE)


def proxies_of_environment() -> dict[str, str]:
    """Return the address of the proxy for each scheme of a page that has one."""
    named = urllib.request.getproxies_environment()
    settings = {scheme: named.get(scheme) or named.get("all") or "" for scheme in ("http", "https")}
    return {
        scheme: value if "://" in value else f"http://{value}"
        for scheme, value in settings.items()
        if value
    }


def goes_through(url: httpx.URL, proxies: Mapping[str, object]) -> bool:
    """Return whether a request uses a proxy: one is named, and NO_PROXY does not name the host."""
    host = url.raw_host.decode()
    name = f"{host}:{url.port}" if url.port else host
    bypassed = urllib.request.proxy_bypass_environment(name)  # type: ignore[attr-defined]
    return url.scheme in proxies and not bypassed


async def check(url: httpx.URL, private_hosts: Collection[str], seconds: float) -> None:
    """Raise WebError (REFUSED) where a host that a proxy would ask for is known to be private.

    A name that this machine can resolve must have public addresses only. One that it cannot, as is
    usual behind a proxy, must look like a name of the public internet.
    """
    if may_be_private(url, private_hosts):
        return
    try:
        await resolve(url, (), seconds)
        return
    except WebError as error:
        if error.outcome not in (Outcome.UNAVAILABLE, Outcome.TIMEOUT):
            raise
    host = url.raw_host.decode().lower().rstrip(".")
    private = host.endswith(PRIVATE_DOMAINS) or host.rpartition(".")[2] in PRIVATE_NAMES
    if private or not _PUBLIC_NAME.fullmatch(host):
        raise WebError(Outcome.REFUSED, f"{host} is not on the public internet: it is not opened")
