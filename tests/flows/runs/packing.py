"""The archives of a mirror, read and written with tarfile, for tests that look into them."""

import io
import tarfile

ARCHIVE = "artifacts.tar"


def contents(file):
    """Return what an archive has: name -> bytes."""
    opened = {"fileobj": file} if isinstance(file, io.BytesIO) else {"name": file}
    with tarfile.open(**opened) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive}


def pack(file, contents):
    """Write an archive as the mirror does: name -> bytes."""
    write(file, [(plain(name, len(content)), content) for name, content in contents.items()])


def plain(name, size):
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def write(file, members, form=tarfile.GNU_FORMAT):
    """Write an archive of any members: pairs of a TarInfo and bytes."""
    packed = io.BytesIO()
    for info, content in members:
        packed.write(info.tobuf(form, "utf-8", "surrogateescape"))
        packed.write(content + bytes(-len(content) % 512))
    file.write_bytes(packed.getvalue() + bytes(1024))


def change(file, changed):
    """Change the contents of an archive: name -> bytes, or None for a member that goes."""
    kept = contents(file) | changed
    pack(file, {name: content for name, content in kept.items() if content is not None})
