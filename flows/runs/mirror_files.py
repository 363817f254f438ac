"""Copy folders of the ledger to a mirror and back: checked names, sizes and signatures.

``fs`` is a filesystem of fsspec, and ``root`` the folder of the ledger in it. Each function raises
RefusedError before it follows a link, or reads or writes what does not belong to the folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import posixpath
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.ledger import artifacts, records
from tasks.ledger.artifacts import RECORD, Record
from tasks.ledger.records import RETIRED, SIGNATURE

LARGEST = 2**24  # bytes of a record, a mark or a list of signatures
Filesystem = Any  # of fsspec


class RefusedError(ValueError):
    """What a mirror has is not what it should be; the message says why."""


def name_of(place: Path) -> str:
    """Return the name of a folder in the ledger, which it has in a mirror, too."""
    return place.relative_to(artifacts.ROOT).as_posix()


def _at(fs: Filesystem, root: str, name: str) -> str:
    """Return the path of ``name`` in the mirror; RefusedError for a link on the way to it."""
    root = posixpath.normpath(root)
    parts = name.split("/")
    if islink := getattr(fs, "islink", None):  # a folder of this machine may have links
        for length in range(1, len(parts) + 1):
            if islink(path := "/".join([root, *parts[:length]])):
                raise RefusedError(f"{path} is a link")
    return f"{root}/{name}"


# ---------------------------------------------------------------- send


def send(fs: Filesystem, root: str, place: Path, key: bytes) -> None:
    """Replace the folder of ``place`` in the mirror; the record is sent last.

    key: what to sign with; b"" for no signature.
    """
    names = _own_files(place)
    there = _at(fs, root, name_of(place))
    remove(fs, root, name_of(place))
    for folder in sorted({f"{there}/{name}".rpartition("/")[0] for name in names}):
        fs.makedirs(folder, exist_ok=True)
    _send_signatures(fs, root, place, key, [_content(place / RETIRED)])
    for name in names:
        fs.put_file(str(place / name), f"{there}/{name}")


def _own_files(place: Path) -> list[str]:
    """Return the names of what belongs to a folder with a record; the record is the last."""
    try:
        record = records.load(place)
    except ValueError as error:
        raise RefusedError(f"its record is damaged: {error}") from None
    made = record["artifacts"].values() if record else []
    paths = [place / records.file_name(each) for each in made]
    found = [path for path in [*paths, place / RETIRED] if os.path.lexists(path)]
    for path in found:
        if odd := artifacts.irregular(path):
            raise RefusedError(f"{odd} is a link or no file")
    files = [file for path in found for file in artifacts.files_of(path)]
    return [file.relative_to(place).as_posix() for file in [*files, place / RECORD]]


def thin(fs: Filesystem, root: str, place: Path, names: Iterable[str], key: bytes) -> None:
    """Send the mark RETIRED of ``place``, and remove these files and folders from the mirror."""
    there = _at(fs, root, f"{name_of(place)}/{RETIRED}")
    marks = [b"", _content(place / RETIRED)]  # the folder counts before and after the next lines
    _send_signatures(fs, root, place, key, marks)
    fs.put_file(str(place / RETIRED), there)
    for name in names:
        remove(fs, root, f"{name_of(place)}/{name}")


def remove(fs: Filesystem, root: str, name: str) -> None:
    """Remove a file or a folder from the mirror, its record first."""
    there = _at(fs, root, name)
    fs.invalidate_cache()
    if fs.exists(f"{there}/{RECORD}"):
        fs.rm_file(f"{there}/{RECORD}")
    if fs.exists(there):
        fs.rm(there, recursive=True)


# ---------------------------------------------------------------- receive


def receive(fs: Filesystem, root: str, place: Path, folder: Path, key: bytes) -> Record | None:
    """Copy the folder of ``place`` into ``folder`` and return its record; None without one.

    Raises RefusedError for one that is malformed, incomplete, damaged or not signed by ``key``.
    """
    fs.invalidate_cache()
    there = _at(fs, root, name_of(place))
    if not fs.exists(f"{there}/{RECORD}"):
        return None
    content, mark = _read(fs, f"{there}/{RECORD}"), _read(fs, f"{there}/{RETIRED}")
    if key:
        _check_signature(fs, there, name_of(place), key, content, mark)
    try:
        record = records.parse(content, place)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    (folder / RECORD).write_bytes(content)
    if mark:
        (folder / RETIRED).write_bytes(mark)
    dropped = records.names_of(mark)
    kept = [made for name, made in record["artifacts"].items() if name not in dropped]
    sizes = {records.file_name(made): made["size"] for made in kept}
    names = _files(fs, there, sizes)
    empty = {records.file_name(e) for e in kept if e["digest"] == artifacts.EMPTY_FOLDER}
    for name in empty - {name.partition("/")[0] for name in names}:
        (folder / name).mkdir()  # object stores list only files
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(f"{there}/{name}", str(target))
    if fault := records.damaged(folder, record):
        raise RefusedError(f"{fault.name} differs from its record")
    return record


def names_in(fs: Filesystem, root: str, name: str) -> list[str]:
    """List the plain names in a folder of the mirror, sorted."""
    fs.invalidate_cache()
    there = _at(fs, root, name)
    found = fs.ls(there, detail=False) if fs.exists(there) else []
    names = [path.rstrip("/").rpartition("/")[2] for path in found if isinstance(path, str)]
    return sorted(filter(records.is_plain, names))


def _files(fs: Filesystem, there: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the files below ``there`` that belong to artifacts of these sizes.

    Raises RefusedError unless each artifact has as many bytes as it should, and the disk has room.
    """
    names = [_relative(path, there) for path in fs.find(there)]
    wanted = [name for name in names if name.partition("/")[0] in sizes]
    found = dict.fromkeys(sizes, 0)
    for name in wanted:
        found[name.partition("/")[0]] += _size(fs, f"{there}/{name}")
    for name, size in sizes.items():
        if found[name] != size:
            raise RefusedError(f"{name} has {found[name]} bytes, and should have {size}")
    if {parent.as_posix() for name in wanted for parent in Path(name).parents} & set(wanted):
        raise RefusedError("a file and a folder have the same name")
    if sum(sizes.values()) > shutil.disk_usage(artifacts.ROOT).free:
        raise RefusedError(f"its {sum(sizes.values())} bytes do not fit on the disk")
    return wanted


def _relative(path: object, there: str) -> str:
    """Return the name of an object below ``there``; RefusedError if it leads out of there."""
    if not isinstance(path, str) or not path.startswith(f"{there}/"):
        raise RefusedError("it lists what is elsewhere")
    name = path.removeprefix(f"{there}/")
    if not all(map(records.is_part, name.split("/"))):
        raise RefusedError(f"{ascii(name)[: records.SHOWN]} cannot be the name of a file in it")
    return name


def _read(fs: Filesystem, path: str) -> bytes:
    """Return the content of a small object of the mirror; b"" for a missing one."""
    if not fs.exists(path):
        return b""
    if _size(fs, path) > LARGEST:
        raise RefusedError(f"{posixpath.basename(path)} has more than {LARGEST} bytes")
    with fs.open(path, "rb") as stream:
        return bytes(stream.read(LARGEST))


def _size(fs: Filesystem, path: str) -> int:
    """Return the bytes of an object of the mirror; RefusedError for a link and for no file."""
    about = fs.info(path)
    if about.get("type") != "file" or about.get("islink") or type(about.get("size")) is not int:
        raise RefusedError(f"{posixpath.basename(path)} is a link or no file")
    return int(about["size"])


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


# ---------------------------------------------------------------- signatures


def sign(key: bytes, name: str, *contents: bytes) -> bytes:
    """Return the HMAC-SHA256 of a name and some contents, as 64 hexadecimal letters."""
    parts = [name, *(hashlib.sha256(content).hexdigest() for content in contents)]
    return hmac.new(key, "\n".join(parts).encode(), "sha256").hexdigest().encode()


def _send_signatures(
    fs: Filesystem, root: str, place: Path, key: bytes, marks: Sequence[bytes]
) -> None:
    """Write the object SIGNATURE: a line for the record with each of these contents of RETIRED."""
    if not key:
        return
    content, name = (place / RECORD).read_bytes(), name_of(place)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(sign(key, name, content, mark) for mark in marks))
        file.flush()
        fs.put_file(file.name, _at(fs, root, f"{name}/{SIGNATURE}"))


def _check_signature(
    fs: Filesystem, there: str, name: str, key: bytes, content: bytes, mark: bytes
) -> None:
    """Raise RefusedError unless record and mark are signed by ``key``."""
    right = sign(key, name, content, mark)
    lines = _read(fs, f"{there}/{SIGNATURE}").split(b"\n")
    if not any(hmac.compare_digest(right, line) for line in lines):
        raise RefusedError("it has no signature by this key")
