"""Why a sub-step runs: what differs from an earlier record, and what is reused."""

import json

from tasks.ledger.explain import changes
from tests.tasks.ledger.toy import Run, Settings


def record(sources=None, **inputs):
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in inputs.items()}
    return {"inputs": texts, "sources": sources or {}}


# ---------------------------------------------------------------- changes


def test_equal_records_have_no_changes():
    one = record({"tasks/a.py": "1"}, policy="digest", settings={"rate": 0.5})
    assert changes(one, json.loads(json.dumps(one))) == []


def test_value_is_named_by_path_with_old_and_new():
    before = record(settings={"rate": 0.5, "steps": 4, "clip": {"low": 0.2}}, size=3, step=[1])
    now = record(settings={"rate": 0.25, "steps": 4, "clip": {"low": 0.1}}, size=4, step=[1])
    assert changes(before, now) == [
        "settings.rate: 0.5 -> 0.25",
        "settings.clip.low: 0.2 -> 0.1",
        "size: 3 -> 4",
    ]


def test_section_in_a_mapping_is_named_by_path():
    before = record(sets={"gsm8k": json.dumps({"scorer": "maths"})})
    now = record(sets={"gsm8k": json.dumps({"scorer": "exact"})})
    assert changes(before, now) == ["sets.gsm8k.scorer: maths -> exact"]


def test_new_and_removed_values():
    before, now = record(row={"kl": None}), record(row={"clip": 1}, critic="digest")
    assert changes(before, now) == [
        "row.kl: null -> nothing",
        "row.clip: nothing -> 1",
        "critic: nothing -> digest",
    ]


def test_digests_are_whole_and_long_values_are_cut():
    before = record(policy="a" * 32, trees=["b" * 32, "c" * 32])
    now = record(policy="d" * 32, trees=["b" * 32, "e" * 32])
    policy, trees = changes(before, now)
    assert policy == f"policy: {'a' * 32} -> {'d' * 32}"
    assert trees.startswith("trees: [") and len(trees) < 100


def test_source_files_that_differ_come_or_go():
    before = record({"tasks/a.py": "1", "tasks/b.py": "1", "tasks/c.py": "1"}, source="x")
    now = record({"tasks/a.py": "1", "tasks/b.py": "2", "tasks/d.py": "1"}, source="y")
    assert changes(before, now) == ["source files: tasks/b.py, tasks/c.py, tasks/d.py"]


# ---------------------------------------------------------------- what a run prints


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_fresh_run_prints_nothing(run, capsys):
    run.train(0)
    run.train(1)
    assert lines(capsys) == []


def test_changes_are_printed_once_per_stage(run, capsys):
    run.train()
    again = Run()
    again.train(settings=Settings(rate=0.1), size=9)
    first, *rest = lines(capsys)
    assert "train of iteration 3 runs again" in first
    assert "0 sub-steps (0 whole iterations)" in first
    assert rest == ["  settings.rate: 0.5 -> 0.1", "  size: 2 -> 9"]
    again.train(settings=Settings(rate=0.2))
    assert lines(capsys) == []


def test_reused_substeps_are_counted(run, capsys):
    for i in range(3):
        run.train(i, size=i)
    again = Run()
    for i in range(2):
        again.train(i, size=i)
    assert lines(capsys) == []
    for i in range(2, 5):
        again.train(i, size=i + 10)
    first, *rest = lines(capsys)
    assert "train of iteration 2 runs again" in first
    assert "2 sub-steps (2 whole iterations)" in first
    assert rest == ["  size: 2 -> 12"]


def test_resumed_run_prints_where_it_resumes(run, capsys):
    for i in range(2):
        run.train(i)
    again = Run()
    for i in range(4):
        again.train(i)
    (line,) = lines(capsys)
    assert "train of iteration 2 is next" in line
    assert "2 sub-steps (2 whole iterations)" in line


def test_further_batch_of_an_iteration_is_no_change(run, capsys):
    run.train(0, size="first batch")
    again = Run()
    again.train(0, size="first batch")
    again.train(0, size="second batch")
    (line,) = lines(capsys)
    assert "is next; 1 sub-steps (0 whole iterations)" in line


def test_most_similar_record_is_compared(run, capsys):
    run.train(settings=Settings(rate=0.1), size=1)
    run.train(settings=Settings(rate=0.2), size=2)
    lines(capsys)
    Run().train(settings=Settings(rate=0.3), size=2)
    assert lines(capsys)[1:] == ["  settings.rate: 0.2 -> 0.3"]


def test_damaged_records_are_not_compared(run, capsys):
    run.train(size=1)
    (run.place(size=1) / "record.json").write_text("{")
    Run().train(size=2)
    assert lines(capsys) == []
