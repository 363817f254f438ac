"""Every gold answer of the project's own files, and of whole files, goes through a box and back."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gold_answers import check, files_below, lost_answers, main, settings_of
from params.schema.benchmarks import load_benchmarks
from tasks.questions import computation, encyclopedia
from tasks.recipes import load
from tasks.scorers import project_scorers
from tasks.trees.tree import Question
from tests.checkout import ROOT
from tests.examples import examples

SETS = load_benchmarks()
SCORERS = project_scorers()
ESCAPED = str.maketrans({sign: "\\" + sign for sign in "%$&_#"})

# (set/split, gold answer) of each that does not score 1 -> cause. None is known, neither in the
# project's files nor in the whole ones.
CAUSES: dict[tuple[str, str], str] = {}
SIGNS = ("50%", "$5", "AT&T", "C#", "3.14", "2,114 m", "Tom & Jerry", "\u5317\u4eac")
WAYS = {  # in which agents write words in a box
    "text": lambda gold: rf"\text{{{gold.translate(ESCAPED)}}}",
    "bold": lambda gold: rf"\textbf{{{gold.translate(ESCAPED)}}}",
    "roman in dollars": lambda gold: rf"$\mathrm{{{gold.translate(ESCAPED)}}}$",
    "dollars": lambda gold: f"${gold.translate(ESCAPED)}$",
    "brackets": lambda gold: rf"\({gold.translate(ESCAPED)}\)",
    "escaped": lambda gold: gold.translate(ESCAPED),
    "Markdown": lambda gold: f"**{gold}**",
}


def question(gold, *more, scorer="exact"):
    return Question("one", "mine", "?", (gold, *more), scorer)


def lost(asked):
    return list(lost_answers(asked, SCORERS[asked.scorer]))


# ---------------------------------------------------------------- files


def test_gold_answers_of_files_come_back(data):
    checked = {}
    for file in files_below(data):
        if row := settings_of(file, SETS):
            checked[f"{file.parent.name}/{file.stem}"] = check(file, row, file.parent.name)
    for name in ("gsm8k/train", "math500/test", "aime24/test", "hotpotqa/test", "bamboogle/test"):
        assert checked[name].golds >= 6
    assert [name for name, each in checked.items() if each.faults] == []
    found = {(name, each.gold): each.cause for name, made in checked.items() for each in made.lost}
    assert found == CAUSES


@pytest.mark.parametrize("scorer", ["exact", "f1", "maths"])
def test_gold_answers_of_pairs_come_back(scorer):
    lines = (ROOT / "tests/data/scorers" / f"{scorer}.jsonl").read_text().splitlines()
    golds = {json.loads(line)["gold"] for line in lines}
    assert len(golds) > 100
    assert [each for gold in golds for each in lost(question(gold, scorer=scorer))] == []


@pytest.mark.parametrize(
    ("recipe", "source"), [("tiny", computation), ("tiny-search", encyclopedia)]
)
def test_gold_answers_of_generated_questions_come_back(recipe, source):
    chosen = load(recipe)
    made = source.material(chosen.prepare.questions, chosen.seed)
    asked = [each for questions in made.questions.values() for each in questions]
    assert len(asked) > 1000
    assert [found for each in asked[::20] for found in lost(each)] == []


# ---------------------------------------------------------------- any gold answer

PRINTABLE = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=30)
ASCII = st.text(string.printable[:95], min_size=1, max_size=20)
MARKS = r"\frac { } \{ \} 1 2 x \text \left \right ( ) [ ] , . ^ _ \boxed $ ** \% - yes The \\"
LATEX = st.lists(st.sampled_from(MARKS.split()), min_size=1, max_size=12).map("".join)


@pytest.mark.parametrize("scorer", SCORERS)
@given(PRINTABLE | ASCII | LATEX)
@examples(300)
def test_any_gold_answer_comes_back_or_has_a_cause(scorer, gold):
    assert [each for each in lost(question(gold, scorer=scorer)) if not each.cause] == []


@pytest.mark.parametrize("way", WAYS)
def test_marked_gold_answers_score_one(data, way):
    """Those of knowledge sets, as they are compared with f1 and with exact; others' are maths."""
    golds = {
        form
        for name in ("hotpotqa", "bamboogle")
        for line in (data / name / "test.jsonl").read_text().splitlines()
        for form in json.loads(line)["answer"]
    }
    for gold in (*golds, *SIGNS):
        for name, scorer in SCORERS.items():
            if name != "maths" or gold in SIGNS:
                assert scorer(WAYS[way](gold), [gold])["score"] == 1, (name, gold)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("way", WAYS)
def test_marked_wrong_answers_score_nothing(scorer, way):
    for answer, gold in (("Lisbon", "Porto"), ("3.14", "314"), ("50%", "51%"), ("", "Porto")):
        assert SCORERS[scorer](WAYS[way](answer), [gold])["score"] == 0, (answer, gold)


# ---------------------------------------------------------------- what is lost


@pytest.mark.parametrize(
    ("gold", "cause"),
    [
        (r"\left\{ x \right.", "unbalanced braces"),
        (r"\boxed{4}", r"\boxed{}"),
        ("a</answer>", "answer tag"),
        ("4", ""),
    ],
)
def test_lost_answer_has_its_cause(gold, cause):
    found = lost(question(gold, "5")) if cause else lost_answers(question("4"), broken)
    assert [(each.gold, cause in each.cause) for each in found] == [(gold, True)]


def broken(answer, accepted):
    return {"score": 0.5}


def test_command_counts_and_names(tmp_path, capsys):
    file = tmp_path / "bamboogle" / "test.jsonl"
    file.parent.mkdir()
    file.write_text('{"question": "a", "answer": ["x", "y"]}\n{"question": "b", "answer": ["{"]}\n')
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "test.csv").write_text("question,answer\n")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "3 gold answers, 2 come back" in said
    assert "bamboogle-test-00002: '{' has unbalanced braces" in said
    assert "no row 'unknown'" in said
    file.write_text('{"question": "a", "answer": []}\n')
    assert main([str(file)]) == 1
    assert "is an empty list in 1 record" in capsys.readouterr().out
    for nothing in ("nowhere/mine.jsonl", str(tmp_path / "unknown"), "gsm8k/nowhere"):
        assert main([nothing]) == 1
    assert capsys.readouterr().err.count("names no file of a set") == 2
