import subprocess
import sys

import pytest

from flows.host import files
from tests import toy_project as toy

HOLD = """
import sys
from pathlib import Path
from flows.host import files
with files.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_ends_with_its_killed_holder(tmp_path):
    path = tmp_path / "folder/lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=toy.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with path.open() as file:
            assert files.is_locked(file)
            assert not files.lock(file)
            holder.kill()
            holder.wait()
            assert not files.is_locked(file)
            assert files.lock(file)
    with files.locked(path), path.open() as another:
        assert not files.lock(another)


def test_looking_at_a_lock_does_not_take_it(tmp_path):
    path = tmp_path / "lock"
    path.write_text("what it is for")
    with path.open() as one, path.open() as other:
        assert not files.is_locked(one)
        assert not files.is_locked(other)
        assert files.lock(other)
        assert files.is_locked(one)
        assert one.read() == "what it is for"


def test_failed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    (tmp_path / ".file.partial").mkdir()  # of a writer that was killed
    with pytest.raises(KeyboardInterrupt), files.replaced(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with files.replaced(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_folder_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "folder"
    with files.replaced(path) as partial:
        partial.mkdir()
        (partial / "a").touch()
        assert not path.exists()
    assert [each.name for each in path.iterdir()] == ["a"]
    with pytest.raises(OSError), files.replaced(path) as partial:
        partial.mkdir()
    assert (path / "a").exists()
