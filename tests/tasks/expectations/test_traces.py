"""The traces' gate: a good table passes, each planted fault is named."""

import json

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import gate
from tasks.expectations import traces

TOOLS = ("python", "search")
TEXT = "<think>t</think><python>1+1</python><result>2</result><answer>\\boxed{2}</answer>"
TRAINING = [f"q{number}" for number in range(12)]


def good():
    return pd.DataFrame(
        {
            "question_id": TRAINING,
            "split": "train",
            "kind": "sum",
            "flaw": ["none", "wrong_digit"] * 6,
            "text": TEXT,
            "tokens": [[1, 2, 3, 4]] * 12,
            "trained": [[False, True, False, True]] * 12,
        }
    )


def check(table, folder, **options):
    """The failed critical expectations of a table: {words: offending rows}."""
    verdict = folder / "traces.json"
    prepared = traces.prepare(table, TRAINING, TOOLS)
    try:
        gate.check("traces", prepared, traces.expectations(**options), verdict, folder / "docs")
    except gate.GateError as error:
        failed = [e for e in json.loads(verdict.read_text())["expectations"] if not e["passed"]]
        assert failed and all(each["expectation"] in str(error) for each in failed)
        return {each["expectation"]: each["rows"] for each in failed}
    return {}


def test_good_table_passes_also_from_parquet(tmp_path, capsys):
    good().to_parquet(tmp_path / "traces.parquet")
    table = pd.read_parquet(tmp_path / "traces.parquet")
    assert check(table, tmp_path, context=4, flawed=(0.4, 0.6)) == {}
    assert capsys.readouterr().out == ""


def test_unexpected_share_of_flaws_only_warns(tmp_path, capsys):
    assert check(good(), tmp_path, context=4, flawed=(0.1, 0.3)) == {}
    assert "10% to 30% are flawed: observed 0.5" in capsys.readouterr().out


def test_each_fault_is_named(tmp_path):
    table = good().astype(object)
    table.loc[0, "question_id"] = "of the test set"
    table.loc[1, "kind"] = None
    table.at[2, "tokens"] = [1, 2, 3, 4, 5]
    table.at[2, "trained"] = [False, True, True, True, True]
    table.at[3, "trained"] = [False, True]
    table.at[4, "trained"] = [False] * 4
    table.at[5, "trained"] = [True] * 4
    table.loc[6, "text"] = TEXT.replace("<answer>", "")
    table.loc[7, "text"] = TEXT + "<answer>3</answer>"
    table.loc[8, "text"] = TEXT.replace("</python>", "")
    table.at[9, "tokens"], table.at[9, "trained"] = None, None

    def row(trace, **value):
        question = "of the test set" if trace == 0 else f"q{trace}"
        return {"trace": trace, "question_id": question, **value}

    assert check(table, tmp_path, context=4) == {
        "every value is present": [
            row(1, unusable="kind=None"),
            row(9, unusable="tokens=None, trained=None"),
        ],
        "the question is one of the training questions": [row(0, of_training=False)],
        "there are 1 to 4 tokens": [row(2, tokens_length=5), row(9, tokens_length=0)],
        "there is one trained flag a token": [row(3, flags_too_many=-2)],
        "at least one token is trained": [row(4, trained_tokens=0), row(9, trained_tokens=0)],
        "the first token, of the prompt, is not trained": [row(5, first_token_trained=True)],
        "there is exactly one answer block": [
            row(6, answer_tags="</answer>"),
            row(7, answer_tags="<answer></answer>" * 2),
        ],
        "each tool call is closed before its result": [row(8, call_fault="<python><result/>")],
    }


def test_empty_table_is_refused(tmp_path):
    prepared = traces.prepare(good().iloc[:0], TRAINING, TOOLS)
    with pytest.raises(gate.GateError, match="- there are traces: observed 0"):
        gate.check(
            "traces", prepared, traces.expectations(4), tmp_path / "verdict", tmp_path / "docs"
        )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("no tool at all", ""),
        ("<python>a</python><result/><search>b</search><result/>", ""),
        ("<python>beyond the limit</python>", ""),
        ("<python>a<result/></python>", "<python><result/></python>"),
        ("<python>a</python><result>never closed", "<python></python><result>"),
        ("<python>a</search>", "<python></search>"),
        ("<python>a", "<python>"),
        ("<result/>", "<result/>"),
        ("<python>a</python><result/><result/>", "<python></python><result/><result/>"),
        ("<browser>not a tool here", ""),
    ],
)
def test_call_fault(text, fault):
    assert traces.call_fault(text, TOOLS) == fault


def test_tags_that_a_tool_quotes_do_not_count():
    quoting = TEXT.replace(">2<", "><answer>5</answer><python>x<")
    prepared = traces.prepare(good().assign(text=quoting), TRAINING, TOOLS)
    assert (prepared["answer_tags"] == "<answer></answer>").all()
    assert (prepared["call_fault"] == "").all()


@given(st.lists(st.sampled_from(["<python>", "</python>", "<search>", "</search>", "<result/>"])))
def test_call_fault_agrees_with_a_walk_over_the_tags(tags):
    opened, result_due, broken = None, False, False
    for tag in tags:
        name, closing = tag.strip("</>"), tag.startswith("</")
        if tag == "<result/>":
            broken |= not result_due
            result_due = False
        elif closing:
            broken |= opened != name
            opened, result_due = None, True
        else:
            broken |= opened is not None
            opened, result_due = name, False
    broken |= opened is not None
    assert (traces.call_fault("text".join(tags), TOOLS) != "") == broken
