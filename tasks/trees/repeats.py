"""Measures over several answers to one question. Pure.

With n answers, of which c are right, the unbiased estimates for k <= n are

    pass@k = 1 - C(n - c, k) / C(n, k)    at least one of k answers is right
                                          (Chen et al. 2021, arXiv 2107.03374, equation 1)
    pass^k = C(c, k) / C(n, k)            all k answers are right
                                          (Yao et al. 2024, arXiv 2406.12045, section 3)

pass@1 and pass^1 are both c / n, which papers also call avg@n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb


def any_right(right: Sequence[bool], k: int) -> float:
    """Return pass@k of a question. Raises ValueError unless 1 <= k <= number of answers."""
    _check(right, k)
    return 1 - comb(len(right) - sum(right), k) / comb(len(right), k)


def all_right(right: Sequence[bool], k: int) -> float:
    """Return pass^k of a question. Raises ValueError unless 1 <= k <= number of answers."""
    _check(right, k)
    return comb(sum(right), k) / comb(len(right), k)


def majority_right(
    answers: Sequence[str | None],
    right: Sequence[bool],
    same: Callable[[str, str], bool] = lambda one, other: False,
) -> float:
    """Return maj@n of a question: whether the answer that is given most often is right.

    Answers are equal where their texts are, case and space aside, or where ``same`` says that
    their values are, and right ones are all equal: each equals the gold answer. None is no answer
    and does not vote. Of several that are given equally often, each is chosen with the same
    probability, so the result may lie between 0 and 1. (Wang et al. 2022, arXiv 2203.11171.)
    """
    texts = [None if text is None else " ".join(text.casefold().split()) for text in answers]
    values: list[tuple[str, bool]] = []  # the first answer of each value, and whether it is right
    votes: Counter[int] = Counter()
    for text, is_right in zip(texts, right, strict=True):
        if text is None:
            continue
        known = (
            index
            for index, (first, was_right) in enumerate(values)
            if text == first or (is_right == was_right and (is_right or same(first, text)))
        )
        index = next(known, len(values))
        if index == len(values):
            values.append((text, is_right))
        votes[index] += 1
    most = max(votes.values(), default=0)
    winners_right = [values[index][1] for index, count in votes.items() if count == most]
    return sum(winners_right) / len(winners_right) if winners_right else 0.0


def _check(right: Sequence[bool], k: int) -> None:
    if not 1 <= k <= len(right):
        raise ValueError(f"k is {k}, of {len(right)} answers: choose a k from 1 to their number")
