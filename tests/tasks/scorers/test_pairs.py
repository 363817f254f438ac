"""300 pairs of answer and gold answer for each scorer, judged by hand before it was written.

The disagreements that remain are listed, so that one more, or one less, is seen.
"""

import json
from functools import partial

import pytest

from tasks.scorers import maths, project_scorers
from tests.checkout import ROOT
from tests.examples import is_thorough

SCORERS = project_scorers()

VERDICTS = {
    "exact": lambda score: int(score),
    "maths": lambda score: int(score),
    "f1": lambda score: {0: "none", 1: "full"}.get(score, "part"),
}
DISAGREEMENTS = {
    "exact": {  # punctuation between digits counts, in these too
        ("9780306406157", "978-0-306-40615-7"),
        ("555-123-4567", "(555) 123-4567"),
        ("00-1A-2B-3C-4D-5E", "00:1a:2b:3c:4d:5e"),
    },
    "f1": set(),
    "maths": {
        ("2e^{i\\pi/2}", "2i"),  # math-verify does not evaluate it
        ("There are 24 ways.", "24"),  # a sentence around a number is not taken apart
    },
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


@pytest.mark.parametrize("scorer", VERDICTS)
def test_scorer_agrees_with_the_judge(scorer):
    """In .ci/run all pairs that need math-verify are compared, else a third of them."""
    file = ROOT / "tests/data/scorers" / f"{scorer}.jsonl"
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({(pair["answer"], pair["gold"]) for pair in pairs}) == 300
    whole = score = SCORERS[scorer]
    if scorer == "maths" and not is_thorough():
        score = partial(maths.mathematics, compare=some(3))
    differ = set()
    for pair in pairs:
        known = (pair["answer"], pair["gold"]) in DISAGREEMENTS[scorer]
        try:
            found = (whole if known else score)(pair["answer"], [pair["gold"]])["score"]
        except LeftOutError:
            continue
        if VERDICTS[scorer](found) != pair["verdict"]:
            differ.add((pair["answer"], pair["gold"]))
    assert differ == DISAGREEMENTS[scorer]
