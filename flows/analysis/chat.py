"""Write trajectories as messages of a chat, the form in which fine-tuning libraries read them.

A message is a dict with ``role`` and ``content``, as in OpenAI's chat completions. A call of a tool
is in ``tool_calls`` of the assistant's message, and the message of role "tool" after it has the
result as the agent read it; a turn with several calls has as many results after it. The recipe's
dialect reads the turns, so messages do not depend on how a policy writes its calls. Thoughts stay
in the content, in ``<think>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from itertools import pairwise
from typing import Any

import numpy as np

from tasks.dialects.contract import Dialect, Exchange, Tokens, calls_in, numbered, observed
from tasks.dialects.native import NativeDialect
from tasks.dialects.tags import TOOLS
from tasks.trees.dialogue import first_text
from tasks.trees.outcomes import ACTED, Outcome
from tasks.trees.tree import (
    PROMPT,
    TURN,
    Call,
    Node,
    Observation,
    Question,
    ToolSpec,
    Tree,
    common_prefix,
)

Message = dict[str, Any]

CALLED = (*ACTED, Outcome.TOO_MANY_CALLS)  # outcomes of turns that end with a sound call
PROBES = ("0", "1")  # results that show what a dialect writes around a result
UNLIMITED = 2**20  # tokens


@dataclass(frozen=True)
class Chat:
    """What the messages of a recipe depend on."""

    dialect: Dialect
    specs: Sequence[ToolSpec]
    system: str  # the recipe's system message
    tokenizer: Any
    objects: bool = False  # arguments of calls as objects; False: as the text of an object

    @property
    def free(self) -> bool:
        """Whether the whole message of the agent is its act, and the user answers it."""
        return bool(getattr(self.dialect, "free", False))


def tools(chat: Chat) -> list[Message]:
    """Return the descriptions of the agent's tools; [] where its only act is free text."""
    return [] if chat.free else [{"type": "function", "function": _told(s)} for s in chat.specs]


def _told(spec: ToolSpec) -> Message:
    parameters = dict(spec.parameters)
    return {"name": spec.name, "description": spec.description, "parameters": parameters}


def conversations(tree: Tree, chat: Chat) -> list[list[Message]]:
    """Return the messages of each trajectory of a tree, in leaf order.

    Where the agent had a prompt for each step, they are the one conversation that it was. The
    observation with which a world ends an episode is left out: the agent has not read it.
    """
    return [_conversation(tree.question, nodes, chat) for nodes in tree.trajectories()]


def _conversation(question: Question, nodes: Sequence[Node], chat: Chat) -> list[Message]:
    messages = _opening(question, nodes[0].text, chat.system)
    shown = nodes[0].text.removeprefix(question.text).strip()
    before, past, made = nodes[0].tokens, list[Exchange](), 0
    for turn, after in pairwise([*nodes, None]):
        if turn is None or turn.kind != TURN:
            continue
        text = turn.text.removesuffix(chat.tokenizer.eos_token or "")
        calls = _calls(turn, text, made, chat)
        if after is not None:  # which has the results of these
            calls = calls[: max(1, len(turn.results))]
        names = [f"call_{number}" for number in range(made + 1, made + len(calls) + 1)]
        made += max(1, len(calls))
        messages.append(_said(turn, text, before, calls, names, chat))
        if after is None:
            break
        given = calls or (Call("", ""),)
        exchange = Exchange(turn.tokens, turn.text, given, (Observation("", ""),) * len(given))
        fresh = after.kind == PROMPT
        if len(turn.results) > 1:
            texts = [result.text for result in turn.results]
        elif fresh:
            written = partial(_restarted, chat, question, shown, [*past, exchange])
            texts = [_read(after, turn, written)]
        else:
            texts = [_read(after, turn, partial(_appended, chat, before, exchange))]
        seen = tuple(Observation(after.outcome, each) for each in texts)
        past.append(replace(exchange, observations=seen))
        messages += _answered(calls, texts, names, chat)
        before = after.tokens if fresh else np.concatenate([before, turn.tokens, after.tokens])
    return messages


def _calls(turn: Node, text: str, before: int, chat: Chat) -> tuple[Call, ...]:
    """Return the calls of a turn after so many earlier ones; those of a turn with several results.

    A turn that made more calls than were left has all of them.
    """
    if turn.outcome not in CALLED:
        return ()
    if len(turn.results) > 1 and turn.outcome != Outcome.TOO_MANY_CALLS:
        return tuple(Call(each.tool, each.argument, id=each.id) for each in turn.results)
    return numbered(chat.dialect, calls_in(chat.dialect, text), before)


def _opening(question: Question, text: str, system: str) -> list[Message]:
    """Return the messages before the first turn; the tools are not described in the system's."""
    told = [each.content for each in question.before if each.role == "system"]
    whole = "\n\n".join(filter(None, [system.replace(TOOLS, "").strip(), *told]))
    others = [each for each in question.before if each.role != "system"]
    return [
        *([{"role": "system", "content": whole}] if whole else []),
        *({"role": each.role, "content": each.content} for each in others),
        {"role": "user", "content": text},
    ]


# ---------------------------------------------------------------- turns


def _said(
    turn: Node, text: str, before: Tokens, calls: Sequence[Call], names: Sequence[str], chat: Chat
) -> Message:
    """Return a turn as a message; one without a sound call has its whole text as content."""
    if not calls and turn.outcome not in (Outcome.ANSWER, Outcome.NO_ANSWER):
        return {"role": "assistant", "content": text}
    content = _content(chat.dialect, turn.tokens, text, before, calls[0] if calls else None)
    if not calls or chat.free:
        return {"role": "assistant", "content": content}
    made = [
        {"id": name, "type": "function", "function": _function(call, chat)}
        for name, call in zip(names, calls, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _function(call: Call, chat: Chat) -> Message:
    values = _arguments(call, chat.specs)
    arguments = values if chat.objects else json.dumps(values, ensure_ascii=False)
    return {"name": call.tool, "arguments": arguments}


@singledispatch
def _content(dialect: Dialect, turn: Tokens, text: str, before: Tokens, call: Call | None) -> str:
    """Return the text of a turn without its call, which is between tags of the tool's name."""
    written = f"<{call.tool}>{call.argument}</{call.tool}>" if call else ""
    return text.partition(written)[0].rstrip() if written else text


@_content.register
def _(dialect: NativeDialect, turn: Tokens, text: str, before: Tokens, call: Call | None) -> str:
    """Return thoughts and content as the model's family separates them from the call."""
    with suppress(Exception):  # the agent wrote the text
        read = dialect.renderer.parse_response(
            turn.tolist(), tools=dialect.tools, prompt_ids=before.tolist()
        )
        thoughts = (read.reasoning_content or "").strip()
        inside = f"<think>\n{thoughts}\n</think>" if thoughts else ""
        return "\n\n".join(filter(None, [inside, (read.content or "").strip()]))
    return text


def _arguments(call: Call, specs: Sequence[ToolSpec]) -> Message:
    """Return the arguments of a call by name; under "argument" what is no object of JSON."""
    if call.values:
        return dict(call.values)
    parameter = next((spec.text_parameter for spec in specs if spec.name == call.tool), None)
    if parameter:
        return {parameter: call.argument}
    with suppress(ValueError, RecursionError):
        if isinstance(values := json.loads(call.argument or "{}"), dict):
            return values
    return {"argument": call.argument}


# ---------------------------------------------------------------- what answers them


def _answered(
    calls: Sequence[Call], results: Sequence[str], names: Sequence[str], chat: Chat
) -> list[Message]:
    """Return the messages that answer a turn."""
    if not calls or chat.free:
        return [{"role": "user", "content": result} for result in results]
    return [
        {"role": "tool", "tool_call_id": name, "name": call.tool, "content": result}
        for name, call, result in zip(names, calls, results, strict=True)
    ]


def _read(after: Node, turn: Node, written: Callable[[Observation], str]) -> str:
    """Return what the agent read after a turn, without what its dialect writes around it.

    The prompt of one step says more than its observation, which is then taken from the turn.
    """
    if after.kind == PROMPT and turn.observation:
        return first_text(turn.observation)
    return between(after.text, *(written(Observation(Outcome.OK, probe)) for probe in PROBES))


def _appended(chat: Chat, before: Tokens, exchange: Exchange, answer: Observation) -> str:
    """Return what the dialect writes for an observation that goes on in the same prompt."""
    probed = replace(exchange, observations=(answer,))
    written = observed(chat.dialect, before, exchange.turn, probed, UNLIMITED)
    return written[0] if written else ""


def _restarted(
    chat: Chat, question: Question, shown: str, past: Sequence[Exchange], answer: Observation
) -> str:
    """Return the new prompt with the whole dialogue, in which an observation is the last."""
    probed = [*past[:-1], replace(past[-1], observations=(answer,))]
    return str(chat.tokenizer.decode(chat.dialect.restart(question, shown, probed)))


def between(text: str, one: str, other: str) -> str:
    """Return what a text has between the beginning and the end that two texts share.

    All of it where it does not begin and end like them. A family that writes results as strings of
    JSON has them read back.
    """
    start = common_prefix(one, other)
    end = common_prefix(one[start:][::-1], other[start:][::-1])
    opening, closing = one[:start], one[len(one) - end :]
    if len(text) < start + end or not (text.startswith(opening) and text.endswith(closing)):
        return text.strip()
    body = text[start : len(text) - end]
    if opening.endswith('"') and closing.startswith('"'):
        with suppress(ValueError):  # cut inside an escape
            body = str(json.loads(f'"{body}"'))
    return body.strip()
