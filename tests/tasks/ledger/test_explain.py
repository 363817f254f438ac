"""Why a sub-step runs: what differs from an earlier record, and what is reused."""

import json

import pytest

from tasks.ledger.explain import changes
from tasks.ledger.recipe_names import recipe_name
from tests.tasks.ledger.toy import Run, Settings


def record(sources=None, /, **inputs):
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
    before, now = record(row={"kl": None}), record(row={"clip": 1}, critic="a text")
    assert changes(before, now) == [
        "row.kl: null -> nothing",
        "row.clip: nothing -> 1",
        "critic: nothing -> a text",
    ]


def test_parts_of_a_list_are_named():
    parts = [{"answer": {"wrong": 0.0}}, {"many_tools": {"bonus": 0.1}}]
    before = record(settings=[json.dumps(part) for part in parts])
    parts[1]["many_tools"]["bonus"] = 0.2
    now = record(settings=[json.dumps(part) for part in parts])
    at = ("reinforce", 0, "reward")
    assert changes(before, now, at) == ["reinforce.reward.many_tools.bonus: 0.1 -> 0.2"]


@pytest.mark.parametrize(
    ("stage", "verb", "path", "key"),
    [
        ("reinforce", "rollout", "budget.temperature", "reinforce.rollout.temperature"),
        ("reinforce/validation", "rollout", "budget.temperature", "evaluate.temperature"),
        ("evaluate/trained", "rollout", "top_p", "evaluate.top_p"),
        ("prepare/sampled", "rollout", "budget.leaves", "prepare.expert.attempts"),
        ("reinforce", "rollout", "agent.dialogue.tool_calls", "dialogue.tool_calls"),
        ("prepare", "prepare", "settings.expert.traces", "prepare.expert.traces"),
        ("cold_start", "cold_start", "step.seed", "seed"),
        ("reinforce", "update", "lora.rank", "lora.rank"),
        ("verdict", "verdict", "settings.margin", "verdict.margin"),
    ],
)
def test_settings_are_named_as_in_the_recipe(stage, verb, path, key):
    assert recipe_name(path, stage, verb) == key


def test_settings_and_data_come_before_what_follows_from_them_and_code():
    old, new, made = "a" * 32, "b" * 32, "c" * 32
    before = record(dict.fromkeys("abcdef", "1"), policy=old, sources=[old], size=1, source="x")
    before["inputs"]["agent"] = json.dumps({"sources": {"tool dice": old}})
    now = record(dict.fromkeys("abcdef", "2"), policy=made, sources=[old, new], size=2, source="y")
    now["inputs"]["agent"] = json.dumps({"sources": {"tool dice": new}})
    files = {new: "data/sources/more.jsonl", made: "models/smoke/initial"}
    at = ("reinforce", 0, "rollout")
    assert changes(before, now, at, files) == [
        "reinforce.questions: 1 -> 2",
        "data: data/sources/more.jsonl",
        "made anew by earlier steps: the policy",
        "code: the files of tool dice, a, b, c, d and 2 more files",
    ]


def test_files_that_are_gone_are_counted():
    before, now = record(sources=["a" * 32, "b" * 32]), record(sources=["a" * 32])
    assert changes(before, now) == ["data: 1 of the files in data/sources/ gone"]


def test_source_files_that_differ_come_or_go():
    before = record({"tasks/a.py": "1", "tasks/b.py": "1", "tasks/c.py": "1"}, source="x")
    now = record({"tasks/a.py": "1", "tasks/b.py": "2", "tasks/d.py": "1"}, source="y")
    assert changes(before, now) == ["code: tasks/b.py, tasks/c.py, tasks/d.py"]


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
    assert first == "reinforce: train of iteration 3 is computed again. What has changed:"
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
    assert "train of iteration 2 is computed again" in first
    assert "2 earlier sub-steps, 2 whole iterations, are reused" in first
    assert rest == ["  size: 2 -> 12"]


def test_resumed_run_prints_where_it_resumes(run, capsys):
    for i in range(2):
        run.train(i)
    again = Run()
    for i in range(4):
        again.train(i)
    (line,) = lines(capsys)
    assert "train of iteration 2 is next" in line
    assert "2 earlier sub-steps, 2 whole iterations, are reused" in line


def test_further_batch_of_an_iteration_is_no_change(run, capsys):
    run.train(0, size="first batch")
    again = Run()
    again.train(0, size="first batch")
    again.train(0, size="second batch")
    (line,) = lines(capsys)
    assert line == "reinforce: train is next; 1 earlier sub-step is reused"


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
