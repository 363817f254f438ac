import json

from tasks.ledger.explain import changes


def record(sources=None, **inputs):
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in inputs.items()}
    return {"inputs": texts, "sources": sources or {}}


def test_equal_records_differ_in_nothing():
    one = record({"tasks/a.py": "1"}, policy="digest", settings={"rate": 0.5})
    assert changes(one, json.loads(json.dumps(one))) == []


def test_a_value_is_named_by_its_path_with_what_it_was_and_is():
    before = record(settings={"rate": 0.5, "steps": 4, "clip": {"low": 0.2}}, size=3, step=[1])
    now = record(settings={"rate": 0.25, "steps": 4, "clip": {"low": 0.1}}, size=4, step=[1])
    assert changes(before, now) == [
        "settings.rate: 0.5 -> 0.25",
        "settings.clip.low: 0.2 -> 0.1",
        "size: 3 -> 4",
    ]


def test_a_section_in_a_mapping_of_sections_is_looked_into():
    before = record(sets={"gsm8k": json.dumps({"scorer": "maths"})})
    now = record(sets={"gsm8k": json.dumps({"scorer": "exact"})})
    assert changes(before, now) == ["sets.gsm8k.scorer: maths -> exact"]


def test_a_value_that_is_new_or_gone_is_said_to_have_been_nothing():
    before, now = record(row={"kl": None}), record(row={"clip": 1}, critic="digest")
    assert changes(before, now) == [
        "row.kl: null -> nothing",
        "row.clip: nothing -> 1",
        "critic: nothing -> digest",
    ]


def test_an_input_is_told_by_its_digest_and_a_long_value_is_cut():
    before = record(policy="a" * 32, trees=["b" * 32, "c" * 32])
    now = record(policy="d" * 32, trees=["b" * 32, "e" * 32])
    policy, trees = changes(before, now)
    assert policy == f"policy: {'a' * 32} -> {'d' * 32}"
    assert trees.startswith("trees: [") and len(trees) < 100


def test_source_files_are_named_where_they_differ_come_or_go():
    before = record({"tasks/a.py": "1", "tasks/b.py": "1", "tasks/c.py": "1"}, source="x")
    now = record({"tasks/a.py": "1", "tasks/b.py": "2", "tasks/d.py": "1"}, source="y")
    assert changes(before, now) == ["source files: tasks/b.py, tasks/c.py, tasks/d.py"]
