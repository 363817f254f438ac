import csv
import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from params.schema import benchmarks as schema
from params.schema.benchmarks import Benchmark
from params.schema.prepare import BenchmarkQuestions
from tasks.gates import questions as question_gate
from tasks.gates.traces import trace_fault
from tasks.questions import benchmarks
from tasks.questions.benchmarks import apart, distinct
from tasks.questions.calculator import CalculatorExpert
from tasks.questions.contract import Rules
from tasks.questions.entries import Entry
from tasks.questions.experts import Dropped
from tasks.questions.faults import RecordError
from tasks.questions.sources import taught
from tasks.questions.written import WrittenTraces
from tasks.recipes import load as settings_of
from tasks.scorers import project_scorers
from tasks.tools.python import python_tool
from tasks.trees.tree import Message, Question
from tasks.trees.words import overlaps
from tests.agents import responding
from tests.tasks.questions.ciphers import encrypted

SCORERS = project_scorers()

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


def load(*arguments, **more):
    """Return the entries of a file that has to be sound; raise its first fault."""
    reference, sets, folder = arguments
    loaded = benchmarks.load(reference, sets, RULES.problems, folder, **more)
    if loaded.faults:
        raise RecordError(loaded.faults[0])
    return loaded.entries


def load_one(folder, record, **changes):
    write(folder, "mine/train", [record])
    (entry,) = load("mine/train", {"mine": row(**changes)}, folder)
    return entry.question


def right(question, answer):
    return SCORERS[question.scorer](answer, question.answers)["score"] == 1


RULES = Rules(
    problems=partial(question_gate.problems, scorers=SCORERS),
    trace_problem=partial(trace_fault, tools=["python"]),
    right=right,
    longest_trace=10_000,
)


@contextmanager
def python():
    limits = settings_of("smoke", ROOT / "params").tools["python"]
    with python_tool(limits, 1) as tool:
        yield responding({"python": tool})


# ---------------------------------------------------------------- the five sets


@pytest.mark.parametrize("reference", SPLITS)
def test_every_record_of_a_set_becomes_a_question(data, sets, reference):
    entries = load(reference, sets, data)
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
    for entry in load("gsm8k/train", sets, data):
        (answer,) = entry.question.answers
        assert answer.replace(",", "").replace(".", "").removeprefix("-").isdigit()
        assert entry.solution.endswith(f"#### {answer}")


def test_other_sets_keep_the_answers_as_they_are(data, sets):
    for reference in ("math500/test", "hotpotqa/test"):
        records = [json.loads(line) for line in (data / f"{reference}.jsonl").open()]
        for entry, record in zip(load(reference, sets, data), records, strict=True):
            given = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
            assert list(entry.question.answers) == [form.strip() for form in given]


def test_gsm8k_is_split(data, sets):
    settings = BenchmarkQuestions(
        source="benchmarks", train=("gsm8k/train",), validation=5, test=("gsm8k/test",)
    )
    made = material(settings, sets, CalculatorExpert(kind="calculator"), 13, RULES, 0, data)
    texts = {split: [q.text for q in questions] for split, questions in made.questions.items()}
    everything = load("gsm8k/train", sets, data)
    assert len(texts["validation"]) == 5
    assert len(texts["train"]) + 5 + len(made.dropped) == len(everything)
    assert len(texts["test"]) == len(load("gsm8k/test", sets, data))
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
    made = material(settings, sets, CalculatorExpert(kind="calculator"), 13, RULES, seed, tmp_path)
    with python() as tools:
        traces, dropped = made.write_traces(tools)
    assert [trace.question.id for trace in traces] == [f"gsm8k-train-0000{n}" for n in (1, 3, 4)]
    assert "<result>77</result>" in "".join(text for text, _ in traces[0].parts)
    assert [each.question_id for each in dropped] == ["gsm8k-train-00002"]


# ---------------------------------------------------------------- rows that are shipped


def test_each_shipped_row_is_pinned_or_local(sets):
    local = {name for name, each in sets.items() if each.hub is None}
    assert local == {"math500", "bamboogle", "intake", "deep-search", "warehouse"}
    for name in ("math500", "bamboogle"):
        assert sets[f"{name}-hub"].hub is not None
    for reference in HUB_RECORDS:
        name, split = reference.split("/")
        assert split in sets[name].hub.files


def test_the_papers_sets_are_rows(sets):
    graded_by_f1 = {"hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "webwalkerqa"}
    judged = {"gsm8k", "math", "math500", "aime24", "aime25", "gaia", "hle"}
    judged |= {"xbench-deepsearch", "simpleqa"}
    for name in graded_by_f1 | judged:
        assert sets[name].papers_scorer == ("f1" if name in graded_by_f1 else "judge")
        assert sets[name].licence
        assert name in ("math500", "bamboogle") or "test" in sets[name].hub.files
    assert {name for name, each in sets.items() if "gated" in (each.licence or "")} == GATED
    assert all("HF_TOKEN" in sets[name].terms for name in GATED)


GATED = {"gaia", "hle"}
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
    "math/test": {
        "problem": "What is $6 \\cdot 7$?",
        "level": "Level 1",
        "solution": "As $5 \\cdot 7 = \\boxed{35}$ and $35 + 7 = 42$, it is $\\boxed{42}$.",
        "type": "Prealgebra",
    },
    "aime25/test": {"id": "1", "problem": "6 * 7?", "answer": "042"},
    "2wikimultihopqa/test": {
        "_id": "2w",
        "question": "How many are 6 * 7?",
        "answer": "42",
        "context": '[["Six", ["Six times seven is forty-two."]]]',
    },
    "musique/test": {
        "id": "2hop__1_2",
        "question": "How many are 6 * 7?",
        "answer": "forty-two",
        "answer_aliases": ["42", "two score and two"],
        "answerable": True,
    },
    "webwalkerqa/test": {
        "question": "How many are 6 * 7?",
        "answer": "42",
        "root_url": "https://numbers.example",
        "info": {"lang": "en", "difficulty_level": "easy"},
    },
    "gaia/test": {
        "task_id": "g",
        "Question": "6 * 7?",
        "Level": "1",
        "Final answer": "42",
        "file_name": "",
    },
    "hle/test": {
        "id": "h",
        "question": "6 * 7?",
        "image": "",
        "answer": "$42$",
        "answer_type": "exactMatch",
    },
    "xbench-deepsearch/test": {
        "id": "1",
        "prompt": encrypted("6 * 7 \u662f\u591a\u5c11\uff1f", "a canary"),
        "answer": encrypted("42", "a canary"),
        "reference_steps": encrypted("Multiply.", "a canary"),
        "canary": "a canary",
    },
    "simpleqa/test": {"metadata": "{'topic': 'Numbers'}", "problem": "6 * 7?", "answer": "42"},
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
        elif file.suffix == ".csv":
            with file.open("w", encoding="utf-8-sig", newline="") as opened:
                table = csv.DictWriter(opened, record)
                table.writeheader()
                table.writerow(record)
        else:
            file.write_text(json.dumps(record) + "\n")
        return file

    return put


@pytest.mark.parametrize("reference", HUB_RECORDS)
def test_missing_file_is_read_from_the_hub(tmp_path, hub, sets, reference):
    name, split = reference.split("/")
    file = hub(sets[name].hub, split, HUB_RECORDS[reference])
    assert benchmarks.locate(reference, sets, tmp_path) == file
    (entry,) = load(reference, sets, tmp_path)
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
    own = f"{tmp_path / 'gsm8k' / 'test.jsonl'} (or .ndjson, .json, .parquet, .csv, .tsv, .jsonl.gz"
    assert f"put its file there as {own}" in message
    assert "\n" not in message


class Gate(BaseHTTPRequestHandler):
    """Answers as the hub does for a gated set without a token."""

    def do_HEAD(self):
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def gated_hub(tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield
        server.shutdown()


def test_gated_set_says_what_to_do(tmp_path, gated_hub, sets):
    with pytest.raises(ValueError) as caught:
        benchmarks.locate("gaia/test", sets, tmp_path)
    message = str(caught.value)
    assert "GatedRepoError" in message and message.endswith(sets["gaia"].terms)


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
    first = write(tmp_path, "mine/train", [], ".CSV")
    second = write(tmp_path, "mine/train", [], ".jsonl.gz")
    with pytest.raises(ValueError, match=f"{first} and in {second}: keep one"):
        benchmarks.locate("mine/train", {"mine": row()}, tmp_path)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".json", ".parquet", ".csv"])
def test_a_set_may_come_in_each_format(tmp_path, suffix):
    file = tmp_path / f"mine/train{suffix}"
    file.parent.mkdir()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"q": "Six?", "a": 6}]), file)
    else:
        written = {".csv": "q,a\nSix?,6\n", ".json": '{"rows": [{"q": "Six?", "a": 6.0}]}'}
        file.write_text(written.get(suffix, '{"q": "Six?", "a": "6"}'))
    (entry,) = load("mine/train", {"mine": row(records="rows")}, tmp_path)
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


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"It is $\boxed{35} + 7 = \boxed{\frac{84}{2}}$.", r"\frac{84}{2}"),
        (r"So $x=\boxed {42}$", "42"),
        (r"So $x = \boxed 5$ or so", "5"),
        (r"As \boxed{1} is not, \fbox{42}", "42"),
    ],
)
def test_an_answer_is_in_the_last_box(tmp_path, solution, answer):
    assert load_one(tmp_path, {"q": "x", "a": solution}, boxed=True).answers == (answer,)


@pytest.mark.parametrize("solution", ["It is 42.", r"\boxed{}", r"\boxed{42", r"\boxedx{1}"])
def test_a_solution_without_a_box_is_named(tmp_path, solution):
    with pytest.raises(
        ValueError, match=r"line 1: the field 'a' has no \\boxed\{\} with an answer"
    ):
        load_one(tmp_path, {"q": "x", "a": solution}, boxed=True)


@pytest.mark.parametrize(("more", "answers"), [(["B", "A"], ("A", "B")), ([], ("A",))])
def test_aliases_are_accepted_forms(tmp_path, more, answers):
    assert load_one(tmp_path, {"q": "x", "a": "A", "more": more}, aliases="more").answers == answers


def test_only_chosen_records_are_read(tmp_path):
    files = ["", "a.png", None, 0, False]
    records = [{"q": f"{number}?", "a": number, "file": file} for number, file in enumerate(files)]
    write(tmp_path, "mine/train", records)
    loaded = load("mine/train", {"mine": row(only={"file": ""})}, tmp_path)
    assert [entry.question.id for entry in loaded] == ["mine-train-00001", "mine-train-00003"]
    (entry,) = load("mine/train", {"mine": row(only={"file": "a.png", "a": "1"})}, tmp_path)
    assert entry.question.text == "1?"
    for wanted, text in (("0", "3?"), ("no", "4?")):
        (entry,) = load("mine/train", {"mine": row(only={"file": wanted})}, tmp_path)
        assert entry.question.text == text
    with pytest.raises(ValueError, match=r"5 records, and none with \{'file': 'b'\}: correct"):
        load("mine/train", {"mine": row(only={"file": "b"})}, tmp_path)
    with pytest.raises(ValueError, match=r"line 1 lacks the field 'image'"):
        load("mine/train", {"mine": row(only={"image": ""})}, tmp_path)


def test_fields_may_lie_deep(tmp_path):
    record = {"prompt": [{"content": "Six?"}], "reward_model": {"ground_truth": 6}, "a.b": "s"}
    write(tmp_path, "mine/train", [record])
    deep = row(question="prompt.0.content", answer="reward_model.ground_truth", solution="a.b")
    (entry,) = load("mine/train", {"mine": deep}, tmp_path)
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
    ({"a": 1}, "lacks the field 'q' (it has ['a'])"),
    ({"q": "x"}, "lacks the field 'a' (it has ['q'])"),
    ({"q": " ", "a": 1}, "the field 'q' is empty"),
    ({"q": {"text": "x"}, "a": 1}, "the field 'q' is no text or number but {'text': 'x'}"),
    ({"q": [], "a": 1}, "the field 'q' is an empty chat: the last message must be the user's"),
    ({"q": [USER, {"role": "assistant", "content": "y"}], "a": 1}, "ends with a message of assis"),
    ({"q": [{"role": "user"}], "a": 1}, "'q.0' is no message but {'role': 'user'}: a role and"),
    ({"q": ["x"], "a": 1}, "the field 'q.0' is no message but 'x': a role and a content"),
    ({"q": [{"role": "judge", "content": "y"}, USER], "a": 1}, "'q.0' has the role 'judge': known"),
    ({"q": [USER, {"role": "user", "content": ""}], "a": 1}, "the field 'q.1.content' is empty"),
    (
        {"q": [{"role": "user", "content": [{"type": "image_url", "url": "z"}]}], "a": 1},
        "'q.0' has a part that is no text ({'type': 'image_url', 'url': 'z'}): only parts of type",
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
        load("mine/train", {"mine": row()}, tmp_path)
    assert str(caught.value).startswith(f"{file}, line 2") and said in str(caught.value)


@pytest.mark.parametrize("answer", ["no mark", "mark #### ", 18])
def test_an_answer_without_the_mark_is_named(tmp_path, answer):
    with pytest.raises(ValueError, match=r"line 1: the field 'a' has no answer after the mark '#"):
        load_one(tmp_path, {"q": "x", "a": answer}, answer_after="####")


def test_unneeded_solution_may_be_missing(tmp_path):
    write(tmp_path, "mine/test", [{"q": "x", "a": "y"}])
    rows = {"mine": row(solution="s")}
    (entry,) = load("mine/test", rows, tmp_path, solutions=False)
    assert entry.solution is None
    with pytest.raises(ValueError, match="lacks the field 's'"):
        load("mine/test", rows, tmp_path)


# ---------------------------------------------------------------- splits


LONG = "Six thieves share nine golden cups and a silver spoon in an old mill by the river"


def material(settings, sets, expert, words, rules, seed, folder):
    """The questions of sets with what writes an expert's traces."""
    solutions = expert.kind == "calculator"
    made = benchmarks.material(settings, sets, words, rules, seed, folder, solutions=solutions)
    return taught(made, expert, rules, seed)


def build(folder, train, test, validation=1, words=8, expert=None, **changes):
    """Material from texts, by the first seed that draws the last of them for validation."""
    for split, texts in (("train", train), ("test", test)):
        write(folder, f"mine/{split}", [{"q": each, "a": "1", "s": "<<1*1=1>>1"} for each in texts])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=validation, test=("mine/test",)
    )
    expert = expert or CalculatorExpert(kind="calculator")
    rows = {"mine": row(solution="s", **changes)}
    pool, _ = benchmarks.distinct(load("mine/train", rows, folder))
    pool, _ = benchmarks.apart(pool, load("mine/test", rows, folder), words)
    last = set(range(len(pool))[-validation:])
    drawn = partial(benchmarks.draw_in_proportion, [entry.question.kind for entry in pool])
    seed = next(seed for seed in count() if drawn(validation, seed) == last)
    return material(settings, rows, expert, words, RULES, seed, folder)


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
        kind="written",
        file=Path("data/sources/t.jsonl"),
        question="q",
        response="r",
        check_calls=(),
    ).model_copy(update={"file": file})
    rows = {name: row() for name in "abc"}
    found = texts_of(material(settings, rows, written, 8, RULES, 0, tmp_path))
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
    entries = [Entry(question, None) for question in (first, same, other)]
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
    with pytest.raises(
        ValueError, match=r"line 1: the field 'ability' names no .*'code'.*'math', 'qa'"
    ):
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


def test_a_set_that_is_named_twice_is_refused(tmp_path):
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=1, test=("mine/train",)
    )
    with pytest.raises(ValueError, match="names mine/train more than once"):
        material(
            settings, {"mine": row()}, CalculatorExpert(kind="calculator"), 8, RULES, 0, tmp_path
        )


def test_calculator_refuses_set_without_solutions(tmp_path):
    write(tmp_path, "mine/train", [{"q": "one", "a": 1}, {"q": "two", "a": 2}])
    write(tmp_path, "mine/test", [{"q": "three", "a": 3}])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train",), validation=1, test=("mine/test",)
    )
    with pytest.raises(ValueError, match="the set mine has none: name their field as solution"):
        material(
            settings, {"mine": row()}, CalculatorExpert(kind="calculator"), 8, RULES, 0, tmp_path
        )


def test_faulty_records_are_in_no_split_and_all_named(tmp_path):
    write(tmp_path, "mine/train", [{"q": "one", "a": 1}, {"a": 2}, {"q": " ", "a": "-"}])
    write(tmp_path, "mine/test", [{"q": "two", "a": "x}{"}, {"q": "\boxed", "a": "N/A"}])
    write(tmp_path, "more/train", [{"q": "three", "a": 3}, {"q": "{name}?", "a": "?"}])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("mine/train", "more/train"), validation=1, test=("mine/test",)
    )
    sound = "<answer>\\boxed{1}</answer>"
    file = write(tmp_path, "t", [{"q": "one", "r": "r"}, {"q": "{name}?", "r": sound}])
    written = WrittenTraces.model_construct(
        kind="written", file=file, question="q", response="r", check_calls=()
    )
    rows = {name: row() for name in ("mine", "more")}
    made = material(settings, rows, written, 8, RULES, 0, tmp_path)
    learned = [*made.questions["train"], *made.questions["validation"]]
    assert sorted(learned, key=lambda q: q.id) == [
        Question("mine-train-00001", "mine", "one", ("1",)),
        Question("more-train-00001", "more", "three", ("3",)),
    ]
    assert made.questions["test"] == []
    found = [(fault.question_id, fault.field, fault.problem) for fault in made.faults]
    assert found == [
        ("mine-train-00002", "", "lacks the field 'q'"),
        ("mine-train-00003", "q", "is empty"),
        ("mine-train-00003", "a", "is a placeholder"),
        ("more-train-00002", "q", "has template remains '{name}'"),
        ("more-train-00002", "a", "is a placeholder"),
        ("mine-test-00001", "a", "has unbalanced braces, so \\boxed{} ends elsewhere"),
        ("mine-test-00002", "q", "has control character U+0008"),
        ("mine-test-00002", "a", "is a placeholder"),
        ("", "r", "is no trace: no answer block"),
    ]
    assert "a backslash was lost: write \\boxed" in str(made.faults[6])
    assert made.write_traces(None) == (
        [],
        [Dropped("more-train-00002", "trace_of_question_left_out", "faulty_record")],
    )
    assert [question.id for question in made.unsound] == [
        "more-train-00002",
        "mine-test-00001",
        "mine-test-00002",
    ]


def test_every_file_that_cannot_be_read_is_named_at_once(tmp_path):
    write(tmp_path, "a/train", [])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/train.json").write_text("{")
    write(tmp_path, "c/test", [{"q": "one", "a": "N/A"}])
    settings = BenchmarkQuestions(
        source="benchmarks", train=("a/train", "b/train"), validation=1, test=("c/test",)
    )
    written = WrittenTraces.model_construct(
        kind="written", file=tmp_path / "none.jsonl", question="q", response="r", check_calls=()
    )
    rows = {name: row() for name in "abc"}
    made = material(settings, rows, written, 8, RULES, 0, tmp_path)
    said = [str(fault) for fault in made.faults]
    for words, found in zip(
        (
            "a/train.jsonl is empty",
            "b/train.json is not JSON",
            "c/test.jsonl, line 1: the field 'a' is a",
            "none.jsonl does not exist",
        ),
        said,
        strict=True,
    ):
        assert words in found


PROBLEM = " ".join(f"word{number}" for number in range(30))


def chat(*texts):
    roles = ("user", "assistant")
    before = tuple(Message(roles[n % 2], text) for n, text in enumerate(texts[:-1]))
    return before, texts[-1]


def entry(name, before, text, answer="5"):
    return Entry(Question(name, "k", text, (answer,), before=before), None)


def test_what_was_said_before_a_question_belongs_to_it():
    train = [
        entry("same", *chat(PROBLEM, "Which zone?", "UTC, please.")),
        entry("other", *chat("Something short.", "Which zone?", "UTC, please."), "6"),
        entry("again", *chat("Something  short.", "Which zone?", "utc, please."), "6"),
    ]
    kept, dropped = distinct(train)
    assert [each.question.id for each in kept] == ["same", "other"]
    assert [(each.question_id, each.reason) for each in dropped] == [("again", "duplicate")]
    for test in (chat(PROBLEM, "What zone?", "Take UTC."), chat(PROBLEM)):
        left, dropped = apart(kept, [entry("test", *test)], 20)
        assert [(each.question_id, each.reason) for each in dropped] == [
            ("same", "overlaps_held_out")
        ]
        assert [each.question.id for each in left] == ["other"]


def test_examples_that_prompts_share_are_no_overlap():
    shots = (*chat(PROBLEM, "5")[0], Message("assistant", "5"))
    train = [entry(f"a{n}", shots, f"What is {n} and {n}?") for n in range(4)]
    test = [entry(f"b{n}", shots, f"What is {n} less {n}?") for n in range(4)]
    kept, dropped = apart(train, test, 20)
    assert (len(kept), dropped) == (4, [])
