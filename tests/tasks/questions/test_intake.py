import json
import os
from functools import partial
from pathlib import Path

import pytest

from params.schema.benchmarks import Benchmark
from tasks.gates import questions as question_gate
from tasks.questions import intake
from tasks.questions.faults import Fault
from tasks.scorers import project_scorers
from tasks.trees.tree import Question

ROW = Benchmark(
    hub=None,
    question="question",
    answer="answer",
    answer_after=None,
    solution=None,
    records=None,
    scorer="exact",
)

SCORERS = project_scorers()


def deliver(file, *records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def asked(text, answer="4"):
    return {"question": text, "answer": answer}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data/sources/intake/toy"


def too_long(entries):
    return [
        Fault(entry.place, "is too long", "shorten it", question_id=entry.question.id)
        for entry in entries
        if len(entry.question.text) > 100
    ]


def read(folder, drop=False):
    problems = partial(question_gate.problems, scorers=SCORERS)
    return intake.read(folder, "intake", ROW, problems, too_long, drop=drop)


def ids(questions):
    return [question.id for question in questions]


def test_a_folder_that_is_not_there_delivers_nothing(folder):
    assert read(folder) == intake.Delivery([], [], [], [])


def test_files_are_read_in_order_of_names(folder):
    deliver(folder / "b.jsonl", asked("What is 2 + 2?"))
    deliver(folder / "a.jsonl", asked("What is 1 + 3?", ["4", "four"]), asked("And 5 - 1?"))
    deliver(folder / "late/c.jsonl", asked("What is 8 / 2?"))
    delivery = read(folder)
    assert delivery.refused == []
    questions = [entry.question for entry in delivery.entries]
    assert ids(questions) == [
        "intake-a.jsonl-00001",
        "intake-a.jsonl-00002",
        "intake-b.jsonl-00001",
        "intake-late/c.jsonl-00001",
    ]
    assert questions[0] == Question(
        "intake-a.jsonl-00001", "intake", "What is 1 + 3?", ("4", "four"), "exact"
    )


def test_what_git_and_dvc_put_there_is_no_delivery(folder):
    deliver(folder / ".gitignore", {})
    deliver(folder / ".hidden/a.jsonl", asked("?"))
    deliver(folder / "big.jsonl.dvc", {})
    deliver(folder / "a.jsonl", asked("What is 2 + 2?"))
    assert intake.files(folder) == [folder / "a.jsonl"]


GOOD = '{"question": "What is 2 + 2?", "answer": "4"}\n'
BAD = [
    ("a.jsonl", GOOD + '{"answer": "4"}', "a.jsonl lacks the field 'question' in 1 record (line 2"),
    ("a.jsonl", GOOD + "{", "a.jsonl is not JSON in 1 record (line 2 (Expecting"),
    ("a.jsonl", GOOD + '{"question": "?", "answer": []}', "the field 'answer' is an empty list in"),
    (
        "a.jsonl",
        '\n{"question": "How many {name}?", "answer": "4"}',
        "'question' has template remains '{name}' in 1 record (line 2): correct the record",
    ),
    ("a.jsonl", '{"question": "Why?", "answer": "nan"}', "'answer' is a placeholder in 1 record ("),
    (
        "a.jsonl",
        '{"question": "Why?", "answer": "."}',
        "the field 'answer' says nothing in 1 record (line 1: '.'): give the answer, or drop the",
    ),
    (
        "a.jsonl",
        '{"question": "Why?", "answer": "\\\\text{}"}',
        "the field 'answer' says nothing in 1 record (line 1: '\\\\text{}'): give the answer",
    ),
    (
        "a.jsonl",
        '{"question": "Why?", "answer": "&lt;5"}',
        "'answer' has the HTML entity &lt; in 1 record (line 1: '&lt;5'): write < for it, or drop",
    ),
    ("a.jsonl", '{"question": "\\ud800?", "answer": "4"}', "has control character U+D800 in 1 rec"),
    ("a.jsonl", "", "a.jsonl is empty: it needs at least one record"),
    ("a.txt", GOOD, "a.txt has the suffix '.txt': known are .jsonl"),
    ("a.csv", "question,answer\n1,2,3\n", "has another number of fields than the header in 1"),
    ("a\n.jsonl", GOOD, "the file's name cannot be printed: rename it"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD)
def test_bad_file_is_refused_whole_others_taken(folder, name, content, said):
    deliver(folder / "good.jsonl", asked("What is 2 + 2?"))
    (folder / name).write_text(content)
    delivery = read(folder)
    assert ids(entry.question for entry in delivery.entries) == ["intake-good.jsonl-00001"]
    (refused,) = delivery.refused
    assert (refused.question_id, refused.reason) == (name, "intake_file_refused")
    assert said in refused.detail


def test_only_faulty_records_are_left_out_where_the_recipe_says_so(folder):
    deliver(folder / "a.jsonl", asked("How many {name}?"), asked("What is 2 + 2?"), asked("?", "-"))
    delivery = read(folder, drop=True)
    assert ids(entry.question for entry in delivery.entries) == ["intake-a.jsonl-00002"]
    assert delivery.refused == []
    assert [fault.question_id for fault in delivery.faults] == [
        "intake-a.jsonl-00001",
        "intake-a.jsonl-00003",
    ]


def test_unprintable_name_is_refused(folder):
    folder.mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl")).write_text(GOOD)
    (refused,) = read(folder).refused
    assert refused.question_id.encode() == b"\\udcff.jsonl"
    refused.detail.encode()


def question(identity, text):
    return Question(identity, "story", text, ("4",))


def test_only_new_questions_without_overlap_are_taken(folder):
    long = "one two three four five six seven eight"
    deliver(
        folder / "a.jsonl",
        asked("What is 2 + 2?"),
        asked("what  is 1 + 3?"),
        asked(f"Before {long} after?"),
        asked("How many?"),
        asked("What is 2 + 2?"),
    )
    train = [question("train-1", "What is 1 + 3?")]
    held_out = [question("test-1", f"{long}."), question("test-2", "How many?")]
    taken, left_out = intake.new_questions(read(folder), train, held_out, words=8)
    assert ids(taken) == ["intake-a.jsonl-00001"]
    assert [(each.question_id[-1], each.reason, each.detail) for each in left_out] == [
        ("2", "duplicate", "train-1"),
        ("4", "duplicate", "test-2"),
        ("5", "duplicate", "intake-a.jsonl-00001"),
        ("3", "overlaps_held_out", "test-1: 'one two three four five six seven eight'"),
    ]
