"""The registry of scorers, which compare an answer with the accepted forms of the gold answer.

A scorer returns a breakdown: "score", in [0, 1], and the measures behind it. Any text is an answer;
no text of a model raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tasks.scorers.answer import exact_match
from tasks.scorers.f1 import token_f1
from tasks.scorers.maths import VERIFIER, budgeted, mathematics

Scorer = Callable[[str, Sequence[str]], Mapping[str, float]]

SCORERS: dict[str, Scorer] = {"exact": exact_match, "f1": token_f1, "maths": mathematics}
GRADED = ("f1",)  # scorers with scores between 0 and 1


def scorers_of_a_question(most_timeouts: int) -> dict[str, Scorer]:
    """Return the scorers for all answers of one question, with a budget of slow ones.

    After the mathematics verifier has run out of processor time with ``most_timeouts`` different
    answers, further ones that only it could compare score 0.
    """
    compare = budgeted(VERIFIER.compare, most_timeouts)
    return SCORERS | {"maths": partial(mathematics, compare=compare)}
