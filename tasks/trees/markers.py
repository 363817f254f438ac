"""The marks of turns in a chat template, and how text that quotes them is encoded as text.

A template marks turns with added tokens (``<|im_start|>``), special or not, or with plain text
(``[INST]``). A question or a tool result that quotes a mark must not become a turn, and an agent
that writes one forges a turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

BREAK = "\ufdd0"  # a noncharacter that no text may use; it marks where a quoted mark is split
UNREADABLE = "\ufffd"  # the replacement character
PROBE = "\ufdd1"  # stands for the content of a message, in renderings that look for marks
BRACKETS = ("<>", "[]", "{}", "||")

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
class Markers:
    """What the tokens of quoted text must not be, and what an agent must not write."""

    tokens: Mapping[int, str]  # added tokens by id
    quoted: Mapping[str, str]  # text of each mark -> the same with BREAK inside
    forged: tuple[str, ...]  # texts that begin or end a turn, the shortest first


_markers: WeakKeyDictionary[Any, dict[Any, Markers]] = WeakKeyDictionary()


def markers(tokenizer: Any, own: Collection[str] = ()) -> Markers:
    """Return the markers of a tokenizer and its chat template, computed once a process.

    own: tags that the agent writes; quoted text does not, whether they are added tokens or not.

    Every added token counts, except white space and the token for unknown characters, which any
    text may contain. So does a token of one character only if it is special or the template uses
    it: it cannot be split, and ``quote`` has to replace it.
    """
    known = _markers.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), tuple(own))
    if key not in known:
        known[key] = _find(tokenizer, own)
    return known[key]


def encode(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the token ids of a text without special tokens; parts at ``BREAK`` separately."""
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(BREAK))
    return np.array([token for part in parts for token in part], np.int32)


def quote(tokenizer: Any, text: str, found: Markers, spare: Collection[str] = ()) -> str:
    """Insert ``BREAK`` so that ``encode`` gives the same text without the tokens of its marks.

    spare: texts of added tokens that stay as they are. A tokenizer may also take other text for an
    added token, such as full-width letters: where that is so, the text is split further. A single
    character that is such a token becomes the replacement character.
    """
    text = text.replace(BREAK, UNREADABLE)
    for mark, split in found.quoted.items():
        if mark not in spare:
            text = text.replace(mark, split)
    banned = {token for token, mark in found.tokens.items() if mark not in spare}
    parts = (part for whole in text.split(BREAK) for part in _apart(tokenizer, whole, banned))
    return BREAK.join(parts)


def added_tokens(tokens: NDArray[np.int32], found: Markers) -> list[int]:
    """Return those of ``tokens`` that are added tokens, in order."""
    return [token for token in tokens.tolist() if token in found.tokens]


def _apart(tokenizer: Any, text: str, banned: Set[int]) -> Iterator[str]:
    """Yield the parts of a text, halved until none of them has a banned token."""
    if banned.isdisjoint(tokenizer.encode(text, add_special_tokens=False)):
        yield text
    elif len(text) == 1:
        yield UNREADABLE
    else:
        middle = len(text) // 2
        yield from _apart(tokenizer, text[:middle], banned)
        yield from _apart(tokenizer, text[middle:], banned)


def _find(tokenizer: Any, own: Collection[str]) -> Markers:
    added = {
        token: mark
        for token, mark in tokenizer.added_tokens_decoder.items()
        if mark.content.replace("\u2581", " ").strip() and token != tokenizer.unk_token_id
    }
    spoken = list(_renderings(tokenizer, SPOKEN, None))
    template = "\n".join([*spoken, *_renderings(tokenizer, CALLED, [TOOL])])
    used = {mark.content for mark in added.values() if mark.special or mark.content in template}
    tokens = {
        token: mark.content
        for token, mark in added.items()
        if len(mark.content) > 1 or mark.content in used
    }
    plain = _plain_marks(spoken, set(tokens.values()))
    quoted = {*tokens.values(), *plain, *own}
    if tokenizer.unk_token:
        quoted.add(tokenizer.unk_token)
    forged = {mark for mark in used if _is_mark(mark)} | {m for m in plain if _is_bracketed(m)}
    return Markers(
        tokens,
        {mark: _split(tokenizer, mark) for mark in _longest_first(quoted)},
        tuple(m for m in _longest_first(forged)[::-1] if not any(m in tag for tag in own)),
    )


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _renderings(
    tokenizer: Any, conversations: Sequence[Conversation], tools: Sequence[Any] | None
) -> Iterator[str]:
    """Yield the template's text of each conversation that it takes.

    A template may refuse a kind of conversation, with any exception.
    """
    for messages in conversations:
        with suppress(Exception):
            yield tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
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
