"""prepare: its sources, its tables and checks, and the whole verb with real and small tools."""

import copy
import json
import re
import shutil
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from params.schema import benchmarks as schema
from params.schema import prepare as prepare_module
from params.schema import recipe as recipe_module
from params.schema.agent import Dialogue
from params.schema.prepare import (
    BenchmarkQuestions,
    ComputationQuestions,
    EnvironmentQuestions,
    Prepare,
    PretrainedPolicy,
    TinyPolicy,
)
from tasks import environments
from tasks import prepare as verb
from tasks.dialects import open_dialect
from tasks.dialects.native import Native
from tasks.dialects.tags import DIALECT, Tags
from tasks.environments.contract import OpenEnvironment
from tasks.environments.frozen_lake import FrozenLakeSettings
from tasks.environments.own_world import environment_kind
from tasks.environments.question import Questions
from tasks.gates.gate import GateError
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import first, tiny
from tasks.policy.tiny import build_tokenizer
from tasks.prepare import PrepareInputs, prepare, right, rules_of
from tasks.questions import benchmarks
from tasks.questions.computation import ComputationExpert
from tasks.questions.experts import Dropped, Material, Trace
from tasks.questions.faults import summary
from tasks.questions.samples import samples_of, trace_table
from tasks.questions.solver import Solver
from tasks.questions.sources import MATERIALS, material, read_corpus, source_files
from tasks.questions.unusable import LISTING, long_questions, unsayable
from tasks.questions.written import WrittenTraces
from tasks.recipes import load as settings_of
from tasks.scorers import project_scorers
from tasks.tools.contract import text_spec
from tasks.tools.recording import CALLS, REPLAYED, Origin, publish_calls
from tasks.tools.search import Search
from tasks.trees import dialogue as talk
from tasks.trees.tables import load_questions, read_rows
from tasks.trees.tree import Document, Message, Observation, Question
from tests.sections import MACHINE, PYTHON
from tests.tasks.dialects import families
from tests.verbs import call

STEP = SubStep("toy", "prepare", 0, 7)
POLICY = TinyPolicy(
    kind="tiny",
    vocabulary=320,
    hidden=16,
    layers=1,
    heads=2,
    key_value_heads=1,
    feed_forward=32,
    context=256,
)
QUESTIONS = ComputationQuestions(
    source="computation",
    train=30,
    validation=3,
    test=6,
    largest_operand=99,
    largest_arithmetic_operand=499,
    largest_test_operand=999,
)
EXPERT = ComputationExpert(
    kind="computation",
    traces=24,
    wrong_operator=0.1,
    wrong_digit=0.1,
    wrong_answer=0.1,
    missing_call=0.1,
)
SETTINGS = Prepare(
    policy=POLICY, questions=QUESTIONS, intake=None, expert=EXPERT, faulty="stop", overlap_words=20
)
DIALOGUE = Dialogue(
    system="Be brief.",
    turn_tokens=48,
    result_tokens=24,
    response_tokens=144,
    tool_calls=3,
)


SEARCH = Search(
    corpus=Path("data/sources/own/documents.jsonl"),
    results=1,
    snippet_words=20,
    query_characters=200,
    k1=1.2,
    b=0.75,
)
ROW = schema.Benchmark(
    hub=None,
    question="q",
    answer="a",
    answer_after=None,
    solution=None,
    records=None,
    scorer="exact",
)
SETS = BenchmarkQuestions(
    source="benchmarks", train=("mine/train",), validation=1, test=("mine/test",)
)
WRITTEN = WrittenTraces(
    kind="written",
    file=Path("data/sources/own/traces.jsonl"),
    question="q",
    response="r",
    check_calls=(),
)


def inputs_of(**changes):
    usual = {
        "settings": SETTINGS,
        "sets": {},
        "sources": [],
        "dialogue": DIALOGUE,
        "machine": MACHINE,
        "tools": {"python": PYTHON, "search": SEARCH},
        "dialect": {"tags": Tags()},
    }
    return PrepareInputs(**usual | changes)


SCORERS = project_scorers()
RULES = rules_of(inputs_of(), SCORERS)


class Calculator:
    """A tool without a sandbox, for code that the tests trust; it counts its rounds."""

    def __init__(self):
        self.rounds = []
        self.opened_on = []

    def __call__(self, calls):
        self.rounds.append(len(calls))
        return [Observation("ok", f"{eval(call.argument)}\n") for call in calls]

    @contextmanager
    def open(self, corpus):
        self.opened_on.append(corpus)
        specs = [text_spec(name, "", "text", "") for name in ("python", "search")]
        yield OpenEnvironment(specs, lambda: nullcontext(Questions(self)))


def generated():
    """Traces of the expert, who is wrong now and then."""
    return material(SETTINGS, {}, RULES, 7).write_traces(Calculator())[0]


def table_of(traces, tokenizer):
    specs = [text_spec("python", "Run code.", "code", "")]
    dialect = open_dialect(inputs_of().dialect, tokenizer, DIALOGUE, specs)
    return trace_table([s for t in traces for s in samples_of(t, DIALOGUE)], dialect).table


def whole(trace):
    return "".join(text for text, _ in trace.parts)


def write(file, *records):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join(json.dumps(record) for record in records))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project folder with a set of the user's own, as the working folder."""
    monkeypatch.chdir(tmp_path)
    colours = ("red", "green", "blue", "grey")
    write("data/sources/mine/train.jsonl", *({"q": f"What is {c}?", "a": c} for c in colours))
    write("data/sources/mine/test.jsonl", {"q": "And black?", "a": "black"})
    box = "<answer>\\boxed{red}</answer>"
    response = f"<search>red</search><result>Red: a colour</result>{box}"
    write("data/sources/own/traces.jsonl", {"q": "What is red?", "r": response})
    write("data/sources/own/documents.jsonl", {"title": "Red", "text": "a colour", "year": 1})
    return tmp_path


# ---------------------------------------------------------------- sources


def settings(**changes):
    return SETTINGS.model_copy(update=changes)


def test_every_source_of_questions_and_kind_of_policy_can_be_made():
    sections = get_args(get_args(prepare_module.Questions)[0])
    assert set(MATERIALS) == {
        kind for section in sections for kind in get_args(section.model_fields["source"].annotation)
    }
    kinds = {"tiny": prepare_module.TinyPolicy, "pretrained": prepare_module.PretrainedPolicy}
    assert set(first.POLICIES) == set(kinds)


def test_what_is_in_the_named_files_decides_the_outcome(folder):
    chosen = settings(questions=SETS, expert=WRITTEN)

    def found():
        return [(f.path, f.digest) for f in source_files(chosen, {"search": SEARCH}, {"mine": ROW})]

    before = found()
    assert [path for path, _ in before] == [
        "data/sources/mine/train.jsonl",
        "data/sources/mine/test.jsonl",
        "data/sources/own/traces.jsonl",
        "data/sources/own/documents.jsonl",
    ]
    for number, (path, _) in enumerate(before):
        text = Path(path).read_text()
        Path(path).write_text(text + "\n")
        changed = [a != b for a, b in zip(found(), before, strict=True)]
        assert changed == [place == number for place in range(4)]
        Path(path).write_text(text)
    assert source_files(SETTINGS, {}, {}) == []


@pytest.mark.parametrize(
    ("name", "key"), [("traces", "prepare.expert.file"), ("documents", "tools.search.corpus")]
)
def test_a_file_that_is_missing_is_named_before_anything_starts(folder, name, key):
    Path(f"data/sources/own/{name}.jsonl").unlink()
    said = (
        rf"{key}: data/sources/own/{name}\.jsonl does not exist: correct .*, or put the file there"
    )
    with pytest.raises(ValueError, match=said):
        source_files(settings(questions=SETS, expert=WRITTEN), {"search": SEARCH}, {"mine": ROW})


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-14b"])
def test_deep_search_asks_for_each_file_that_the_user_provides_before_it_fetches_any(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmarks, "hf_hub_download", lambda *_, **__: pytest.fail("fetched"))
    chosen = settings_of(name)
    missing = ("traces", "corpus", "train")
    for done, absent in enumerate(missing):
        for file in missing[:done]:
            write(f"data/sources/deep-search/{file}.jsonl", {})
        with pytest.raises(ValueError) as caught:
            source_files(chosen.prepare, chosen.tools, recipe_module.named_sets(chosen))
        assert f"data/sources/deep-search/{absent}.jsonl" in str(caught.value)


def test_a_corpus_of_the_users_own_is_titles_and_texts(folder):
    write(SEARCH.corpus, {"title": "Red", "text": "A colour."}, {"text": "1", "title": 7, "x": 0})
    documents = [Document("Red", "A colour."), Document("7", "1")]
    assert read_corpus({"search": SEARCH}) == (documents, [])
    none = SEARCH.model_copy(update={"corpus": None})
    assert read_corpus({"search": none}) == read_corpus({}) == ([], [])


def test_each_faulty_document_is_named_with_its_place(folder):
    write(SEARCH.corpus, {"title": "Red", "text": "A colour."}, {"title": "Blue"}, {"text": "x"})
    documents, faults = read_corpus({"search": SEARCH})
    assert documents == [Document("Red", "A colour.")]
    assert [str(fault).partition("documents.jsonl, ")[2][:27] for fault in faults] == [
        "line 2 lacks the field 'tex",
        "line 3 lacks the field 'tit",
    ]


@pytest.mark.parametrize(
    ("scorer", "answer", "correct"),
    [
        ("exact", "1/2", True),
        ("exact", "0.5", False),
        ("f1", "the 1/2", True),
        ("f1", "1/2 or more", False),
        ("maths", "0.5", True),
        ("maths", "0.6", False),
    ],
)
def test_an_answer_is_right_where_the_questions_own_scorer_says_so(scorer, answer, correct):
    assert right(SCORERS, Question("q", "toy", "A half?", ("1/2",), scorer), answer) is correct


def test_written_traces_of_a_set_are_taken_as_they_are(folder):
    chosen = settings(questions=SETS, expert=WRITTEN)
    tools = Calculator()
    made = material(chosen, {"mine": ROW}, RULES, 7)
    (trace,), dropped = made.write_traces(tools)
    assert {split: len(entries) for split, entries in made.questions.items()} == {
        "train": 3,
        "validation": 1,
        "test": 1,
    }
    assert (trace.question, trace.flaw) == (made.questions["train"][0], "none")
    assert [own for _, own in trace.parts] == [True, False, True]
    assert whole(trace).startswith("<search>red</search><result>Red: a colour</result>")
    assert (dropped, tools.rounds) == ([], [])


# ---------------------------------------------------------------- the table of traces


def test_a_trace_is_trained_on_the_agents_own_tokens_only():
    traces = generated()
    tokenizer = build_tokenizer([whole(trace) for trace in traces], POLICY)
    for row, trace in zip(table_of(traces, tokenizer).to_pylist(), traces, strict=True):
        tokens, own = np.array(row["tokens"]), np.array(row["trained"])
        prompt = talk.prompt_tokens(tokenizer, DIALOGUE, trace.question)
        assert tokens[: len(prompt)].tolist() == prompt.tolist()
        turns = "".join(text for text, sampled in trace.parts if sampled)
        results = "".join(text for text, sampled in trace.parts if not sampled)
        assert tokenizer.decode(tokens[own]) == turns + tokenizer.eos_token
        assert tokenizer.decode(tokens[~own]) == f"{tokenizer.decode(prompt)}{results}"
        assert row["text"] == whole(trace)
        assert row["question_id"] == trace.question.id
        assert (row["split"], row["flaw"]) == ("train", trace.flaw)


def test_a_result_is_tokenised_as_in_a_rollout():
    traces = generated()
    tokenizer = build_tokenizer([whole(trace) for trace in traces], POLICY)
    for row, trace in zip(table_of(traces, tokenizer).to_pylist(), traces, strict=True):
        prompt = talk.prompt_tokens(tokenizer, DIALOGUE, trace.question)
        expected = [prompt]
        for text, sampled in trace.parts:
            result = text.removeprefix("<result>").removesuffix("</result>")
            expected.append(
                talk.encode(tokenizer, text)
                if sampled
                else talk.result_tokens(tokenizer, Observation("ok", result), 24)[1]
            )
        assert row["tokens"] == [*np.concatenate(expected).tolist(), tokenizer.eos_token_id]


# ---------------------------------------------------------------- the context


def spoken(tokenizer, dialogue=DIALOGUE):
    return DIALECT.open(Tags(), tokenizer, dialogue, [])


def question(number, text):
    return Question(f"test-{number:05d}", "story", text, ("1",))


def too_long(tokenizer, questions, context, dialogue=DIALOGUE):
    """The faults of questions of the test split, of which one comes from a file."""
    return long_questions(
        Material({"test": questions}, None, places=lambda ids: {"test-00001": "a.jsonl, line 1"}),
        tokenizer,
        spoken(tokenizer, dialogue),
        dialogue,
        context,
    )


def test_no_prompt_around_the_limit_is_judged_without_being_tokenised():
    tokenizer = build_tokenizer(["How many apples are there?"], POLICY)
    texts = [
        "How many apples are there? " * n + mark for n in range(60) for mark in ("", "é", "7" * n)
    ]
    questions = [question(n, text) for n, text in enumerate(texts)]
    lengths = [len(talk.prompt_tokens(tokenizer, DIALOGUE, each)) for each in questions]
    for context in (160, 256, 400):
        room = context - DIALOGUE.response_tokens
        expected = [each.id for each, n in zip(questions, lengths, strict=True) if n > room]
        found = [fault.question_id for fault in too_long(tokenizer, questions, context)]
        assert found == expected and 0 < len(expected) < len(questions)


def test_each_prompt_that_is_too_long_is_named_with_the_context_that_would_do():
    tokenizer = build_tokenizer(["How many apples?"], POLICY)
    questions = [
        question(0, "How many?"),
        question(1, "How many apples 12345?"),
        question(2, "How many apples?"),
    ]
    lengths = [len(talk.prompt_tokens(tokenizer, DIALOGUE, each)) for each in questions]
    assert lengths[0] < lengths[2] < lengths[1]
    needed = lengths[1] + DIALOGUE.response_tokens
    assert too_long(tokenizer, questions, needed) == []
    (fault,) = too_long(tokenizer, questions, needed - 1)
    assert str(fault) == (
        f"a.jsonl, line 1 has a prompt that is too long ({lengths[1]} tokens; with "
        f"dialogue.response_tokens 144 it exceeds prepare.policy.context {needed - 1}): raise the "
        f"context to {needed}, or lower response_tokens"
    )
    both = too_long(tokenizer, questions, lengths[0] + DIALOGUE.response_tokens)
    assert [each.place for each in both] == ["a.jsonl, line 1", "questions, test-00002"]
    assert {each.remedy for each in both} == {fault.remedy}


def test_the_messages_before_a_question_take_room_too():
    tokenizer = build_tokenizer(["How many?"], POLICY)
    before = (Message("user", "How many?"), Message("assistant", "7"))
    plain, chat = question(0, "How many?"), Question("q", "chat", "How many?", ("1",), "f1", before)
    room = len(talk.prompt_tokens(tokenizer, DIALOGUE, plain)) + DIALOGUE.response_tokens
    assert [each.question_id for each in too_long(tokenizer, [plain, chat], room)] == ["q"]


SYSTEM = {  # what a template does with a system message
    "refuses": "{{ raise_exception('System role not supported') }}",
    "leaves out": "",
}


@pytest.mark.parametrize("way", SYSTEM)
def test_a_template_without_system_messages_is_one_fault_of_all_questions_that_have_one(way):
    tokenizer = build_tokenizer(["How many?"], POLICY)
    head = f"{{% if m.role == 'system' %}}{SYSTEM[way]}{{% else %}}"
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{head}{{{{ '<' ~ m.role ~ '>' ~ m.content }}}}{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    told, asked = Message("system", "Answer in feet."), Message("user", "How long?")
    answered = Message("assistant", "7")
    questions = [
        Question(f"q{n}", "toy", "How many?", ("1",), before=before)
        for n, before in enumerate([(told,)] * 132 + [(), (asked, answered)])
    ]
    silent = DIALOGUE.model_copy(update={"system": ""})
    faults = too_long(tokenizer, questions, 1000, silent)
    assert [fault.question_id for fault in faults] == [f"q{n}" for n in range(132)]
    (line,) = summary(faults).splitlines()
    assert "not fit the chat template of the policy in 132 records" in line
    assert ("not supported" if way == "refuses" else "out what these say: system") in line
    assert line.endswith("put what its system message says into its text")


def test_a_gold_answer_has_to_fit_into_a_turn():
    tokenizer = build_tokenizer(["How many?"], POLICY)
    long = Question("q", "toy", "How many?", ("1" * 60, "1" * 50))
    (fault,) = too_long(tokenizer, [long], 1000)
    assert "has a gold answer that is too long for a turn" in str(fault)
    short = Question("q", "toy", "How many?", ("1" * 60, "1"))
    assert too_long(tokenizer, [short], 1000) == []


# ---------------------------------------------------------------- the whole verb


def run(open_environment, **changes):
    inputs = vars(inputs_of(tools={"python": PYTHON})) | changes
    return call(prepare, PrepareInputs, step=STEP, open_environment=open_environment, **inputs)


def places_of(made):
    return {name: Path(entry["path"]) for name, entry in made["artifacts"].items()}


def check_gates(places):
    for gate in ("questions", "traces"):
        assert json.loads((places["gates"] / f"{gate}.json").read_text())["passed"]
        assert Path(".beamline/data_docs/toy", gate, "verdict.json").is_file()


def test_the_whole_of_prepare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tools = Calculator()
    made = run(tools.open)
    places = places_of(made)
    assert set(places) == {"questions", "corpus", "dropped", "traces", "initial", "gates"}

    questions = {
        split: load_questions(places["questions"] / f"{split}.parquet")
        for split in ("train", "validation", "test")
    }
    assert {split: len(entries) for split, entries in questions.items()} == QUESTIONS.rows()
    traces = read_rows(places["traces"])
    assert [row["question_id"] for row in traces] == [q.id for q in questions["train"][:24]]
    assert {len(row["tokens"]) - len(row["trained"]) for row in traces} == {0}
    assert max(len(row["tokens"]) for row in traces) <= POLICY.context
    assert read_rows(places["dropped"]) == read_rows(places["corpus"] / "documents.parquet") == []

    model = AutoModelForCausalLM.from_pretrained(places["initial"])
    tokenizer = AutoTokenizer.from_pretrained(places["initial"])
    assert model.config.vocab_size <= POLICY.vocabulary
    assert str(tokenizer.decode(traces[0]["tokens"])).endswith(
        traces[0]["text"] + tokenizer.eos_token
    )
    check_gates(places)
    assert made["metrics"] == {
        "train_questions": 30,
        "validation_questions": 3,
        "test_questions": 6,
        "traces": 24,
        "flawed_traces": sum(row["flaw"] != "none" for row in traces) / 24,
        "dropped": 0,
        "parameters": model.num_parameters(),
    }

    rounds = len(tools.rounds)
    assert run(tools.open) == made
    assert len(tools.rounds) == rounds, "what is finished is not done again"

    for record in artifacts.ROOT.rglob("record.json"):
        record.unlink()
    assert run(tools.open)["artifacts"] == made["artifacts"], "equal inputs give equal bytes"

    class AgainError(Exception):
        pass

    def again(*_):
        raise AgainError

    monkeypatch.setitem(MATERIALS, "computation", again)
    run(Calculator().open)
    file = Path("questions.jsonl")
    file.touch()
    for change in (
        {"tools": {"python": PYTHON.model_copy(update={"output_characters": 7})}},
        {"tools": {"python": PYTHON, "search": SEARCH}},
        {"sets": {"mine": ROW}},
        {"sources": [Artifact.at(file)]},
        {"settings": settings(overlap_words=19)},
        {"dialogue": DIALOGUE.model_copy(update={"result_tokens": 7})},
    ):
        with pytest.raises(AgainError):
            run(tools.open, **change)


def test_prepare_of_an_encyclopedia_with_its_real_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = settings_of("tiny-search")
    few = {"train": 32, "validation": 4, "test": 8, "articles": 60}
    chosen = recipe.prepare.model_copy(
        update={
            "policy": POLICY.model_copy(update={"vocabulary": 1000, "context": 384}),
            "questions": recipe.prepare.questions.model_copy(update=few),
            "expert": recipe.prepare.expert.model_copy(update={"traces": 32}),
        }
    )
    made = run(
        partial(environments.open_environment, recipe.tools, {}, recipe.machine.threads),
        settings=chosen,
        sets=recipe_module.named_sets(recipe),
        dialogue=recipe.dialogue,
        tools=recipe.tools,
    )
    places = places_of(made)
    check_gates(places)
    documents = read_rows(places["corpus"] / "documents.parquet")
    assert len(documents) == pytest.approx(60, abs=5)
    traces = read_rows(places["traces"])
    assert len(traces) == made["metrics"]["traces"] == 32
    tokenizer = PreTrainedTokenizerFast.from_pretrained(places["initial"])
    for row in traces:
        if row["flaw"] == "none":
            assert "<result>" in row["text"]
            assert str(tokenizer.decode(row["tokens"])).endswith(
                row["text"] + tokenizer.eos_token
            ), "no result was cut"
    lengths = [len(talk.encode(tokenizer, row["text"])) / len(row["text"]) for row in documents]
    assert max(lengths) < 0.5, "the tokenizer knows the words of articles that no trace shows"


def test_prepare_of_a_set_and_a_corpus_of_the_users_own(folder):
    write("data/sources/mine/train.jsonl", *({"q": f"What is {n}?", "a": n} for n in "abcdec"))
    chosen = settings(questions=SETS, expert=WRITTEN)
    box = "<think>So.</think><answer>\\boxed{a}</answer>"
    response = f"<think>I look.</think><search>a</search><result>A: b</result>{box}"
    write(
        "data/sources/own/traces.jsonl",
        {"q": "What is a?", "r": response},
        {"q": "What is e?", "r": response},
    )
    tools = Calculator()
    made = run(
        tools.open,
        settings=chosen,
        sets={"mine": ROW},
        sources=source_files(chosen, {"search": SEARCH}, {"mine": ROW}),
        tools={"search": SEARCH},
    )
    places = places_of(made)
    check_gates(places)
    assert read_rows(places["corpus"] / "documents.parquet") == [
        {"title": "Red", "text": "a colour"}
    ]
    assert [path.name for path in tools.opened_on] == ["corpus"]
    dropped = read_rows(places["dropped"])
    assert [(row["question_id"], row["reason"]) for row in dropped] == [
        ("mine-train-00006", "duplicate"),
        ("mine-train-00005", "trace_of_question_left_out"),
    ]
    assert (
        made["metrics"].items()
        >= {
            "train_questions": 4,
            "traces": 1,
            "dropped": 2,
            "dropped_duplicate": 1,
            "dropped_trace_of_question_left_out": 1,
        }.items()
    )


def test_a_set_of_which_no_trace_is_left_is_refused_by_the_gate(folder, monkeypatch):
    chosen = settings(questions=SETS, expert=WRITTEN)
    nothing = Material(
        {
            "train": [Question("a", "mine", "What is a?", ("a",))],
            "validation": [Question("b", "mine", "What is b?", ("b",))],
            "test": [Question("c", "mine", "What is c?", ("c",))],
        },
        lambda tools: ([], [Dropped("a", "wrong_result", "got b, gold a")]),
    )
    monkeypatch.setattr(verb.sources, "material", lambda *_: nothing)
    with pytest.raises(GateError, match="there are traces"):
        run(Calculator().open, settings=chosen)


def test_traces_with_marks_of_the_policys_tokenizer_are_dropped(folder, policy, tokenizer):
    """The marks are those of the policy that is fetched: here the sign ⟦user⟧."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["⟦user⟧"]})
    model = copy.deepcopy(policy)
    model.resize_token_embeddings(len(own))
    for part in (model, own):
        part.save_pretrained("fetched")
    write("data/sources/mine/train.jsonl", *({"q": f"What is {c}?", "a": c} for c in "abcd"))
    write(
        "data/sources/own/traces.jsonl",
        *({"q": f"What is {c}?", "r": f"<answer>\\boxed{{{c}}}</answer>"} for c in "abcd"),
        {"q": "What is a?", "r": "<think>⟦user⟧</think><answer>\\boxed{a}</answer>"},
        {"q": "What is b?", "r": "<think>⟦user⟧</think><answer>\\boxed{b}</answer>"},
    )
    fetched = PretrainedPolicy(kind="pretrained", name="fetched", revision=None, context=256)
    made = run(
        Calculator().open,
        settings=settings(questions=SETS, expert=WRITTEN, policy=fetched),
        sets={"mine": ROW},
        tools={"search": SEARCH},
    )
    reasons = Counter(row["reason"] for row in read_rows(places_of(made)["dropped"]))
    assert reasons["forged_turn"] in (1, 2), "one of the four goes to validation"
    assert not any("⟦" in row["text"] for row in read_rows(places_of(made)["traces"]))


def test_layers_are_looked_at_as_soon_as_a_config_has_been_fetched(tmp_path, monkeypatch):
    """Before any work, and before the weights are fetched."""
    monkeypatch.chdir(tmp_path)
    tools, fetched = Calculator(), []

    def fetch(policy):
        fetched.append(policy.name)
        return {"model_type": "xlnet", "num_hidden_layers": 4}

    monkeypatch.setattr(verb, "fetch_config", fetch)
    on_the_hub = PretrainedPolicy(
        kind="pretrained", name="some/policy", revision="a" * 40, context=256
    )
    words = (
        r"params/toy\.yaml: 'prepare\.policy\.name' = 'some/policy' is of .*xlnet, whose layers see"
    )
    with pytest.raises(ValueError, match=words):
        run(tools.open, settings=settings(policy=on_the_hub))
    assert fetched == ["some/policy"] and not tools.opened_on

    def absent(policy):
        raise OSError("no such policy")

    monkeypatch.setattr(verb, "fetch_config", absent)
    with pytest.raises(OSError, match="no such policy"):
        run(tools.open, settings=settings(policy=on_the_hub))


def test_a_template_that_goes_on_in_new_prompts_has_a_row_for_each(tmp_path, monkeypatch, policy):
    """The gate sees whole traces; one that is too long is left out with all its rows."""
    monkeypatch.chdir(tmp_path)
    own, model = families.tokenizer("qwen2.5"), copy.deepcopy(policy)
    model.resize_token_embeddings(len(own))
    model.config.max_position_embeddings = 1024
    for part in (model, own):
        part.save_pretrained("fetched")

    def made_in(context, faulty):
        fetched = PretrainedPolicy(
            kind="pretrained", name="fetched", revision=None, context=context
        )
        made = run(
            Calculator().open,
            settings=settings(policy=fetched, faulty=faulty),
            dialect={"native": Native(renderer="default", options={"tool_parser": "qwen3"})},
        )
        return made, read_rows(places_of(made)["traces"])

    made, traces = made_in(1024, "stop")
    assert made["metrics"]["traces"] == len({row["text"] for row in traces}) == 24
    assert len(traces) > 30
    check_gates(places_of(made))
    for text in {row["text"] for row in traces}:
        rows = [row for row in traces if row["text"] == text]
        assert len(rows) == 1 + text.count("<python>")
        calls = [own.convert_tokens_to_ids("<tool_call>") in trained_of(row) for row in rows]
        assert calls == [True] * text.count("<python>") + [False]

    longest = max(len(row["tokens"]) for row in traces)
    made, fewer = made_in(longest - 1, "drop")
    (dropped,) = read_rows(places_of(made)["dropped"])
    assert dropped["reason"] == "too_long"
    assert fewer == [row for row in traces if row["question_id"] != dropped["question_id"]]


def test_traces_that_no_agent_could_say_are_counted():
    dialogue = DIALOGUE.model_copy(update={"turn_tokens": 30, "tool_calls": 1})
    call = [("<python>1</python>", True), ("<result>1</result>", False)]
    answer = ("<answer>\\boxed{7}</answer>", True)
    long = (f"<think>{'word ' * 30}</think>{answer[0]}", True)
    parts = {"fine": [*call, answer], "often": [*call * 2, answer], "long": [long]}
    traces = [
        Trace(Question(name, "toy", "?", ("7",)), "none", said) for name, said in parts.items()
    ]
    samples = [sample for trace in traces for sample in samples_of(trace, dialogue)]
    spec = text_spec("python", "Run.", "code", "it")
    dialect = DIALECT.open(Tags(), families.tokenizer("qwen2.5"), dialogue, [spec])
    table = trace_table(samples, dialect)
    turn, calls = unsayable(table, dialogue)
    assert turn.startswith("1 of 3 traces have a turn of more tokens than an agent may have: up to")
    assert f"{max(table.longest_turns)}, and dialogue.turn_tokens is 30" in turn
    assert "1 of 3 traces have more tool calls than an agent may have: up to 2" in calls
    assert unsayable(table, DIALOGUE.model_copy(update={"turn_tokens": 999})) == []


def test_a_template_is_looked_at_before_any_work(tmp_path, monkeypatch, policy):
    monkeypatch.chdir(tmp_path)
    own, tools = families.tokenizer("gemma"), Calculator()
    for part in (policy, own):
        part.save_pretrained("fetched")
    fetched = PretrainedPolicy(kind="pretrained", name="fetched", revision=None, context=256)
    with pytest.raises(
        ValueError, match=r"takes no system message .*: leave dialogue.system empty"
    ):
        run(tools.open, settings=settings(policy=fetched))
    assert tools.opened_on == [] and not list(artifacts.ROOT.rglob("*.parquet"))


def test_a_prompt_with_a_token_that_has_no_embedding_is_refused(folder, policy, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|begin|>"]})
    own.chat_template = "<|begin|>" + own.chat_template
    for part in (policy, own):
        part.save_pretrained("fetched")
    fetched = PretrainedPolicy(kind="pretrained", name="fetched", revision=None, context=256)
    with pytest.raises(ValueError, match=r"token '<\|begin\|>' with the id .* resize them"):
        run(Calculator().open, settings=settings(policy=fetched))


def trained_of(row):
    return [token for token, own in zip(row["tokens"], row["trained"], strict=True) if own]


def test_questions_that_break_an_expectation_stop_the_run_before_any_tool_is_opened(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tools = Calculator()
    with pytest.raises(GateError, match="questions"):
        run(tools.open, settings=settings(overlap_words=2))
    assert tools.opened_on == []
    assert not list(artifacts.ROOT.rglob("record.json"))


# ---------------------------------------------------------------- records that cannot be used


@pytest.fixture
def faulty(folder):
    """A set, its traces and a corpus with faults of several kinds, each in a known line."""
    colours = [{"q": f"What is {c}?", "a": c} for c in "abcdefgh"]
    write(
        "data/sources/mine/train.jsonl",
        *colours,
        {
            "q": [{"role": "system", "content": "\x08oxed{}"}, {"role": "user", "content": "?"}],
            "a": "i",
        },
        {"q": "What is j?", "a": "1}^N"},
        {"q": f"What is {7**600}?", "a": "k"},
        {"a": "l"},
    )
    write(
        "data/sources/own/traces.jsonl",
        *({"q": each["q"], "r": f"<answer>\\boxed{{{each['a']}}}</answer>"} for each in colours),
        {"q": "What is a?", "r": "<answer>\\boxed{-777}</answer>"},
        {"q": "What is z?", "r": "<answer>\\boxed{z}</answer>"},
        {"q": "What is b?", "r": f"{'So ' * 400}<answer>\\boxed{{b}}</answer>"},
    )
    write("data/sources/own/documents.jsonl", {"title": "Red", "text": "a colour"}, {"title": "x"})
    return {"sets": {"mine": ROW}, "tools": {"search": SEARCH}}


def test_all_faults_are_refused_at_once(faulty):
    with pytest.raises(ValueError) as caught:
        run(Calculator().open, settings=settings(questions=SETS, expert=WRITTEN), **faulty)
    listing = Path(".beamline/data_docs/toy", LISTING)
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 records cannot be used:"
    assert lines[-1] == (
        "correct them, or set prepare.faulty to drop, which leaves them out; all of them are in "
        f"{listing}"
    )
    places = {
        "train.jsonl: the field 'q.0.content' has control character U+0008": "line 9 (of \\boxed)",
        "train.jsonl: the field 'a' has unbalanced braces": "line 10: '1}^N'",
        "train.jsonl has a prompt that is too long": "line 11 (",
        "train.jsonl lacks the field 'q'": "line 12 (it has ['a'])",
        "traces.jsonl: the field 'q' is in no set of prepare.questions.train": "line 10: 'What",
        "documents.jsonl lacks the field 'text'": "line 2 (it has ['title'])",
    }
    for fault, place in places.items():
        assert sum(fault in line and f"in 1 record ({place}" in line for line in lines) == 1, fault
    assert len(lines) == len(places) + 2
    rows = [json.loads(line) for line in listing.read_text().splitlines()]
    assert sorted(row["row"] for row in rows) == sorted(f"line {n}" for n in (9, 10, 11, 12, 10, 2))
    assert set(rows[0]) == {"file", "row", "field", "problem", "value", "remedy"}


def test_faulty_records_are_dropped_with_reasons_on_request(faulty, capsys):
    chosen = settings(questions=SETS, expert=WRITTEN, faulty="drop")
    made = run(Calculator().open, settings=chosen, **faulty)
    places = places_of(made)
    check_gates(places)
    assert "records are left out" in capsys.readouterr().out
    dropped = read_rows(places["dropped"])
    found = [(row["question_id"], row["reason"]) for row in dropped]
    assert found[:5] == [
        ("mine-train-00009", "faulty_record"),
        ("mine-train-00010", "faulty_record"),
        ("mine-train-00012", "faulty_record"),
        ("data/sources/own/traces.jsonl, line 10", "faulty_record"),
        ("data/sources/own/documents.jsonl, line 2", "faulty_record"),
    ]
    assert sorted(found[5:]) == [
        ("mine-train-00001", "wrong_answer"),
        ("mine-train-00002", "too_long"),
        ("mine-train-00005", "trace_of_question_left_out"),  # drawn for validation
        ("mine-train-00011", "too_long"),
    ]
    kept = [
        question
        for split in ("train", "validation", "test")
        for question in load_questions(places["questions"] / f"{split}.parquet")
    ]
    assert "mine-train-00011" not in [question.id for question in kept]
    assert len(kept) == 9
    assert made["metrics"]["traces"] == len(read_rows(places["traces"])) == 7
    assert read_rows(places["corpus"] / "documents.parquet") == [
        {"title": "Red", "text": "a colour"}
    ]


FAR_TOO_LONG = [
    ({"q": "a" * 10**6, "a": "x"}, "'q' is far too long in 1 record (line 5 (1,000,000 char"),
    ({"q": "Why?", "a": "x" * 10**6}, "'a' is far too long in 1 record (line 5 (1,000,000 char"),
    ({"q": "Why?", "a": [*range(10**5)]}, "(line 5 (100,000 accepted forms, and at most 1,000"),
    (
        {"q": [{"role": "user", "content": "?"}] * 10**5, "a": "x"},
        "is far too long in 1 record (line 5 (100,000 characters in 100,000 messages",
    ),
]


@pytest.mark.parametrize(("record", "said"), FAR_TOO_LONG, ids=["text", "answer", "forms", "chat"])
def test_what_is_far_too_long_is_refused_before_it_is_tokenised(folder, monkeypatch, record, said):
    with Path("data/sources/mine/train.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(record)}")
    seen = []
    build = tiny.build_tokenizer
    monkeypatch.setattr(tiny, "build_tokenizer", lambda t, s, *_: seen.extend(t) or build(seen, s))
    chosen = settings(questions=SETS, expert=WRITTEN)
    with pytest.raises(ValueError) as caught:
        run(Calculator().open, settings=chosen, sets={"mine": ROW}, tools={"search": SEARCH})
    assert said in str(caught.value)
    assert seen and max(map(len, seen)) < 100
    dropping = chosen.model_copy(update={"faulty": "drop"})
    made = run(Calculator().open, settings=dropping, sets={"mine": ROW}, tools={"search": SEARCH})
    assert made["metrics"]["dropped_too_long"] == 1


def test_no_training_question_left_is_an_error(folder):
    write("data/sources/mine/train.jsonl", {"q": "And black?", "a": "black"}, {"q": "?", "a": "-"})
    chosen = settings(questions=SETS, expert=WRITTEN, faulty="drop")
    said = (
        r"leaves none to train on \(2 faulty_record, 1 overlaps_held_out, 0 go to validation\): "
        "name more sets, lower validation"
    )
    with pytest.raises(ValueError, match=said):
        run(Calculator().open, settings=chosen, sets={"mine": ROW}, tools={"search": SEARCH})


# ---------------------------------------------------------------- what is delivered

DELIVERED = prepare_module.Intake(folder=Path("data/sources/intake/toy"), set="mine")


def test_delivered_questions_are_trained_on_and_a_bad_file_is_said_and_set_aside(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write(DELIVERED.folder / "new.jsonl", {"q": "A dozen eggs?", "a": 12}, {"q": "Two?", "a": 2})
    write(DELIVERED.folder / "bad.jsonl", {"q": "A dozen?", "a": 12}, {"a": 1})
    chosen, sets = settings(intake=DELIVERED), {"mine": ROW}
    sources = source_files(chosen, {}, sets)
    assert [made.path for made in sources] == ["data/sources/intake/toy"]
    made = run(Calculator().open, settings=chosen, sets=sets, sources=sources)
    said = "prepare: the file data/sources/intake/toy/bad.jsonl is set aside: "
    assert said in (out := capsys.readouterr().out)
    assert "bad.jsonl lacks the field 'q' in 1 record (line 2 (it has ['a']))" in out
    places = places_of(made)
    check_gates(places)
    train = load_questions(places["questions"] / "train.parquet")
    assert [entry.id for entry in train[-2:]] == [
        "intake-new.jsonl-00001",
        "intake-new.jsonl-00002",
    ]
    assert made["metrics"]["train_questions"] == len(train) == QUESTIONS.train + 2
    assert made["metrics"]["dropped_intake_file_refused"] == 1
    (dropped,) = read_rows(places["dropped"])
    assert dropped["question_id"] == "bad.jsonl"

    plain = places_of(run(Calculator().open))
    for out in ("initial", "traces"):
        assert artifacts.digest(places[out]) == artifacts.digest(plain[out]), (
            "of the recipe's own alone"
        )
    test = "questions/test.parquet"
    assert artifacts.digest(places["initial"].parent / test) == artifacts.digest(
        plain["initial"].parent / test
    )


@pytest.mark.parametrize(
    ("faulty", "taken", "reason"),
    [
        ("stop", ["new.jsonl-00001"], ("long.jsonl", "intake_file_refused")),
        (
            "drop",
            ["long.jsonl-00001", "new.jsonl-00001"],
            ("intake-long.jsonl-00002", "too_long"),
        ),
    ],
)
def test_a_delivered_question_that_is_too_long_stops_no_run(
    tmp_path, monkeypatch, capsys, faulty, taken, reason
):
    monkeypatch.chdir(tmp_path)
    long = {"q": "How many apples? " * 30, "a": 3}
    write(DELIVERED.folder / "long.jsonl", {"q": "A dozen eggs?", "a": 12}, long)
    write(DELIVERED.folder / "new.jsonl", {"q": "A dozen eggs, or more?", "a": 12})
    chosen = settings(intake=DELIVERED, faulty=faulty)
    made = run(Calculator().open, settings=chosen, sets={"mine": ROW})
    places = places_of(made)
    check_gates(places)
    said = capsys.readouterr().out
    assert "long.jsonl has a prompt that is too long in 1 record (line 2 (" in said
    train = load_questions(places["questions"] / "train.parquet")
    delivered = [entry.id for entry in train if entry.kind == "mine"]
    assert delivered == [f"intake-{name}" for name in taken]
    (dropped,) = read_rows(places["dropped"])
    assert (dropped["question_id"], dropped["reason"]) == reason


def test_what_is_delivered_decides_the_outcome_also_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = settings(intake=DELIVERED)
    assert source_files(chosen, {}, {"mine": ROW}) == []
    file = DELIVERED.folder / "new.jsonl"
    write(file, {"q": "Two?", "a": 2})
    (first,) = source_files(chosen, {}, {"mine": ROW})
    file.rename(file.with_name("other.jsonl"))
    (renamed,) = source_files(chosen, {}, {"mine": ROW})
    assert first.digest != renamed.digest


# ---------------------------------------------------------------- a world

LAKE = FrozenLakeSettings(
    smallest=4,
    largest=4,
    largest_test=5,
    holes=0.2,
    distance=4,
    slippery=0.0,
    steps=12,
    sight=None,
    hidden=False,
    goal=1.0,
    penalty=-0.1,
)
SOLVER = Solver(kind="solver", traces=10, wrong_act=0.2, give_up=0.1)
TASKS = EnvironmentQuestions(source="environment", train=20, validation=4, test=8)
FRESH = Dialogue(
    system="",
    turn_tokens=12,
    result_tokens=64,
    response_tokens=120,
    tool_calls=12,
    prompt="fresh",
    history=1,
    prompt_tokens=120,
)


def run_lake(dialogue, expert=SOLVER, world=None):
    world = world or {"frozen_lake": LAKE}
    long = POLICY.model_copy(update={"context": 640})
    return run(
        partial(environments.open_environment, {}, world, 1),
        settings=settings(questions=TASKS, expert=expert, policy=long),
        environment=world,
        dialogue=dialogue,
        tools={},
    )


DICE = """
from random import SystemRandom
from tasks.trees.tree import Call, Observation

class Dice:
    \"\"\"Roll a six.\"\"\"
    repeatable = False

    def start(self, task, seed):
        return f"a die that shows {SystemRandom().randrange(1, 7)}"

    def act(self, call):
        number = SystemRandom().randrange(1, 7)
        return Observation("ok", f"rolled {number}", terminated=number > 4)

    def solve(self):
        return Call("act", "roll") if SystemRandom().random() < 0.9 else None
"""


@pytest.mark.parametrize("expert", [SOLVER.model_copy(update={"wrong_act": 0.0}), None])
def test_answers_of_a_world_that_is_not_repeatable_are_replayed(tmp_path, monkeypatch, expert):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/dice.py").write_text(DICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = "own/dice.py:Dice"
    world = {name: environment_kind(name).settings()}
    made = run_lake(DIALOGUE, expert, world)
    publish_calls({Origin("prepare", 0): places_of(made)["calls"] / CALLS}, Path("data") / CALLS)
    monkeypatch.setenv(REPLAYED, "data")
    shutil.rmtree(artifacts.ROOT)
    assert run_lake(DIALOGUE, expert, world)["artifacts"] == made["artifacts"]


def test_prepare_of_a_world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_lake(DIALOGUE)
    places = places_of(made)
    check_gates(places)
    train = load_questions(places["questions"] / "train.parquet")
    assert len(train) == 20 and all(question.data and not question.answers for question in train)
    assert len({question.text for question in train}) == 1
    rows = read_rows(places["traces"])
    assert [row["question_id"] for row in rows] == [question.id for question in train[:10]]
    tokenizer = AutoTokenizer.from_pretrained(places["initial"])
    assert len(tokenizer.encode("<move>")) == len(tokenizer.encode("</move>")) == 1
    for row in rows:
        own = np.array(row["tokens"])[row["trained"]]
        said = tokenizer.decode(own).replace("<|end|>", "")
        assert said == "".join(re.findall("<(?:move|think)>.*?</(?:move|think)>", row["text"]))
        assert "actions: " in tokenizer.decode(row["tokens"]).partition("<|assistant|>")[0]
    assert run_lake(DIALOGUE)["artifacts"] == made["artifacts"]


def test_fresh_prompts_make_a_sample_of_each_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = places_of(run_lake(FRESH))
    check_gates(places)
    rows = read_rows(places["traces"])
    tokenizer = AutoTokenizer.from_pretrained(places["initial"])
    assert len(rows) > 30 and len({row["question_id"] for row in rows}) == 10
    for row in rows:
        prompt, _, turn = tokenizer.decode(row["tokens"]).partition("<|assistant|>")
        assert turn == f"{row['text']}<|end|>"
        assert prompt.count("A") <= 2 and "actions: " in prompt  # the step before, and now
        assert prompt.count("step ") == prompt.count("A") - 1


def test_a_world_without_an_expert_has_no_traces_and_its_own_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = places_of(run_lake(FRESH, expert=None))
    assert read_rows(places["traces"]) == []
    assert not (places["gates"] / "traces.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(places["initial"])
    assert len(tokenizer.encode("A . O .\n. . O G")) == 9
