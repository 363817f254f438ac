import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from params.schema import benchmarks as schema
from params.schema.benchmarks import Benchmark
from params.schema.prepare import BenchmarkQuestions, CalculatorExpert, WrittenTraces
from tasks.environments.question import respond
from tasks.questions import benchmarks
from tasks.questions.experts import Dropped
from tasks.scorers import SCORERS
from tasks.settings import load as settings_of
from tasks.tools.python import python_tool
from tasks.trees.tree import Message, Question
from tasks.trees.words import overlaps

ROOT = Path(__file__).parents[3]
SPLITS = ("gsm8k/train", "gsm8k/test", "math500/test", "aime24/test", "hotpotqa/test")
SPLITS = (*SPLITS, "bamboogle/test")
REVISION = "0123456789" * 4


@pytest.fixture(scope="module")
def sets():
    return schema.load_benchmarks(ROOT / "params")


def row(**changes):
    plain = {"hub": None, "question": "q", "answer": "a", "answer_after": None, "solution": None}
    return Benchmark(**{**plain, "records": None, "scorer": "exact", **changes})


def write(folder, reference, rows, suffix=".jsonl"):
    file = folder / f"{reference}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def load_one(folder, record, **changes):
    write(folder, "mine/train", [record])
    (entry,) = benchmarks.load("mine/train", {"mine": row(**changes)}, folder)
    return entry.question


def right(question, answer):
    return SCORERS[question.scorer](answer, question.answers)["score"] == 1


@contextmanager
def python():
    limits = settings_of("smoke", ROOT / "params").tool_settings["python"]
    with python_tool(limits, 1) as tool:
        yield partial(respond, {"python": tool})


# ---------------------------------------------------------------- the five sets


@pytest.mark.parametrize("reference", SPLITS)
def test_every_record_of_a_set_becomes_a_question(data, sets, reference):
    entries = benchmarks.load(reference, sets, data)
    lines = (data / f"{reference}.jsonl").read_text(encoding="utf-8").splitlines()
    name, split = reference.split("/")
    assert len(entries) == len(lines)
    assert [entry.question.id for entry in entries] == [
        f"{name}-{split}-{number:05d}" for number in range(1, len(lines) + 1)
    ]
    for question in (entry.question for entry in entries):
        assert question.text and question.kind == name and question.before == ()
        assert question.answers and all(question.answers)


def test_gsm8k_answer_follows_the_mark(data, sets):
    for entry in benchmarks.load("gsm8k/train", sets, data):
        (answer,) = entry.question.answers
        assert answer.replace(",", "").replace(".", "").removeprefix("-").isdigit()
        assert entry.solution.endswith(f"#### {answer}")


def test_other_sets_keep_the_answers_as_they_are(data, sets):
    for reference in ("math500/test", "hotpotqa/test"):
        records = [json.loads(line) for line in (data / f"{reference}.jsonl").open()]
        for entry, record in zip(benchmarks.load(reference, sets, data), records, strict=True):
            given = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
            assert list(entry.question.answers) == [form.strip() for form in given]


def test_gsm8k_is_split(data, sets):
    settings = BenchmarkQuestions(
        source="benchmarks", train=("gsm8k/train",), validation=5, test=("gsm8k/test",)
    )
    made = benchmarks.material(
        settings, sets, CalculatorExpert(kind="calculator"), 13, right, 0, data
    )
    texts = {split: [q.text for q in questions] for split, questions in made.questions.items()}
    everything = benchmarks.load("gsm8k/train", sets, data)
    assert len(texts["validation"]) == 5
    assert len(texts["train"]) + 5 + len(made.dropped) == len(everything)
    assert len(texts["test"]) == len(benchmarks.load("gsm8k/test", sets, data))
    assert set(overlaps(texts["train"], texts["validation"] + texts["test"], 13)) == {None}
    assert {each.reason for each in made.dropped} <= {"overlaps_held_out"}


def test_solved_questions_become_traces(tmp_path, sets):
    rows = [
        {
            "question": f"What is {n} * 7?",
            "answer": f"It is <<{n}*7={n * 7}>>{n * 7}.\n#### {n * 7}",
        }
        for n in range(11, 16)
    ]
    rows[1]["answer"] = "It is known.\n#### 84"
    write(tmp_path, "gsm8k/train", rows)
    write(tmp_path, "gsm8k/test", [{"question": "What is 2 + 2?", "answer": "#### 4"}])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("gsm8k/train",), validation=1, test=("gsm8k/test",)
    )
    seed = next(n for n in count() if benchmarks.draw_in_proportion("aaaaa", 1, n) == {4})
    made = benchmarks.material(
        settings, sets, CalculatorExpert(kind="calculator"), 13, right, seed, tmp_path
    )
    with python() as tools:
        traces, dropped = made.write_traces(tools)
    assert [trace.question.id for trace in traces] == [f"gsm8k-train-0000{n}" for n in (1, 3, 4)]
    assert "<result>77</result>" in "".join(text for text, _ in traces[0].parts)
    assert [each.question_id for each in dropped] == ["gsm8k-train-00002"]


# ---------------------------------------------------------------- rows that are shipped


def test_each_shipped_row_is_pinned_or_local(sets):
    local = {name for name, each in sets.items() if each.hub is None}
    assert local == {"math500", "bamboogle", "intake", "deep-search"}
    for name in ("math500", "bamboogle"):
        assert sets[f"{name}-hub"].hub is not None
    for reference in ("gsm8k/train", "gsm8k/test", "math500-hub/test", "aime24/test"):
        name, split = reference.split("/")
        assert split in sets[name].hub.files


HUB_RECORDS = {  # in the shapes of the hub's files
    "gsm8k/train": {"question": "6 * 7?", "answer": "It is <<6*7=42>>42.\n#### 42"},
    "math500-hub/test": {
        "problem": "What is $6 \\cdot 7$?",
        "solution": "It is $42$.",
        "answer": "42",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    "aime24/test": {"id": 60, "problem": "6 * 7?", "solution": "42", "answer": "042", "year": "24"},
    "hotpotqa/test": {
        "id": "5a",
        "question": "How many are 6 * 7?",
        "answer": "42",
        "type": "bridge",
        "supporting_facts": {"title": ["Six"], "sent_id": [0]},
        "context": {"title": ["Six"], "sentences": [["Six times seven is forty-two."]]},
    },
    "bamboogle-hub/test": {"Question": "6 * 7?", "Answer": "42"},
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder of the hub's files, and no network: what lies there is found, nothing else."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(hub, split, record):
        file = tmp_path / "hub" / f"datasets--{hub.name.replace('/', '--')}" / "snapshots"
        file = file / hub.revision / hub.files[split]
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([record]), file)
        else:
            file.write_text(json.dumps(record) + "\n")
        return file

    return put


@pytest.mark.parametrize("reference", HUB_RECORDS)
def test_missing_file_is_read_from_the_hub(tmp_path, hub, sets, reference):
    name, split = reference.split("/")
    file = hub(sets[name].hub, split, HUB_RECORDS[reference])
    assert benchmarks.locate(reference, sets, tmp_path) == file
    (entry,) = benchmarks.load(reference, sets, tmp_path)
    assert right(entry.question, "42")
    assert (entry.solution is not None) == (sets[name].solution is not None)


def test_a_file_of_ones_own_goes_before_the_hubs(tmp_path, hub, sets):
    hub(sets["gsm8k"].hub, "train", HUB_RECORDS["gsm8k/train"])
    own = write(tmp_path, "gsm8k/train", [{"question": "x", "answer": "#### 1"}])
    assert benchmarks.locate("gsm8k/train", sets, tmp_path) == own


def test_unreachable_hub_is_an_error_with_places(tmp_path, hub, sets):
    with pytest.raises(ValueError) as caught:
        benchmarks.locate("gsm8k/test", sets, tmp_path)
    message = str(caught.value)
    assert "main/test-00000-of-00001.parquet of openai/gsm8k at e53f0488" in message
    own = f"{tmp_path / 'gsm8k' / 'test.jsonl'} (or .ndjson, .json, .parquet, .csv)"
    assert f"put its file there as {own}" in message
    assert "\n" not in message


PINNED = {"name": "some/where", "revision": REVISION, "files": {"train": "a.csv", "dev": "b.csv"}}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("theirs/train", "params/benchmarks.yaml has no row 'theirs': choose one of ['local',"),
        (
            "local/train",
            "no file, and its row in params/benchmarks.yaml no hub: put its file there",
        ),
        ("mine/test", "no split 'test' but ['dev', 'train']: name one of these, or put its file"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(tmp_path, reference, said):
    rows = {"local": row(), "mine": row(hub=PINNED)}
    with pytest.raises(ValueError) as caught:
        benchmarks.locate(reference, rows, tmp_path)
    assert reference in str(caught.value) and said in str(caught.value)


def test_two_files_of_one_split_are_both_named(tmp_path):
    first = write(tmp_path, "mine/train", [])
    second = write(tmp_path, "mine/train", [], ".csv")
    with pytest.raises(ValueError, match=f"{first} and in {second}: keep one"):
        benchmarks.locate("mine/train", {"mine": row()}, tmp_path)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_a_set_may_come_in_each_format(tmp_path, suffix):
    file = tmp_path / f"mine/train{suffix}"
    file.parent.mkdir()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"q": "Six?", "a": 6}]), file)
    else:
        written = {".csv": "q,a\nSix?,6\n", ".json": '{"rows": [{"q": "Six?", "a": 6.0}]}'}
        file.write_text(written.get(suffix, '{"q": "Six?", "a": "6"}'))
    (entry,) = benchmarks.load("mine/train", {"mine": row(records="rows")}, tmp_path)
    assert entry.question == Question("mine-train-00001", "mine", "Six?", ("6",))


@pytest.mark.parametrize(
    ("found", "answers"),
    [
        ("18", ("18",)),
        (18, ("18",)),
        (18.0, ("18",)),
        (0.5, ("0.5",)),
        (True, ("yes",)),
        ([False], ("no",)),
        (["Ada Lovelace", "Lovelace", 1815, "Lovelace"], ("Ada Lovelace", "Lovelace", "1815")),
    ],
)
def test_answers_of_every_type_are_read(tmp_path, found, answers):
    assert load_one(tmp_path, {"q": "x", "a": found}).answers == answers


def test_an_answer_follows_the_last_mark(tmp_path):
    record = {"q": "x", "a": "First #### 1\nthen\n#### 1,080 "}
    assert load_one(tmp_path, record, answer_after="####").answers == ("1,080",)


def test_fields_may_lie_deep(tmp_path):
    record = {"prompt": [{"content": "Six?"}], "reward_model": {"ground_truth": 6}, "a.b": "s"}
    write(tmp_path, "mine/train", [record])
    deep = row(question="prompt.0.content", answer="reward_model.ground_truth", solution="a.b")
    (entry,) = benchmarks.load("mine/train", {"mine": deep}, tmp_path)
    assert (entry.question.text, entry.question.answers, entry.solution) == ("Six?", ("6",), "s")


def test_chat_becomes_question_and_messages(tmp_path):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 * 7?"}],
        },
    ]
    question = load_one(tmp_path, {"q": chat, "a": 42})
    assert question.text == "What is 6 * 7?"
    assert question.before == (
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "Hello."),
    )


USER = {"role": "user", "content": "x"}
FAULTS = [
    ({"a": 1}, "lacks the field 'q': it has ['a']"),
    ({"q": "x"}, "lacks the field 'a': it has ['q']"),
    ({"q": " ", "a": 1}, "the field 'q' is empty"),
    ({"q": {"text": "x"}, "a": 1}, "the field 'q' is no text or number but {'text': 'x'}"),
    ({"q": [], "a": 1}, "the field 'q' is an empty chat: the last message must be the user's"),
    ({"q": [USER, {"role": "assistant", "content": "y"}], "a": 1}, "ends with a message of assis"),
    ({"q": [{"role": "user"}], "a": 1}, "message 1 is \"{'role': 'user'}\": a role and a content"),
    ({"q": ["x"], "a": 1}, "message 1 is 'x': a role and a content"),
    ({"q": [{"role": "judge", "content": "y"}, USER], "a": 1}, "message 1 has the role 'judge': k"),
    ({"q": [USER, {"role": "user", "content": ""}], "a": 1}, "message 2: its content is empty"),
    (
        {"q": [{"role": "user", "content": [{"type": "image_url", "url": "z"}]}], "a": 1},
        "message 1 has the part \"{'type': 'image_url', 'url': 'z'}\": only parts of type 'text'",
    ),
    ({"q": "x", "a": None}, "the field 'a' is empty"),
    ({"q": "x", "a": []}, "the field 'a' is an empty list: give at least one accepted form"),
    ({"q": "x", "a": ["y", ""]}, "the field 'a' is empty"),
    ({"q": "x", "a": [["y"]]}, "the field 'a' is no text or number but ['y']"),
    ({"q": "x", "a": {"value": "y"}}, "the field 'a' is no text or number but {'value': 'y'}"),
]


@pytest.mark.parametrize(("record", "said"), FAULTS, ids=[said[:50] for _, said in FAULTS])
def test_a_record_that_cannot_be_read_is_named(tmp_path, record, said):
    file = write(tmp_path, "mine/train", [{"q": "fine", "a": 1}, record])
    with pytest.raises(ValueError) as caught:
        benchmarks.load("mine/train", {"mine": row()}, tmp_path)
    assert str(caught.value).startswith(f"{file}, line 2") and said in str(caught.value)


@pytest.mark.parametrize("answer", ["no mark", "mark #### ", 18])
def test_an_answer_without_the_mark_is_named(tmp_path, answer):
    with pytest.raises(ValueError, match=r"line 1: the field 'a' has no answer after the mark '#"):
        load_one(tmp_path, {"q": "x", "a": answer}, answer_after="####")


def test_unneeded_solution_may_be_missing(tmp_path):
    write(tmp_path, "mine/test", [{"q": "x", "a": "y"}])
    rows = {"mine": row(solution="s")}
    (entry,) = benchmarks.load("mine/test", rows, tmp_path, solutions=False)
    assert entry.solution is None
    with pytest.raises(ValueError, match="lacks the field 's'"):
        benchmarks.load("mine/test", rows, tmp_path)


# ---------------------------------------------------------------- splits


LONG = "Six thieves share nine golden cups and a silver spoon in an old mill by the river"


def build(folder, train, test, validation=1, words=8, expert=None, **changes):
    """Material from texts, by the first seed that draws the last of them for validation."""
    for split, texts in (("train", train), ("test", test)):
        write(folder, f"mine/{split}", [{"q": each, "a": "1", "s": "<<1*1=1>>1"} for each in texts])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=validation, test=("mine/test",)
    )
    expert = expert or CalculatorExpert(kind="calculator")
    rows = {"mine": row(solution="s", **changes)}
    pool, _ = benchmarks.distinct(benchmarks.load("mine/train", rows, folder))
    pool, _ = benchmarks.apart(pool, benchmarks.load("mine/test", rows, folder), words)
    last = set(range(len(pool))[-validation:])
    drawn = partial(benchmarks.draw_in_proportion, [entry.question.kind for entry in pool])
    seed = next(seed for seed in count() if drawn(validation, seed) == last)
    return benchmarks.material(settings, rows, expert, words, right, seed, folder)


def texts_of(made):
    return {split: [each.text for each in questions] for split, questions in made.questions.items()}


def test_validation_is_set_aside_and_the_order_stays(tmp_path):
    made = build(tmp_path, ["one", "two", "three", "four"], ["five"], validation=2)
    assert texts_of(made) == {
        "train": ["one", "two"],
        "validation": ["three", "four"],
        "test": ["five"],
    }
    assert made.dropped == []


def test_validation_is_drawn_from_each_set_in_proportion():
    kinds = ["a"] * 60 + ["b"] * 30 + ["c"] * 10
    drawn = [benchmarks.draw_in_proportion(kinds, 10, seed) for seed in range(50)]
    for places in drawn:
        assert Counter(kinds[place] for place in places) == {"a": 6, "b": 3, "c": 1}
    assert len(set().union(*drawn)) == 100, "any question may be drawn"
    assert benchmarks.draw_in_proportion(kinds, 10, 3) == drawn[3]
    odd = benchmarks.draw_in_proportion(kinds, 7, 0)  # 4.2, 2.1 and 0.7
    assert Counter(kinds[place] for place in odd) == {"a": 4, "b": 2, "c": 1}
    assert benchmarks.draw_in_proportion(kinds, 500, 0) == set(range(100))


def test_sets_keep_the_recipes_order(tmp_path):
    for reference in ("b/train", "a/train", "c/x", "b/x"):
        write(tmp_path, reference, [{"q": f"{reference} {n}", "a": n} for n in "12"])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("b/train", "a/train"), validation=2, test=("c/x", "b/x")
    )
    file = write(
        tmp_path, "t", [{"q": f"{name}/train {n}", "r": "r"} for name in "ab" for n in "12"]
    )
    written = WrittenTraces(
        kind="written", file=Path("data/sources/t.jsonl"), question="q", response="r"
    ).model_copy(update={"file": file})
    rows = {name: row() for name in "abc"}
    found = texts_of(benchmarks.material(settings, rows, written, 8, right, 0, tmp_path))
    for split in ("train", "validation"):
        assert [text[:7] for text in found[split]] == ["b/train", "a/train"]
    assert found["test"] == ["c/x 1", "c/x 2", "b/x 1", "b/x 2"]


def test_a_repeated_question_is_dropped_and_named(tmp_path):
    made = build(tmp_path, ["one", "ONE ", "two", "three"], ["six", "Six"])
    assert texts_of(made) == {"train": ["one", "two"], "validation": ["three"], "test": ["six"]}
    assert made.dropped == [
        Dropped("mine-test-00002", "duplicate", "mine-test-00001"),
        Dropped("mine-train-00002", "duplicate", "mine-train-00001"),
    ]


def test_equal_questions_with_other_answers_are_a_conflict():
    first = Question("a-1", "a", "Who wrote it?", ("Ann", "A. Bee"))
    same = replace(first, id="a-2", text="who  wrote it?", answers=("A. Bee",))
    other = replace(first, id="b-1", answers=("Cy",))
    entries = [benchmarks.Entry(question, None) for question in (first, same, other)]
    kept, dropped = benchmarks.distinct(entries)
    assert [entry.question.id for entry in kept] == ["a-1"]
    assert dropped == [
        Dropped("a-2", "duplicate", "a-1"),
        Dropped("b-1", "conflicting_answers", "a-1: 'Ann' there, 'Cy' here"),
    ]


def test_a_record_chooses_its_scorer(tmp_path):
    scorer = {"field": "ability", "math": "maths", "qa": "f1"}
    for ability, name in (("math", "maths"), ("qa", "f1")):
        assert (
            load_one(tmp_path, {"q": "x", "a": "1", "ability": ability}, scorer=scorer).scorer
            == name
        )
    with pytest.raises(ValueError, match=r"line 1: the field 'ability' is 'code'.*'math', 'qa'"):
        load_one(tmp_path, {"q": "x", "a": "1", "ability": "code"}, scorer=scorer)


def test_overlap_with_test_is_dropped(tmp_path):
    train = ["five", f"Why do {LONG}?", "two", "three", f"{LONG} now", "four"]
    made = build(tmp_path, train, ["Five!", f"When did {LONG}?"])
    assert texts_of(made)["train"] == ["two", "three"]
    assert texts_of(made)["validation"] == ["four"]
    assert made.dropped == [
        Dropped("mine-train-00001", "overlaps_held_out", "mine-test-00001: 'five'"),
        Dropped("mine-train-00002", "overlaps_held_out", f"mine-test-00002: {LONG.lower()!r}"),
        Dropped("mine-train-00005", "overlaps_held_out", f"mine-test-00002: {LONG.lower()!r}"),
    ]


def test_overlap_with_validation_is_dropped(tmp_path):
    made = build(tmp_path, ["one", f"Why do {LONG}?", f"{LONG}."], ["five"])
    assert texts_of(made)["train"] == ["one"]
    assert texts_of(made)["validation"] == [f"{LONG}."]
    detail = f"mine-train-00003: {LONG.lower()!r}"
    assert made.dropped == [Dropped("mine-train-00002", "overlaps_held_out", detail)]


def test_overlap_depends_on_the_number_of_words(tmp_path):
    train, test = ["one", f"Why do {LONG}?", "two"], [f"When did {LONG}?"]
    assert build(tmp_path, train, test, words=30).dropped == []


@pytest.mark.parametrize(
    ("train", "validation", "said"),
    [
        (
            ["one", "ONE", "five", "two"],
            2,
            "have 4, of which 1 are duplicates, 1 overlap test, 2 go",
        ),
        ([LONG, LONG + "!"], 1, "1 go to validation and 1 overlap those"),
        (["one", "two"], 99, "2 go to validation"),
    ],
)
def test_no_training_question_left_is_an_error(tmp_path, train, validation, said):
    with pytest.raises(ValueError, match=r"leaves none to train on: mine/train") as caught:
        build(tmp_path, train, ["five"], validation)
    assert said in str(caught.value)


def test_a_set_that_is_named_twice_is_refused(tmp_path):
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=1, test=("mine/train",)
    )
    with pytest.raises(ValueError, match="names mine/train more than once"):
        benchmarks.material(
            settings, {"mine": row()}, CalculatorExpert(kind="calculator"), 8, right, 0, tmp_path
        )


def test_calculator_refuses_set_without_solutions(tmp_path):
    write(tmp_path, "mine/train", [{"q": "one", "a": 1}, {"q": "two", "a": 2}])
    write(tmp_path, "mine/test", [{"q": "three", "a": 3}])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=1, test=("mine/test",)
    )
    with pytest.raises(ValueError, match="the set mine has none: name their field as solution"):
        benchmarks.material(
            settings, {"mine": row()}, CalculatorExpert(kind="calculator"), 8, right, 0, tmp_path
        )


# ---------------------------------------------------------------- written traces


CALL = "<think>a</think><python>1 + 1</python>"
RESULT = "<result>2\n</result>"
END = "<think>b</think><answer>\\boxed{2}</answer>"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Settings for a file of traces, and how it is filled with (question, response)."""
    monkeypatch.chdir(tmp_path)
    settings = WrittenTraces(
        kind="written", file=Path("data/sources/traces.jsonl"), question="ask", response="say"
    )

    def fill(*traces):
        write(Path(), "data/sources/traces", [{"ask": ask, "say": say} for ask, say in traces])
        return settings

    return fill


def test_a_written_trace_is_cut_into_turns_and_results(tmp_path, written):
    response = CALL + RESULT + CALL + "<result></result>" + END
    expert = written((" one ", response), ("two", END), ("one", END))
    made = build(tmp_path, ["one", "two", "three"], ["five"], expert=expert)
    traces, dropped = made.write_traces(lambda calls: [])
    assert [trace.question.text for trace in traces] == ["one", "two", "one"]
    assert traces[0].parts == [
        (CALL, True),
        (RESULT, False),
        (CALL, True),
        ("<result></result>", False),
        (END, True),
    ]
    assert [trace.flaw for trace in traces] == ["none"] * 3
    assert dropped == []


def test_trace_of_left_out_question_is_dropped(tmp_path, written):
    train = ["one", "ONE", f"Why do {LONG}?", "last"]
    expert = written(*((text, END) for text in reversed(train)))
    made = build(tmp_path, train, [f"When did {LONG}?"], expert=expert)
    traces, dropped = made.write_traces(lambda calls: [])
    assert [trace.question.text for trace in traces] == ["one"]
    assert dropped == [
        Dropped("mine-train-00004", "trace_of_question_left_out", "validation"),
        Dropped("mine-train-00003", "trace_of_question_left_out", "overlaps_held_out"),
        Dropped("mine-train-00002", "trace_of_question_left_out", "duplicate"),
    ]


def test_trace_of_repeated_question_is_of_the_first(tmp_path, written):
    made = build(tmp_path, ["one", "one", "two"], ["five"], expert=written(("one", END)))
    ((trace,), _) = made.write_traces(lambda calls: [])
    assert trace.question.id == "mine-train-00001"


def test_a_trace_of_a_chat_finds_its_question(tmp_path, written):
    chats = [[{"role": "system", "content": "Be brief."}, {**USER, "content": c}] for c in "xyz"]
    expert = written((chats[0], END))
    made = build(tmp_path, chats, ["five"], expert=expert)
    ((trace,), _) = made.write_traces(lambda calls: [])
    assert trace.question == made.questions["train"][0]
    with pytest.raises(ValueError, match="the question 'x' is in no set"):
        build(tmp_path, chats, ["five"], expert=written(("x", END)))


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        ([("six", END)], "line 1: the question 'six' is in no set of prepare.questions.train"),
        ([("one", END), ("two", " ")], "line 2: the field 'say' is empty"),
        ([("three", END)], "none of its 1 traces is to a training question that is left"),
        ([], "data/sources/traces.jsonl is empty"),
    ],
)
def test_a_fault_in_the_written_traces_is_named_at_once(tmp_path, written, traces, said):
    with pytest.raises(ValueError) as caught:
        build(tmp_path, ["one", "two", "three"], ["five"], expert=written(*traces))
    assert str(caught.value).startswith("data/sources/traces.jsonl") and said in str(caught.value)
