"""How a trajectory is written: chat template, tags, tool calls, which tokens are sampled.

The agent answers one user message. Inside its answer it thinks in ``<think>``, calls a tool by its
tag (``<python>code</python>``), reads ``<result>...</result>``, and ends with ``<answer>`` that
holds ``\\boxed{}`` (ARPO, section 3.1 and appendix; the tags of Tool-Star). A turn is what the
agent writes until it calls a tool or answers; a tool result is appended as tokens of its own.

Only this module writes result tags. An agent that writes one ends its trajectory; tags and control
tokens that a tool result quotes, and control tokens that a question quotes, are spelt out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Dialogue
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Message, Observation, Question

TOOL_TAGS = ("python", "search")
RESULT_TAGS = ("<result>", "</result>")
STOP_STRINGS = (*(f"</{tag}>" for tag in TOOL_TAGS), "</answer>", *RESULT_TAGS)
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", *TOOL_TAGS, "result", "answer") for slash in ("", "/")
)
BREAK = "\ufdd0"  # a code point that no text may use: where a quoted tag is taken apart

_CALL = re.compile(rf"<({'|'.join(TOOL_TAGS)})>((?:(?!<\1>).)*)</\1>", re.DOTALL)


def prompt_tokens(tokenizer: Any, dialogue: Dialogue, question: Question) -> NDArray[np.int32]:
    """The chat template over all messages of a prompt, up to where the agent begins. [T]

    The recipe's system message comes first; system messages of the question's own are joined to it,
    since most templates take one. A control token that a message quotes stays text.
    """
    own = [message.content for message in question.before if message.role == "system"]
    system = "\n\n".join(filter(None, [dialogue.system, *own]))
    messages = [
        *([Message("system", system)] if system else []),
        *(message for message in question.before if message.role != "system"),
        Message("user", question.text),
    ]
    control = control_tokens(tokenizer)
    quoted = [
        {"role": message.role, "content": quote(message.content, control)} for message in messages
    ]
    text = tokenizer.apply_chat_template(quoted, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, text)


def encode(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Token ids of a piece of text as it stands, nothing added; of a quoted one in parts. [T]"""
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(BREAK))
    return np.array([token for part in parts for token in part], np.int32)


def control_tokens(tokenizer: Any) -> list[str]:
    """The texts that a chat template is made of: the end of a turn, whose turn it is."""
    return [added.content for added in tokenizer.added_tokens_decoder.values() if added.special]


def quote(text: str, tags: Iterable[str]) -> str:
    """``text`` with a ``BREAK`` inside each of ``tags``: encoded, the same text in other tokens.

    A tag without a token of its own (those of a pretrained policy) may come out like a real one;
    no code takes it for one, since only the agent's turns are searched for tags.
    """
    text = text.replace(BREAK, "\ufffd")
    for tag in tags:
        text = text.replace(tag, tag[:1] + BREAK + tag[1:])
    return text


def read_turn(text: str, stopped: str) -> tuple[str, Call | None]:
    """How a turn ended, and the tool call it ended with, if any.

    ``stopped`` is the engine's StopReason. A token may go on after the tag that it closes.
    """
    if any(tag in text for tag in RESULT_TAGS):
        return Outcome.FORGED_RESULT, None
    if stopped == StopReason.LENGTH:
        return Outcome.CUT, None
    if stopped == StopReason.END:
        return Outcome.NO_ANSWER, None
    if "</answer>" in text:
        return Outcome.ANSWER, None
    found = _CALL.search(text)
    return (Outcome.CALL, Call(found[1], found[2])) if found else (Outcome.BAD_CALL, None)


def result_tokens(
    tokenizer: Any, observation: Observation, limit: int
) -> tuple[str, NDArray[np.int32]]:
    """A tool result as the agent reads it: its text and tokens, at most ``limit`` of them.

    A longer result loses its end, which an ellipsis marks; the tags stay whole. Tags and control
    tokens that a tool quotes stay text: they end neither the result nor the agent's turn.
    """
    opening, closing = (encode(tokenizer, tag) for tag in RESULT_TAGS)
    readable = observation.text.encode(errors="replace").decode()  # no lone surrogates
    body = encode(tokenizer, quote(readable.strip(), [*control_tokens(tokenizer), *TAGS]))
    room = limit - len(opening) - len(closing)
    if len(body) > room:
        mark = encode(tokenizer, "...")
        body = np.concatenate([body[: max(0, room - len(mark))], mark])
    tokens = np.concatenate([opening, body, closing])
    return tokenizer.decode(tokens), tokens


def final_answer(response: str) -> str | None:
    """What the last ``\\boxed{}`` of the last answer block holds; None where there is none.

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


def called_tool(turn: str) -> str | None:
    """The tool that a turn ended by calling."""
    found = _CALL.search(turn)
    return found[1] if found else None


def trace_tokens(
    tokenizer: Any, prompt: NDArray[np.int32], parts: Sequence[tuple[str, bool]], limit: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """A written trajectory as training data: tokens [T], and which of them are the agent's own [T].

    ``parts`` alternate between (turn, True) and (tool result, False). Each is tokenised on its own,
    exactly as in a rollout, a result to at most ``limit`` tokens; the end token comes last.
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
