"""Sub-steps are computed once, survive kills, and are shared through a mirror."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import RECORD, Artifact
from tasks.ledger.substeps import RETIRED, recorded
from tests.tasks.ledger.toy import FolderMirror, Run, there

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Nothing:
    """No inputs."""


# ---------------------------------------------------------------- records


def test_name_has_recipe_stage_iteration_and_verb(run):
    assert run.place().parent == artifacts.ROOT / "smoke" / "reinforce"
    assert re.fullmatch("0003-train-[0-9a-f]{16}", run.place().name)


def test_record_has_inputs_and_artifacts(run):
    record = run.train()
    assert record["verb"] == "train"
    assert record["key"] == run.place().name.split("-")[-1]
    assert record["step"] == {"recipe": "smoke", "stage": "reinforce", "iteration": 3, "seed": 7}
    assert record["metrics"] == {"loss": 0.25}
    assert record["inputs"]["policy"] == "digest of the policy"
    assert set(record["inputs"]) == {"policy", "settings", "size", "source", "step"}
    assert "tests/tasks/ledger/toy.py" in record["sources"]
    assert set(record["artifacts"]) == {"table", "weights"}
    assert record["duration"] >= 0
    written = json.loads((run.place() / RECORD).read_text())
    assert set(written) == {*record, "digest"}
    assert written["artifacts"]["weights"]["size"] == 9
    assert str(run.place()) not in json.dumps(written), "paths are built from where it lies"
    assert substeps.read(run.place()) == record


def test_artifact_is_where_its_record_names_it(run):
    record = run.train()
    table, weights = artifacts.output(record, "table"), artifacts.output(record, "weights")
    assert Path(table.path).read_text() == "0.5 2"
    assert Path(weights.path).is_dir()
    assert Artifact.at(Path(table.path)) == table
    assert Artifact.at(Path(weights.path)) == weights


def test_finished_substep_is_not_computed_again(run):
    first = run.train()
    run.train(size=5)
    again = Run()
    assert again.train() == first, "a result of other inputs stays"
    assert again.computed == []
    assert again.ledger.used == {again.place()}
    assert again.ledger.reused == {again.place().parent: {again.place().name}}


def test_ledger_calls_each_substep_as_it_is_told(run):
    seen = []

    def watched(verb, sub_step):
        record, found = sub_step()
        seen.append((verb, found))
        return record

    run.ledger.run_sub_step = watched
    assert run.train() == run.train()
    assert seen == [("train", False), ("train", True)]


def test_only_whole_results_are_in_the_ledger(run):
    run.train()
    assert [path.name for path in run.place().parent.iterdir()] == [run.place().name]


def test_artifacts_of_one_stem_keep_their_endings(run):
    @recorded
    def verb(step, inputs):
        (step.out / "table.txt").write_text("")
        (step.out / "table.json").write_text("")
        (step.out / ".hidden").write_text("")
        return {}

    assert set(verb(run.step(), Nothing())["artifacts"]) == {"table.txt", "table.json"}


def test_error_leaves_no_record(run):
    @recorded
    def fails(step, inputs):
        (step.out / "half").write_text("half")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fails(run.step(), Nothing())
    assert not run.step().place(fails, Nothing()).exists()


def test_verb_knows_its_final_folder(run):
    finals = []

    @recorded
    def verb(step, inputs):
        finals.append(step.final())
        (step.out / "made").write_text("")
        return {}

    verb(run.step(), Nothing())
    assert finals == [run.step().place(verb, Nothing())]
    assert (finals[0] / "made").exists()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("content", [b"", b'{"verb": "train", "artif', b"\0\0\0", b"{}"])
def test_damaged_record_is_computed_again(run, capsys, content):
    first = run.train()
    (run.place() / RECORD).write_bytes(content)
    assert run.train()["artifacts"] == first["artifacts"]
    assert len(run.computed) == 2
    assert "is damaged" in capsys.readouterr().out
    run.train()
    assert len(run.computed) == 2


def change_file(place):
    (place / "table.txt").write_text("0.5 3")


def lose_file(place):
    (place / "table.txt").unlink()


def change_folder(place):
    (place / "weights" / "a.bin").write_bytes(b"\0" * 8 + b"\1")


def add_to_folder(place):
    (place / "weights" / "b.bin").write_bytes(b"")


@pytest.mark.parametrize("damage", [change_file, lose_file, change_folder, add_to_folder])
def test_damaged_artifact_is_computed_again(run, capsys, damage):
    first = run.train()
    damage(run.place())
    assert run.train()["artifacts"] == first["artifacts"]
    assert len(run.computed) == 2
    assert re.search(r"(table.txt|weights) is missing or damaged", capsys.readouterr().out)
    run.train()
    assert len(run.computed) == 2


# ---------------------------------------------------------------- kills

DEADLY = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
from tasks.ledger import keys, substeps

keys.PROJECT = Path.cwd()
POINT = sys.argv[1]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

@dataclass(frozen=True)
class Inputs:
    size: int = 1

@substeps.recorded
def verb(step, inputs):
    with open("computed", "a") as log:
        log.write("x")
    progress = step.ledger.scratch(step) / "progress"
    progress.write_text((progress.read_text() if progress.exists() else "") + "+")
    (step.out / "half").write_text("one half")
    if POINT == "compute":
        die()
    (step.out / "other").write_text("the other")
    if POINT == "rename":
        Path.rename = die
    if POINT == "record":
        write = Path.write_text
        Path.write_text = lambda path, text: die(write(path, text[: len(text) // 2]))
    if POINT == "scratch":
        substeps.shutil.rmtree = lambda path, **_: die() if "scratch" in path.name else None
    return {"progress": len(progress.read_text())}

record = verb(substeps.SubStep("smoke", "toy", 0, 1), Inputs())
print(record["progress"], sorted(record["artifacts"]))
"""


def start(point):
    Path("deadly.py").write_text(DEADLY)
    return subprocess.run(
        [sys.executable, "deadly.py", point],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("point", ["compute", "record", "rename"])
def test_kill_before_the_end_leaves_only_scratch(point):
    assert start(point).returncode == -signal.SIGKILL
    folder = artifacts.ROOT / "smoke" / "toy"
    assert [path for path in folder.iterdir() if not path.name.startswith(".")] == []
    ended = start("nowhere")
    assert ended.stdout.splitlines()[-1] == "2 ['half', 'other']", ended.stderr
    assert len(Path("computed").read_text()) == 2
    assert [path.name[:10] for path in folder.iterdir()] == ["0000-verb-"]
    assert start("nowhere").stdout == ended.stdout
    assert len(Path("computed").read_text()) == 2


def test_kill_after_the_record_costs_nothing():
    assert start("scratch").returncode == -signal.SIGKILL
    assert start("nowhere").stdout == "1 ['half', 'other']\n"
    assert len(Path("computed").read_text()) == 1


# ---------------------------------------------------------------- retiring


def test_old_artifacts_go_and_their_records_count(run):
    records = [run.train(i) for i in range(5)]
    run.retire(4, last=2)
    for name in ("table", "weights"):
        assert [i for i, record in enumerate(records) if there(record, name)] == [3, 4]
    again = Run()
    assert [again.train(i) for i in range(5)] == records
    assert again.computed == []


def test_weights_of_every_few_iterations_stay(run):
    records = [run.train(i) for i in range(8)]
    for i in range(8):
        run.retire(i, last=2, every=3, weights=("weights",))
    assert [i for i, record in enumerate(records) if there(record, "weights")] == [2, 5, 6, 7]
    assert [i for i, record in enumerate(records) if there(record, "table")] == [6, 7]
    again = Run()
    assert [again.train(i) for i in range(8)] == records
    assert again.computed == []


def test_weights_that_stay_are_still_checked(run, capsys):
    run.train(2)
    run.retire(9, last=1, every=3, weights=("weights",))
    (run.place(2) / "weights" / "a.bin").write_bytes(b"")
    again = Run()
    again.train(2)
    assert again.computed == [2]
    assert "weights is missing or damaged" in capsys.readouterr().out


def test_what_is_retired_later_adds_to_what_was_before(run):
    record = run.train(2)
    run.retire(9, last=1, every=3, weights=("weights",))
    run.retire(9, last=1)
    assert not there(record, "table") and not there(record, "weights")
    again = Run()
    assert again.train(2) == record
    assert again.computed == []


def test_interrupted_retirement_keeps_the_record(run, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    run.train(0)
    with monkeypatch.context() as patch:
        patch.setattr(substeps, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            run.retire(1, last=1)
    again = Run()
    again.train(0)
    assert again.computed == []
    again.retire(1, last=1)
    assert sorted(path.name for path in run.place(0).iterdir()) == [RECORD, RETIRED]


def test_long_retirement_says_how_far_it_is(run, monkeypatch, capsys):
    records = [run.train(i) for i in range(4)]
    monkeypatch.setattr(substeps, "PROGRESS", -1)  # each of them takes long
    run.retire(9, last=1)
    assert not any(there(record, "table") for record in records)
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == [f"{n} of 4" for n in range(1, 5)]


def test_only_the_named_verb_is_retired(run):
    @recorded
    def retrain(step, inputs):
        (step.out / "made").write_text("")
        return {}

    other = retrain(run.step(0), Nothing())
    run.train(0)
    run.retire(9, last=1)
    assert there(other, "made")


@pytest.mark.parametrize("name", ["table", "weights"])
def test_spared_substep_stays_until_it_is_not_spared(run, name):
    records = [run.train(i) for i in range(5)]
    spare = artifacts.output(records[1], name)
    run.retire(4, last=1, weights=("table", "weights"), spare=[spare])
    for artifact in ("table", "weights"):
        assert [i for i, record in enumerate(records) if there(record, artifact)] == [1, 4]
    assert not (Path(spare.path).parent / RETIRED).exists()
    run.retire(4, last=1)
    assert not Path(spare.path).exists()
    assert run.train(1) == records[1], "its record counts"


@pytest.mark.parametrize("path", ["models/smoke/cold_start", str(artifacts.ROOT / "other")])
def test_spare_elsewhere_changes_nothing(run, path):
    record = run.train(0)
    run.retire(0, last=1, spare=[Artifact(path, "")])
    assert there(record, "table")
    run.retire(1, last=1, spare=[Artifact(path, "")])
    assert not there(record, "table")


def test_retiring_passes_over_leftovers_of_a_kill(run):
    run.train(0)
    left = run.place(3).with_name(f".{run.place(3).name}.partial")
    left.mkdir()
    left.with_suffix(".scratch").mkdir()
    run.retire(2, last=1)
    assert left.is_dir()
    assert left.with_suffix(".scratch").is_dir()


@dataclass(frozen=True)
class Tables:
    tables: list[Artifact] | tuple[Artifact, ...] | dict[str, Artifact]
    others: list[Artifact] = field(default_factory=list)


@recorded
def look(step, inputs, computed):
    computed.append(step.iteration)
    (step.out / "seen.txt").write_text(str(len(inputs.tables)))
    return {}


@pytest.mark.parametrize("pruned", [0, 1, 2])
@pytest.mark.parametrize("kind", [list, tuple, lambda tables: dict(enumerate(tables))])
def test_pruned_input_is_named_before_any_work(run, pruned, kind):
    tables = [artifacts.output(run.train(i), "table") for i in range(3)]
    inputs = Tables(kind(tables))
    computed = []
    done = look(run.step(8), inputs, computed=computed)
    shutil.rmtree(Path(tables[pruned].path).parent)
    with pytest.raises(artifacts.PrunedError, match=re.escape(tables[pruned].path)):
        look(run.step(9), inputs, computed=computed)
    assert computed == [8]
    assert look(run.step(8), inputs, computed=computed) == done, "a finished one needs nothing"


def test_revived_substeps_are_computed_again(run):
    records = [run.train(i) for i in range(3)]
    other = Run()
    other.train(0, size=5)
    other.retire(2, last=1)
    run.ledger.revive(run.step().folder)
    assert (other.place(0, size=5) / RETIRED).exists(), "another run's sub-step stays"
    run.computed.clear()
    assert [run.train(i)["artifacts"] for i in range(3)] == [r["artifacts"] for r in records]
    assert run.computed == [0, 1]
    assert all(there(record, "weights") for record in records)


# ---------------------------------------------------------------- mirrors


@pytest.fixture
def shared(tmp_path):
    """A mirror that several workers share."""
    return FolderMirror(tmp_path / "mirror")


def worker(mirror, monkeypatch, tmp_path, name):
    """Return a run of another worker, in another folder."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    return Run(mirror)


def test_mirror_shares_finished_substeps(shared, monkeypatch, tmp_path):
    first = worker(shared, monkeypatch, tmp_path, "first")
    record = first.train()
    second = worker(shared, monkeypatch, tmp_path, "second")
    assert second.train() == record
    assert second.computed == []
    assert there(record, "weights")
    shutil.rmtree(shared.root)
    Run(shared).train()
    assert (shared.at(second.place()) / RECORD).exists(), "what it lacks is sent"


def test_mirror_keeps_records_of_retired_artifacts(shared, monkeypatch, tmp_path):
    first = worker(shared, monkeypatch, tmp_path, "first")
    record = first.train(0)
    first.retire(2, last=1, every=1, weights=("weights",))
    second = worker(shared, monkeypatch, tmp_path, "second")
    assert second.train(0) == record
    assert second.computed == []
    assert (there(record, "table"), there(record, "weights")) == (False, True)


def test_revived_substep_leaves_the_mirror(shared, monkeypatch, tmp_path):
    first = worker(shared, monkeypatch, tmp_path, "first")
    first.train(0)
    first.retire(2, last=1)
    first.ledger.revive(first.step().folder)
    assert not shared.at(first.place(0)).exists()
    first.train(0)
    assert first.computed == [0, 0]
    assert (shared.at(first.place(0)) / "table.txt").exists()


def halves(step, inputs, upto):
    """Compute the parts 0 to ``upto``, each sealed in the scratch; keep the newest two."""
    scratch = step.ledger.scratch(step)
    found = sorted(path.name for path in scratch.iterdir())
    for i in range(int(found[-1]) + 1 if found else 0, upto):
        part = scratch / str(i)
        part.mkdir()
        (part / "a").write_text(str(i))
        if i > 1:
            shutil.rmtree(scratch / str(i - 2))
        step.ledger.seal(part)
    if upto < 4:
        raise KeyboardInterrupt
    (step.out / "made").write_text("")
    return {"found": found}


def test_sealed_parts_are_resumed_elsewhere(shared, monkeypatch, tmp_path):
    verb = recorded(halves)
    first = worker(shared, monkeypatch, tmp_path, "first")
    with pytest.raises(KeyboardInterrupt):
        verb(first.step(), Nothing(), upto=3)
    place = first.step().place(verb, Nothing())
    scratch = place.with_name(f".{place.name}.scratch")
    assert shared.names(scratch) == ["1", "2"], "parts that are gone here go there"
    assert substeps.read(scratch / "2")
    (scratch / "2" / "a").write_text("damaged")
    assert substeps.read(scratch / "2") is None

    second = worker(shared, monkeypatch, tmp_path, "second")
    assert verb(second.step(), Nothing(), upto=4)["found"] == ["1", "2"]
    assert not scratch.exists()
    assert shared.names(scratch) == []
    assert (shared.at(place) / RECORD).exists()
