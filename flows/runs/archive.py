"""Pack files into one stream and unpack them: a tar archive that follows from names and contents.

Tar, because it is written and read from front to back: nothing of it is held in memory, no copy is
needed on disk, and an object store sees one upload. A zip has its directory at the end, so that
reading it would take many ranged requests.

The headers are those of ``tarfile``. Its class ``TarFile`` is not used: it keeps a list of all
members, and reads links, sparse files and extended headers of any size. Here a header counts only
if it is the very one that ``write`` makes for this name and this size.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
CHUNK = 2**20  # bytes that are in memory at a time
LONGEST = 2000  # bytes of a name with its folders
Member = tuple[str, Path]  # the name in the archive, and the file


def size(files: Iterable[Member]) -> int:
    """Return the bytes of the archive that ``write`` makes of these files."""
    lengths = ((name, file.stat().st_size) for name, file in files)
    return sum(
        len(_header(name, length)) + length + _gap(length) for name, length in lengths
    ) + len(END)


def write(stream: IO[bytes], files: Iterable[Member]) -> None:
    """Write an archive of ``files``. Raises ValueError for a file that changes meanwhile."""
    for name, file in files:
        length = file.stat().st_size
        stream.write(_header(name, length))
        with file.open("rb") as source:
            copy(source, stream, length)
        stream.write(bytes(_gap(length)))
    stream.write(END)


def members(stream: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield the name and the size of each file, whose bytes are then to be read from ``stream``.

    Names are those of the writer, and may lead anywhere. Raises ValueError for anything that
    ``write`` would not have written.
    """
    while (head := _exactly(stream, BLOCK)) != bytes(BLOCK):
        name, length = _read_header(stream, head)
        yield name, length
        if any(_exactly(stream, _gap(length))):
            raise ValueError("its archive has something between two files")
    if any(_exactly(stream, BLOCK)) or stream.read(1):
        raise ValueError("its archive goes on after its end")


def copy(source: IO[bytes], target: IO[bytes], length: int) -> None:
    """Copy ``length`` bytes. Raises ValueError where there are fewer."""
    while length:
        chunk = source.read(min(length, CHUNK))
        if not chunk:
            raise ValueError("a file or its archive is cut short")
        target.write(chunk)
        length -= len(chunk)


def _header(name: str, length: int) -> bytes:
    """Return the blocks before the content of a file: two more for a name of over 100 bytes."""
    if (size := len(name.encode("utf-8", "surrogateescape"))) >= LONGEST:
        raise ValueError(f"an archive takes no name of {size} bytes: {ascii(name)[:80]}")
    info = tarfile.TarInfo(name)  # of nobody, and of no time
    info.size = length
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _read_header(stream: IO[bytes], head: bytes) -> tuple[str, int]:
    try:
        info = _info(head)
        name = info.name
        if info.type == tarfile.GNUTYPE_LONGNAME:
            if not 0 < info.size <= LONGEST:
                raise ValueError(f"its archive has a name of {info.size} bytes")
            text = _exactly(stream, info.size + _gap(info.size))
            head += text + _exactly(stream, BLOCK)
            name = text[: info.size - 1].decode("utf-8", "surrogateescape")
            info = _info(head[-BLOCK:])
    except tarfile.TarError as error:
        raise ValueError(f"its archive is damaged: {error}") from None
    if info.size < 0 or head != _header(name, info.size):
        raise ValueError(f"its archive has something else than a file: {ascii(name)[:80]}")
    return name, info.size


def _info(block: bytes) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _exactly(stream: IO[bytes], length: int) -> bytes:
    """Read ``length`` bytes, at most a few blocks. Raises ValueError where there are fewer."""
    content = b""
    while len(content) < length:
        part = stream.read(length - len(content))
        if not part:
            raise ValueError("its archive is cut short")
        content += part
    return content


def _gap(length: int) -> int:
    """Return the zeros that fill the last block of a content."""
    return -length % BLOCK
