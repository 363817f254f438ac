"""Addresses of servers in settings, and the keys that they ask for.

An address stands in the recipe and in keys of the ledger, so it has no room for a secret. A key is
in an environment variable, and the recipe names the variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SERVERS = "BEAMLINE_SERVERS"  # environment variable: addresses of servers that sample, by commas
_KEY = re.compile(r"[!-~]+")  # what a header can carry
_HOST = re.compile(r"[^\s/\\?#@]+")


def is_loopback(url: str) -> bool:
    """Return whether an address is on this machine, so that no proxy is asked for it."""
    host = (urlsplit(url).hostname or "").lower().rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _parsed(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises ValueError for what is none."""
    shown = url.rpartition("@")[2]  # without a password
    try:
        parsed = urlsplit(url)
        host, _ = parsed.hostname or "", parsed.port
    except ValueError:
        raise ValueError(f"'{shown}' is no address: write https://host:port/path") from None
    if parsed.scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise ValueError(f"'{shown}' is no address of a web server: write https://host/path")
    return parsed


def check_endpoint(url: str) -> str:
    """Return the address of a server, for a setting. Raises ValueError for one that cannot be."""
    parsed = _parsed(url)
    host = parsed.hostname
    if "@" in parsed.netloc or parsed.query or parsed.fragment:
        raise ValueError(
            f"the address of {host} has a password, a query or a fragment: leave them out, "
            "and name the environment variable with the key in key_variable"
        )
    return url


def check_servers(urls: Sequence[str]) -> None:
    """Raise ValueError for what is no address of a server that samples, or names one twice."""
    places: set[str] = set()
    for url in urls:
        parsed = _parsed(url)
        if parsed.query or parsed.fragment:
            raise ValueError(f"'{parsed.hostname}' has a query or a fragment: leave it out")
        port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
        place = f"{parsed.scheme}://{parsed.hostname}:{port}{parsed.path.rstrip('/')}"
        if place in places:
            raise ValueError(f"names the server {place} twice: name each once")
        places.add(place)


def check_key_travels_safely(url: str, key_variable: str | None) -> None:
    """Raise ValueError where a key would cross a network in plain text."""
    parsed = urlsplit(url)
    if key_variable and parsed.scheme == "http" and parsed.hostname not in LOOPBACK:
        raise ValueError(
            f"{url} would send the key of {key_variable} in plain text: use https, or set "
            "key_variable to null where the server needs no key"
        )


def key_fault(section: str, variable: str | None) -> str:
    """Return why the key of a setting cannot be used, or "". ``section``: the setting's."""
    key = os.environ.get(variable, "").strip() if variable else None
    if key == "":
        return (
            f"{section}.key_variable: the environment variable {variable} is not set: put the API "
            f"key into it (export {variable}=...), or set key_variable to null for a server "
            "without keys"
        )
    if key and not _KEY.fullmatch(key):
        return f"{section}.key_variable: {variable} holds characters that no key has: correct it"
    return ""


def read_key(section: str, variable: str | None) -> str:
    """Return the key in an environment variable, "" where none is needed. Raises ValueError."""
    if fault := key_fault(section, variable):
        raise ValueError(fault)
    return os.environ.get(variable, "").strip() if variable else ""


def servers_here() -> tuple[str, ...]:
    """Return the servers that this environment names; () where it names none. Raises ValueError."""
    named = tuple(filter(None, map(str.strip, os.environ.get(SERVERS, "").split(","))))
    try:
        check_servers(named)
    except ValueError as error:
        raise ValueError(f"{SERVERS}: {error}; commas stand between several") from None
    return named
