"""What differs is read from dvc.lock, the records and git's history, here without a run."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from flows.runs import cache, file_difference, first_difference
from tests import toy_project as toy

STAGES = ["prepare@toy", "reinforce@toy"]


def md5(content):
    return hashlib.md5(content).hexdigest()


def line(iteration, verb, **changes):
    return {
        "stage": "reinforce",
        "iteration": iteration,
        "verb": verb,
        "key": "k",
        "inputs": {"settings": json.dumps({"rate": 0.1, "update": {"epochs": 1}}), "trees": "t"},
        "artifacts": {"policy": "p"},
        "seed": 3,
        **changes,
    }


def write(root, lock, records=()):
    (root / "data/toy/records").mkdir(parents=True, exist_ok=True)
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": lock}))
    lines = [json.dumps(record) + "\n" for record in records]
    (root / "data/toy/records/reinforce.jsonl").write_text("".join(lines))


def lock(out="o", **changes):
    stage = {
        "cmd": "python",
        "deps": [{"path": "loss.py", "md5": "d"}],
        "params": {"params/toy.yaml": {"seed": 3, "update": {"rate": 0.1}}},
        "outs": [{"path": "models/toy", "md5": out}],
    }
    return {"prepare@toy": {"cmd": "make"}, "reinforce@toy": {**stage, **changes}}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two checkouts beside each other, of a repository that is the working folder."""
    toy.create(tmp_path, flows=False)
    toy.commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    before, now = tmp_path / "before", tmp_path / "now"
    records = [line(i, verb) for i in range(2) for verb in ("rollout", "update")]
    for root in (before, now):
        root.mkdir()
        write(root, lock(), records)
    return before, now


def said(places, commit="HEAD"):
    return str(first_difference.first_difference(STAGES, *places, commit)).splitlines()


def test_equal_runs_have_no_difference(places):
    assert first_difference.first_difference(STAGES, *places, "HEAD") is None


def test_first_sub_step_and_value_are_named(places):
    records = [line(0, "rollout"), line(0, "update"), line(1, "rollout", artifacts={"policy": "x"})]
    settings = {"settings": json.dumps({"rate": 0.1, "update": {"epochs": 2}}), "trees": "t"}
    write(places[1], lock("x"), [*records, line(1, "update", inputs=settings)])
    assert said(places) == [
        "differs first at reinforce@toy, iteration 1, rollout",
        "  artifact policy: was p, is x",
        "  out models/toy: was o, is x",
    ]
    write(places[1], lock("x"), [*records[:2], line(1, "rollout", inputs=settings)])
    assert said(places)[1:2] == ["  input settings.update.epochs: was 1, is 2"]


@pytest.mark.parametrize("text", ["{", "null", "[]", "3", "{}", "[" * 10**5, '{"stage": 3}'])
def test_malformed_line_is_named(places, text):
    file = places[1] / "data/toy/records/reinforce.jsonl"
    file.write_text(f"{json.dumps(line(0, 'rollout'))}\n{text}\n")
    with pytest.raises(ValueError, match=r"reinforce.jsonl: line 2 is no record of a sub-step"):
        said(places)


def test_other_questions_and_sub_steps_are_named(places):
    records = [line(0, "rollout", questions=["a"]), line(0, "update")]
    write(places[0], lock(), records)
    write(places[1], lock(), [line(0, "rollout", questions=["b"]), line(0, "update")])
    assert said(places)[1:] == ['  questions: was ["a"], is ["b"]', "  the outs are the same"]
    write(places[1], lock(), [records[0], line(0, "rollout", attempt=1)])
    assert said(places)[:2] == [
        "differs first at reinforce@toy, iteration 0, update",
        "  sub-step: was iteration 0, update, is iteration 0, rollout (attempt 1)",
    ]
    write(places[1], lock(), records[:1])
    assert said(places)[1] == "  sub-step: was iteration 0, update, is nothing"


def test_parameters_and_commands_are_named_by_stage(places):
    params = {"params/toy.yaml": {"seed": 3, "update": {"rate": 0.2}}}
    write(places[1], lock(params=params, cmd="perl"), [])
    assert "  input params/toy.yaml update.rate: was 0.1, is 0.2" in said(places)
    assert "  input cmd: was python, is perl" in said(places)
    write(places[1], {**lock(params=params), "prepare@toy": {"cmd": "made"}}, [])
    assert said(places)[:2] == ["differs first at prepare@toy", "  input cmd: was make, is made"]


def rows(*values):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(values)}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("file", "contents", "expected"),
    [
        ("loss.py", (b"a\nb\n", b"a\nc\n"), "loss.py, line 2: was b, is c"),
        ("q.jsonl", (b"1\n", b"1\n2\n"), "q.jsonl, row 2: was nothing, is 2"),
        ("t.parquet", (rows(1, 2), rows(1, 5)), 't.parquet, row 2: was {"id": 2}, is {"id": 5}'),
        (
            "l.txt",
            (b"x" * 200, b"x" * 199 + b"y"),
            f"l.txt, line 1: was …{'x' * 21}, is …{'x' * 20}y",
        ),
    ],
)
def test_first_line_or_row_is_found_by_history(places, file, contents, expected):
    (Path.cwd() / ".gitignore").write_text("/before\n/now\n")
    for content in contents:
        Path(file).write_bytes(content)
        commit = toy.commit(Path.cwd())
    (places[1] / file).write_bytes(contents[1])
    for root, content in zip(places, contents, strict=True):
        write(root, lock(deps=[{"path": file, "md5": md5(content)}]))
    assert said(places, commit)[1].startswith(f"  input {expected}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"new/b.jsonl": "1\n5\n"}, "data/sources/new/b.jsonl, row 2: was 2, is 5"),
        ({"c.jsonl": "3\n"}, "data/sources/c.jsonl: was nothing, is a file"),
    ],
)
def test_first_row_of_a_folder_is_found_by_history(places, changes, expected):
    (Path.cwd() / ".gitignore").write_text("/before\n/now\n")
    first = {"a.jsonl": "0\n", "new/b.jsonl": "1\n2\n"}
    for root, files in ((Path(), first), (places[1], first | changes)):
        for name, text in files.items():
            (root / "data/sources" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "data/sources" / name).write_text(text)
    toy.commit(Path.cwd())
    digest = cache.digest_of(Path("data/sources"))
    Path("data/sources/a.jsonl").write_text("later\n")
    commit = toy.commit(Path.cwd())
    for root, md5 in zip(places, (digest, "other.dir"), strict=True):
        write(root, lock(deps=[{"path": "data/sources", "md5": md5}]))
    assert said(places, commit)[1] == f"  input {expected}"


SOURCE = (
    """# what is learned
def loss(value):
    """
    + '"""A docstring."""'
    + """
    return (2 *
            value)
"""
)
MOVED = SOURCE.replace("# what", "# more\n# of what").replace("A doc", "Another doc")


@pytest.mark.parametrize(
    ("path", "now", "expected"),
    [
        (
            "loss.py",
            MOVED.replace("2 *", "3 *"),
            "loss.py, line 5: was     return (2 *, is     return (3 *",
        ),
        ("loss.py", MOVED + "more = 1\n", "loss.py, line 7: was nothing, is more = 1"),
        ("loss.py", MOVED, None),
        ("loss.py", SOURCE.replace("\n            value", " value"), None),
        ("tasks/tools/a.py", MOVED, "tasks/tools/a.py, line 4: was "),
        ("loss.py", "no Python:\n", "loss.py, line 1: was # what"),
    ],
    ids=["after comments", "at the end", "no code", "line breaks", "read at run time", "no Python"],
)
def test_sources_differ_by_their_code(path, now, expected):
    found = file_difference.in_file(path, SOURCE.encode(), now.encode())
    assert (found and str(found).startswith(expected)) if expected else found is None


def test_multi_line_string_differs_at_its_line():
    before, now = (f'TEXT = """\na\n{each}\n"""\n'.encode() for each in "bc")
    assert str(file_difference.in_file("a.py", before, now)) == "a.py, line 3: was b, is c"


def test_room_with_changed_comments_is_no_difference(places):
    (Path.cwd() / ".gitignore").write_text("/before\n/now\n")
    (places[1] / "tasks/__pycache__").mkdir(parents=True)
    (places[1] / "tasks/__pycache__/a.pyc").write_text("bytecode")
    Path("tasks").mkdir()
    for root, text in ((Path(), SOURCE), (places[1], MOVED)):
        (root / "tasks/a.py").write_text(text)
        (root / "tasks/b.py").write_text("b = 1\n")
    commit = toy.commit(Path.cwd())
    for root, md5 in zip(places, (cache.digest_of(Path("tasks")), "other.dir"), strict=True):
        write(root, lock(deps=[{"path": "tasks", "md5": md5}]))
    assert first_difference.first_difference(STAGES, *places, commit) is None
    (places[1] / "tasks/b.py").write_text("# two\nb = 2\n")
    assert said(places, commit)[1] == "  input tasks/b.py, line 2: was b = 1, is b = 2"


def test_file_without_history_is_named_by_digests(places):
    write(places[1], lock(deps=[{"path": "loss.py", "md5": "e"}]))
    assert "  input loss.py: was d, is e" in said(places)
