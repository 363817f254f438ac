"""Kinds of scorers: how an answer is compared with the accepted forms of the gold answer.

A scorer is given an answer and the accepted forms, and returns its breakdown: "score", in [0, 1],
and what the score was made from. Whatever a model wrote is an answer; none raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasks.scorers.answer import exact_match
from tasks.scorers.f1 import token_f1
from tasks.scorers.maths import mathematics

Scorer = Callable[[str, Sequence[str]], Mapping[str, float]]

SCORERS: dict[str, Scorer] = {"exact": exact_match, "f1": token_f1, "maths": mathematics}
GRADED = ("f1",)  # those that know more than right and wrong
