"""Write and read the text of a trajectory: chat template, tags, tool calls, sampled tokens.

The agent answers one user message. Inside its answer it thinks in ``<think>``, calls a tool by its
tag (``<python>code</python>``), reads ``<result>...</result>``, and ends with ``<answer>`` that
contains ``\\boxed{}`` (ARPO, section 3.1 and appendix; the tags of Tool-Star). A turn is what the
agent writes until it calls a tool or answers; a tool result is appended as tokens of its own.

Only this module writes result tags, and only the chat template marks turns. An agent that writes
either ends its trajectory. What a question or a tool result quotes of them is encoded as text
(markers.py).

Every tool of an agent has a tag of its name; ``python`` and ``search`` are tags in every recipe.
Functions take the names of the agent's tools as ``tools``, which may leave out these two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from tasks.trees.clock import template_clock
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
OTHER_TAGS = ("think", "result", "answer")  # no tool may be called so
STOP_STRINGS = (*(f"</{tag}>" for tag in TOOL_TAGS), "</answer>", *RESULT_TAGS)
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", *TOOL_TAGS, "result", "answer") for slash in ("", "/")
)

NO_MARKS = any_of([])
OPENED_THOUGHT = re.compile(r"<think>\s*\Z")  # at the end of a prompt


def own_tools(tools: Sequence[str]) -> tuple[str, ...]:
    """Return those of the names that are no tag in every recipe."""
    return tuple(name for name in dict.fromkeys(tools) if name not in TOOL_TAGS)


def tags(tools: Sequence[str] = ()) -> tuple[str, ...]:
    """Return all tags of a dialogue: those of every recipe, then those of its own tools."""
    names = own_tools(tools)
    return (*TAGS, *(f"<{slash}{name}>" for name in names for slash in ("", "/")))


def any_tool(tools: Sequence[str]) -> str:
    """Return the expression that finds the name of a tool that has a tag."""
    return "|".join(map(re.escape, (*TOOL_TAGS, *own_tools(tools))))


@cache
def _call(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({any_tool(tools)})>((?:(?!<\1>).)*)</\1>", re.DOTALL)


def prompt_tokens(
    tokenizer: Any, dialogue: Dialogue, question: Question, tools: Sequence[str] = ()
) -> NDArray[np.int32]:
    """Apply the chat template to all messages of a prompt; the tokens before the agent's first.

    The recipe's system message comes first, joined with those of the question, since most templates
    accept one. Marks of turns and added tokens that a message quotes stay text, but for the tags in
    the recipe's own message.
    """
    marks = markers(tokenizer, tags(tools))
    expected = _frame(tokenizer, dialogue, question, marks)
    # Text that is only normalised to a mark is rare, and quote encodes all to find it.
    for show in (split_marks, partial(quote, tokenizer)):
        messages = _messages(dialogue, question, marks, show)
        tokens = _rendered(tokenizer, messages, dialogue.date)
        if added_tokens(tokens, marks) == expected:
            return tokens
    # a message and its mark have become one token
    apart = [(role, BREAK + text + BREAK) for role, text in messages]
    return _rendered(tokenizer, apart, dialogue.date)


def _frame(tokenizer: Any, dialogue: Dialogue, question: Question, marks: Markers) -> list[int]:
    """Return the added tokens of a prompt, in order, as far as its template writes them."""
    before = tuple(replace(each, content=_harmless(each.content)) for each in question.before)
    plain = replace(question, text=_harmless(question.text), before=before)
    key = dialogue.system, dialogue.date, plain.text, before
    if key not in marks.frames:
        messages = _messages(dialogue, plain, marks, partial(quote, tokenizer))
        tokens = _rendered(tokenizer, messages, dialogue.date)
        marks.frames[key] = added_tokens(tokens, marks)
    return marks.frames[key]


def _harmless(text: str) -> str:
    """Return a text without any mark, which a template treats alike: blank if ``text`` is."""
    return "a" if text.strip() else text


def _messages(
    dialogue: Dialogue, question: Question, marks: Markers, show: Callable[[str, Quoting], str]
) -> list[tuple[str, str]]:
    """Return role and content of each message of a prompt, as ``show`` quotes it."""
    system_texts = [
        show(each.content, marks.quoted) for each in question.before if each.role == "system"
    ]
    system = "\n\n".join(filter(None, [show(dialogue.system, marks.spared), *system_texts]))
    others = [
        (m.role, show(m.content, marks.quoted)) for m in question.before if m.role != "system"
    ]
    return [
        *([("system", system)] if system else []),
        *others,
        ("user", show(question.text, marks.quoted)),
    ]


def _rendered(tokenizer: Any, messages: Sequence[tuple[str, str]], day: date) -> NDArray[np.int32]:
    """Apply the chat template, up to where the agent begins.

    A thought that the template opens itself (DeepSeek R1's distillations, QwQ) is left out: the
    agent opens it, as in every answer in tags.
    """
    said = [{"role": role, "content": content} for role, content in messages]
    return encode(tokenizer, OPENED_THOUGHT.sub("", applied(tokenizer, said, day)))


def applied(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], day: date, begins: bool = True
) -> str:
    """Return what the chat template makes of messages on a day.

    ``begins``: with the header of the agent's turn.
    """
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=begins, **template_clock(day)
    )
    return text


def stop_strings(tokenizer: Any, tools: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the texts that end a turn: the tags, and the marks of turns that the template writes.

    Engines search for each of them after each token, and a tokenizer may have a thousand special
    tokens that no template uses: ``read_turn`` finds these when the turn has ended. The end token's
    own text is left out: the token ends a turn without a stop string.
    """
    end = tokenizer.eos_token or ""
    rendered = markers(tokenizer, tags(tools)).rendered
    closing = (f"</{name}>" for name in own_tools(tools))
    return (*STOP_STRINGS, *closing, *(mark for mark in rendered if mark not in end))


def forged(tokenizer: Any, tools: Sequence[str] = ()) -> re.Pattern[str]:
    """Return a pattern that finds the marks of turns, which an agent must not write."""
    return markers(tokenizer, tags(tools)).forged


def read_turn(
    text: str, stopped: str, forged: re.Pattern[str] = NO_MARKS, tools: Sequence[str] = ()
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
    call = read_call(text, tools)
    return (Outcome.CALL, call) if call else (Outcome.BAD_CALL, None)


def result_tokens(
    tokenizer: Any, observation: Observation, limit: int, tools: Sequence[str] = ()
) -> tuple[str, NDArray[np.int32]]:
    """Return a tool result as the agent reads it: text and tokens, at most ``limit`` tokens.

    The end of a longer result is replaced by an ellipsis; the tags stay whole, and so does the line
    of the admissible actions where it fits. Tags, marks of turns and added tokens that a tool
    quotes stay text: they end neither the result nor the turn.
    """
    opening, closing = (encode(tokenizer, tag) for tag in RESULT_TAGS)
    quoting = markers(tokenizer, tags(tools)).quoted
    room = limit - len(opening) - len(closing)
    body = body_tokens(tokenizer, observation, room, quoting)
    tokens = np.concatenate([opening, body, closing])
    return tokenizer.decode(tokens), tokens


def body_tokens(
    tokenizer: Any, observation: Observation, room: int, quoting: Quoting
) -> NDArray[np.int32]:
    """Return an observation as the agent reads it, in at most ``room`` tokens or an ellipsis."""
    ellipsis = encode(tokenizer, "...")
    body = quoted_tokens(tokenizer, readable(observation.text).strip(), quoting)
    actions = quoted_tokens(tokenizer, readable(actions_line(observation)), quoting)
    left = max(room - len(actions), len(ellipsis) * (len(body) > 0))
    whole = np.concatenate([_cut(body, left, ellipsis), actions])
    return _cut(whole, room, ellipsis)


def _cut(body: NDArray[np.int32], room: int, ellipsis: NDArray[np.int32]) -> NDArray[np.int32]:
    if len(body) <= room:
        return body
    return np.concatenate([body[: max(0, room - len(ellipsis))], ellipsis])


def readable(text: str) -> str:
    """Return a text without lone surrogates, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def actions_line(observation: Observation) -> str:
    """Return the line that lists the admissible actions; "" where none are listed."""
    return f"\nactions: {', '.join(observation.actions)}" if observation.actions else ""


def first_text(observation: Observation | None) -> str:
    """Return what an agent reads of an environment's first observation; "" for none."""
    if observation is None:
        return ""
    return readable(observation.text.strip() + actions_line(observation))


def final_answer(response: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` in the last answer block, or None.

    Braces inside the box are balanced, so ``\\boxed{\\frac{1}{2}}`` gives ``\\frac{1}{2}``.
    """
    start = response.rfind("<answer>")
    return boxed(response[start:].partition("</answer>")[0]) if start >= 0 else None


def boxed(block: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` of a text, or None."""
    box = block.rfind("\\boxed{")
    if box < 0:
        return None
    depth, begin = 1, box + len("\\boxed{")
    for at in range(begin, len(block)):
        depth += {"{": 1, "}": -1}.get(block[at], 0)
        if depth == 0:
            return block[begin:at].strip()
    return None


def read_call(turn: str, tools: Sequence[str] = ()) -> Call | None:
    """Return the tool call that a turn ends with, or None."""
    return next(iter(read_calls(turn, tools)), None)


def read_calls(turn: str, tools: Sequence[str] = ()) -> tuple[Call, ...]:
    """Return all tool calls in the text of a turn, in their order."""
    return tuple(Call(each[1], each[2]) for each in _call(own_tools(tools)).finditer(turn))


def trace_tokens(
    tokenizer: Any,
    prompt: NDArray[np.int32],
    parts: Sequence[tuple[str, bool]],
    limit: int,
    tools: Sequence[str] = (),
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
            encode(tokenizer, text)
            if sampled
            else result_tokens(tokenizer, observed, limit, tools)[1]
        )
    flags = [False, *(sampled for _, sampled in parts)]
    pieces.append(np.array([tokenizer.eos_token_id], np.int32))
    flags.append(True)
    mask = np.repeat(np.array(flags), [len(piece) for piece in pieces])
    return np.concatenate(pieces), mask
