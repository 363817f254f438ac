"""Reach this machine's own servers without a proxy, and refuse settings of proxies that are wrong.

Prefect, MLflow, DVC and the clients of tools take their proxies from the environment, each by a
library of its own. The names of loopback in NO_PROXY hold for all of them, and for the processes
that a program starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from params.schema.addresses import LOOPBACK

EXCEPTIONS = ("no_proxy", "NO_PROXY")  # most libraries take the first where both are set
READ = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")
SCHEMES = ("http", "https", "socks5", "socks5h")  # of a proxy, as httpx knows them
_HOST = re.compile(r"[^\s/\\?#@]+")
_EXCEPTION = re.compile(r"(?:\w+://)?[^\s\[\]:/]+(?::\d+)?(?:/\S*)?")  # what httpx can read


def keep_loopback_direct() -> None:
    """Add the names of loopback to NO_PROXY, in both spellings, where a proxy is set."""
    if not any(_is_proxy(name) and os.environ[name].strip() for name in os.environ):
        return
    before = [os.environ.get(name, "").strip() for name in EXCEPTIONS]
    for name, mine, other in zip(EXCEPTIONS, before, reversed(before), strict=True):
        entries = _entries(mine or other)
        missing = [one for one in LOOPBACK if one not in entries]
        # Some libraries take "*" for all hosts only where it stands alone.
        os.environ[name] = "*" if "*" in entries else ",".join([*entries, *missing])


def _is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy") and variable.lower() != "no_proxy"


def _entries(value: str) -> list[str]:
    """Return the entries of NO_PROXY, single IPv6 addresses as httpx reads them: without more."""
    entries = re.split(r"[,\s]+", value.strip())
    bare = [one.removesuffix("/128").removeprefix("[").removesuffix("]") for one in entries]
    pairs = zip(entries, bare, strict=True)
    return [plain if _is_ipv6(plain) else entry for entry, plain in pairs if entry]


def _is_ipv6(text: str) -> bool:
    try:
        return ip_address(text).version == 6
    except ValueError:
        return False


def faults(environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the settings of proxies, a line a variable, with the remedy.

    The libraries would end in errors that do not name the variable.
    """
    found = []
    for name in sorted(environment):
        value = environment[name].strip()
        if value and name.lower() in READ and (fault := _proxy_fault(value)):
            found.append(f"{name} is '{_shown(value)}', {fault}, or unset {name}")
        if name in EXCEPTIONS:
            found += [f"{name} has '{_shown(entry)}', {fault}" for entry, fault in _unread(value)]
    return found


def _proxy_fault(value: str) -> str:
    """Return why a value is no address of a proxy, and what to write; "" where it is one."""
    scheme, separator, rest = value.partition("://")
    if not separator:
        return f"which has no scheme: write http://{_shown(value)}"
    if scheme.lower() not in SCHEMES:
        return f"which is no proxy's address: write {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}"
    try:
        parsed = urlsplit(value)
        host, _ = parsed.hostname or "", parsed.port
    except ValueError:
        host = ""
    if not _HOST.fullmatch(host) or not rest.isprintable() or not _takes(value):
        return f"which has no host and port that can be read: write {scheme}://host:port"
    if scheme.lower().startswith("socks") and not find_spec("socksio"):
        return "and proxies of this kind need the package socksio: pip install 'httpx[socks]'"
    return ""


def _takes(address: str) -> bool:
    """Return whether httpx reads an address; its rules for names and numbers are stricter."""
    import httpx  # imported here: it is slow, and few machines have a proxy

    try:
        return bool(httpx.URL(address).host)
    except (httpx.InvalidURL, ValueError):
        return False


def _unread(value: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of NO_PROXY that httpx, which Prefect uses, ends with an error at."""
    for entry in _entries(value):
        if _is_ipv6(entry):
            continue
        pattern = entry if "://" in entry else f"all://*{entry}"  # as httpx makes one of it
        if _EXCEPTION.fullmatch(entry) and entry.isprintable() and _takes(pattern):
            continue
        remedy = "name its addresses one by one" if _is_network(entry) else "correct it"
        yield entry, f"which cannot be read: {remedy}, or leave it out"


def _is_network(text: str) -> bool:
    try:
        return bool(ip_network(text, strict=False))
    except ValueError:
        return False


def _shown(value: str) -> str:
    """Return a value without the user and the password in it, as one printable line."""
    head, separator, rest = value.rpartition("@")
    scheme = re.match(r"\w+://", head)
    plain = f"{scheme[0] if scheme else ''}***@{rest}" if separator else rest
    return plain if plain.isprintable() else ascii(plain)[1:-1]
