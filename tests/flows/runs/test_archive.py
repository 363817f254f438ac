"""Archives of any files, against tarfile."""

import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.runs import archive
from tests.examples import examples

PART = st.text("ab\u00e9\u4e2d. ", min_size=1, max_size=60).filter(lambda part: set(part) != {"."})
NAMES = st.lists(PART, min_size=1, max_size=4).map("/".join)
FILES = st.dictionaries(NAMES, st.binary(max_size=1100), max_size=5)


def packed(contents):
    """Return the archive of these contents."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, (name, content) in enumerate(contents.items()):
            (Path(folder) / str(number)).write_bytes(content)
            files.append((name, Path(folder) / str(number)))
        stream = io.BytesIO()
        archive.write(stream, files)
        assert archive.size(files) == stream.tell()
        return stream.getvalue()


def unpacked(content):
    stream, found = io.BytesIO(content), {}
    for name, size in archive.members(stream):
        found[name] = stream.read(size)
    return found


@given(FILES)
@examples(60, deadline=None)
def test_what_was_packed_is_unpacked_by_us_and_by_tar(contents):
    content = packed(contents)
    assert unpacked(content) == contents
    with tarfile.open(fileobj=io.BytesIO(content)) as theirs:
        assert {info.name: theirs.extractfile(info).read() for info in theirs} == contents


@given(st.integers(0, 2**20), st.integers(1, 255))
@examples(200, deadline=None)
def test_damage_is_found_or_changes_what_is_unpacked(position, change):
    """Contents and long names have no checksum here; the digest of an artifact is of both."""
    contents = {"a": b"x" * 700, "b/" + "c" * 150: b"", "d": b"y"}
    content = bytearray(packed(contents))
    content[position % len(content)] ^= change
    try:
        found = unpacked(bytes(content))
    except ValueError:
        return
    assert found != contents
    assert [len(each) for each in found.values()] == [700, 0, 1]


def test_file_that_shrinks_while_it_is_packed_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 2000)

    class Shrinking(io.BytesIO):
        def write(self, content):
            (tmp_path / "file").write_bytes(b"")
            return super().write(content)

    with pytest.raises(ValueError, match="cut short"):
        archive.write(Shrinking(), [("file", tmp_path / "file")])


def test_name_that_no_reader_takes_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no name of"):
        archive.write(io.BytesIO(), [("x" * 3000, tmp_path / "file")])
