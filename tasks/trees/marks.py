"""Find where the macro actions of a trajectory end (GPG, arXiv 2512.10365, section 4.2). Pure.

An output can be cut anywhere: its log-probability is the sum over its segments, however it is cut.
A segment ends after the token that completes a mark, and at the end of the trajectory. Marks are
searched in the joined texts of single token ids, so a mark may span several tokens, and a token may
extend past it. A mark that the end of the trajectory cuts off does not count.
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
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import TURN, Node

CLOSED_CALL = re.compile(f"</(?:{'|'.join(TOOL_TAGS)})>")
BLANK_LINE = re.compile(r"(?<!\n)\n\n")  # **chosen**: a run of newlines is one mark, at its second
THINK_TAG = re.compile(r"</?think>")  # **chosen**: both, so that a thought is a segment of its own

Turn = Sequence[Node]  # the parts of one turn
Ends = NDArray[np.bool_]

_texts: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def token_texts(tokenizer: Any, size: int) -> list[str]:
    """Return the text of each vocabulary id on its own, at least of the first ``size`` ids.

    A tokenizer's texts are decoded once a process. Incomplete characters are decoded to replacement
    characters, which no mark contains.
    """
    texts = _texts.setdefault(tokenizer, [])
    if len(texts) < size:
        texts += tokenizer.batch_decode([[token] for token in range(len(texts), size)])
    return texts


def segments(marks: Marks, trajectory: Sequence[Node], pieces: Sequence[str]) -> NDArray[np.int64]:
    """Return the segment (0, 1, ...) of each sampled token of a trajectory. [S]

    ``trajectory``: nodes from the root to a leaf; consecutive turns are parts of one turn.
    ``pieces``: the text of each vocabulary id, listed by id (``token_texts``).
    """
    after = np.cumsum(ends(marks, trajectory, pieces))
    return np.concatenate([np.zeros(1, np.int64), after])[: len(after)]


def ends(marks: Marks, trajectory: Sequence[Node], pieces: Sequence[str]) -> Ends:
    """Flag the sampled tokens that complete a mark, so that a segment ends after them. [S]

    Arguments are those of ``segments``. The end of the trajectory is no mark.
    """
    turns = [list(parts) for kind, parts in groupby(trajectory, _kind) if kind == TURN]
    return KINDS[marks.kind](marks, turns, pieces)


def completed(mark: re.Pattern[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """Return the indices of tokens that complete a match of ``mark``, each once, ascending.

    ``texts``: the text of each token; matches are searched in all of them joined.
    """
    reach = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))  # characters, inclusive
    match_ends = [match.end() for match in mark.finditer("".join(texts))]
    return np.unique(np.searchsorted(reach, np.array(match_ends, np.int64)))


def _kind(node: Node) -> str:
    return node.kind


def _length(turn: Turn) -> int:
    return sum(len(part.tokens) for part in turn)


def _nowhere(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    return np.zeros(sum(map(_length, turns)), np.bool_)


def _everywhere(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    return np.ones(sum(map(_length, turns)), np.bool_)


def _where_written(mark: re.Pattern[str]) -> Callable[..., Ends]:
    """Return a function that finds marks that are texts, turn by turn."""

    def found(_: Marks, turns: Sequence[Turn], pieces: Sequence[str]) -> Ends:
        marked = [np.zeros(_length(turn), np.bool_) for turn in turns]
        for turn, where in zip(turns, marked, strict=True):
            tokens = [token for part in turn for token in part.tokens.tolist()]
            where[completed(mark, [pieces[token] for token in tokens])] = True
        return np.concatenate([np.zeros(0, np.bool_), *marked])

    return found


def _where_calls_end(marks: Marks, turns: Sequence[Turn], pieces: Sequence[str]) -> Ends:
    """Flag the tokens that close a tag of a tool, and else the last one of a turn that was an act.

    Calls may be written in any format, and acts in a world in free text: their outcome tells.
    """
    marked = _where_written(CLOSED_CALL)(marks, turns, pieces)
    end = 0
    for turn in turns:
        start, end = end, end + _length(turn)
        acted = turn[-1].outcome == Outcome.CALL or turn[-1].observation is not None
        if acted and end > start and not marked[start:end].any():
            marked[end - 1] = True
    return marked


def _where_uncertain(marks: Marks, turns: Sequence[Turn], _: Sequence[str]) -> Ends:
    """Flag tokens whose entropy is above a threshold, or above a quantile of the trajectory's own.

    **Chosen**: the segment ends after such a token.
    """
    parts = [part.entropies for turn in turns for part in turn]
    entropies = np.concatenate([np.zeros(0, np.float32), *parts])
    if marks.threshold is not None:
        return entropies > marks.threshold
    assert marks.quantile is not None
    return entropies > np.quantile(entropies, marks.quantile) if len(entropies) else entropies > 0


def _where_steps_end(_: Marks, turns: Sequence[Turn], __: Sequence[str]) -> Ends:
    """Flag the last token of each turn, because the environment answers a turn as a whole."""
    marked = _nowhere(_, turns, __)
    lengths = [length for turn in turns if (length := _length(turn))]
    marked[np.cumsum(np.array(lengths, np.int64)) - 1] = True
    return marked


KINDS: dict[str, Callable[[Marks, Sequence[Turn], Sequence[str]], Ends]] = {
    "none": _nowhere,
    "every_token": _everywhere,
    "tool_call": _where_calls_end,
    "paragraph": _where_written(BLANK_LINE),
    "think": _where_written(THINK_TAG),
    "entropy": _where_uncertain,
    "step": _where_steps_end,
}
