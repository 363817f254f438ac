"""Digests of files and folders, and artifacts and records that are published whole."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact

ROOT = Path(__file__).parents[3]


def write(files):
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


# ---------------------------------------------------------------- digests


def test_folder_digest_is_of_names_and_bytes():
    def digest(folder, **files):
        write({f"{folder}/{name.replace('__', '/')}": text for name, text in files.items()})
        return artifacts.digest(Path(folder))

    first = digest("first", a="1", sub__b="2")
    os.utime("first/a", (0, 0))
    Path("first/a").chmod(0o600)
    assert artifacts.digest(Path("first")) == first
    assert digest("second", sub__b="2", a="1") == first, "order and place do not count"
    others = [
        digest("bytes", a="1", sub__b="3"),
        digest("name", a="1", sub__c="2"),
        digest("moved", a="1", b="2"),
        digest("swapped", a="2", sub__b="1"),
        digest("fewer", a="1"),
        digest("joined", a="1\0sub/b2"),
    ]
    write({"file": ""})
    Path("empty").mkdir()
    others += [artifacts.digest(Path("file")), artifacts.digest(Path("empty"))]
    assert len({first, *others}) == 1 + len(others)
    assert re.fullmatch("[0-9a-f]{32}", first)


def test_large_file_has_the_digest_of_a_small_one(monkeypatch):
    file = Path("file")

    def digest(content):
        file.write_bytes(content)
        return artifacts.digest(file)

    content = bytes(range(35))
    changed = [content[:i] + b"\xff" + content[i + 1 :] for i in range(len(content))]
    cut = [content[:i] for i in range(len(content))]
    swapped = content[10:20] + content[:10] + content[20:]
    every = [content, *changed, *cut, swapped]
    small = [digest(each) for each in every]
    assert len(set(small)) == len(every)
    monkeypatch.setattr(artifacts, "MAPPED", 10)  # a file of 35 bytes is large
    assert [digest(each) for each in every] == small


def test_file_digest_does_not_depend_on_the_name():
    write({"a": "same", "b": "same"})
    assert artifacts.digest(Path("a")) == artifacts.digest(Path("b"))


def test_missing_artifact_is_refused():
    with pytest.raises(ValueError, match="models/smoke/initial does not exist"):
        Artifact.at(Path("models/smoke/initial"))


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "half a copy"])
@pytest.mark.parametrize("name", ["table", "weights"])
def test_publish_replaces_what_was_there(run, name, before):
    made = artifacts.output(run.train(), name)
    old = {
        "nothing": {},
        "file": {"data/out": "old"},
        "folder": {"data/out/old": "old"},
        "half a copy": {"data/.out.partial/a.bin": "half", "data/.out.partial/b.bin": "half"},
    }
    write(old[before])
    target = Path("data", "out")
    artifacts.publish(made, target)
    assert artifacts.digest(target) == made.digest
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert Path(made.path).exists()


def test_publish_can_write_another_form(run):
    made = artifacts.output(run.train(), "table")
    target = Path("data/out")
    artifacts.publish(made, target, lambda source, copy: copy.write_text(source.read_text() * 2))
    assert target.read_text() == "0.5 20.5 2"


def test_pruned_artifact_cannot_be_published(run):
    made = artifacts.output(run.train(0), "table")
    write({"data/out": "old"})
    run.retire(9, last=1)
    with pytest.raises(artifacts.PrunedError, match=re.escape(made.path)):
        artifacts.publish(made, Path("data/out"))
    assert Path("data/out").read_text() == "old"


HALF_A_COPY = """
import os, shutil, signal
from pathlib import Path
from tasks.ledger import artifacts

copy = shutil.copytree

def half_a_copy(source, target):
    copy(source, target)
    os.kill(os.getpid(), signal.SIGKILL)

shutil.copytree = half_a_copy
artifacts.publish(artifacts.Artifact.at(Path("made")), Path("data/out"))
"""


@pytest.mark.parametrize("before", [{}, {"data/out/old": "an older one"}], ids=["first", "again"])
def test_killed_publish_leaves_what_was_there(before):
    write({"made/a": "1", "made/b": "2", **before})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", HALF_A_COPY], env=environment, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    out = Path("data/out")
    assert [path.name for path in out.iterdir()] == ["old"] if before else not out.exists()
    artifacts.publish(Artifact.at(Path("made")), out)
    assert artifacts.digest(out) == artifacts.digest(Path("made"))
    assert [path.name for path in Path("data").iterdir()] == ["out"]


def published(records):
    file = Path("data/smoke/records/reinforce.jsonl")
    artifacts.publish_records(records, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    return file.read_text()


def test_equal_runs_publish_equal_records(run, monkeypatch):
    first = [run.train(i) for i in range(2)]
    text = published(first)
    shutil.rmtree(artifacts.ROOT)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    again = [run.train(i) for i in range(2)]
    assert again != first, "times and hosts differ"
    assert published(again) == text


def test_published_record_has_key_inputs_and_digests(run):
    records = [run.train(i) for i in range(2)]
    extended = [{**records[0], "attempt": 1, "questions": ["q7", "q3"], "cursor": 8}, records[1]]
    lines = [json.loads(line) for line in published(extended).splitlines()]
    assert lines[0] == {
        "stage": "reinforce",
        "iteration": 0,
        "verb": "train",
        "key": run.place(0).name.split("-")[-1],
        "inputs": records[0]["inputs"],
        "artifacts": {name: made["digest"] for name, made in records[0]["artifacts"].items()},
        "seed": 7,
        "attempt": 1,
        "questions": ["q7", "q3"],
        "cursor": 8,
    }
    assert lines[1]["iteration"] == 1
    assert not {"attempt", "questions", "cursor"} & set(lines[1]), "only what applies"
