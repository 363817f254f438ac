import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from tasks.ledger import artifacts, prefect_cache, substeps
from tasks.ledger import keys as ledger
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import Step

ROOT = Path(__file__).parents[3]
STEP = Step("smoke", "reinforce", 3, 7)
computed: list[Step] = []


class Settings(BaseModel):
    rate: float = 0.5
    steps: int = 4


@substeps.recorded
def train(step, folder, *, policy, settings, size=2, tool=len):
    """A sub-step with one artifact that is a file and one that is a folder."""
    computed.append(step)
    (folder / "table.txt").write_text(f"{settings.rate} {size}")
    (folder / "weights").mkdir()
    (folder / "weights" / "a.bin").write_bytes(b"\0" * 9)
    return {"metrics": {"loss": 0.25}}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    computed.clear()
    substeps._told.clear()
    substeps._taken.clear()


def run(step=STEP, policy="digest of the policy", settings=None, **rest):
    policy = Artifact("some/path", policy)
    return train(step=step, policy=policy, settings=settings or Settings(), **rest)


def place(step=STEP, policy=None, settings=None, **rest):
    policy = policy or Artifact("some/path", "digest of the policy")
    return place_of(train, step, policy=policy, settings=settings or Settings(), **rest)


def place_of(sub_step: Any, step, **rest):
    return sub_step.place(step, **rest)


# ---------------------------------------------------------------- digests


def test_a_digest_depends_on_names_and_bytes_and_on_nothing_else(tmp_path):
    def folder(name, **files):
        for file, text in files.items():
            path = tmp_path / name / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return artifacts.digest(tmp_path / name)

    first = folder("first", a="1", sub__b="2")
    os.utime(tmp_path / "first" / "a", (0, 0))
    (tmp_path / "first" / "a").chmod(0o600)
    assert artifacts.digest(tmp_path / "first") == first
    assert folder("second", sub__b="2", a="1") == first  # whatever the order and the place
    others = [
        folder("bytes", a="1", sub__b="3"),
        folder("name", a="1", sub__c="2"),
        folder("moved", a="1", b="2"),
        folder("swapped", a="2", sub__b="1"),
        folder("fewer", a="1"),
        folder("joined", a="1\0sub/b2"),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert re.fullmatch("[0-9a-f]{32}", first)


def test_a_digest_of_a_file_depends_on_its_bytes_only(tmp_path):
    (tmp_path / "a").write_bytes(b"same")
    (tmp_path / "b").write_bytes(b"same")
    (tmp_path / "c").write_bytes(b"Same")
    assert artifacts.digest(tmp_path / "a") == artifacts.digest(tmp_path / "b")
    assert artifacts.digest(tmp_path / "a") != artifacts.digest(tmp_path / "c")


def test_every_byte_of_a_large_file_counts_and_it_has_the_digest_of_a_small_one(
    tmp_path, monkeypatch
):
    file = tmp_path / "large"

    def of(content):
        file.write_bytes(content)
        return artifacts.digest(file)

    content = bytes(range(35))
    changed = [content[:i] + b"\xff" + content[i + 1 :] for i in range(len(content))]
    cut = [content[:i] for i in range(len(content))]
    swapped = content[10:20] + content[:10] + content[20:]
    digests = {of(each) for each in [content, *changed, *cut, swapped]}
    assert len(digests) == 1 + 35 + 35 + 1
    small = of(content)
    monkeypatch.setattr(artifacts, "MAPPED", 10)  # a file of 35 bytes is large
    assert {of(each) for each in [content, *changed, *cut, swapped]} == digests
    assert of(content) == small


def test_an_artifact_that_is_not_there_is_refused_by_its_path():
    with pytest.raises((ValueError, RuntimeError, OSError), match="models/smoke/initial"):
        Artifact.at(Path("models/smoke/initial"))


# ---------------------------------------------------------------- keys


def test_the_key_changes_with_everything_that_decides_the_outcome():
    places = [
        place(),
        place(policy=Artifact("some/path", "another digest")),
        place(settings=Settings(rate=0.25)),
        place(settings=Settings(steps=5)),
        place(size=3),
        place(step=Step("smoke", "reinforce", 3, 8)),
        place(step=Step("smoke", "reinforce", 4, 7)),
    ]
    assert len(set(places)) == len(places)
    assert len({path.name.split("-")[-1] for path in places}) == len(places)


def test_the_key_changes_with_nothing_else():
    assert place(policy=Artifact("elsewhere", "digest of the policy")) == place()
    assert place(size=2, tool=print) == place(size=2, tool=len) == place(size=2)
    assert place(settings=Settings(steps=4, rate=0.5)) == place()


def test_a_list_is_all_of_its_entries_in_their_order():
    one, other = Artifact("a", "digest 1"), Artifact("b", "digest 2")
    lists = [[one, other], [other, one], [one], [], [[one, other]]]
    assert len({place(size=entries) for entries in lists}) == len(lists)
    assert place(size=[one]) == place(size=[Artifact("elsewhere", "digest 1")])


def test_a_mapping_is_all_of_its_entries_by_name():
    one, other = Settings(rate=0.25), Settings(steps=5)
    mappings = [{"a": one}, {"b": one}, {"a": other}, {"a": one, "b": other}, {}]
    assert len({place(size=entries) for entries in mappings}) == len(mappings)
    assert place(size={"a": one, "b": other}) == place(size={"b": other, "a": one})


def test_values_of_different_kinds_have_different_keys():
    values = (1, 1.0, True, None, "1", "true", "null", [1], ["1"], "[1]", {"a": 1}, [None], [])
    places = [place(size=value) for value in values]
    assert len(set(places)) == len(places)


def test_a_name_tells_recipe_stage_iteration_and_verb():
    assert place().parent == artifacts.ROOT / "smoke" / "reinforce"
    assert re.fullmatch("0003-train-[0-9a-f]{16}", place().name)


UNFIT = [Path("a"), (1, 2), b"x", [[Path("a")]], {"a": Path("a")}]


@pytest.mark.parametrize("value", UNFIT)
def test_what_cannot_be_part_of_a_key_is_refused(value):
    with pytest.raises(TypeError, match="can't be part of a key: pass an artifact"):
        run(size=value)
    assert not artifacts.ROOT.exists()


def write(files):
    for name, source in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(source)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project beside the ledger's own."""
    monkeypatch.setattr(ledger, "PROJECT", tmp_path)
    write(
        {
            "tasks/__init__.py": "",
            "tasks/verb.py": "import numpy\nfrom tasks import helper\n",
            "tasks/helper.py": "def f():\n    from params.schema import Recipe\n",
            "tasks/drawer/__init__.py": "import tasks.verb",
            "tasks/drawer/one.py": "from tasks.drawer import something",
            "tasks/unrelated.py": "import tasks.helper",
            "params/schema.py": "from tasks_of_another_project import verb",
        }
    )
    ledger.source_digests.cache_clear()
    yield tmp_path
    ledger.source_digests.cache_clear()


def source_of(name):
    ledger.source_digests.cache_clear()
    return ledger.source_digest(Path(name).absolute())


def test_a_module_is_made_of_the_project_files_that_it_imports(project):
    def closure(name):
        return [str(path.relative_to(project)) for path in ledger.import_closure(project / name)]

    verb = ["params/schema.py", "tasks/__init__.py", "tasks/helper.py", "tasks/verb.py"]
    assert closure("tasks/verb.py") == verb
    assert closure("tasks/helper.py") == ["params/schema.py", "tasks/helper.py"]
    assert closure("tasks/drawer/one.py") == sorted(
        [*verb, "tasks/drawer/__init__.py", "tasks/drawer/one.py"]
    )


def test_the_closure_of_a_real_module():
    closure = ledger.import_closure(ROOT / "tasks" / "losses.py")
    assert closure == [ROOT / "tasks" / "losses.py"]
    closure = ledger.import_closure(ROOT / "tasks" / "branching.py")
    assert [path.name for path in closure] == ["schema.py", "branching.py", "trajectory.py"]


def test_the_inside_of_the_python_tool_is_part_of_a_rollouts_source():
    # the tool starts it as a script of its own, but it decides what a call gives back
    closure = ledger.import_closure(ROOT / "tasks" / "rollout.py")
    assert ROOT / "tasks" / "tools" / "python_worker.py" in closure


def test_source_counts_with_all_that_it_imports_and_with_nothing_else(project):
    before = source_of("tasks/verb.py")
    write({"tasks/unrelated.py": "print()", "tasks/drawer/__init__.py": "import tasks.helper"})
    assert source_of("tasks/verb.py") == before
    write({"params/schema.py": "# another comment"})
    assert source_of("tasks/verb.py") != before


def test_a_change_of_source_changes_the_key(project, monkeypatch):
    verb = """
        from tasks import ledger

        @ledger.recorded
        def verb(step, folder):
            return {}
    """
    write({"tasks/verb.py": textwrap.dedent(verb), "tasks/ledger/substeps.py": ""})

    def key():
        ledger.source_digests.cache_clear()
        space: dict[str, Any] = {}
        code = compile(Path("tasks/verb.py").read_text(), str(project / "tasks/verb.py"), "exec")
        exec(code, space)
        return space["verb"].place(STEP)

    before = key()
    assert key() == before
    write({"tasks/ledger/substeps.py": "VERSION = 2"})
    assert key() != before


# ---------------------------------------------------------------- records


def test_a_record_says_what_was_made_of_what():
    made = run()
    assert made["verb"] == "train"
    assert made["step"] == {"recipe": "smoke", "stage": "reinforce", "iteration": 3, "seed": 7}
    assert made["metrics"] == {"loss": 0.25}
    assert made["inputs"]["policy"] == "digest of the policy"
    assert {"step", "settings", "source"} <= set(made["inputs"])
    assert set(made["artifacts"]) == {"table", "weights"}
    assert 0 <= made["duration"] < 60
    assert json.loads((place() / "record.json").read_text()) == made


def test_an_artifact_lies_where_its_record_says():
    made = run()
    table, weights = artifacts.output(made, "table"), artifacts.output(made, "weights")
    assert Path(table.path).read_text() == "0.5 2"
    assert Path(weights.path).is_dir()
    assert Artifact.at(Path(table.path)) == table
    assert Artifact.at(Path(weights.path)) == weights


def test_what_is_finished_is_not_done_again():
    first = run()
    assert run() == first
    assert run(tool=print) == first
    assert len(computed) == 1
    run(size=5)
    assert len(computed) == 2
    assert run() == first, "a result of other inputs stays"
    assert len(computed) == 2


def test_nothing_but_whole_results_lies_in_the_ledger():
    run()
    assert [path.name for path in place().parent.iterdir()] == [place().name]


@pytest.mark.parametrize("content", [b"", b'{"verb": "train", "artif', b"\0\0\0", b"\xff\xfe{}"])
def test_a_damaged_record_is_done_again_and_said(capsys, content):
    first = run()
    (place() / "record.json").write_bytes(content)
    assert run()["artifacts"] == first["artifacts"]
    assert len(computed) == 2
    assert "done again" in capsys.readouterr().out


def damage_file():
    (place() / "table.txt").write_text("0.5 3")


def lose_file():
    (place() / "table.txt").unlink()


def damage_folder():
    (place() / "weights" / "a.bin").write_bytes(b"\0" * 8 + b"\1")


def fill_folder():
    (place() / "weights" / "b.bin").write_bytes(b"")


@pytest.mark.parametrize("harm", [damage_file, lose_file, damage_folder, fill_folder])
def test_a_damaged_artifact_is_done_again_and_said(capsys, harm):
    first = run()
    harm()
    assert run()["artifacts"] == first["artifacts"]
    assert len(computed) == 2
    assert re.search(
        r"(table.txt|weights) is missing or damaged: train is done again", capsys.readouterr().out
    )
    run()
    assert len(computed) == 2


def test_what_is_done_anew_is_said_once_a_stage_with_its_reason(capsys):
    run()
    assert capsys.readouterr().out == ""
    substeps._told.clear()
    run(settings=Settings(rate=0.1), size=9)
    assert capsys.readouterr().out == (
        "reinforce: train of iteration 3 is done anew; 0 sub-steps (0 whole iterations) are taken "
        "over. What has changed since:\n"
        "  settings.rate: 0.5 -> 0.1\n"
        "  size: nothing -> 9\n"
    )
    run(settings=Settings(rate=0.2))
    assert capsys.readouterr().out == ""


def test_a_run_says_once_what_it_takes_over_and_what_is_new(capsys):
    for i in range(3):
        run(step=step(i), policy=f"policy {i}")
    restart(capsys)
    for i in range(2):
        run(step=step(i), policy=f"policy {i}")
    assert capsys.readouterr().out == ""
    for i in range(2, 5):
        run(step=step(i), policy=f"other policy {i}")
    assert capsys.readouterr().out == (
        "reinforce: train of iteration 2 is done anew; 2 sub-steps (2 whole iterations) are taken "
        "over. What has changed since:\n  policy: policy 2 -> other policy 2\n"
    )


def test_a_run_that_goes_on_after_a_kill_says_from_where(capsys):
    for i in range(2):
        run(step=step(i))
    restart(capsys)
    for i in range(4):
        run(step=step(i))
    assert capsys.readouterr().out == (
        "reinforce: train of iteration 2 is next; 2 sub-steps (2 whole iterations) are taken over\n"
    )


def test_a_further_batch_of_an_iteration_is_no_change(capsys):
    run(step=step(0), policy="first batch")
    restart(capsys)
    run(step=step(0), policy="first batch")
    run(step=step(0), policy="second batch")
    assert "is next; 1 sub-steps (0 whole" in capsys.readouterr().out


def restart(capsys):
    """As if another process began."""
    substeps._told.clear()
    substeps._taken.clear()
    capsys.readouterr()


def test_the_record_that_differs_least_is_the_one_to_compare_with(capsys):
    run(policy="a", settings=Settings(rate=0.1), size=1)
    run(policy="b", settings=Settings(rate=0.2), size=2)
    restart(capsys)
    run(policy="b", settings=Settings(rate=0.3), size=2)
    assert capsys.readouterr().out.splitlines()[1:] == ["  settings.rate: 0.2 -> 0.3"]


def test_an_error_leaves_no_record():
    @substeps.recorded
    def fails(step, folder):
        (folder / "half").write_text("half")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fails(step=STEP)
    assert substeps.read(place_of(fails, STEP)) is None
    assert not place_of(fails, STEP).exists()


# ---------------------------------------------------------------- kills

DEADLY = """
import os, signal, sys
from pathlib import Path
from tasks import ledger

ledger.PROJECT = Path.cwd()
POINT = sys.argv[1]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

@ledger.recorded
def verb(step, folder):
    with open("computed", "a") as log:
        log.write("x")
    scratch = ledger.scratch(folder)
    (scratch / "progress").write_text((scratch / "progress").read_text() + "+"
                                      if (scratch / "progress").exists() else "+")
    (folder / "half").write_text("one half")
    if POINT == "compute":
        die()
    (folder / "other").write_text("the other")
    if POINT == "rename":
        Path.rename = die
    if POINT == "record":
        ledger.json.dumps = die
    if POINT == "scratch":
        ledger.shutil.rmtree = lambda path, **_: die() if "scratch" in path.name else None
    return {"progress": len((scratch / "progress").read_text())}

record = verb(step=ledger.Step("smoke", "toy", 0, 1))
print(record["progress"], sorted(record["artifacts"]))
"""


def start(point):
    Path("deadly.py").write_text(DEADLY)
    return subprocess.run(
        [sys.executable, "deadly.py", point],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("point", ["compute", "record", "rename"])
def test_a_kill_before_the_end_leaves_no_result_but_the_scratch(point):
    assert start(point).returncode == -signal.SIGKILL
    folder = artifacts.ROOT / "smoke" / "toy"
    assert [path for path in folder.iterdir() if not path.name.startswith(".")] == []
    ended = start("nowhere")
    assert ended.stdout == "2 ['half', 'other']\n", ended.stderr
    assert len(Path("computed").read_text()) == 2
    assert [path.name[:10] for path in folder.iterdir()] == ["0000-verb-"]
    assert start("nowhere").stdout == ended.stdout
    assert len(Path("computed").read_text()) == 2


def test_a_kill_after_the_record_is_there_costs_nothing():
    assert start("scratch").returncode == -signal.SIGKILL
    assert start("nowhere").stdout == "1 ['half', 'other']\n"
    assert len(Path("computed").read_text()) == 1


def test_a_folder_knows_the_name_that_it_will_have():
    names = []

    @substeps.recorded
    def verb(step, folder):
        names.append(substeps.final_place(folder))
        (folder / "made").write_text("")
        return {}

    verb(step=STEP)
    assert names == [place_of(verb, STEP)]
    assert (names[0] / "made").exists()


# ---------------------------------------------------------------- retiring


def step(iteration):
    return Step("smoke", "reinforce", iteration, 7)


def test_old_artifacts_are_dropped_and_their_records_count():
    records = [run(step=step(i)) for i in range(5)]
    substeps.retire(step(4), "train", last=2, every=99, weights=())
    for i, record in enumerate(records):
        kept = i > 2
        assert Path(artifacts.output(record, "table").path).exists() == kept
        assert Path(artifacts.output(record, "weights").path).exists() == kept
    computed.clear()
    assert [run(step=step(i)) for i in range(5)] == records
    assert computed == []


def test_weights_of_every_few_iterations_stay_and_all_of_the_last():
    records = [run(step=step(i)) for i in range(8)]
    for i in range(8):
        substeps.retire(step(i), "train", last=2, every=3, weights=("weights",))

    def there(name):
        return [i for i, r in enumerate(records) if Path(artifacts.output(r, name).path).exists()]

    assert there("weights") == [2, 5, 6, 7], "the third, the sixth, and the last two"
    assert there("table") == [6, 7]
    computed.clear()
    assert [run(step=step(i)) for i in range(8)] == records
    assert computed == []


def test_weights_that_stayed_are_still_looked_at(capsys):
    run(step=step(2))
    substeps.retire(step(9), "train", last=1, every=3, weights=("weights",))
    (place(step=step(2)) / "weights" / "a.bin").write_bytes(b"")
    computed.clear()
    run(step=step(2))
    assert computed == [step(2)]
    assert "weights is missing or damaged" in capsys.readouterr().out


def test_a_kill_while_something_is_dropped_leaves_a_record_that_counts(monkeypatch):
    run(step=step(0))
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "remove", lambda _: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            substeps.retire(step(1), "train", last=1, every=9, weights=())
    computed.clear()
    run(step=step(0))
    assert computed == []
    substeps.retire(step(1), "train", last=1, every=9, weights=())
    assert sorted(path.name for path in place(step=step(0)).iterdir()) == ["record.json", "retired"]


def test_only_the_named_verb_is_retired():
    @substeps.recorded
    def retrain(step, folder):
        (folder / "made").write_text("")
        return {}

    other = retrain(step=step(0))
    run(step=step(0))
    substeps.retire(step(9), "train", last=1, every=99, weights=())
    assert Path(artifacts.output(other, "made").path).exists()


@pytest.mark.parametrize("name", ["table", "weights"])
def test_what_is_spared_stays_whole_and_is_retired_when_it_is_no_longer(name):
    records = [run(step=step(i)) for i in range(5)]
    spare = artifacts.output(records[1], name)
    substeps.retire(step(4), "train", last=1, every=99, weights=("table", "weights"), spare=spare)
    there = [
        [Path(artifacts.output(r, n).path).exists() for n in ("table", "weights")] for r in records
    ]
    assert there == [[False] * 2, [True] * 2, [False] * 2, [False] * 2, [True] * 2]
    assert not (Path(spare.path).parent / substeps.RETIRED).exists()
    substeps.retire(step(4), "train", last=1, every=99, weights=())
    assert not Path(spare.path).exists()
    assert run(step=step(1)) == records[1], "its record counts"


def test_what_lies_elsewhere_is_spared_without_a_fault():
    made = run(step=step(0))
    for path in ("models/smoke/cold_start", str(artifacts.ROOT / "other")):
        substeps.retire(step(0), "train", last=1, every=99, weights=(), spare=Artifact(path, ""))
        assert Path(artifacts.output(made, "table").path).exists()
    substeps.retire(
        step(1),
        "train",
        last=1,
        every=99,
        weights=(),
        spare=Artifact("models/smoke/cold_start", ""),
    )
    assert not Path(artifacts.output(made, "table").path).exists()


@substeps.recorded
def look(step, folder, *, tables):
    computed.append(step)
    (folder / "seen.txt").write_text(str(len(tables)))
    return {}


@pytest.mark.parametrize("pruned", [0, 1, 2])
def test_something_pruned_in_a_list_is_named_before_any_work(pruned):
    tables = [artifacts.output(run(step=step(i)), "table") for i in range(3)]
    assert look(step=step(8), tables=tables)["artifacts"]
    computed.clear()
    shutil.rmtree(Path(tables[pruned].path).parent)
    with pytest.raises(artifacts.PrunedError, match=re.escape(tables[pruned].path)):
        look(step=step(9), tables=tables)
    assert computed == []
    assert look(step=step(8), tables=tables), "what is done needs nothing"


def test_retiring_passes_over_what_a_kill_left_behind():
    run(step=step(0))
    left = place(step=step(3)).with_name(f".{place(step=step(3)).name}.partial")
    left.mkdir()
    left.with_suffix(".scratch").mkdir()
    substeps.retire(step(2), "train", last=1, every=99, weights=())
    assert left.is_dir()
    assert left.with_suffix(".scratch").is_dir()


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize("before", ["nothing", "file", "folder", "a half copy"])
@pytest.mark.parametrize("name", ["table", "weights"])
def test_an_artifact_is_published_whole_in_place_of_what_was_there(name, before):
    made = artifacts.output(run(), name)
    target = Path("data", "out")
    if before == "file":
        write({"data/out": "old"})
    if before == "folder":
        write({"data/out/old": "old"})
    if before == "a half copy":
        write({"data/.out.partial/a.bin": "half", "data/.out.partial/b.bin": "half"})
    artifacts.publish(made, target)
    assert artifacts.digest(target) == made.digest
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert Path(made.path).exists()


HALF_A_COPY = """
import os, shutil, signal
from pathlib import Path
from tasks import ledger

copy = shutil.copytree

def half_a_copy(source, target):
    copy(source, target)
    os.kill(os.getpid(), signal.SIGKILL)

shutil.copytree = half_a_copy
ledger.publish(ledger.artifact(Path("made")), Path("data/out"))
"""


@pytest.mark.parametrize("before", [{}, {"data/out/old": "an older one"}], ids=["first", "again"])
def test_a_kill_while_publishing_leaves_what_was_there(before):
    write({"made/a": "1", "made/b": "2", **before})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", HALF_A_COPY], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    out = Path("data/out")
    assert [path.name for path in out.iterdir()] == ["old"] if before else not out.exists()
    artifacts.publish(Artifact.at(Path("made")), out)
    assert artifacts.digest(out) == artifacts.digest(Path("made"))
    assert [path.name for path in Path("data").iterdir()] == ["out"]


def published(records):
    artifacts.publish_records(records, Path("data/smoke/records/reinforce.jsonl"))
    return Path("data/smoke/records/reinforce.jsonl").read_text()


def test_what_is_published_of_records_is_the_same_for_equal_runs(monkeypatch):
    first = [run(step=step(i)) for i in range(2)]
    said = published(first)
    shutil.rmtree(artifacts.ROOT)
    monkeypatch.setattr(substeps.socket, "gethostname", lambda: "elsewhere")
    again = [run(step=step(i)) for i in range(2)]
    assert again != first, "times and hosts differ"
    assert published(again) == said
    assert [path.name for path in Path("data/smoke/records").iterdir()] == ["reinforce.jsonl"]


def test_a_published_record_says_what_was_made_of_what_in_order():
    records = [run(step=step(i)) for i in range(2)]
    extended = [{**records[0], "attempt": 1, "questions": ["q7", "q3"], "cursor": 8}, records[1]]
    lines = [json.loads(line) for line in published(extended).splitlines()]
    assert lines[0] == {
        "stage": "reinforce",
        "iteration": 0,
        "verb": "train",
        "key": place(step=step(0)).name.split("-")[-1],
        "inputs": records[0]["inputs"],
        "artifacts": {name: made["digest"] for name, made in records[0]["artifacts"].items()},
        "seed": 7,
        "attempt": 1,
        "questions": ["q7", "q3"],
        "cursor": 8,
    }
    assert lines[1]["iteration"] == 1
    assert not {"attempt", "questions", "cursor"} & set(lines[1]), "what does not apply is left out"


# ---------------------------------------------------------------- stages and Prefect


def test_a_stage_key_depends_on_the_recipe_and_on_what_the_stage_reads():
    one, other = Artifact("a", "1"), Artifact("b", "2")
    keys = [
        ledger.stage_key(Settings()),
        ledger.stage_key(Settings(rate=0.1)),
        ledger.stage_key(Settings(), one),
        ledger.stage_key(Settings(), other),
        ledger.stage_key(Settings(), one, other),
    ]
    assert len(set(keys)) == len(keys)
    assert ledger.stage_key(Settings(), Artifact("elsewhere", "1")) == keys[2]


def test_prefects_cache_key_is_the_place_and_drops_a_stale_result():
    arguments = {
        "step": STEP,
        "policy": Artifact("some/path", "digest of the policy"),
        "settings": Settings(),
    }
    context = SimpleNamespace(task=SimpleNamespace(fn=train))  # as far as our function looks
    key = prefect_cache.cache_key(context, arguments)
    assert artifacts.ROOT / key == place()
    kept = prefect_cache.RESULTS / key
    kept.parent.mkdir(parents=True)
    kept.write_text("a result")
    prefect_cache.cache_key(context, arguments)
    assert not kept.exists(), "the ledger has no record"
    run()
    kept.write_text("a result")
    prefect_cache.cache_key(context, arguments)
    assert kept.exists()
