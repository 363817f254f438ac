"""The marks of turns in a chat template, and how text that quotes them is encoded as text.

A template marks turns with added tokens (``<|im_start|>``), special or not, or with plain text
(``[INST]``). A question or a tool result that quotes a mark must not become a turn, and an agent
that writes one forges a turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import groupby, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tasks.trees.clock import template_clock

BREAK = "\ufdd0"  # a noncharacter that no text may use; it marks where a quoted mark is split
UNREADABLE = "\ufffd"  # the replacement character
PROBE = "\ufdd1"  # stands for the content of a message, in renderings that look for marks
BRACKETS = ("<>", "[]", "{}", "||")
FIRST_DAY, OTHER_DAY = date(2003, 4, 5), date(2028, 11, 29)  # alike in no part, for probes

Conversation = Sequence[Mapping[str, Any]]

# Conversations of probes: with and without a system message, and with a tool.
SYSTEM, USER, AGENT = ({"role": role, "content": PROBE} for role in ("system", "user", "assistant"))
SPOKEN: Sequence[Conversation] = ([SYSTEM, USER, AGENT, USER], [USER, AGENT, USER])
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"type": "function", "function": {"name": "probe", "arguments": {}}}
RESULT = {"role": "tool", "name": "probe", "content": PROBE}
CALLED: Sequence[Conversation] = ([USER, {**AGENT, "tool_calls": [CALL]}, RESULT],)


@dataclass(frozen=True)
class Quoting:
    """The marks that a quoted text must not have."""

    marks: re.Pattern[str]
    split: Mapping[str, str]  # text of each mark -> the same with BREAK inside
    banned: Set[int]  # ids of added tokens


@dataclass(frozen=True)
class Markers:
    """What the tokens of quoted text must not be, and what an agent must not write."""

    tokens: Mapping[int, str]  # added tokens by id
    quoted: Quoting  # of text that others wrote
    spared: Quoting  # of text that may name the agent's own tags
    forged: re.Pattern[str]  # finds a text that begins or ends a turn
    rendered: tuple[str, ...]  # those of these texts that the template writes
    # messages -> the added tokens of their rendering, for messages whose contents are harmless
    frames: dict[Any, list[int]] = field(default_factory=dict)


# A tokenizer has no owner of ours that all stages share, and to find its marks takes a while.
_markers: WeakKeyDictionary[Any, dict[Any, Markers]] = WeakKeyDictionary()


def markers(tokenizer: Any, agent_tags: Collection[str] = ()) -> Markers:
    """Return the markers of a tokenizer and its chat template, computed once a process.

    agent_tags: what the agent writes; quoted text has none, whether they are added tokens or not.

    Every added token counts, except white space and the token for unknown characters, which any
    text may contain. So does a token of one character only if it is special or the template uses
    it: it cannot be split, and ``quote`` has to replace it.
    """
    known = _markers.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), tuple(agent_tags))
    if key not in known:
        known[key] = _find(tokenizer, agent_tags)
    return known[key]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds the longest of the texts at a place; of no texts, nothing.

    Shared beginnings are compared once: a tokenizer may have thousands of marks that begin alike.
    """
    groups = groupby(sorted(set(texts)), key=lambda text: text[0])
    return re.compile("|".join(_branch(list(group)) for _, group in groups) or "(?!)")


def _branch(texts: Sequence[str]) -> str:
    """Return the expression for sorted texts with the same first character."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
    shared = "".join(sign for sign, _ in alike)
    rests = [text[len(shared) :] for text in texts]
    groups = groupby(filter(None, rests), key=lambda text: text[0])
    branches = "|".join(_branch(list(group)) for _, group in groups)
    ending = f"(?:{branches}){'' if rests[0] else '?'}" if branches else ""
    return re.escape(shared) + ending


def encode(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the token ids of a text without special tokens; parts at ``BREAK`` separately."""
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(BREAK))
    return np.array([token for part in parts for token in part], np.int32)


def split_marks(text: str, quoting: Quoting) -> str:
    """Insert ``BREAK`` so that no mark is left whole; ``BREAK`` itself is replaced before."""
    text, count = text.replace(BREAK, UNREADABLE), 1
    while count:  # again for marks inside, or across the end of, one that has been split
        text, count = quoting.marks.subn(lambda matched: quoting.split[matched[0]], text)
    return text


def quote(tokenizer: Any, text: str, quoting: Quoting) -> str:
    """Insert ``BREAK`` so that ``encode`` gives the same text without the tokens of its marks.

    A tokenizer may also take other text for an added token, such as full-width letters: where that
    is so, the text is split further. A single character that is such a token becomes the
    replacement character.
    """
    return BREAK.join(part for part, _ in _quoted(tokenizer, text, quoting))


def quoted_tokens(tokenizer: Any, text: str, quoting: Quoting) -> NDArray[np.int32]:
    """Return what ``encode`` gives for what ``quote`` gives."""
    parts = _quoted(tokenizer, text, quoting)
    return np.array([token for _, tokens in parts for token in tokens], np.int32)


def _quoted(tokenizer: Any, text: str, quoting: Quoting) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the parts of a quoted text, each with its tokens."""
    for part in split_marks(text, quoting).split(BREAK):
        yield from _apart(tokenizer, part, quoting.banned)


def added_tokens(tokens: NDArray[np.int32], marks: Markers) -> list[int]:
    """Return those of ``tokens`` that are added tokens, in order."""
    return [token for token in tokens.tolist() if token in marks.tokens]


def _apart(tokenizer: Any, text: str, banned: Set[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """Halve a text until no part has a banned token; yield each part with its tokens."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if banned.isdisjoint(tokens):
        yield text, tokens
    elif len(text) == 1:
        yield UNREADABLE, tokenizer.encode(UNREADABLE, add_special_tokens=False)
    else:
        middle = len(text) // 2
        yield from _apart(tokenizer, text[:middle], banned)
        yield from _apart(tokenizer, text[middle:], banned)


def _find(tokenizer: Any, agent_tags: Collection[str]) -> Markers:
    added = {
        token: mark
        for token, mark in tokenizer.added_tokens_decoder.items()
        if mark.content.replace("\u2581", " ").strip() and token != tokenizer.unk_token_id
    }
    spoken = list(_renderings(tokenizer, SPOKEN, None))
    template = "\n".join([*spoken, *_renderings(tokenizer, CALLED, [TOOL])])
    used = {mark.content for mark in added.values() if mark.content in template}
    control = {mark.content for mark in added.values() if mark.special}
    tokens = {
        token: mark.content
        for token, mark in added.items()
        if len(mark.content) > 1 or mark.content in used | control
    }
    later = list(_renderings(tokenizer, SPOKEN, None, OTHER_DAY))
    # a line with a date is no mark: a day of a recipe would decide what is quoted
    plain, others = (_plain_marks(texts, set(tokens.values())) for texts in (spoken, later))
    plain &= others
    quoted = {*tokens.values(), *plain, *agent_tags}
    if tokenizer.unk_token:
        quoted.add(tokenizer.unk_token)
    splits = {mark: _split(tokenizer, mark) for mark in quoted}
    forged = {mark for mark in used | control if _is_mark(mark)} | set(filter(_is_bracketed, plain))
    forged = {mark for mark in forged if not any(mark in tag for tag in agent_tags)}
    return Markers(
        tokens,
        _quoting(tokens, splits),
        _quoting(tokens, splits, agent_tags),
        any_of(forged),
        _shortest(forged & (used | plain)),
    )


def _quoting(
    tokens: Mapping[int, str], splits: Mapping[str, str], spare: Collection[str] = ()
) -> Quoting:
    """Return the quoting of text in which the marks ``spare`` stay as they are."""
    marks = [mark for mark, split in splits.items() if BREAK in split and mark not in spare]
    banned = frozenset(token for token, mark in tokens.items() if mark not in spare)
    return Quoting(any_of(marks), splits, banned)


def _shortest(texts: Collection[str]) -> tuple[str, ...]:
    """Return the texts that contain no other of them: any text with the others has one of these."""
    shortest_texts: list[str] = []
    for text in reversed(_longest_first(texts)):
        if not any(other in text for other in shortest_texts):
            shortest_texts.append(text)
    return tuple(shortest_texts)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _renderings(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    tools: Sequence[Any] | None,
    day: date = FIRST_DAY,
) -> Iterator[str]:
    """Yield the template's text of each conversation that it takes.

    A template may refuse a kind of conversation, with any exception.
    """
    for messages in conversations:
        with suppress(Exception):
            yield tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **template_clock(day),
            )


def _plain_marks(rendered: Sequence[str], tokens: Collection[str]) -> set[str]:
    """Return the marks that the template writes next to contents and that are not added tokens.

    They are lines with a sign and a letter, such as "### User:", and their words in brackets.
    """
    text = "\n".join(rendered).replace(PROBE, "\n")
    for token in _longest_first(tokens):
        text = text.replace(token, "\n")
    lines = {line.strip() for line in text.splitlines()}
    words = {word for line in lines for word in line.split() if _is_bracketed(word)}
    return {mark for mark in lines | words if _is_mark(mark) and any(map(str.isalpha, mark))}


def _is_mark(text: str) -> bool:
    """Return whether a text is no ordinary word: it has a sign that is neither letter nor space."""
    return len(text) > 1 and any(not (sign.isalnum() or sign.isspace()) for sign in text)


def _is_bracketed(text: str) -> bool:
    return len(text) > 2 and text[0] + text[-1] in BRACKETS and any(map(str.isalpha, text))


def _split(tokenizer: Any, mark: str) -> str:
    """Insert ``BREAK`` into a mark, where its tokens then differ if there is such a place."""
    whole = tokenizer.encode(mark, add_special_tokens=False)
    places = [mark[:at] + BREAK + mark[at:] for at in range(1, len(mark))]
    other = (text for text in places if encode(tokenizer, text).tolist() != whole)
    return next(other, places[0] if places else mark)
