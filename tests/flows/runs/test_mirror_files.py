"""A store that others write to: whatever is forged there, nothing else is read or written."""

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from flows.runs import ledger_mirror, mirror_files
from tasks.ledger import artifacts, records, substeps
from tasks.ledger.substeps import SubStep
from tests.flows.runs import packing
from tests.flows.runs.mirror_steps import Inputs, computed, half, verb
from tests.tasks.ledger.forging import ENTRIES, FILES, FREE, WRONG, forge, put

KEY = "a key that no other worker of the store has"
SECRET = "a private file of the worker"


class Workplace:
    """Workers with ledgers of their own, a store that they share, and a private folder."""

    def __init__(self, folder):
        self.folder, self.store, self.private = folder, folder / "store", folder / "private"
        self.private.mkdir()
        (self.private / "table.txt").write_text("2 0")  # with the content of the artifact
        (self.private / "secret").write_text(SECRET)
        self.workers = 0

    def use(self, work=verb, iteration=0):
        """Run a sub-step on a new worker; return its record."""
        self.workers += 1
        here = self.folder / f"worker {self.workers}"
        here.mkdir()
        os.chdir(here)
        computed.clear()
        with ledger_mirror.opened() as ledger:
            return work(SubStep("toy", "reinforce", iteration, 7, ledger), Inputs())

    def leave(self):
        """Remove the newest worker."""
        os.chdir(self.folder)
        shutil.rmtree(self.folder / f"worker {self.workers}")

    def entry(self, iteration=0):
        (found,) = (self.store / "toy/reinforce").glob(f"{iteration:04d}-verb-*")
        return found

    def files(self, without=()):
        """Yield the path of each file, but not of those in the folders ``without``."""
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if Path(folder, name) not in without]
            yield from (path for name in names if (path := Path(folder, name)).is_file())

    def outside(self):
        """Return what is outside of the ledgers and the store: path -> content."""
        inside = {self.store, *self.folder.glob("worker */.beamline/ledger")}
        return {file: file.read_bytes() for file in self.files(inside)}

    def leaked(self):
        """Return the files of ledgers and store with the private content; links do not count."""
        return [
            file
            for file in self.files({self.private})
            if SECRET.encode() in file.read_bytes() and not file.is_symlink()
        ]


@pytest.fixture(params=["unsigned", "signed"])
def place(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ledger_mirror.VARIABLE, str(tmp_path / "store"))
    monkeypatch.delenv(ledger_mirror.SECRET, raising=False)
    if request.param == "signed":
        monkeypatch.setenv(ledger_mirror.SECRET, KEY)
    return Workplace(tmp_path)


def check(place, true, what=""):
    """Run the sub-step on a new worker: it computes, and nothing else is read or written."""
    outside = place.outside()
    made = place.use()
    assert computed == [0], what
    assert made["artifacts"] == true["artifacts"], what
    assert made["metrics"] == true["metrics"], what
    assert substeps.read(Path(artifacts.output(made, "table").path).parent) == made
    assert place.outside() == outside, what
    assert not place.leaked(), what
    place.leave()


def is_signed():
    return ledger_mirror.SECRET in os.environ


# ---------------------------------------------------------------- records


@pytest.fixture
def sent(place):
    """A sub-step in the store: its record, its folder there, and what brings that back."""
    true, entry = place.use(), place.entry()
    shutil.copytree(entry, place.folder / "whole")

    def restore():
        artifacts.remove(entry)
        shutil.copytree(place.folder / "whole", entry)

    return true, entry, restore


def test_each_entry_of_a_record_forged_in_turn(place, sent):
    true, entry, restore = sent
    for name in ENTRIES:
        for value in WRONG[:: 4 if is_signed() else 1]:  # a signature is of all bytes
            restore()
            forge(entry, put(name, value))
            if not is_signed() and (name[0] in FREE or (name, value) == (("artifacts",), {})):
                outside = place.outside()
                place.use()  # it may count: the docs say whom a store without a key trusts
                assert place.outside() == outside
                assert not place.leaked()
                place.leave()
            else:
                check(place, true, f"{name} {value!r}")


def test_each_name_of_a_file_forged_in_turn(place, sent):
    true, entry, restore = sent
    for name in [*FILES, str(place.private / "table.txt"), "../../../../private/table.txt"]:
        restore()
        forge(entry, put(("artifacts", "table", "file"), name))
        check(place, true, name)


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[]", b"7", b"[" * 10**5, b"\xff"])
@pytest.mark.parametrize("name", ["record.json", packing.ARCHIVE, "table.txt", "weights/a.bin"])
def test_object_of_other_content_is_computed_again(place, sent, name, content):
    true, entry, _ = sent
    if (entry / name).exists():
        (entry / name).write_bytes(content)
    else:
        packing.change(entry / packing.ARCHIVE, {name: content})
    check(place, true)


def test_record_of_another_key_is_computed_again(place, sent):
    true, entry, _ = sent
    place.use(iteration=1)
    shutil.rmtree(entry)
    shutil.copytree(place.entry(1), entry)  # with its signature
    check(place, true)


@pytest.mark.parametrize("value", ["", "another signature", "0" * 64, "\n" * 999, "\xff"])
def test_signature_of_somebody_else_does_not_count(place, sent, value, capsys):
    true, entry, _ = sent
    if is_signed():
        (entry / records.SIGNATURE).write_text(value)
        check(place, true)
        assert capsys.readouterr().out.count("no signature by this key") == 1
    else:
        (entry / records.SIGNATURE).write_text(value)
        place.use()
        assert computed == [], "without a key, none is asked for"


def test_signature_is_of_record_folder_and_retired_names(place, sent, monkeypatch):
    true, entry, restore = sent
    if not is_signed():
        assert not (entry / records.SIGNATURE).exists()
        monkeypatch.setenv(ledger_mirror.SECRET, KEY)
        check(place, true, "unsigned ones are computed again, and sent with a signature")
        place.use()
        assert computed == []
        return
    forge(entry, put(("metrics", "loss"), 0.0))
    check(place, true, "record")
    restore()
    (entry / records.RETIRED).write_text("table")
    packing.change(entry / packing.ARCHIVE, {"table.txt": None})
    (entry / packing.ARCHIVE).rename(entry / mirror_files.archive_name(b"table"))
    check(place, true, "retired names")
    monkeypatch.setenv(ledger_mirror.SECRET, KEY[::-1])
    check(place, true, "another key")


def test_key_is_in_no_file_and_no_log(place, sent, capsys):
    place.use(iteration=1)
    files = [file for file in place.folder.rglob("*") if file.is_file()]
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in capsys.readouterr().out


def test_short_key_is_refused_and_not_shown(place, monkeypatch):
    monkeypatch.setenv(ledger_mirror.SECRET, "hunter2")
    with pytest.raises(ValueError, match="BEAMLINE_STORE_KEY has 7 characters") as error:
        place.use()
    assert "hunter2" not in str(error.value)


def test_retired_and_revived_with_a_signature(place, sent):
    """What this worker retires counts elsewhere, too."""
    os.chdir(place.folder / "worker 1")
    with ledger_mirror.opened() as ledger:
        step = SubStep("toy", "reinforce", 3, 7, ledger)
        ledger.retire(step, "verb", 1, 9, ("weights",))
    place.use()
    assert computed == []


# ---------------------------------------------------------------- archives


def grow(file, size):
    with file.open("ab") as stream:
        stream.truncate(size)  # a hole: it takes no room


@pytest.mark.parametrize("name", ["record.json", packing.ARCHIVE])
def test_huge_object_is_not_fetched(place, sent, name):
    true, entry, _ = sent
    grow(entry / name, 2**43)
    check(place, true)


@pytest.mark.parametrize("size", [0, 2, 2**40, 2**43, 2**70])
def test_forged_size_is_computed_again(place, sent, size):
    true, entry, _ = sent
    forge(entry, put(("artifacts", "table", "size"), size))
    check(place, true)
    forge(entry, put(("artifacts", "table", "size"), size))
    packing.write(entry / packing.ARCHIVE, [(packing.plain("table.txt", size), b"")])
    check(place, true)
    forge(entry, put(("artifacts", "table", "size"), size))
    packing.write(entry / packing.ARCHIVE, [(packing.plain("table.txt", size), b"")])
    grow(entry / packing.ARCHIVE, min(size, 2**43))
    check(place, true)


def of_type(kind, name, link=""):
    info = packing.plain(name, 0)
    info.type, info.linkname = kind, link
    return info, b""


def odd_members(private):
    """Return what tar can hold and the mirror never writes: name -> members, and their format."""
    table, weights = (packing.plain("table.txt", 3), b"2 0"), b"weights" * 99
    a, b = (packing.plain(f"weights/{name}.bin", len(weights)) for name in "ab")
    whole = [table, (a, weights)]
    owned, long = packing.plain("table.txt", 3), packing.plain("weights/" + "x" * 5000, 0)
    owned.mode, huge = 0o4755, packing.plain("table.txt", 3)
    huge.pax_headers = {"comment": "x" * 2**22}
    negative = packing.plain("weights/c.bin", -512)
    return {
        "a link": ([*whole, of_type(tarfile.SYMTYPE, "weights/l", str(private / "secret"))], None),
        "a linked file": ([of_type(tarfile.SYMTYPE, "table.txt", "../secret"), whole[1]], None),
        "a linked folder": ([of_type(tarfile.SYMTYPE, "weights", str(private)), *whole], None),
        "a hard link": ([table, of_type(tarfile.LNKTYPE, "weights/a.bin", "table.txt")], None),
        "a folder": ([*whole, of_type(tarfile.DIRTYPE, "weights/more")], None),
        "a device": ([*whole, of_type(tarfile.CHRTYPE, "weights/device")], None),
        "a pipe": ([*whole, of_type(tarfile.FIFOTYPE, "weights/pipe")], None),
        "a mode": ([(owned, b"2 0"), whole[1]], None),
        "an extended header": ([(huge, b"2 0"), whole[1]], tarfile.PAX_FORMAT),
        "a long name": ([*whole, (long, b"")], None),
        "a size below nothing": ([*whole, (negative, b"")], None),
        "a file twice": ([*whole, table], None),
        "an empty file twice": ([*whole, *2 * [(packing.plain("weights/e", 0), b"")]], None),
        "a file too many": ([*whole, (packing.plain("weights/e", 0), b"")], None),
        "another artifact": ([*whole, (packing.plain("other", 0), b"")], None),
        "a record": ([*whole, (packing.plain("record.json", 0), b"")], None),
        "a way out": ([*whole, (packing.plain("weights/../../out", 0), b"")], None),
        "a file in a file": ([*whole, (packing.plain("table.txt/a", 0), b"")], None),
        "more than there should be": ([*whole, (b, weights)], None),
        "less than there should be": ([table], None),
        "the end in its middle": ([table, (packing.plain("", 0), bytes(1024)), whole[1]], None),
        "nothing": ([], None),
    }


def test_archive_of_other_members_is_computed_again(place, sent):
    true, entry, restore = sent
    for name, (members, form) in odd_members(place.private).items():
        restore()
        packing.write(entry / packing.ARCHIVE, members, form or tarfile.GNU_FORMAT)
        check(place, true, name)


def test_damage_of_any_byte_is_found_before_it_is_used(place, sent):
    """Whatever a byte of an archive becomes, the artifacts are those of the record, or none."""
    true, entry, restore = sent
    whole = (entry / packing.ARCHIVE).read_bytes()
    fetched = 0
    for position in range(0, len(whole), 97):
        restore()
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        (entry / packing.ARCHIVE).write_bytes(damaged)
        made = place.use()
        assert made["artifacts"] == true["artifacts"]
        assert substeps.read(Path(artifacts.output(made, "table").path).parent) == made
        fetched += not computed
        place.leave()
    assert not fetched, "there is no byte that does not count"
    for length in range(0, len(whole), 97):
        restore()
        (entry / packing.ARCHIVE).write_bytes(whole[:length])
        check(place, true, f"cut after {length} bytes")


# ---------------------------------------------------------------- links and other objects


def replace(path, target):
    artifacts.remove(path)
    path.symlink_to(target)


@pytest.mark.parametrize("at", ["record.json", packing.ARCHIVE, "."])
@pytest.mark.parametrize("target", ["the same", "secret", "nothing"])
def test_link_is_not_followed(place, sent, at, target):
    true, entry, _ = sent
    shutil.copytree(entry, place.private / "same")
    targets = {"the same": place.private / "same" / at, "secret": place.private / "secret"}
    replace(entry / at if at != "." else entry, targets.get(target, place.private / "nothing"))
    check(place, true)


@pytest.mark.parametrize("level", ["toy", "toy/reinforce"])
def test_link_on_the_way_is_not_followed(place, sent, level):
    true, *_ = sent
    (place.store / level).rename(place.private / "moved")
    (place.store / level).symlink_to(place.private / "moved")
    check(place, true)


@pytest.mark.parametrize("at", ["record.json", packing.ARCHIVE])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_object_that_is_no_file_is_computed_again(place, sent, at, make):
    true, entry, _ = sent
    (entry / at).unlink()
    make(entry / at)
    check(place, true)


@pytest.mark.parametrize("at", ["toy", "toy/reinforce", "entry"])
@pytest.mark.parametrize("target", ["secret", "nothing", "."])
def test_nothing_is_sent_through_a_link(place, sent, at, target):
    true, entry, _ = sent
    link = entry if at == "entry" else place.store / at
    replace(link, place.private / target)
    check(place, true)


def test_nothing_is_dropped_through_a_link(place, sent):
    _, entry, _ = sent
    entry.rename(place.private / "moved")
    entry.symlink_to(place.private / "moved")
    outside = place.outside()
    os.chdir(place.folder / "worker 1")
    with ledger_mirror.opened() as ledger:
        step = SubStep("toy", "reinforce", 3, 7, ledger)
        verb(SubStep("toy", "reinforce", 0, 7, ledger), Inputs())
        ledger.retire(step, "verb", 1, 9, ())
        ledger.revive(step.folder)
    assert place.outside() == outside


def test_link_here_is_not_sent(place, sent):
    _, entry, _ = sent
    (mine,) = (place.folder / "worker 1").glob(".beamline/ledger/toy/reinforce/0000-*")
    replace(mine / "table.txt", place.private / "secret")
    (mine / records.DELIVERED).unlink()
    os.chdir(place.folder / "worker 1")
    with ledger_mirror.opened() as ledger:
        (mirror,) = ledger.mirrors
        mirror.push(mine.relative_to(place.folder / "worker 1"))
    assert not place.leaked()
    kept = packing.contents(entry / packing.ARCHIVE)
    assert kept["table.txt"] == b"2 0", "what was sent before stays"


@pytest.mark.parametrize(
    "owner, name",
    [(os.path, "lexists"), (records, "load"), (artifacts, "files_of"), (mirror_files, "_has")],
)
def test_removed_while_it_is_sent(place, sent, monkeypatch, capsys, owner, name):
    _, entry, _ = sent
    shutil.rmtree(entry)
    os.chdir(place.folder / "worker 1")
    (mine,) = Path(".beamline/ledger/toy/reinforce").glob("0000-*")
    (mine / records.DELIVERED).unlink()
    work = getattr(owner, name)

    def then_removed(*arguments):
        found = work(*arguments)
        shutil.rmtree(mine, ignore_errors=True)
        return found

    with ledger_mirror.opened() as ledger:
        (mirror,) = ledger.mirrors
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, then_removed)
            mirror.push(mine)
            mirror.flush()
    assert not (entry / artifacts.RECORD).exists()
    assert "removed meanwhile" in capsys.readouterr().out
    assert not mirror.logged, "the mirror is reachable"


# ---------------------------------------------------------------- half-done sub-steps


def forged_record(found):
    forge(found, put(("artifacts", "state", "file"), "../../../../../private/secret"))


def linked_file(found):
    replace(found / packing.ARCHIVE, Path.cwd().parent / "private/secret")


def linked_folder(found):
    target = Path.cwd().parent / "private/moved"
    found.rename(target)
    found.symlink_to(target)


def renamed(found):
    found.rename(found.with_name("checkpoint-2"))


def hidden(found):
    found.rename(found.with_name(".checkpoint-1"))


def empty(found):
    (found / "record.json").write_text("[]")


HARMS = [forged_record, linked_file, linked_folder, renamed, hidden, empty]


@pytest.mark.parametrize("harm", HARMS)
def test_forged_checkpoint_is_not_continued(place, harm):
    with pytest.raises(InterruptedError):
        place.use(half)
    (found,) = place.store.glob("toy/reinforce/.*.scratch/checkpoint-1")
    harm(found)
    outside = place.outside()
    with pytest.raises(InterruptedError):
        place.use(half)
    assert place.outside() == outside
    assert not place.leaked()


def test_whole_checkpoint_is_continued(place):
    with pytest.raises(InterruptedError):
        place.use(half)
    assert place.use(half)["found"] == ["checkpoint-1"]
