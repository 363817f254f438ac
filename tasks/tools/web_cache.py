"""Answers of the web on disk, found by what was asked, and shared by all runs of a checkout.

Only good answers are kept, for as long as the file lies there: remove the folder to ask anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = "BEAMLINE_WEB_CACHE"  # environment variable: another folder than this one
DEFAULT = Path(".beamline/cache")


class Cache:
    """A folder with one file an answer; its name is a digest of what was asked.

    Any number of processes may use a folder: files appear whole, by a rename.
    """

    def __init__(self, tool: str) -> None:
        self.folder = Path(os.environ.get(FOLDER) or DEFAULT) / tool

    def find(self, *key_parts: Any) -> Any:
        """Return the answer that is kept for a key of these values of JSON, or None."""
        try:
            entry = json.loads(self._file(key_parts).read_text())
            return entry["answer"] if entry["asked"] == list(key_parts) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent or damaged: it is asked for again

    def keep(self, answer: Any, *key_parts: Any) -> None:
        """Keep an answer, a value of JSON."""
        file = self._file(key_parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"asked": list(key_parts), "answer": answer})
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=".", suffix=".partial", delete=False
        ) as partial:
            partial.write(text)
        Path(partial.name).replace(file)

    def _file(self, key_parts: tuple[Any, ...]) -> Path:
        name = hashlib.blake2b(json.dumps(key_parts).encode(), digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name}.json"
