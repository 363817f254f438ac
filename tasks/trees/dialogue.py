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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from tasks.trees.markers import BREAK, added_tokens, encode, markers, quote
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Observation, Question

TOOL_TAGS = ("python", "search")
RESULT_TAGS = ("<result>", "</result>")
STOP_STRINGS = (*(f"</{tag}>" for tag in TOOL_TAGS), "</answer>", *RESULT_TAGS)
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", *TOOL_TAGS, "result", "answer") for slash in ("", "/")
)

_CALL = re.compile(rf"<({'|'.join(TOOL_TAGS)})>((?:(?!<\1>).)*)</\1>", re.DOTALL)


def prompt_tokens(tokenizer: Any, dialogue: Dialogue, question: Question) -> NDArray[np.int32]:
    """Apply the chat template to all messages of a prompt; the tokens before the agent's first.

    The recipe's system message comes first, joined with those of the question, since most templates
    accept one. Marks of turns and added tokens that a message quotes stay text, but for the tags in
    the recipe's own message.
    """
    marks = markers(tokenizer, TAGS)

    def rendered(show: Callable[[str], str], around: str = "") -> NDArray[np.int32]:
        own = [show(message.content) for message in question.before if message.role == "system"]
        system = "\n\n".join(filter(None, [quote(tokenizer, dialogue.system, marks, TAGS), *own]))
        messages = [
            *([("system", system)] if system else []),
            *((m.role, show(m.content)) for m in question.before if m.role != "system"),
            ("user", show(question.text)),
        ]
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": around + content + around} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return encode(tokenizer, text)

    def quoted(text: str) -> str:
        return quote(tokenizer, text, marks)

    tokens, plain = rendered(quoted), rendered(_harmless)
    if added_tokens(tokens, marks) == added_tokens(plain, marks):
        return tokens
    return rendered(quoted, around=BREAK)  # a message and its mark had become one token


def _harmless(text: str) -> str:
    return "a" if text.strip() else text


def stop_strings(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that end a turn: the tags, and what would forge another turn.

    The end token's own text is left out: the token ends a turn without a stop string.
    """
    end = tokenizer.eos_token or ""
    return (*STOP_STRINGS, *(mark for mark in forged(tokenizer) if mark not in end))


def forged(tokenizer: Any) -> tuple[str, ...]:
    """Return the marks of turns that an agent must not write."""
    return markers(tokenizer, TAGS).forged


def read_turn(text: str, stopped: str, forged: Collection[str] = ()) -> tuple[str, Call | None]:
    """Return the outcome of a turn, and its tool call if it ended with one.

    ``text`` is without the end token, ``stopped`` is the engine's StopReason, ``forged`` are the
    marks of turns. The text may extend past the closing tag, because a token may.
    """
    if any(tag in text for tag in RESULT_TAGS):
        return Outcome.FORGED_RESULT, None
    if any(mark in text for mark in forged):
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
    body = encode(tokenizer, quote(tokenizer, readable.strip(), markers(tokenizer, TAGS)))
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
