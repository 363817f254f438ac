"""The contract of a scorer, which compares an answer with the accepted forms of the gold answer.

A file of this room holds a ScorerKind, and its name is the file's. A user's scorer is a function in
a file of ``own/``, named by its path (``own/close.py:close``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Any text is an answer; no text of a model raises an error.
Scorer = Callable[[str, Sequence[str]], Mapping[str, float]]  # -> "score", in [0, 1], and measures


@dataclass(frozen=True)
class ScorerKind:
    """A kind of scorer: its function, and whether it gives scores between 0 and 1.

    ``lenient``: accepted forms are texts that can be looked for in a turn (lenient.py).

    ``of_a_question(most_timeouts)`` returns the scorer for all answers of one question where some
    answers cost much time: it compares no more of them after that many have run out of it.
    """

    compare: Scorer
    graded: bool = False
    lenient: bool = False
    of_a_question: Callable[[int], Scorer] | None = None

    def limited(self, most_timeouts: int) -> Scorer:
        """Return the scorer for all answers of one question."""
        return self.of_a_question(most_timeouts) if self.of_a_question else self.compare
