"""Where the macro actions of a trajectory end (GPG, arXiv 2512.10365, section 4.2). Pure.

An output can be cut anywhere: the log-probability of the whole is the sum over its segments
whatever the cut. A segment ends after the token in which a mark is completed, and at the end of the
trajectory. Marks are looked for on token ids, in the text that each id stands for on its own, so a
mark may span several tokens, and a token may go on past it; what the end cuts off is no mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from params.schema.algorithms import Marks
from tasks.trees.dialogue import TOOL_TAGS
from tasks.trees.tree import TURN, Node

CLOSED_CALL = re.compile(f"</(?:{'|'.join(TOOL_TAGS)})>")
BLANK_LINE = re.compile(r"(?<!\n)\n\n")  # **chosen**: a run of newlines is one mark, at its second

Turn = Sequence[Node]  # the parts of one turn
Ends = NDArray[np.bool_]

_texts: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def token_texts(tokenizer: Any, size: int) -> list[str]:
    """The text of each vocabulary id on its own: at least ``size`` of them, listed by id.

    A tokenizer's texts are decoded once a process. Bytes that are no whole character come out as
    replacement characters, which no mark contains.
    """
    texts = _texts.setdefault(tokenizer, [])
    if len(texts) < size:
        texts += tokenizer.batch_decode([[token] for token in range(len(texts), size)])
    return texts


def segments(marks: Marks, trajectory: Sequence[Node], pieces: Sequence[str]) -> NDArray[np.int64]:
    """The segment (0, 1, ...) of each sampled token of a trajectory. [S]

    ``trajectory``: nodes from the root to a leaf, of which consecutive turns are parts of one;
    ``pieces``: the text of each vocabulary id on its own, listed by id (``token_texts``).
    """
    after = np.cumsum(ends(marks, trajectory, pieces))
    return np.concatenate([np.zeros(1, np.int64), after])[: len(after)]


def ends(marks: Marks, trajectory: Sequence[Node], pieces: Sequence[str]) -> Ends:
    """Which sampled tokens a mark is completed in, so that a segment ends after them. [S]

    Arguments as of ``segments``. The end of the trajectory is no mark.
    """
    turns = [list(parts) for kind, parts in groupby(trajectory, _kind) if kind == TURN]
    return KINDS[marks.kind](marks, turns, pieces)


def completed(mark: re.Pattern[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """The tokens in which a match of ``mark`` is completed, each once, ascending.

    ``texts`` are those of the tokens, in which matches are looked for as they stand in line.
    """
    reach = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))  # characters, inclusive
    found = [match.end() for match in mark.finditer("".join(texts))]
    return np.unique(np.searchsorted(reach, np.array(found, np.int64)))


def _kind(node: Node) -> str:
    return node.kind


def _length(turn: Turn) -> int:
    return sum(len(part.tokens) for part in turn)


def _nowhere(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    return np.zeros(sum(map(_length, turns)), np.bool_)


def _everywhere(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    return np.ones(sum(map(_length, turns)), np.bool_)


def _where_written(mark: re.Pattern[str]) -> Callable[..., Ends]:
    """Marks that are texts; none reaches from one turn into another."""

    def found(_: Marks, turns: Sequence[Turn], pieces: Sequence[str]) -> Ends:
        marked = [np.zeros(_length(turn), np.bool_) for turn in turns]
        for turn, where in zip(turns, marked, strict=True):
            tokens = [token for part in turn for token in part.tokens.tolist()]
            where[completed(mark, [pieces[token] for token in tokens])] = True
        return np.concatenate([np.zeros(0, np.bool_), *marked])

    return found


def _where_uncertain(marks: Marks, turns: Sequence[Turn], _: Sequence[str]) -> Ends:
    """**Chosen**: after each token whose entropy is above an absolute threshold, or above a
    quantile of those that the trajectory itself sampled."""
    parts = [part.entropies for turn in turns for part in turn]
    entropies = np.concatenate([np.zeros(0, np.float32), *parts])
    if marks.threshold is not None:
        return entropies > marks.threshold
    assert marks.quantile is not None
    return entropies > np.quantile(entropies, marks.quantile) if len(entropies) else entropies > 0


def _where_steps_end(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    """Each turn, which the environment answers, ends a step."""
    marked = _nowhere(_, turns, __)
    lengths = [length for turn in turns if (length := _length(turn))]
    marked[np.cumsum(np.array(lengths, np.int64)) - 1] = True
    return marked


KINDS: dict[str, Callable[[Marks, Sequence[Turn], Sequence[str]], Ends]] = {
    "none": _nowhere,
    "every_token": _everywhere,
    "tool_call": _where_written(CLOSED_CALL),
    "paragraph": _where_written(BLANK_LINE),
    "entropy": _where_uncertain,
    "step": _where_steps_end,
}
