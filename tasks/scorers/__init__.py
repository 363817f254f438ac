"""The registry of scorers, which compare an answer with the accepted forms of the gold answer.

A scorer returns a breakdown: "score", in [0, 1], and the measures behind it. Any text is an answer;
no text of a model raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tasks.scorers.answer import exact_match
from tasks.scorers.f1 import token_f1
from tasks.scorers.maths import mathematics

Scorer = Callable[[str, Sequence[str]], Mapping[str, float]]

SCORERS: dict[str, Scorer] = {"exact": exact_match, "f1": token_f1, "maths": mathematics}
# Without the processes of the mathematics verifier: what only these can compare scores 0.
WITHOUT_VERIFIER: dict[str, Scorer] = SCORERS | {"maths": partial(mathematics, verifier=None)}
GRADED = ("f1",)  # scorers with scores between 0 and 1
