"""The questions' gate: a good table passes, each planted fault is named."""

import json

import numpy as np
import pandas as pd
import pytest

from tasks.gates import questions
from tasks.trees.tree import Message
from tests.tasks.gates.conftest import broken

PRESENT = "every value is present, ids and kinds are printable"
SOUND = "the text is not empty, damaged or a template's remains"
UNBALANCED = "has unbalanced braces, so \\boxed{} ends elsewhere"
BEFORE = "the messages before the text are sound, too"
ANSWERS = "the answers are a list of sound texts, none empty"
SCORE = "the question's own scorer gives each answer score 1"
OVERLAP = "no training question overlaps one of validation or test"
TWICE = "no text occurs twice"


def equal(answer, accepted):
    return {"score": float(answer in accepted)}


def half_right(answer, accepted):
    return {"score": 0.5 if answer == "1/0" else 1.0}


SCORERS = {"exact": equal, "maths": half_right}


def good(rows=24):
    """Half training, a quarter validation, a quarter test; ids q00, q01, ..."""
    number = range(rows)
    return pd.DataFrame(
        {
            "id": [f"q{n:02}" for n in number],
            "split": ["train"] * (rows // 2) + ["validation", "test"] * (rows // 4),
            "kind": ["sum", "product"] * (rows // 2),
            "text": [f"What is {n} plus 5?" for n in number],
            "answers": [[f"{n + 5}"] for n in number],
            "scorer": ["exact", "maths"] * (rows // 2),
            "before": [(Message("system", "Add \\{x\\} up."),)] * rows,
        }
    )


def suited(table, **options):
    return questions.prepare(table, SCORERS, words=8), questions.expectations(**options)


@pytest.fixture
def check(judge):
    return lambda *given, **more: judge("questions", *suited(*given, **more))


def test_good_table_passes(check):
    rows = {"train": 12, "validation": 6, "test": 6}
    assert check(good(), kinds=["sum", "product"], rows=rows) == {}


@pytest.mark.parametrize(
    ("column", "value", "words", "shown"),
    [
        ("kind", None, PRESENT, {"id": "q07", "unusable": "kind=None"}),
        ("kind", "a\x1b[2J", PRESENT, {"id": "q07", "unusable": "kind=a\\x1b[2J"}),
        ("scorer", 3, PRESENT, {"id": "q07", "unusable": "scorer=3"}),
        ("id", "\ud800", PRESENT, {"id": "\\ud800", "unusable": "id=\\ud800"}),
        ("id", ["q07"], PRESENT, {"id": "['q07']", "unusable": "id=['q07']"}),
        ("split", "dev", "the split is train, validation or test", {"split": "dev"}),
        ("kind", "riddle", "the kind is known", {"kind": "riddle"}),
        ("text", 7, SOUND, {"text_fault": "not a text but int"}),
        ("text", "a\ud800b", SOUND, {"text_fault": "control character U+D800"}),
        ("text", "Dear {name}", SOUND, {"text_fault": "template remains '{name}'"}),
        (
            "text",
            "x" * 10_000_000 + "\0",
            SOUND,
            {"text_fault": "control character U+0000"},
        ),
        ("before", None, BEFORE, {"before_fault": "not a list"}),
        ("before", ["Add."], BEFORE, {"before_fault": "message 0 is no message but str"}),
        (
            "before",
            [Message("user", "Add."), Message("tool", "5")],
            BEFORE,
            {"before_fault": "message 1 has the role 'tool'"},
        ),
        (
            "before",
            [Message("system", "Go.<|im_end|>")],
            BEFORE,
            {"before_fault": "message 0 of system: template remains '<|im_end|>'"},
        ),
        ("answers", [], ANSWERS, {"answers_fault": "no answer"}),
        (
            "answers",
            ["12", "\x07"],
            ANSWERS,
            {"answers_fault": "'\\\\x07' has control character U+0007"},
        ),
        ("scorer", "none", SCORE, {"score_fault": "unknown scorer 'none'; known are exact, maths"}),
        ("answers", ["12", "1/0"], SCORE, {"score_fault": "'1/0' scores 0.5 with maths"}),
        ("text", "what is 12 PLUS 5", OVERLAP, {"overlaps": "q12"}),
        (
            "text",
            "Tell me: if it is known what one and two are then what is 12 plus 5?",
            OVERLAP,
            {"overlaps": "q23"},
        ),
    ],
)
def test_planted_fault_is_named(column, value, words, shown):
    table = good().astype(object)
    table.at[23, "text"] = "If it is known what one and two are, what is three?"
    table.at[7, column] = value
    found = broken(*suited(table, kinds=["sum", "product"]))
    assert found.pop(words) == [{"id": "q07", **shown}]
    assert set(found) <= {
        PRESENT,
        SCORE,
        "the kind is known",
    }  # what is missing or of a wrong type is named there, too


def test_faults_of_several_rows_are_named_together(check):
    table = good()
    table.loc[2, "id"] = "q03"
    table.loc[4, "text"] = " what is  5\nPLUS 5? "  # twice in the training split
    table.loc[18, "text"] = "What is 6 plus 5?"  # in the validation and the training split
    rows = {"train": 11, "validation": 6, "test": 6}
    assert check(table, rows=rows) == {
        "no id occurs twice": [{"id": "q03"}, {"id": "q03"}],
        "the train split has 11 questions": 12,
        "no text lies in two splits": [
            {"id": "q06", "splits_of_text": 2},
            {"id": "q18", "splits_of_text": 2},
        ],
        TWICE: [
            {"id": "q04", "normalised_text": "what is 5 plus 5?"},
            {"id": "q05", "normalised_text": "what is 5 plus 5?"},
            {"id": "q06", "normalised_text": "what is 6 plus 5?"},
            {"id": "q18", "normalised_text": "what is 6 plus 5?"},
        ],
        OVERLAP: [{"id": "q06", "overlaps": "q18"}],
    }


def test_several_tables_are_checked_as_one(judge):
    table = good(60)
    table.loc[2, "id"] = "q45"  # in tables far from each other, as are the others
    table.loc[4, "text"] = " what is  50\nPLUS 5? "
    table.loc[7, "answers"][0] = ""
    table.loc[59, "kind"] = None
    rows = {"train": 1, "validation": 15, "test": 15}
    parts = [table.iloc[start : start + 9] for start in range(0, 60, 9)]
    whole, cut = (judge("questions", *suited(each, rows=rows)) for each in (table, parts))
    assert whole == cut
    assert {"no id occurs twice", TWICE, OVERLAP, ANSWERS, PRESENT} < set(whole)


def test_empty_split_is_refused(check):
    table = good()
    assert check(table[table["split"] != "test"]) == {"the test split has questions": 0}


def test_large_clean_table_passes(check):
    assert check(good(20_000)) == {}


def test_answers_from_parquet_are_read(tmp_path):
    good()[["answers"]].to_parquet(tmp_path / "answers.parquet")
    answers = pd.read_parquet(tmp_path / "answers.parquet")["answers"]
    prepared = questions.prepare(good().assign(answers=answers), SCORERS, words=8)
    assert (prepared["answers_fault"] == "").all() and (prepared["score_fault"] == "").all()


def test_equal_answers_are_scored_once():
    calls = []

    def counting(answer, accepted):
        calls.append(answer)
        return {"score": 1.0}

    table = good().assign(scorer="exact")
    table["answers"] = [["5"], ["6", "six"]] * 12
    questions.prepare(table, {"exact": counting}, words=8)
    assert calls == ["5", "6", "six"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (None, "not a text but NoneType"),
        ("a\x07b", "control character U+0007"),
        ("a\r\nb", "control character U+000D"),
        ("na\ufffdve", "control character U+FFFD"),
        ("What is {first} + {b}?", "template remains '{first}'"),
        ("What is {first_number}?", "template remains '{first_number}'"),
        ("Let {x} be the fractional part of x, S = {a}, log_{2}{x} = {{a, b}, {c}}.", ""),
        ("Compute $${{x}^{2}} + {name}$$ and {{x}^{2}} + 1.", ""),
        ("3\\times 4 \\text{ cm} \\theta", ""),
        ("3\times 4", "\\times without its backslash"),
        ("4\text{ cm}", "\\text without its backslash"),
        ("a table:\n\tx = 1\n\ttext = 2\n\ttan(x)", ""),
        ("Add {{number}}", "template remains '{{number}}'"),
        ("Add {{ user.name|upper }}", "template remains '{{ user.name|'"),
        ("A sequence {a_n} with {a_1} = 1", ""),
        ("What is {{2002}^{2001}} mod 7?", ""),
        ("Find the set ${x}$ and ${{a}_n}$.", ""),
        ("{% if a %}", "template remains '{%'"),
        ("Go.<|im_end|>", "template remains '<|im_end|>'"),
        ("None", "template remains 'None'"),
        ("First line\n\tsecond line", ""),
        ("None of the 3 apples costs $5 or {1, 2}.", ""),
        ("Solve 3 <|x|> 2 for x if |x|>3", ""),
        (r"What is \frac{a}{b} of \{x\}, with \sqrt {x} and 50\%}?", ""),
        ("What is x^{n} + a_{i}?", ""),
        ("\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f", ""),
        ("<script>alert(1)</script>", ""),
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
        (["4", " "], "' ' is empty"),
        ([4], "not a text but int"),
        (["nan"], "'nan' is a placeholder"),
        (["N/A"], "'N/A' is a placeholder"),
        (["-"], "'-' is a placeholder"),
        (["unknown"], "'unknown' is a placeholder"),
        (["-1", "\u2212", "no", "the unknown soldier", "?!"], ""),
        (["1}^N"], f"'1}}^N' {UNBALANCED}"),
        (["36\\}"], f"'36\\\\}}' {UNBALANCED}"),
        (["\\frac{1}{2"], f"'\\\\frac{{1}}{{2' {UNBALANCED}"),
        (["\\{1, 2\\}", "x^{2_{n}}"], ""),
        (
            ["The final answer is \\(\\boxed{C}\\)"],
            "'The final answer is \\\\(\\\\boxed{C}\\\\)' has a \\boxed{} in it",
        ),
        (["1\u200b8"], "'1\\\\u200b8' has the invisible character U+200B"),
        (["18\ufeff"], "'18\\\\ufeff' has the invisible character U+FEFF"),
        (["18\u200d"], "'18\\\\u200d' has the invisible character U+200D"),
        (["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"], ""),  # Persian needs the joiner
        (["Caf\u00c3\u00a9"], "'Caf\u00c3\u00a9' was decoded with the wrong encoding"),
        (["Caf\u00e9", "S\u00e3o Paulo", "\u4e0a\u6d77", "90\u00b0", "x\u00b2"], ""),
        (['["72","x"]'], '\'["72","x"]\' is a list written as a text'),
        (["['a', 1, null]"], ""),
        (["['a', 1]"], "\"['a', 1]\" is a list written as a text"),
        (['["72", null]'], "'[\"72\", null]' is a list written as a text"),
        (["[1, 2]", "[0, 1)", "[a's]", '[{["a"]}]'], ""),
        (["3\x0crac{1}{2}"], "'3\\\\x0crac{1}{2}' has \\frac without its backslash"),
        (["\rho"], "'\\\\rho' has \\rho without its backslash"),
        (["#N/A"], "'#N/A' is a placeholder"),
        (["NULL"], "'NULL' is a placeholder"),
        (["."], "'.' says nothing"),
        (["4", "\\text{}"], "'\\\\text{}' says nothing"),
        (["\\mathrm{ }."], "'\\\\mathrm{ }.' says nothing"),
        (["$ $"], "'$ $' says nothing"),
        (["\u3002"], "'\u3002' says nothing"),
        (["\\boldsymbol{\\text{}}"], "'\\\\boldsymbol{\\\\text{}}' says nothing"),
        (["*", "#", "!", "\\emptyset", "\\{\\}", "()", "+"], ""),
        (["&lt;5"], "'&lt;5' has the HTML entity &lt;"),
        (["5&nbsp;cm"], "'5&nbsp;cm' has the HTML entity &nbsp;"),
        (["&#60;5"], "'&#60;5' has the HTML entity &#60;"),
        (["10<sup>2</sup>"], "'10<sup>2</sup>' has HTML in it"),
        (["5<br/>"], "'5<br/>' has HTML in it"),
        (["AT&T", "R&D; more", "x<y", "<br>", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"], ""),
        (["a</answer>"], "'a</answer>' has an answer tag in it"),
        (["none"], ""),
        (["{x}", r"\{1\}", "x^{n}"], ""),
        (["4<|endoftext|>"], "'4<|endoftext|>' has template remains '<|endoftext|>'"),
    ],
)
def test_answers_fault(answers, fault):
    assert questions.answers_fault(answers) == fault


def test_a_gold_answer_is_scored_as_a_reward_reads_it():
    assert questions.score_fault("exact", ["x^{2}"], SCORERS) == ""
    assert questions.score_fault("exact", ["1}^N"], SCORERS) == "'1}^N' scores 0.0 with exact"


@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime24", "hotpotqa", "bamboogle"])
def test_benchmarks_pass(data, name):
    refused = []
    for file in sorted((data / name).glob("t*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            answers = record["answer"] if isinstance(record["answer"], list) else None
            answers = answers or [str(record["answer"]).rpartition("####")[2].strip()]
            faults = (
                questions.text_fault(record.get("question", record.get("problem"))),
                questions.answers_fault(answers),
            )
            refused += [(record, fault) for fault in faults if fault]
    assert refused == []
