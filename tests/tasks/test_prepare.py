import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from params.schema import (
    Dialogue,
    Expert,
    FileQuestions,
    GeneratedQuestions,
    Machine,
    Prepare,
    PythonTool,
    TinyPolicy,
)
from tasks import dialogue as talk
from tasks import ledger
from tasks.ledger import Step
from tasks.policy import build_tokenizer
from tasks.prepare import SOURCES, check_context, prepare, trace_table
from tasks.trajectory import Observation, Question, load_questions, read_rows

STEP = Step("toy", "prepare", 0, 7)
MACHINE = Machine(threads=1, device="cpu", precision="float32")
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
QUESTIONS = GeneratedQuestions(
    source="generated",
    train=30,
    validation=3,
    test=6,
    largest_operand=99,
    largest_arithmetic_operand=499,
    largest_test_operand=999,
)
EXPERT = Expert(traces=24, wrong_operator=0.1, wrong_digit=0.1, wrong_answer=0.1, missing_call=0.1)
SETTINGS = Prepare(policy=POLICY, questions=QUESTIONS, expert=EXPERT)
DIALOGUE = Dialogue(
    system="Be brief.",
    tools=("python",),
    turn_tokens=48,
    result_tokens=24,
    response_tokens=144,
    tool_calls=3,
)
LIMITS = PythonTool(
    sandbox="auto",
    cpu_seconds=1,
    wall_seconds=20,
    memory_mib=256,
    processes=8,
    file_mib=4,
    output_characters=2000,
)


class Calculator:
    """A tool without a sandbox, for code that the tests trust; it counts its rounds."""

    def __init__(self):
        self.rounds = []

    def __call__(self, calls):
        self.rounds.append(len(calls))
        return [Observation("ok", f"{eval(call.argument)}\n") for call in calls]


def generated(expert, seed=7):
    questions, traces = SOURCES["generated"](
        SETTINGS.model_copy(update={"expert": expert}), Calculator(), seed
    )
    return questions, traces


def flawed(traces=30, **rates):
    none = dict.fromkeys(("wrong_operator", "wrong_digit", "wrong_answer", "missing_call"), 0.0)
    return Expert(traces=traces, **{**none, **rates})


def whole(trace):
    return "".join(text for text, _ in trace.parts)


# ---------------------------------------------------------------- the expert's traces


def test_an_expert_without_flaws_shows_calls_results_and_the_gold_answer():
    _, traces = generated(flawed())
    assert len(traces) == 30
    for trace in traces:
        text = whole(trace)
        assert trace.flaw == "none"
        assert talk.final_answer(text) == trace.question.answers[0]
        calls = 2 if trace.question.kind == "chain" else 1
        assert len(re.findall("<python>.*?</python><result>-?[0-9]+</result>", text)) == calls
        assert [own for _, own in trace.parts] == [True, False] * calls + [True]
        assert text.count("<think>") == text.count("</think>") == calls + 1


def test_the_second_call_works_on_what_the_first_one_gave():
    _, traces = generated(flawed())
    for trace in traces:
        if trace.question.kind == "chain":
            first, second = re.findall("<python>(.*?)</python><result>", whole(trace))
            assert second.split()[0] == str(eval(first))


def test_a_missing_call_goes_straight_to_an_answer():
    _, traces = generated(flawed(missing_call=1))
    for trace in traces:
        assert (trace.flaw, len(trace.parts)) == ("missing_call", 1)
        assert talk.final_answer(whole(trace)) == "0"


def test_a_wrong_answer_differs_from_the_last_result():
    _, traces = generated(flawed(wrong_answer=1))
    for trace in traces:
        last = re.findall("<result>(.*?)</result>", whole(trace))[-1]
        assert last == trace.question.answers[0] != talk.final_answer(whole(trace))


def test_the_expert_answers_the_first_training_questions_in_their_order():
    questions, traces = generated(EXPERT)
    assert [trace.question for trace in traces] == questions["train"][:24]


def test_all_calls_of_a_round_run_together():
    tools = Calculator()
    SOURCES["generated"](SETTINGS.model_copy(update={"expert": flawed()}), tools, 7)
    assert tools.rounds == [30, 10], "then the second calls of the chains"


def test_traces_of_files_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("train", "validation", "test", "traces")
    paths = {name: Path("questions", f"{name}.jsonl") for name in names}
    Path("questions").mkdir()
    for name in names[:3]:
        paths[name].write_text(json.dumps({"q": f"Of {name}?", "a": "1"}))
    response = "<python>1</python><result>1</result><answer>\\boxed{1}</answer>"
    paths["traces"].write_text(json.dumps({"q": "Of train?", "r": response}))
    settings = Prepare(
        policy=POLICY,
        questions=FileQuestions(
            source="files", question_field="q", answer_field="a", response_field="r", **paths
        ),
        expert=None,
    )
    tools = Calculator()
    questions, (trace,) = SOURCES["files"](settings, tools, 7)
    assert trace.question == questions["train"][0]
    assert (trace.flaw, whole(trace)) == ("none", response)
    assert [own for _, own in trace.parts] == [True, False, True]
    assert tools.rounds == []


# ---------------------------------------------------------------- the table of traces


def test_a_trace_is_trained_on_the_agents_own_tokens_only():
    _, traces = generated(EXPERT)
    tokenizer = build_tokenizer([whole(trace) for trace in traces], POLICY)
    for row, trace in zip(
        trace_table(traces, tokenizer, DIALOGUE).to_pylist(), traces, strict=True
    ):
        tokens, own = np.array(row["tokens"]), np.array(row["trained"])
        prompt = talk.prompt_tokens(tokenizer, DIALOGUE, trace.question.text)
        assert tokens[: len(prompt)].tolist() == prompt.tolist()
        turns = "".join(text for text, sampled in trace.parts if sampled)
        results = "".join(text for text, sampled in trace.parts if not sampled)
        assert tokenizer.decode(tokens[own]) == turns + tokenizer.eos_token
        assert tokenizer.decode(tokens[~own]) == f"{tokenizer.decode(prompt)}{results}"
        assert row["text"] == whole(trace)
        assert row["question_id"] == trace.question.id
        assert (row["split"], row["flaw"]) == ("train", trace.flaw)


def test_a_result_is_tokenised_as_in_a_rollout():
    _, traces = generated(flawed())
    tokenizer = build_tokenizer([whole(trace) for trace in traces], POLICY)
    for row, trace in zip(
        trace_table(traces, tokenizer, DIALOGUE).to_pylist(), traces, strict=True
    ):
        prompt = talk.prompt_tokens(tokenizer, DIALOGUE, trace.question.text)
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


def question(number, text):
    return Question(f"test-{number:05d}", "story", text, ("1",))


def test_a_context_that_is_too_small_is_an_error_with_the_one_that_would_do():
    tokenizer = build_tokenizer(["How many apples?"], POLICY)
    questions = {
        "train": [question(0, "How many?")],
        "test": [question(1, "How many apples 12345?")],
    }
    longest = len(talk.prompt_tokens(tokenizer, DIALOGUE, "How many apples 12345?"))
    needed = longest + DIALOGUE.response_tokens
    check_context(tokenizer, DIALOGUE, questions, needed)
    with pytest.raises(ValueError) as caught:
        check_context(tokenizer, DIALOGUE, questions, needed - 1)
    for words in (
        "question test-00001",
        f"a prompt of {longest} tokens",
        "dialogue.response_tokens 144",
        f"prepare.policy.context {needed - 1}",
        f"raise the context to {needed} or lower response_tokens",
    ):
        assert words in str(caught.value)


def test_the_longest_prompt_is_the_one_with_the_most_tokens_not_letters():
    words = "How many apples are left over?"
    tokenizer = build_tokenizer([words] * 9, POLICY)
    many_letters, many_tokens = question(0, words), question(1, "1234567890 * 1234567890")
    letters, tokens = (
        len(talk.prompt_tokens(tokenizer, DIALOGUE, entry.text))
        for entry in (many_letters, many_tokens)
    )
    assert len(many_letters.text) > len(many_tokens.text)
    assert tokens > letters
    with pytest.raises(ValueError, match="question test-00001 has a prompt of"):
        check_context(
            tokenizer,
            DIALOGUE,
            {"test": [many_letters, many_tokens]},
            letters + DIALOGUE.response_tokens,
        )


# ---------------------------------------------------------------- the whole verb


def run(tools):
    return prepare.fn(
        step=STEP,
        settings=SETTINGS,
        sources=[],
        dialogue=DIALOGUE,
        machine=MACHINE,
        limits=LIMITS,
        tools=tools,
    )


def test_the_whole_of_prepare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tools = Calculator()
    made = run(tools)
    places = {name: Path(entry["path"]) for name, entry in made["artifacts"].items()}
    assert set(places) == {"questions", "traces", "initial", "gates"}

    questions = {
        split: load_questions(places["questions"] / f"{split}.parquet")
        for split in ("train", "validation", "test")
    }
    assert {split: len(entries) for split, entries in questions.items()} == {
        "train": 30,
        "validation": 3,
        "test": 6,
    }
    traces = read_rows(places["traces"])
    assert [row["question_id"] for row in traces] == [q.id for q in questions["train"][:24]]
    assert {len(row["tokens"]) - len(row["trained"]) for row in traces} == {0}
    assert max(len(row["tokens"]) for row in traces) <= POLICY.context

    model = AutoModelForCausalLM.from_pretrained(places["initial"])
    tokenizer = AutoTokenizer.from_pretrained(places["initial"])
    assert model.config.vocab_size <= POLICY.vocabulary
    assert str(tokenizer.decode(traces[0]["tokens"])).endswith(
        traces[0]["text"] + tokenizer.eos_token
    )

    for gate in ("questions", "traces"):
        assert json.loads((places["gates"] / f"{gate}.json").read_text())["passed"]
        assert Path(".beamline/data_docs/toy", gate, "index.html").is_file()

    assert made["metrics"] == {
        "train_questions": 30,
        "validation_questions": 3,
        "test_questions": 6,
        "traces": 24,
        "flawed_traces": sum(row["flaw"] != "none" for row in traces) / 24,
        "parameters": model.num_parameters(),
    }

    rounds = len(tools.rounds)
    assert run(tools) == made
    assert len(tools.rounds) == rounds, "what is finished is not done again"

    for record in ledger.ROOT.rglob("record.json"):
        record.unlink()
    assert run(tools)["artifacts"] == made["artifacts"], "equal inputs give equal bytes"


def test_the_limits_of_the_tool_are_part_of_the_key():
    # the traces hold what the tool printed, and recipe.python says how much it may print; the
    # ``tools`` callable is no part of a key
    annotations = {entry.annotation for entry in inspect.signature(prepare.fn).parameters.values()}
    assert annotations & {"PythonTool", "Recipe"}
