"""Addresses of servers in settings, and the keys that they ask for.

An address stands in the recipe and in keys of the ledger, so it has no room for a secret. A key is
in an environment variable, and the recipe names the variable.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_address
from urllib.parse import urlsplit

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


def check_endpoint(url: str) -> str:
    """Return the address of a server, for a setting. Raises ValueError for one that cannot be."""
    try:
        parsed = urlsplit(url)
        host, _ = parsed.hostname or "", parsed.port
    except ValueError as error:
        raise ValueError(f"'{url}' is no address ({error}): write https://host/path") from None
    if parsed.scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise ValueError(f"'{url}' is no address of a web server: write https://host/path")
    if "@" in parsed.netloc or parsed.query or parsed.fragment:
        raise ValueError(
            f"the address of {host} has a password, a query or a fragment: leave them out, "
            "and name the environment variable with the key in key_variable"
        )
    return url


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
    if wrong := [one for one in named if not one.startswith(("http://", "https://"))]:
        raise ValueError(
            f"{SERVERS}: '{wrong[0]}' is no address: write http://host:port, and commas between "
            "several"
        )
    if len(set(named)) < len(named):
        raise ValueError(f"{SERVERS} names a server twice: name each once")
    return named
