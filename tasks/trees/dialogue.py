"""Write and read the text of a trajectory: chat template, tags, tool calls, sampled tokens.

The agent answers one user message. Inside its answer it thinks in ``<think>``, calls a tool by its
tag (``<python>code</python>``), reads ``<result>...</result>``, and ends with ``<answer>`` that
contains ``\\boxed{}`` (ARPO, section 3.1 and appendix; the tags of Tool-Star). A turn is what the
agent writes until it calls a tool or answers; a tool result is appended as tokens of its own.

Only this module writes result tags, and only the chat template marks turns. An agent that writes
either ends its trajectory. What a question or a tool result quotes of them is encoded as text
(markers.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from tasks.trees.markers import (
    BREAK,
    Markers,
    Quoting,
    added_tokens,
    any_of,
    encode,
    markers,
    quote,
    quoted_tokens,
    split_marks,
)
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Observation, Question

TOOL_TAGS = ("python", "search")
RESULT_TAGS = ("<result>", "</result>")
STOP_STRINGS = (*(f"</{tag}>" for tag in TOOL_TAGS), "</answer>", *RESULT_TAGS)
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", *TOOL_TAGS, "result", "answer") for slash in ("", "/")
)

NO_MARKS = any_of([])
_CALL = re.compile(rf"<({'|'.join(TOOL_TAGS)})>((?:(?!<\1>).)*)</\1>", re.DOTALL)


def prompt_tokens(tokenizer: Any, dialogue: Dialogue, question: Question) -> NDArray[np.int32]:
    """Apply the chat template to all messages of a prompt; the tokens before the agent's first.

    The recipe's system message comes first, joined with those of the question, since most templates
    accept one. Marks of turns and added tokens that a message quotes stay text, but for the tags in
    the recipe's own message.
    """
    marks = markers(tokenizer, TAGS)
    expected = _frame(tokenizer, dialogue, question, marks)
    # Text that is only normalised to a mark is rare, and quote encodes all to find it.
    for show in (split_marks, partial(quote, tokenizer)):
        messages = _messages(dialogue, question, marks, show)
        tokens = _rendered(tokenizer, messages)
        if added_tokens(tokens, marks) == expected:
            return tokens
    # a message and its mark have become one token
    return _rendered(tokenizer, [(role, BREAK + text + BREAK) for role, text in messages])


def _frame(tokenizer: Any, dialogue: Dialogue, question: Question, marks: Markers) -> list[int]:
    """Return the added tokens of a prompt, in order, as far as its template writes them."""
    before = tuple(replace(each, content=_harmless(each.content)) for each in question.before)
    plain = replace(question, text=_harmless(question.text), before=before)
    key = dialogue.system, plain.text, before
    if key not in marks.frames:
        messages = _messages(dialogue, plain, marks, partial(quote, tokenizer))
        marks.frames[key] = added_tokens(_rendered(tokenizer, messages), marks)
    return marks.frames[key]


def _harmless(text: str) -> str:
    """Return a text without any mark, which a template treats alike: blank if ``text`` is."""
    return "a" if text.strip() else text


def _messages(
    dialogue: Dialogue, question: Question, marks: Markers, show: Callable[[str, Quoting], str]
) -> list[tuple[str, str]]:
    """Return role and content of each message of a prompt, as ``show`` quotes it."""
    own = [show(each.content, marks.quoted) for each in question.before if each.role == "system"]
    system = "\n\n".join(filter(None, [show(dialogue.system, marks.spared), *own]))
    others = [
        (m.role, show(m.content, marks.quoted)) for m in question.before if m.role != "system"
    ]
    return [
        *([("system", system)] if system else []),
        *others,
        ("user", show(question.text, marks.quoted)),
    ]


def _rendered(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> NDArray[np.int32]:
    """Apply the chat template, up to where the agent begins."""
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    return encode(tokenizer, text)


def stop_strings(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that end a turn: the tags, and the marks of turns that the template writes.

    Engines search for each of them after each token, and a tokenizer may have a thousand special
    tokens that no template uses: ``read_turn`` finds these when the turn has ended. The end token's
    own text is left out: the token ends a turn without a stop string.
    """
    end = tokenizer.eos_token or ""
    rendered = markers(tokenizer, TAGS).rendered
    return (*STOP_STRINGS, *(mark for mark in rendered if mark not in end))


def forged(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that finds the marks of turns, which an agent must not write."""
    return markers(tokenizer, TAGS).forged


def read_turn(
    text: str, stopped: str, forged: re.Pattern[str] = NO_MARKS
) -> tuple[str, Call | None]:
    """Return the outcome of a turn, and its tool call if it ended with one.

    ``text`` is without the end token, ``stopped`` is the engine's StopReason, ``forged``
    finds the marks of turns. The text may extend past the closing tag, because a token may.
    """
    if any(tag in text for tag in RESULT_TAGS):
        return Outcome.FORGED_RESULT, None
    if forged.search(text):
        return Outcome.FORGED_TURN, None
    if stopped == StopReason.LENGTH:
        return Outcome.CUT, None
    if stopped == StopReason.END:
        return Outcome.NO_ANSWER, None
    if "</answer>" in text:
        return Outcome.ANSWER, None
    call = read_call(text)
    return (Outcome.CALL, call) if call else (Outcome.BAD_CALL, None)


def result_tokens(
    tokenizer: Any, observation: Observation, limit: int
) -> tuple[str, NDArray[np.int32]]:
    """Return a tool result as the agent reads it: text and tokens, at most ``limit`` tokens.

    The end of a longer result is replaced by an ellipsis; the tags stay whole. Tags, marks of turns
    and added tokens that a tool quotes stay text: they end neither the result nor the turn.
    """
    opening, closing = (encode(tokenizer, tag) for tag in RESULT_TAGS)
    readable = observation.text.encode(errors="replace").decode()  # no lone surrogates
    body = quoted_tokens(tokenizer, readable.strip(), markers(tokenizer, TAGS).quoted)
    room = limit - len(opening) - len(closing)
    if len(body) > room:
        mark = encode(tokenizer, "...")
        body = np.concatenate([body[: max(0, room - len(mark))], mark])
    tokens = np.concatenate([opening, body, closing])
    return tokenizer.decode(tokens), tokens


def final_answer(response: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` in the last answer block, or None.

    Braces inside the box are balanced, so ``\\boxed{\\frac{1}{2}}`` gives ``\\frac{1}{2}``.
    """
    start = response.rfind("<answer>")
    block = response[start:].partition("</answer>")[0] if start >= 0 else ""
    box = block.rfind("\\boxed{")
    if box < 0:
        return None
    depth, begin = 1, box + len("\\boxed{")
    for at in range(begin, len(block)):
        depth += {"{": 1, "}": -1}.get(block[at], 0)
        if depth == 0:
            return block[begin:at].strip()
    return None


def read_call(turn: str) -> Call | None:
    """Return the tool call that a turn ends with, or None."""
    found = _CALL.search(turn)
    return Call(found[1], found[2]) if found else None


def trace_tokens(
    tokenizer: Any, prompt: NDArray[np.int32], parts: Sequence[tuple[str, bool]], limit: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Tokenise a written trajectory for training: tokens [T], and which are the agent's own [T].

    ``parts`` alternate between (turn, True) and (tool result, False). Each is tokenised separately,
    exactly as in a rollout, a result to at most ``limit`` tokens; the end token is appended.
    """
    pieces = [prompt]
    for text, sampled in parts:
        body = text.removeprefix("<result>").removesuffix("</result>")
        observed = Observation(Outcome.OK, body)
        pieces.append(
            encode(tokenizer, text) if sampled else result_tokens(tokenizer, observed, limit)[1]
        )
    own = [False, *(sampled for _, sampled in parts)]
    pieces.append(np.array([tokenizer.eos_token_id], np.int32))
    own.append(True)
    mask = np.repeat(np.array(own), [len(piece) for piece in pieces])
    return np.concatenate(pieces), mask
