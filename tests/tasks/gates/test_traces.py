"""The traces' gate: a good table passes, each planted fault is named."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.gates import traces
from tests.tasks.gates.conftest import broken

CALL = ("<think>t</think><python>print(f'{1 + 1}')</python>", True)
RESULT = ("<result>2 <search></answer>\x1b</result>", False)  # a tool may give back anything
ANSWER = ("<think>done {1, 2}</think><answer>\\boxed{2}</answer>", True)
PARTS = [CALL, RESULT, ANSWER]
TRAINING = [f"q{number}" for number in range(12)]

PRESENT = "every value is present, ids and kinds are printable"
ALTERNATE = "turns and tool results alternate and make up the text"
CALLS = "each tool result follows one call of a tool at hand"
ENDS = "exactly one answer block, not empty, ends the trace"
WORDS = "the agent's words are not damaged or a template's remains"
FLAGS = "there is one trained flag a token"


def good(rows=12):
    return pd.DataFrame(
        {
            "question_id": TRAINING * (rows // 12),
            "split": "train",
            "kind": "sum",
            "flaw": ["none", "wrong_digit"] * (rows // 2),
            "text": "".join(text for text, _ in PARTS),
            "parts": [PARTS] * rows,
            "tokens": [[1, 2, 3, 4]] * rows,
            "trained": [[False, True, False, True]] * rows,
        }
    )


def suited(table, flawed=None):
    return traces.prepare(table, TRAINING, ["python"]), traces.expectations(4, flawed)


@pytest.fixture
def check(judge):
    return lambda *given, **more: judge("traces", *suited(*given, **more))


def test_good_table_passes(check, capsys):
    table = good()
    for column in ("tokens", "trained"):  # as Parquet gives them
        table[column] = table[column].map(np.array)
    assert check(table, flawed=(0.4, 0.6)) == {}
    assert capsys.readouterr().out == ""


def test_unexpected_share_of_flaws_only_warns(check, capsys):
    assert check(good(), flawed=(0.1, 0.3)) == {}
    assert "10% to 30% are flawed: observed 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "value", "words", "shown"),
    [
        ("kind", None, PRESENT, {"unusable": "kind=None"}),
        ("flaw", "\u202e", PRESENT, {"unusable": "flaw=\\u202e"}),
        ("question_id", "t1", "the question is one of the training questions", False),
        ("text", "2", ALTERNATE, {"parts_fault": "the text differs from its parts"}),
        ("tokens", [1] * 5, "there are 1 to 4 tokens", {"tokens_length": 5}),
        ("tokens", [], "there are 1 to 4 tokens", {"tokens_length": 0}),
        ("trained", [False, True], FLAGS, {"flags_too_many": -2}),
        ("trained", [False] * 4, "at least one token is trained", {"trained_tokens": 0}),
        (
            "trained",
            [True] * 4,
            "the first token, of the prompt, is not trained",
            {"first_token_trained": True},
        ),
    ],
)
def test_planted_fault_is_named(column, value, words, shown):
    table = good().astype(object)
    table.at[5, column] = value
    row = {"trace": 5, "question_id": "q5"}
    if shown is False:
        row["question_id"], shown = value, {"of_training": False}
    found = broken(*suited(table))
    assert found.pop(words) == [{**row, **shown}]
    assert set(found) <= {FLAGS}


def call(text):
    return (f"<think>t</think>{text}", True)


@pytest.mark.parametrize(
    ("parts", "words", "fault"),
    [
        ([CALL, ANSWER], ALTERNATE, "part 1 is a turn out of turn"),
        ([RESULT, ANSWER], ALTERNATE, "part 0 is a tool result out of turn"),
        ([CALL, RESULT], ALTERNATE, "ends with a tool result"),
        ([], ALTERNATE, "no turn"),
        (
            [CALL, ("2</result>", False), ANSWER],
            ALTERNATE,
            "part 1 is a tool result without its tags",
        ),
        ([call(""), RESULT, ANSWER], CALLS, "turn 0 has no call before its result"),
        ([call("<python>1"), RESULT, ANSWER], CALLS, "turn 0 has the tags <python>"),
        (
            [call("<python>1</python> so"), RESULT, ANSWER],
            CALLS,
            "turn 0 has the tags <python></python>",
        ),
        (
            [call("<python>1</python><python>2</python>"), RESULT, ANSWER],
            CALLS,
            "turn 0 has the tags <python></python><python></python>",
        ),
        (
            [call("<search>1</search>"), RESULT, ANSWER],
            CALLS,
            "turn 0 calls search, which the recipe does not name",
        ),
        (
            [call("<python>1</python><result>2</result>" + ANSWER[0])],
            CALLS,
            "turn 0 has the tags <python></python><result></result>",
        ),
        ([(ANSWER[0] + CALL[0], True)], CALLS, "turn 0 ends with a call without a result"),
        ([CALL, RESULT, call("2")], ENDS, "no answer block"),
        (
            [CALL, RESULT, (ANSWER[0] + ANSWER[0], True)],
            ENDS,
            "answer tags <answer></answer><answer></answer>",
        ),
        ([CALL, RESULT, (ANSWER[0][:-9], True)], ENDS, "answer tags <answer>"),
        (
            [(ANSWER[0] + CALL[0], True), RESULT, call("")],
            ENDS,
            "answers in turn 0 and goes on",
        ),
        ([CALL, RESULT, call("<answer>2</answer>")], ENDS, "no \\boxed{} in the answer"),
        ([CALL, RESULT, call("<answer>\\boxed{ }</answer>")], ENDS, "an empty answer"),
        ([(CALL[0].replace("1", "\0"), True), RESULT, ANSWER], WORDS, "control character U+0000"),
        (
            [(CALL[0].replace("1", "<|im_end|>"), True), RESULT, ANSWER],
            WORDS,
            "template remains '<|im_end|>'",
        ),
        (
            [(CALL[0].replace(">t<", ">{thought}<"), True), RESULT, ANSWER],
            WORDS,
            "template remains '{thought}'",
        ),
    ],
)
def test_fault_of_the_dialogue_is_named(parts, words, fault):
    table = good()
    table.at[5, "parts"] = parts
    table.at[5, "text"] = "".join(text for text, _ in parts)
    [row] = broken(*suited(table))[words]
    assert {key: row[key] for key in ("trace", "question_id")} == {"trace": 5, "question_id": "q5"}
    assert list(row.values())[2].removeprefix("turn 0: ") == fault.removeprefix("turn 0: ")


def test_empty_table_is_refused(check):
    assert check(good().iloc[:0]) == {"there are traces": 0}


def test_many_faults_at_once_are_named(check):
    """Each kind of expectation, by the gate itself."""
    table = good().astype(object)
    table.at[2, "question_id"], table.at[5, "text"] = "t1", "2"
    table.at[7, "tokens"] = [1] * 5
    assert check(table) == {
        "the question is one of the training questions": [
            {"trace": 2, "question_id": "t1", "of_training": False}
        ],
        ALTERNATE: [
            {"trace": 5, "question_id": "q5", "parts_fault": "the text differs from its parts"}
        ],
        "there are 1 to 4 tokens": [{"trace": 7, "question_id": "q7", "tokens_length": 5}],
        FLAGS: [{"trace": 7, "question_id": "q7", "flags_too_many": -1}],
    }


def test_large_clean_table_passes(check):
    assert check(good(20_004)) == {}


def test_trace_without_a_call_is_sound():
    assert traces.call_fault([ANSWER[0]], ["python"]) == ""


@given(
    st.lists(st.sampled_from(["<python>", "</python>", "<search>", "</search>", "<result>", "x"]))
)
def test_call_ends_with_one_closed_pair(pieces):
    turn = "".join(pieces)
    inside = turn.partition("<python>")[2].removesuffix("</python>")
    sound = turn.endswith("</python>") and "<" not in inside and "<" not in turn.partition("<p")[0]
    assert (traces.call_fault([turn, ""], ["python"]) == "") == sound


TWICE = ("<think>t</think><python>1</python>\n<python>2</python>", True)
SECOND = ("<result>4</result>", False)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([TWICE, RESULT, SECOND, ANSWER], ""),
        ([TWICE, RESULT, SECOND, CALL, RESULT, ANSWER], ""),
        (PARTS, ""),
        ([TWICE, RESULT, ANSWER], "before 1 results"),
        ([CALL, RESULT, SECOND, ANSWER], "before 2 results"),
        ([RESULT, SECOND, ANSWER], "part 0 is a tool result out of turn"),
        ([TWICE, RESULT, SECOND], "ends with a tool result"),
        ([(TWICE[0].replace("2<", "2<python><"), True), RESULT, SECOND, ANSWER], "the tags"),
        ([(TWICE[0].replace(">2", ">2</python>x"), True), RESULT, SECOND, ANSWER], "the tags"),
    ],
)
def test_a_turn_may_make_several_calls_where_the_dialect_has_them(parts, fault):
    found = traces.trace_fault(parts, ["python"], several=True)
    assert fault in found and bool(found) == bool(fault)
    assert traces.trace_fault(parts, ["python"]) or parts == PARTS
    table = good()
    table.at[5, "parts"], table.at[5, "text"] = parts, "".join(text for text, _ in parts)
    prepared = traces.prepare(table, TRAINING, ["python"], several=True)
    row = prepared.xs(5, level="trace").iloc[0]
    assert bool(row["parts_fault"] or row["call_fault"]) == bool(fault)
