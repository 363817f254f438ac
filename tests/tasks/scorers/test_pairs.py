"""Pairs of answer and gold answer for each scorer, judged by hand before they were scored.

The disagreements that remain are listed, so that one more, or one less, is seen. The pairs of
``maths_further.jsonl`` are of kinds that had been judged wrongly; ``why`` begins with the kind.
"""

import json
from functools import partial

import pytest

from tasks.scorers import maths, project_scorers
from tests.checkout import ROOT
from tests.examples import is_thorough

FEWEST = {"exact": 300, "f1": 300, "maths": 390, "maths_further": 930}  # pairs of a file

SCORERS = project_scorers()

VERDICTS = {
    "exact": lambda score: int(score),
    "maths": lambda score: int(score),
    "f1": lambda score: {0: "none", 1: "full"}.get(score, "part"),
    "maths_further": lambda score: int(score),
}
DISAGREEMENTS = {
    "exact": {  # punctuation between digits counts, in these too
        ("9780306406157", "978-0-306-40615-7"),
        ("555-123-4567", "(555) 123-4567"),
        ("00-1A-2B-3C-4D-5E", "00:1a:2b:3c:4d:5e"),
    },
    "f1": set(),
    "maths": {
        ("There are 24 ways.", "24"),  # a sentence around a number is not taken apart
    },
    "maths_further": {("x^2 < 4", "(-2,2)")},  # an inequality is not solved
}


class LeftOutError(Exception):
    """A pair is not compared, to save time."""


def some(every):
    """A comparison of math-verify that leaves out all pairs but each ``every``-th."""
    asked = []

    def compare(answer, gold):
        asked.append(gold)
        if len(asked) % every:
            raise LeftOutError
        return maths.VERIFIER.compare(answer, gold)

    return compare


def pairs_of(name):
    """Return the pairs of a file, all of them different."""
    lines = (ROOT / "tests/data/scorers" / f"{name}.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    assert len({(pair["answer"], pair["gold"]) for pair in pairs}) == len(pairs) >= FEWEST[name]
    return pairs


def test_judged_pairs_have_no_false_positives_and_few_false_negatives():
    """The known disagreements are all that there is; see below."""
    pairs = [(name, pair) for name in VERDICTS for pair in pairs_of(name) if name != "f1"]
    right = {(name, pair["answer"], pair["gold"]) for name, pair in pairs if pair["verdict"]}
    known = {(name, *pair) for name, several in DISAGREEMENTS.items() for pair in several}
    assert known <= right, "each is a false negative"
    assert len(known) <= 0.02 * len(right)


@pytest.mark.parametrize("name", VERDICTS)
def test_scorer_agrees_with_the_judge(name):
    """In .ci/run all pairs that need math-verify are compared, else a part of them."""
    scorer, pairs = name.partition("_")[0], pairs_of(name)
    whole = score = SCORERS[scorer]
    if scorer == "maths" and not is_thorough():
        score = partial(maths.mathematics, compare=some(3 if name == scorer else 6))
    differ = set()
    for pair in pairs:
        known = (pair["answer"], pair["gold"]) in DISAGREEMENTS[name]
        try:
            found = (whole if known else score)(pair["answer"], [pair["gold"]])["score"]
        except LeftOutError:
            continue
        if VERDICTS[name](found) != pair["verdict"]:
            differ.add((pair["answer"], pair["gold"]))
    assert differ == DISAGREEMENTS[name]
