"""Records that are damaged or forged are not believed, and no reader ends a run."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tasks.ledger import artifacts, records
from tasks.ledger.artifacts import RECORD
from tasks.ledger.substeps import recorded
from tests.tasks.ledger.forging import ENTRIES, FILES, FREE, WRONG, forge, put
from tests.tasks.ledger.toy import Inputs, Run


@pytest.fixture
def sealed(run):
    """A sealed folder with a record."""
    folder = run.place(4).with_name(f".{run.place(4).name}.scratch") / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "state.bin").write_bytes(b"state")
    run.ledger.seal(folder)
    return folder


@pytest.mark.parametrize("kind", ["sub-step", "sealed"])
def test_no_flipped_bit_is_believed(run, sealed, kind, capsys):
    run.train()
    place = run.place() if kind == "sub-step" else sealed
    true, content = records.read(place), (place / RECORD).read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (place / RECORD).write_bytes(changed)
        assert records.read(place) in (None, true), (bit // 8, bytes(changed))
    (place / RECORD).write_bytes(content)
    assert records.read(place) == true
    assert capsys.readouterr().out.count("is damaged") > 7 * len(content)


def test_record_of_an_earlier_version_runs_again(run, capsys):
    made = run.train()
    old = {**made, "artifacts": {k: dict(v) for k, v in made["artifacts"].items()}}
    (run.place() / RECORD).write_text(json.dumps(old, indent=1))
    assert Run().train()["artifacts"] == made["artifacts"]
    assert "no digest" in capsys.readouterr().out


def accepted(place, true, changed):
    """Forge one record; return whether it counts, and check that it harms nothing."""
    forge(place, changed)
    found = records.read(place)
    if found is None:
        return False
    for name, made in found["artifacts"].items():
        assert made == true["artifacts"][name]
    kept = {name: value for name, value in found.items() if name not in {*FREE, "artifacts"}}
    assert kept == {name: true[name] for name in kept}
    return True


def test_entry_of_another_type_or_value_runs_again(run):
    true = run.train()
    content = (run.place() / RECORD).read_text()
    counted = []
    for entry in ENTRIES:
        for value in copy.deepcopy(WRONG):
            (run.place() / RECORD).write_text(content)
            if accepted(run.place(), true, put(entry, value)):
                counted.append((".".join(entry), value))
    numbers = [4, -1, 0.5]
    assert counted == [
        ("artifacts", {}),
        *[("duration", number) for number in numbers],
        *[("finished", number) for number in numbers],
        ("host", "x"),
        ("metrics", {}),
        *[("metrics.loss", number) for number in numbers],
    ]


@pytest.mark.parametrize("kind", ["sub-step", "sealed"])
def test_file_names_stay_in_the_folder(run, sealed, kind):
    run.train()
    place, name = (run.place(), "table") if kind == "sub-step" else (sealed, "state")
    outside = place.parent / "x"
    outside.write_text("0.5 2")
    content = (place / RECORD).read_text()
    assert records.read(place)
    for file in [*FILES, str(outside.absolute()), "weights"]:
        (place / RECORD).write_text(content)
        forge(place, put(("artifacts", name, "file"), file))
        assert records.read(place) is None, file


MALFORMED = [b"{}", b"null", b"[]", b"3", b'"text"', b"", b"NaN", b"\xff\xfe{}", b"9" * 5000]
MALFORMED += [b"[" * 10**5, b'{"digest": ' * 900 + b"1" + b"}" * 900]


@pytest.mark.parametrize("content", MALFORMED)
def test_malformed_record_never_ends_a_run(run, content):
    made = run.train()
    other = Run()
    (run.place() / RECORD).write_bytes(content)
    other.train(size=3)  # which explains what differs from the records that are there
    assert other.train()["artifacts"] == made["artifacts"]
    assert len(other.computed) == 2


@pytest.mark.parametrize("other", [{"iteration": 4}, {"seed": 8}, {"size": 5}])
def test_record_of_another_sub_step_runs_again(run, other):
    made = run.train()
    run.train(**other)
    shutil.rmtree(run.place())
    shutil.copytree(run.place(**other), run.place())
    assert records.read(run.place()) is None
    again = Run()
    assert again.train()["artifacts"] == made["artifacts"]
    assert again.computed == [3]


def test_record_of_another_stage_runs_again(run):
    run.train()
    moved = run.place().parent.with_name("elsewhere") / run.place().name
    shutil.copytree(run.place(), moved)
    assert records.read(moved) is None


# ---------------------------------------------------------------- links


def link_file(place, private):
    replace(place / "table.txt", private / "table.txt")


def link_file_in_folder(place, private):
    replace(place / "weights" / "a.bin", private / "weights" / "a.bin")


def link_folder(place, private):
    replace(place / "weights", private / "weights")


def link_folder_in_folder(place, private):
    (place / "weights" / "more").symlink_to(private / "empty")


def link_record(place, private):
    replace(place / RECORD, private / RECORD)


def link_whole(place, private):
    replace(place, private)


def dangling(place, private):
    replace(place / "table.txt", private / "nothing")


def pipe(place, private):
    artifacts.remove(place / "table.txt")
    os.mkfifo(place / "table.txt")


def replace(path, target):
    artifacts.remove(path)
    path.symlink_to(target.absolute())


LINKS = [link_file, link_file_in_folder, link_folder, link_folder_in_folder, link_record]
LINKS += [link_whole, dangling, pipe]


@pytest.mark.parametrize("link", LINKS)
def test_link_to_equal_content_runs_again(run, link, tmp_path):
    made = run.train()
    private = tmp_path / "private"
    shutil.copytree(run.place(), private)
    (private / "empty").mkdir()
    before = artifacts.digest(private)
    link(run.place(), private)
    assert records.read(run.place()) is None
    again = Run()
    assert again.train()["artifacts"] == made["artifacts"]
    assert again.computed == [3]
    assert artifacts.irregular(run.place()) is None
    assert artifacts.digest(private) == before, "what it led to stays as it is"


@pytest.mark.parametrize("link", [link_file, link_file_in_folder, link_folder, dangling])
def test_link_is_not_published(run, link, tmp_path):
    made = run.train()
    private = tmp_path / "private"
    shutil.copytree(run.place(), private)
    link(run.place(), private)
    name = "table" if link in (link_file, dangling) else "weights"
    with pytest.raises(ValueError, match="is a link or no file: remove"):
        artifacts.publish(artifacts.output(made, name), Path("data/out"))
    assert not Path("data").exists()


def test_link_of_a_verb_is_refused(run):
    @recorded
    def links(step, inputs):
        (step.out / "made").symlink_to("/etc/hostname")
        return {}

    with pytest.raises(ValueError, match=r"made is a link or no file"):
        links(run.step(), Inputs())


@pytest.mark.parametrize("result", [{"metrics": {"loss": "low"}}, {"step": 3}, {"verb": "other"}])
def test_entries_that_no_reader_would_take_are_refused(run, result):
    @recorded
    def verb(step, inputs):
        return result

    with pytest.raises(ValueError, match=re.escape("the record cannot be kept")):
        verb(run.step(), Inputs())
