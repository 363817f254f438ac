"""Keep what parsing a source file gives, across processes: a run parses hundreds, again and again.

The entries lie in the user's cache folder, a line each, and are found by a digest of the whole text
of a file. A half-written or foreign line is ignored; without the folder every file is parsed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

KEY_LETTERS = 32
MOST_BYTES = 2**24  # of a file, which then begins anew

Parsed = tuple[tuple[str, ...], str]  # the dotted names that a source may import, its code's digest


def key_of(source: str, described: bool) -> str:
    """Return what an entry is found by. Hexadecimal, KEY_LETTERS letters."""
    text = f"{described}\n{source}".encode()
    return hashlib.blake2b(text, digest_size=KEY_LETTERS // 2).hexdigest()


def find(key: str, parser: str) -> Parsed | None:
    """Return the entry of a key, or None; ``parser``: a digest of the code that parses."""
    return _entries(_file(parser)).get(key)


def keep(key: str, parser: str, parsed: Parsed) -> None:
    """Add an entry; a folder that cannot be written only costs time."""
    names, digest = parsed
    file = _file(parser)
    _entries(file)[key] = parsed
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if not file.exists() or file.stat().st_size < MOST_BYTES else "w"
        with file.open(mode) as lines:  # one write: appended as a whole
            lines.write(f"{key}\t{digest}\t{' '.join(names)}\n")


def cache_folder() -> Path:
    """Return this project's folder in the user's cache."""
    home = Path(os.environ.get("HOME", os.devnull))
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "beamline"


def _file(parser: str) -> Path:
    version = "".join(map(str, sys.version_info[:2]))
    return cache_folder() / f"parsed-{version}-{parser}.tsv"


@functools.cache
def _entries(file: Path) -> dict[str, Parsed]:
    try:
        lines = file.read_text().splitlines(keepends=True)
    except (OSError, ValueError):
        return {}
    entries = {}
    for line in lines:
        key, *rest = line.removesuffix("\n").split("\t")
        if line.endswith("\n") and len(key) == KEY_LETTERS and len(rest) == 2:
            entries[key] = tuple(rest[1].split()), rest[0]
    return entries
