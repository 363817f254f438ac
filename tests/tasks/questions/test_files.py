import json
from pathlib import Path

import pytest

from params.schema import FileQuestions
from tasks.questions import files
from tasks.trajectory import Question

FOLDER = Path("questions")
GOOD = {
    "train.jsonl": '{"q": "1 + 1?", "a": 2, "extra": []}\n\n  {"q": " Who? ", "a": "Ann"}\n',
    "validation.jsonl": '{"q": "2 + 2?", "a": "4"}\n',
    "test.jsonl": '{"q": "3 + 3?", "a": "6"}',
    "traces.jsonl": '{"q": "1 + 1?", "r": "<think>x</think>"}\n',
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir()
    for name, text in GOOD.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return FileQuestions(
        source="files",
        train=FOLDER / "train.jsonl",
        validation=FOLDER / "validation.jsonl",
        test=FOLDER / "test.jsonl",
        question_field="q",
        answer_field="a",
        traces=FOLDER / "traces.jsonl",
        response_field="r",
    )


def traces_of(settings):
    return list(files.load_traces(settings, files.load(settings)["train"]))


def test_questions_come_from_three_files(settings):
    loaded = files.load(settings)
    assert loaded["train"] == [
        Question("train-00001", "train", "1 + 1?", ("2",)),
        Question("train-00003", "train", "Who?", ("Ann",)),
    ]
    assert [question.text for question in loaded["validation"]] == ["2 + 2?"]
    assert [question.answers for question in loaded["test"]] == [("6",)]


def test_a_trace_is_cut_into_turns_and_results(settings):
    call = "<think>a</think><python>1 + 1</python>"
    result = "<result>2\n</result>"
    end = "<think>b</think><answer>\\boxed{2}</answer>"
    response = call + result + call + "<result></result>" + end
    settings.traces.write_text(json.dumps({"q": "1 + 1?", "r": response}))
    ((question, parts),) = traces_of(settings)
    assert question.id == "train-00001"
    assert parts == [
        (call, True),
        (result, False),
        (call, True),
        ("<result></result>", False),
        (end, True),
    ]
    assert "".join(text for text, _ in parts) == response


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_a_line_feed_ends_a_line(settings, separator):
    # JSON allows these within a text; str.splitlines cuts there
    entry = {"q": f"one{separator}two", "a": "1"}
    settings.train.write_text(json.dumps(entry, ensure_ascii=False) + "\n", encoding="utf-8")
    (question,) = files.load(settings)["train"]
    assert question.text == f"one{separator}two"


def test_lines_may_end_as_on_windows(settings):
    settings.test.write_bytes(b'{"q": "x", "a": "1"}\r\n{"q": "y", "a": "2"}\r\n')
    assert [question.text for question in files.load(settings)["test"]] == ["x", "y"]


FAULTS = [
    ("train.jsonl", None, "train.jsonl does not exist: correct the path in prepare.questions"),
    ("test.jsonl", "", "test.jsonl is empty: it needs at least one question"),
    ("test.jsonl", "\n \n", "test.jsonl is empty: it needs at least one question"),
    ("train.jsonl", GOOD["test.jsonl"] + "\n{'q'", "train.jsonl, line 2 is not JSON (Expecting"),
    ("train.jsonl", "[1, 2]", "train.jsonl, line 1 is no object: '[1, 2]'"),
    (
        "validation.jsonl",
        '\n{"q": "x", "answer": "1"}',
        "validation.jsonl, line 2 lacks the field 'a': it has ['answer', 'q']; name the",
    ),
    ("train.jsonl", '{"q": " ", "a": "1"}', "train.jsonl, line 1: the field 'q' is empty"),
    ("train.jsonl", '{"q": "x", "a": ""}', "train.jsonl, line 1: the field 'a' is empty"),
    ("train.jsonl", '{"q": "x", "a": null}', "train.jsonl, line 1: the field 'a' is empty"),
    ("traces.jsonl", None, "traces.jsonl does not exist"),
    ("traces.jsonl", '{"q": "1 + 1?"}', "traces.jsonl, line 1 lacks the field 'r'"),
    ("traces.jsonl", '{"q": "1 + 1?", "r": " "}', "traces.jsonl, line 1: the field 'r' is empty"),
    (
        "traces.jsonl",
        GOOD["traces.jsonl"] + '{"q": "2 + 2?", "r": "y"}',
        "traces.jsonl, line 2: the question '2 + 2?' is not in ",
    ),
]


@pytest.mark.parametrize(("name", "text", "said"), FAULTS, ids=[said[:60] for *_, said in FAULTS])
def test_a_fault_is_one_message_with_file_line_field_and_remedy(settings, name, text, said):
    if text is None:
        (FOLDER / name).unlink()
    else:
        (FOLDER / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        traces_of(settings)
    assert str(FOLDER / said) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_in_another_encoding_is_named(settings):
    settings.train.write_bytes('{"q": "Gr\u00fc\u00dfe?", "a": "1"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.jsonl.* UTF-8"):
        files.load(settings)


@pytest.mark.parametrize("answer", [["2", "two"], {"value": 2}])
def test_an_answer_that_is_no_text_or_number_is_refused(settings, answer):
    # its Python spelling, "['2', 'two']", would be a gold answer that nothing matches
    settings.train.write_text(json.dumps({"q": "1 + 1?", "a": answer}))
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1.*'a'"):
        files.load(settings)
