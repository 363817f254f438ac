"""The questions' gate: a good table passes, each planted fault is named."""

import json

import numpy as np
import pandas as pd
import pytest

from tasks import gate
from tasks.expectations import questions


def good():
    return pd.DataFrame(
        {
            "id": [f"q{number:02}" for number in range(24)],
            "split": ["train"] * 12 + ["validation"] * 6 + ["test"] * 6,
            "kind": ["sum", "product"] * 12,
            "text": [f"What is {number} plus 5?" for number in range(24)],
            "answers": [[f"{number + 5}"] for number in range(24)],
        }
    )


def check(table, folder, **options):
    """The failed expectations of a table: {words: its offending rows, or what was observed}."""
    verdict = folder / "questions.json"
    prepared = questions.prepare(table)
    try:
        gate.check(
            "questions", prepared, questions.expectations(**options), verdict, folder / "docs"
        )
    except gate.GateError as error:
        failed = [e for e in json.loads(verdict.read_text())["expectations"] if not e["passed"]]
        assert failed and all(each["expectation"] in str(error) for each in failed)
        assert all(
            len(each["rows"]) == min(each["unexpected"], 3) for each in failed if "rows" in each
        )
        return {each["expectation"]: each.get("rows", each.get("observed")) for each in failed}
    return {}


def test_good_table_passes(tmp_path):
    rows = {"train": 12, "validation": 6, "test": 6}
    assert check(good(), tmp_path, kinds=["sum", "product"], rows=rows) == {}


def test_each_fault_is_named(tmp_path):
    table = good().astype(object)
    table.loc[2, "id"] = "q03"
    table.loc[4, "text"] = " what is  5\nPLUS 5? "  # twice in the training split
    table.loc[18, "text"] = "What is 6 plus 5?"  # in the test and the training split
    table.loc[7, "text"] = "Dear {name}"
    table.loc[8, "kind"] = "riddle"
    table.loc[9, "kind"] = None
    table.loc[10, "split"] = "dev"
    table.at[11, "answers"] = []
    rows = {"train": 11, "validation": 7, "test": 6}
    assert check(table, tmp_path, kinds=["sum", "product"], rows=rows) == {
        "every value is present": [{"id": "q09", "unusable": "kind=None"}],
        "no id occurs twice": [{"id": "q03"}, {"id": "q03"}],
        "the split is train, validation or test": [{"id": "q10", "split": "dev"}],
        "the validation split has 7 questions": 6,
        "the kind is known": [{"id": "q08", "kind": "riddle"}],
        "the text is not empty, damaged or a template's remains": [
            {"id": "q07", "text_fault": "template remains '{name}'"}
        ],
        "no text lies in two splits": [
            {"id": "q06", "splits_of_text": 2},
            {"id": "q18", "splits_of_text": 2},
        ],
        "no text occurs twice": [
            {"id": "q04", "normalised_text": "what is 5 plus 5?"},
            {"id": "q05", "normalised_text": "what is 5 plus 5?"},
            {"id": "q06", "normalised_text": "what is 6 plus 5?"},
        ],
        "the answers are a list of texts, none empty": [
            {"id": "q11", "answers_fault": "no answer"}
        ],
    }


def test_empty_split_is_refused(tmp_path):
    table = good()
    assert check(table[table["split"] != "test"], tmp_path) == {"the test split has questions": 0}


def test_table_read_from_parquet_passes(tmp_path):
    good().to_parquet(tmp_path / "questions.parquet")
    prepared = questions.prepare(pd.read_parquet(tmp_path / "questions.parquet"))
    assert (prepared["answers_fault"] == "").all()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (None, "empty"),
        ("a\x07b", "control character U+0007"),
        ("a\r\nb", "control character U+000D"),
        ("na\ufffdve", "control character U+FFFD"),
        ("What is {a} + {b}?", "template remains '{a}'"),
        ("Add {{a}}", "template remains '{{'"),
        ("{% if a %}", "template remains '{%'"),
        ("Go.<|im_end|>", "template remains '<|im_end|>'"),
        ("None", "template remains 'None'"),
        ("First line\n\tsecond line", ""),
        ("None of the 3 apples costs $5 or {1, 2}.", ""),
        ("Solve 3 <|x|> 2 for x if |x|>3", ""),
        (r"What is \frac{a}{b} of \{x\}, with \sqrt {x} and 50\%}?", ""),
        ("What is x^{n} + a_{i}?", ""),
    ],
)
def test_text_fault(text, fault):
    assert questions.text_fault(text) == fault


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        (["4"], ""),
        (np.array(["4", "four"], dtype=object), ""),
        ("4", "not a list"),
        (None, "not a list"),
        ([], "no answer"),
        (["4", " "], "an empty answer"),
        ([4], "an empty answer"),
    ],
)
def test_answers_fault(answers, fault):
    assert questions.answers_fault(answers) == fault
