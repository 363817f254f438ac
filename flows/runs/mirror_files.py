"""Send folders of the ledger to a mirror and fetch them: checked names, sizes and signatures.

A folder is two objects there: its record, and an archive of its artifacts (flows/runs/archive.py),
because many small objects are slow. With a key there is a third one, the signature. Once artifacts
were retired, there is the mark RETIRED, and the archive is one of what stays: it has another name,
and the larger one is removed after the mark has been sent. At every moment the record that is there
agrees with an archive that is whole. Archives of single artifacts would save sending again what
stays, which is little and seldom (of an update the table of its tokens, and the weights of one
iteration in so many), but would be two to six objects for every sub-step.

``fs`` is a filesystem of fsspec, and ``root`` the folder of the ledger in it. Each function raises
RefusedError before it follows a link, or reads or writes what does not belong to the folder. Of an
archive, memory holds as much as the filesystem buffers: 50 MB for S3.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from flows.runs import archive
from tasks.ledger import artifacts, records
from tasks.ledger.artifacts import RECORD, Record
from tasks.ledger.records import RETIRED, SIGNATURE

LARGEST = 2**24  # bytes of a record, a mark or a list of signatures
ARCHIVE = "artifacts"  # begins the name of an archive
Filesystem = Any  # of fsspec
Listing = Mapping[str, int | None]  # the objects of a folder: name -> bytes, None for no file


class RefusedMirrorError(ValueError):
    """What a mirror has is not what it should be; the message says why."""


def name_of(folder: Path) -> str:
    """Return the name of a folder in the ledger, which it has in a mirror, too."""
    return folder.relative_to(artifacts.ROOT).as_posix()


def archive_name(mark: bytes) -> str:
    """Return the name of the archive of what the content of RETIRED does not name."""
    return f"{ARCHIVE}-{hashlib.sha256(mark).hexdigest()[:16]}.tar" if mark else f"{ARCHIVE}.tar"


def _at(fs: Filesystem, root: str, name: str) -> str:
    """Return the path of ``name`` in the mirror; RefusedError for a link on the way to it."""
    root = posixpath.normpath(root)
    parts = name.split("/")
    if islink := getattr(fs, "islink", None):  # a folder of this machine may have links
        for length in range(1, len(parts) + 1):
            if islink(path := "/".join([root, *parts[:length]])):
                raise RefusedMirrorError(f"{path} is a link")
    return f"{root}/{name}"


# ---------------------------------------------------------------- send


def send(fs: Filesystem, root: str, name: str, folder: Path, key: bytes) -> None:
    """Make the folder ``name`` in the mirror what ``folder`` is; remove it if that has no record.

    Another record there goes first, and the new one comes last. key: what to sign with; b"" for no
    signature. Raises RefusedError for a folder that is removed here while it is sent, too.
    """
    try:
        _send(fs, root, name, folder, key)
    except FileNotFoundError as error:  # of this folder, or of the mirror
        if Path(error.filename or "").is_relative_to(folder):
            raise RefusedMirrorError(f"{error.filename} was removed meanwhile") from None
        raise


def _send(fs: Filesystem, root: str, name: str, folder: Path, key: bytes) -> None:
    there = _at(fs, root, name)
    listed = _listed(fs, there)
    files = _members(folder) if os.path.lexists(folder / RECORD) else None
    if files is None:
        remove(fs, root, name)
        return
    content, mark = (folder / RECORD).read_bytes(), _content(folder / RETIRED)
    new, known = archive_name(mark), _has(fs, there, listed, content)
    if listed and not known:
        remove(fs, root, name)
        listed = {}
    if not known:
        fs.makedirs(there, exist_ok=True)
    if files and listed.get(new) != archive.size(files):  # one that was cut is smaller
        _send_archive(fs, root, f"{name}/{new}", files)
    if key:  # a folder that has been there counts before and after the next lines
        lines = [sign(key, name, content, each) for each in sorted({b"", mark})]
        _write(fs, root, f"{name}/{SIGNATURE}", b"\n".join(lines))
    if mark:
        _write(fs, root, f"{name}/{RETIRED}", mark)
    if not known:
        _write(fs, root, f"{name}/{RECORD}", content)
    for other in listed:
        if other.startswith(ARCHIVE) and (other != new or not files):
            remove(fs, root, f"{name}/{other}")


def _send_archive(fs: Filesystem, root: str, name: str, files: Sequence[archive.Member]) -> None:
    try:
        with _open(fs, root, name) as stream:
            archive.write(stream, files)
    except ValueError as error:
        raise RefusedMirrorError(str(error)) from None


def _has(fs: Filesystem, there: str, listed: Listing, content: bytes) -> bool:
    try:
        return _read(fs, there, RECORD, listed) == content
    except RefusedMirrorError:
        return False


def _members(folder: Path) -> list[archive.Member]:
    """Return what the archive of a folder with a record has: its artifacts that are not retired."""
    try:
        record = records.load(folder)
    except ValueError as error:
        raise RefusedMirrorError(f"its record is damaged: {error}") from None
    entries = record["artifacts"].values() if record else []
    paths = [folder / records.file_name(each) for each in entries]
    existing_paths = [path for path in [*paths, folder / RETIRED] if os.path.lexists(path)]
    for path in existing_paths:
        if odd := artifacts.irregular(path):
            raise RefusedMirrorError(f"{odd} is a link or no file")
    files = [file for path in sorted(paths) if path.exists() for file in artifacts.files_of(path)]
    return [(file.relative_to(folder).as_posix(), file) for file in files]


def _open(fs: Filesystem, root: str, name: str) -> IO[bytes]:
    """Open an object for writing; RefusedError for a link on the way to it."""
    stream: IO[bytes] = fs.open(_at(fs, root, name), "wb")
    return stream


def _write(fs: Filesystem, root: str, name: str, content: bytes) -> None:
    with _open(fs, root, name) as stream:
        stream.write(content)


def remove(fs: Filesystem, root: str, name: str) -> None:
    """Remove a file or a folder from the mirror, its record first."""
    there = _at(fs, root, name)
    fs.invalidate_cache()
    if fs.exists(f"{there}/{RECORD}"):
        fs.rm_file(f"{there}/{RECORD}")
    if fs.exists(there):
        fs.rm(there, recursive=True)


# ---------------------------------------------------------------- receive


def receive(fs: Filesystem, root: str, folder: Path, partial: Path, key: bytes) -> Record | None:
    """Copy ``folder`` from the mirror into ``partial``; return its record, or None without one.

    Raises RefusedError for one that is malformed, incomplete, damaged or not signed by ``key``.
    """
    there = _at(fs, root, name_of(folder))
    listed = _listed(fs, there)
    if not (content := _read(fs, there, RECORD, listed)):
        return None
    mark = _read(fs, there, RETIRED, listed)
    if key:
        signatures = _read(fs, there, SIGNATURE, listed)
        _check_signature(signatures, name_of(folder), key, content, mark)
    try:
        record = records.parse(content, folder)
    except ValueError as error:
        raise RefusedMirrorError(str(error)) from None
    (partial / RECORD).write_bytes(content)
    if mark:
        (partial / RETIRED).write_bytes(mark)
    dropped = records.names_of(mark)
    entries = [artifact for name, artifact in record["artifacts"].items() if name not in dropped]
    sizes = {records.file_name(artifact): artifact["size"] for artifact in entries}
    if any(artifact["digest"] != artifacts.EMPTY_FOLDER for artifact in entries):
        name = archive_name(mark)
        _check_size(name, listed, sizes)
        _fetch(fs, f"{there}/{name}", partial, sizes)
    for artifact in entries:
        path = partial / records.file_name(artifact)
        if artifact["digest"] == artifacts.EMPTY_FOLDER and not path.exists():
            path.mkdir()  # archives have only files
    if fault := records.damaged(partial, record):
        raise RefusedMirrorError(f"{fault.name} differs from its record")
    return record


def names_in(fs: Filesystem, root: str, name: str) -> list[str]:
    """List the plain names in a folder of the mirror, sorted."""
    fs.invalidate_cache()
    there = _at(fs, root, name)
    paths = fs.ls(there, detail=False) if fs.exists(there) else []
    names = [path.rstrip("/").rpartition("/")[2] for path in paths if isinstance(path, str)]
    return sorted(filter(records.is_plain, names))


def _check_size(name: str, listed: Listing, sizes: Mapping[str, int]) -> None:
    """Raise RefusedError unless an archive can have artifacts of these sizes, and has room here."""
    packed = listed.get(name)
    if packed is None:
        raise RefusedMirrorError(f"{name} is missing, a link or no file")
    if packed < sum(sizes.values()):
        raise RefusedMirrorError(f"{name} is shorter than what it should have")
    if packed > shutil.disk_usage(artifacts.ROOT).free:  # each file takes a block, or more, of it
        raise RefusedMirrorError(f"its {packed} bytes do not fit on the disk")


def _fetch(fs: Filesystem, path: str, folder: Path, sizes: Mapping[str, int]) -> None:
    """Unpack an archive; RefusedError unless it has artifacts of these sizes and nothing else."""
    try:
        with fs.open(path, "rb") as stream:
            _unpack(stream, folder, sizes)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        # removed meanwhile, or files and folders of the same name
        raise RefusedMirrorError(
            f"its archive cannot be unpacked: {type(error).__name__}"
        ) from None
    except RefusedMirrorError:
        raise
    except ValueError as error:
        raise RefusedMirrorError(str(error)) from None


def _unpack(stream: IO[bytes], folder: Path, sizes: Mapping[str, int]) -> None:
    left = dict(sizes)
    for name, size in archive.members(stream):
        parts = name.split("/")
        if not all(map(records.is_part, parts)) or parts[0] not in left:
            raise RefusedMirrorError(f"its archive has {ascii(name)[: records.SHOWN]}")
        left[parts[0]] -= size
        if left[parts[0]] < 0:
            raise RefusedMirrorError(f"{parts[0]} has more than {sizes[parts[0]]} bytes")
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            archive.copy(stream, file, size)
    for name, lacking in left.items():
        if lacking:
            raise RefusedMirrorError(f"{name} lacks {lacking} bytes")


def _listed(fs: Filesystem, there: str) -> Listing:
    """Return what a folder of the mirror has, by one request: name -> bytes, None for no file."""
    fs.invalidate_cache()
    try:
        objects = fs.ls(there, detail=True)
    except FileNotFoundError:
        return {}
    return {
        about["name"].rstrip("/").rpartition("/")[2]: about["size"] if _is_file(about) else None
        for about in objects
    }


def _is_file(about: Mapping[str, Any]) -> bool:
    is_plain = about.get("type") == "file" and not about.get("islink")
    return is_plain and type(about.get("size")) is int


def _read(fs: Filesystem, there: str, name: str, listed: Listing) -> bytes:
    """Return the content of a small object of a folder; b"" for a missing one."""
    if name not in listed:
        return b""
    size = listed[name]
    if size is None:
        raise RefusedMirrorError(f"{name} is a link or no file")
    if size > LARGEST:
        raise RefusedMirrorError(f"{name} has more than {LARGEST} bytes")
    with fs.open(f"{there}/{name}", "rb") as stream:
        return bytes(stream.read(LARGEST))


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


# ---------------------------------------------------------------- signatures


def sign(key: bytes, name: str, *contents: bytes) -> bytes:
    """Return the HMAC-SHA256 of a name and some contents, as 64 hexadecimal letters."""
    parts = [name, *(hashlib.sha256(content).hexdigest() for content in contents)]
    return hmac.new(key, "\n".join(parts).encode(), "sha256").hexdigest().encode()


def _check_signature(signatures: bytes, name: str, key: bytes, content: bytes, mark: bytes) -> None:
    """Raise RefusedError unless record and mark are signed by ``key``."""
    right = sign(key, name, content, mark)
    if not any(hmac.compare_digest(right, line) for line in signatures.split(b"\n")):
        raise RefusedMirrorError("it has no signature by this key")
