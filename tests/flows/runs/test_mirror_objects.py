"""A store with objects of any names, as S3 has them, and with answers of any kind."""

import io
import json
from pathlib import Path
from typing import ClassVar

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from flows.runs import ledger_mirror
from tasks.ledger import artifacts
from tasks.ledger.substeps import Ledger, SubStep
from tests.flows.runs import packing
from tests.flows.runs.mirror_steps import Inputs, computed, half, hollow, verb


class Odd(MemoryFileSystem):
    """Objects with any names, as S3 has them, and answers of any kind."""

    cachable = False
    answers: ClassVar[dict[str, object]] = {}

    def ls(self, path, **rest):
        return self.answers["ls"] if self.answers else super().ls(path, **rest)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """A store with one finished sub-step and one checkpoint, and what runs on a new worker."""
    odd = Odd()
    odd.store.clear()
    odd.answers.clear()
    numbers = iter(range(99))

    def use(work=verb):
        here = tmp_path / f"worker {next(numbers)}"
        here.mkdir()
        monkeypatch.chdir(here)
        computed.clear()
        mirror = ledger_mirror.RemoteMirror("odd", lambda: (odd, "/store"))
        try:
            return work(SubStep("toy", "reinforce", 0, 7, Ledger(mirror)), Inputs())
        finally:
            mirror.flush()

    with pytest.raises(InterruptedError):
        use(half)
    use()
    use()
    assert computed == [], "it is fetched"
    yield odd, use
    odd.store.clear()
    odd.answers.clear()


def put(odd, path, content):
    odd.store[path] = MemoryFile(odd, path, content)


def packed(odd, start):
    """Return the path of the archive of the folder whose name has ``start``, and its contents."""
    path = next(name for name in odd.store if name.endswith(packing.ARCHIVE) and start in name)
    return path, packing.contents(io.BytesIO(odd.store[path].getvalue()))


def pack(odd, path, contents, folder):
    """Replace an archive by one of these contents."""
    packing.pack(folder / "packed", contents)
    put(odd, path, (folder / "packed").read_bytes())
    (folder / "packed").unlink()


def test_empty_folder_is_fetched_and_a_missing_file_is_not(objects, capsys, tmp_path):
    odd, use = objects
    use(hollow)
    made = use(hollow)
    assert computed == [], "both are fetched"
    path, found = packed(odd, "-hollow-")
    assert found == {"file": b""}
    assert Path(artifacts.output(made, "file").path).is_file()
    assert Path(artifacts.output(made, "folder").path).is_dir()
    pack(odd, path, {}, tmp_path)
    made = use(hollow)
    assert computed == [0]
    assert Path(artifacts.output(made, "file").path).is_file()
    pack(odd, path, {"file": b"", "folder": b""}, tmp_path)
    use(hollow)
    assert computed == [0], "it is a file now"
    assert "unreachable" not in capsys.readouterr().out


NAMES = ["weights/../../../../../../evil", "weights/..", "../0001-verb/evil", "/evil"]
NAMES += ["weights//evil", "weights/./evil", "weights\\..\\evil", "..\\evil", "weights/a\nb"]
NAMES += ["weights/a.bin/evil", "weights/\udc80", "weights/" + "x" * 300, "weights", "evil"]
NAMES += ["weights/" + "x/" * 2000 + "evil"]


@pytest.mark.parametrize("name", NAMES)
def test_member_of_any_name_stays_inside(objects, tmp_path, name):
    odd, use = objects
    path, found = packed(odd, "-verb-")
    pack(odd, path, {**found, name: b""}, tmp_path)
    use()
    assert computed == [0]
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("name", ["..", ".", "", ".hidden", "a\\b", "record.json", "x\ny"])
def test_checkpoint_of_any_name_stays_inside(objects, tmp_path, name):
    odd, use = objects
    place = packed(odd, "checkpoint-1")[0].partition("/checkpoint-1")[0]
    for file in ("record.json", packing.ARCHIVE):
        put(odd, f"{place}/{name}/{file}", odd.store[f"{place}/checkpoint-1/{file}"].getvalue())
    mirror = ledger_mirror.RemoteMirror("odd", lambda: (odd, "/store"))
    assert mirror.names(artifacts.ROOT / place.removeprefix("/store/")) == ["checkpoint-1"]
    assert use(half)["found"] == ["checkpoint-1"]
    files = {file.name for file in Path.cwd().rglob("*") if file.is_file()}
    assert files == {"record.json", "found", "delivered"}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [None, 3, {}],
        [{"name": "/etc/hostname"}],
        [{"name": None, "type": "file", "size": 9}],
        *([{"name": "record.json", "type": "file", "size": size}] for size in (None, "9", True)),
        *([{"name": "record.json", "type": kind, "size": 9}] for kind in ("link", "directory")),
        [{"name": "record.json", "type": "file", "size": 9, "islink": True}],
    ],
    ids=json.dumps,
)
def test_odd_answer_ends_no_run(objects, tmp_path, answer):
    odd, use = objects
    odd.answers["ls"] = answer
    use()
    assert computed == [0]
    with pytest.raises(InterruptedError):
        use(half)
    assert {file.name for file in tmp_path.iterdir()} <= {f"worker {i}" for i in range(9)}
