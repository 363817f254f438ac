"""Where a request of an agent may go: addresses of the public internet, and hosts of the recipe.

The agent chooses the address, and pages choose where they redirect to. Without this guard both
could reach what only this machine can: services without a password, routers, the metadata of a
cloud. So each name is resolved here, every address that it has is checked, and the connection is
made to an address that was checked: a name cannot point elsewhere in between.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

import anyio
import httpx

from tasks.tools.web_client import WebError
from tasks.trees.outcomes import Outcome

URL_CHARACTERS = 2000  # of an address, at most
SCHEMES = {"http": 80, "https": 443}
MOST_ADDRESSES = 3  # of a host that are tried
# No page of the web is at an address with a special purpose: those of IANA's registries, relays and
# name servers that can be reached globally included, and multicast.
SPECIAL_V4 = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
    *(
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
    ),
    *("224.0.0.0/4", "240.0.0.0/4"),
)
# Every address of the internet's hosts is in GLOBAL_V6. So the rest need not be listed: ::/96,
# ::ffff:0:0:0/96 and 64:ff9b::/96 (which lead to IPv4), fc00::/7, fe80::/10, fec0::/10, ff00::/8
# and what will be given to other uses.
GLOBAL_V6 = "2000::/3"
SPECIAL_V6 = (
    "2001::/23",  # of the IETF: Teredo, benchmarks, ORCHID, AMT, drones
    *("2001:db8::/32", "3fff::/20"),  # documentation
    "2002::/16",  # 6to4
    "2620:4f:8000::/48",  # AS112
    "3ffe::/16",  # 6bone, given back
)
_SPECIAL = tuple(map(ipaddress.ip_network, (*SPECIAL_V4, *SPECIAL_V6)))
_GLOBAL = ipaddress.ip_network(GLOBAL_V6)
_ISATAP = (0x00005EFE, 0x02005EFE)  # the first half of an interface's id; the other is IPv4
_HOST = re.compile(r"[0-9A-Za-z._:-]+")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_url(text: str) -> httpx.URL:
    """Return an address without its fragment. Raises WebError (BAD_ARGUMENTS)."""
    if len(text) > URL_CHARACTERS:
        raise _bad(f"the address is longer than {URL_CHARACTERS} characters")
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, ValueError):
        raise _bad("this is no address: give one such as https://host/page") from None
    if url.scheme not in SCHEMES or not _HOST.fullmatch(url.raw_host.decode("ascii", "replace")):
        raise _bad("only addresses that begin with http:// or https:// and a host can be opened")
    if url.userinfo:
        raise _bad("an address with a user's name or password is not opened")
    return url.copy_with(fragment=None)


def _bad(reason: str) -> WebError:
    return WebError(Outcome.BAD_ARGUMENTS, reason)


def port_of(url: httpx.URL) -> int:
    """Return the port of an address, the scheme's own where it names none."""
    return url.port or SCHEMES[url.scheme]


def may_be_private(url: httpx.URL, private_hosts: Collection[str]) -> bool:
    """Return whether the recipe names a URL's host, or ``host:port``, as one of any network."""
    host = url.raw_host.decode()
    return not {host, f"{host}:{port_of(url)}"}.isdisjoint(private_hosts)


async def resolve(url: httpx.URL, private_hosts: Collection[str], seconds: float) -> list[str]:
    """Return the addresses of a URL's host that may be connected to, at most MOST_ADDRESSES.

    ``private_hosts``: hosts, or ``host:port``, that may be anywhere. Raises WebError: REFUSED where
    any address of another host is not public; UNAVAILABLE where the name has none. The reason does
    not name addresses: an agent must not explore a private network by its names.
    """
    host, port = url.raw_host.decode(), port_of(url)
    try:
        with anyio.fail_after(seconds):
            entries = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise WebError(Outcome.TIMEOUT, f"{host} was not found within {seconds:g} s") from None
    except (OSError, UnicodeError):
        raise WebError(Outcome.UNAVAILABLE, f"{host} was not found", 0) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if may_be_private(url, private_hosts):
        return addresses[:MOST_ADDRESSES]
    if not all(map(is_public, addresses)):
        raise WebError(Outcome.REFUSED, f"{host} is not on the public internet: it is not opened")
    return addresses[:MOST_ADDRESSES]


def is_public(text: str) -> bool:
    """Return whether an address is one of the public internet, and not of this machine."""
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped and not address.scope_id:
            return is_public(str(address.ipv4_mapped))
        host = int(address) & (2**64 - 1)
        if host >> 32 in _ISATAP and not is_public(str(ipaddress.IPv4Address(host & 0xFFFFFFFF))):
            return False
        if address.scope_id or address not in _GLOBAL:  # such as fe80::1%eth0
            return False
    return not any(address in network for network in _SPECIAL) and not _is_own(address)


def _is_own(address: Address) -> bool:
    """Return whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
