"""Notice that files of ``own/`` change while a stage runs.

They decide results, and what has been loaded of them stays as it was: a sub-step that began with
one version must not be kept under the key of another.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from tasks.extensions.named import OWN

SHOWN = 5  # files that are named in a message

Seen = tuple[int, int, str]  # size, time of change, digest


class OwnFiles:
    """The files of ``own/`` as they are now, to compare later ones with."""

    def __init__(self) -> None:
        self.before = {file: _seen(file) for file in _files()}

    def check(self) -> None:
        """Raise ValueError where a file is another one than before, or is gone."""
        changed = [str(file) for file, seen in self.before.items() if _seen(file, seen) != seen]
        if changed:
            raise ValueError(
                f"{', '.join(changed[:SHOWN])} changed while it ran, with the code that was loaded "
                "before: what ended before stays in the ledger; run the command again, which "
                "computes what the change decides"
            )

    def added(self) -> list[str]:
        """Return the files that were not there before."""
        return sorted(str(file) for file in _files() if file not in self.before)


def _files() -> list[Path]:
    """Return the files that decide results."""
    with suppress(OSError):  # one is removed just now
        files = [file for file in OWN.rglob("*") if file.is_file() and file.suffix != ".pyc"]
        return [file for file in files if file != OWN / "README.md"]
    return []


def _seen(file: Path, before: Seen | None = None) -> Seen | None:
    """Return what a file is, None where it is gone; ``before`` where its contents are the same."""
    with suppress(OSError):
        about = file.stat()
        if before and before[:2] == (about.st_size, about.st_mtime_ns):
            return before
        digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        if before and before[2] == digest:
            return before
        return about.st_size, about.st_mtime_ns, digest
    return None
