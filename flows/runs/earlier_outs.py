"""Keep the outs of an earlier run until a stage has made new ones.

DVC deletes the outs of a stage before it runs it. Of those that git keeps, such as the table of the
evaluation, there is no copy in DVC's cache, and a stage that fails, is refused or killed would
leave nothing. So they wait beside their place, under a hidden name in the same folder, and are put
back unless the stage succeeds. A record in ``HOME`` lists them. Its lock is held while the stage
runs; it ends with the process, so the next call sees what a kill has left, and puts it back.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flows.host import files

HOME = Path(".beamline/earlier_outs")  # a record for each stage that has run; empty afterwards


@contextmanager
def preserved(stage: str, outs: Sequence[str], root: Path) -> Iterator[None]:
    """Move the outs of a stage aside during the block; put them back if it raises.

    ``outs``: paths relative to ``root``. No other process may run the stage meanwhile.
    """
    (root / HOME).mkdir(parents=True, exist_ok=True)
    with (root / HOME / f"{stage}.json").open("a+") as record:
        fcntl.flock(record, fcntl.LOCK_EX)  # ``put_back`` may hold it for a moment
        _settle(record, root)
        _write(record, outs, done=False)
        try:
            for out in outs:
                if os.path.lexists(root / out):
                    (root / out).rename(_aside(root / out))
            yield
        except BaseException:
            if restored := _settle(record, root):
                print(f"{stage} made nothing new: {_few(restored)} of the earlier run stay")
            raise
        _write(record, outs, done=True)  # from here on, the new ones count
        _settle(record, root)


def put_back(root: Path) -> list[str]:
    """Put back what stages that were killed have left aside; return the paths of these outs."""
    restored: list[str] = []
    for file in sorted((root / HOME).glob("*.json")):
        if file.stat().st_size:
            with file.open("a+") as record:
                restored += _settle(record, root) if files.lock(record) else []
    return restored


def waiting(root: Path) -> list[str]:
    """List the outs that ``put_back`` would put back."""
    outs: list[str] = []
    for file in sorted((root / HOME).glob("*.json")):
        with file.open("a+") as record:
            if files.lock(record):
                listed, done = _read(record)
                outs += [out for out in listed if not done and _aside(root / out).exists()]
    return outs


def _settle(record: IO[str], root: Path) -> list[str]:
    """Put back the outs of a locked record, or drop them if the stage was done; empty the record.

    Returns what has been put back.
    """
    outs, done = _read(record)
    aside = [out for out in outs if os.path.lexists(_aside(root / out))]
    for out in aside:
        if done:
            _remove(_aside(root / out))
        else:
            _remove(root / out)
            _aside(root / out).rename(root / out)
    record.truncate(0)
    return [] if done else aside


def _aside(path: Path) -> Path:
    """Return where an out waits: a name in its folder, so that a rename is enough."""
    return path.with_name(f".{path.name}.earlier")


def _read(record: IO[str]) -> tuple[list[str], bool]:
    record.seek(0)
    try:
        content = json.load(record)
        return content["outs"], content["done"]
    except ValueError:  # empty, or its writer was killed before it had moved anything
        return [], False


def _write(record: IO[str], outs: Sequence[str], *, done: bool) -> None:
    record.truncate(0)
    json.dump({"outs": list(outs), "done": done}, record)
    record.flush()
    os.fsync(record.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _few(outs: Sequence[str]) -> str:
    more = f" and {len(outs) - 3} more" if len(outs) > 3 else ""
    return ", ".join(outs[:3]) + more
