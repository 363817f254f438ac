"""The fixed tasks of an evaluation: their order, their digests, and what does not fit."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.rollout import batch
from tasks.trees import panels
from tasks.trees.tree import Message, Question

SUM = Question("a", "sum", "1 + 1?", ("2",), before=(Message("system", "Be brief: ×"),))
WALK = Question("b", "4x4", "", (), data='{"seed": 41, "size": 4}')
MANY = [replace(SUM, id=f"test-{number}") for number in range(20)]


def by_hand(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def saved(panel, file="panel.json"):
    panels.save(panel, Path(file))
    return json.loads(Path(file).read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_digests_can_be_computed_again_from_the_file_and_the_questions():
    values = saved(panels.panel_of([SUM, WALK], "test", "computation", seed=0))
    first, second = sorted(values["tasks"], key=lambda task: task["id"])
    assert first == {
        "id": "a",
        "kind": "sum",
        "digest": by_hand(
            {
                "id": "a",
                "kind": "sum",
                "text": "1 + 1?",
                "answers": ["2"],
                "scorer": "exact",
                "before": [{"role": "system", "content": "Be brief: ×"}],
            }
        ),
    }
    whole = {"id": "b", "kind": "4x4", "scorer": "exact", "data": '{"seed": 41, "size": 4}'}
    assert second == {"id": "b", "kind": "4x4", "seed": 41, "digest": by_hand(whole)}
    assert values.pop("digest") == by_hand(values)


def test_the_order_is_that_of_a_first_pass_with_the_seed():
    """So the tasks, and their order, are those that evaluations asked before there were panels."""
    for seed in (0, 3):
        panel = panels.panel_of(MANY, "test", "computation", seed)
        assert panels.questions_of(panel, MANY, "") == batch(MANY, seed, 0, 0, len(MANY))
        assert panels.load(_file(panel)) == panel


def _file(panel):
    saved(panel)
    return Path("panel.json")


def test_slices_have_digests_of_their_own_and_results_say_of_what_they_are_slices():
    whole = panels.panel_of(MANY, "test", "computation", seed=0)
    parts = [whole.part(first, 8) for first in (0, 8, 16)]
    assert [len(part.tasks) for part in parts] == [8, 8, 4]
    assert sum((part.tasks for part in parts), ()) == whole.tasks
    assert len({whole.digest, *(part.digest for part in parts)}) == 4
    assert panels.summary(whole, 8, 8) == {
        "digest": parts[1].digest,
        "split": "test",
        "source": "computation",
        "tasks": 8,
        "first": 8,
        "of": {"digest": whole.digest, "tasks": 20},
    }
    assert panels.sentence(panels.summary(whole, 8, 8)) == (
        f"Panel {parts[1].digest[:12]}: 8 tasks of the split test (computation), 9 to 16 of the 20 "
        f"of the panel {whole.digest[:12]}"
    )
    assert panels.sentence(panels.summary(whole, 0, 900)) == (
        f"Panel {whole.digest[:12]}: 20 tasks of the split test (computation)"
    )


def test_all_tasks_that_a_split_has_not_or_not_so_are_named_at_once():
    panel = panels.panel_of(MANY, "test", "computation", seed=0)
    other = [
        replace(each, text="2 + 2?") if each.id in ("test-3", "test-7") else each for each in MANY
    ]
    kept = [each for each in other if each.id not in ("test-5", "test-19")]
    with pytest.raises(ValueError) as caught:
        panels.questions_of(panel, kept, "evaluate.panel x.json")
    said = str(caught.value)
    assert said.startswith(f"evaluate.panel x.json, panel {panel.digest[:12]}: ")
    lacking, changed = said.split(". ")[0].split("; ")
    assert {name for name in ("test-5", "test-19") if name in lacking} == {"test-5", "test-19"}
    assert {name for name in ("test-3", "test-7") if name in changed} == {"test-3", "test-7"}
    assert said.count("test-") == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": "validation"}, ["'digest' is", "changed after it was written"]),
        ({"split": 5, "source": None}, ["'split' is 5", "'source' is None"]),
        ({"tasks": []}, ["'tasks' is empty"]),
        ({"tasks": [{"id": "a"}, 7]}, ["task 0: 'kind'", "task 0: 'digest'", "task 1: 7"]),
        ({"tasks": [{"id": "a", "kind": "", "digest": ""}] * 2}, ["the id a comes twice"]),
    ],
)
def test_a_file_that_is_no_panel_is_refused_with_all_its_faults(change, said):
    values = saved(panels.panel_of([SUM, WALK], "test", "computation", seed=0))
    Path("panel.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError) as caught:
        panels.load(Path("panel.json"))
    assert all(line.startswith("panel.json: ") for line in str(caught.value).splitlines())
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[1]"])
def test_what_cannot_be_read_is_no_panel(content):
    if content is not None:
        Path("panel.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"panel\.json"):
        panels.load(Path("panel.json"))
