"""The native dialect: tool calls in the format that a model was trained on.

The library ``renderers`` writes prompts and reads turns of each family (Qwen3, Llama 3, ...); the
tools are described where the family's chat template does. An agent ends its turn with the family's
own end token. A turn may make several calls, each with a result of its own. Where the family's
format has one call a turn (Llama 3), a turn with several is a bad call: no such model was trained
on a dialogue in which calls have no result.

Where the only tool is the free act, a turn's content is the act and observations are messages of
the user; no tool is described.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects import family
from tasks.dialects.call_check import call_fault
from tasks.dialects.contract import (
    Context,
    DialectKind,
    Exchange,
    Tokens,
    Turn,
    numbered,
    several,
)
from tasks.dialects.json_values import depth, object_of, quoted
from tasks.dialects.prompt_check import (
    PROBE,
    Messages,
    end_faults,
    has_clock,
    prompt_faults,
    refuse,
    template_faults,
    that_ends,
)
from tasks.dialects.tags import TOOLS
from tasks.dialects.tokenizer_check import tokenizer_faults
from tasks.dialects.written_calls import TEXT_CALLS, reads_text, with_calls
from tasks.dialects.written_turns import answered_turns, in_tags
from tasks.trees import dialogue as talk
from tasks.trees.markers import BREAK, added_tokens, any_of, markers, quote
from tasks.trees.outcomes import ENDED_BY_WORLD, Outcome, StopReason
from tasks.trees.tree import Call, Observation, Question, ToolSpec

FREE_ACT = "act"  # the name of FREE_TEXT (tasks/environments/contract.py)
THOUGHTS = ("<think>", "</think>")
RESULTS = ("<tool_response>", "</tool_response>")  # plain text in some tokenizers
FORGED = {family.HARMONY: r"<\|start\|>(?!assistant)"}  # a mark that the agent writes, too
ATTEMPT = re.compile(r'^\s*\{\s*"name"|</?tool_call>|<\|python_tag\|>')  # at a call
OWN_MARKS = {family.HARMONY: ("<|constrain|>",)}  # that an agent writes, and no rendering has
# How a prompt ends that opens a thought, and what closes one: by family, and of all others.
IN_THOUGHT = {
    family.HARMONY: (
        re.compile(r"<\|channel\|>analysis<\|message\|>\Z"),
        "<|end|><|start|>assistant",
    )
}
USUAL_THOUGHT = (talk.OPENED_THOUGHT, f"\n{THOUGHTS[1]}\n\n")
CALL_IDS = ("call_{}", "call{:05}")  # of call number 0, 1, ...; Mistral's have nine signs
NAMED_CALLS = ("kimi-k2", "kimi-k2.5")  # a call's id is all that names its tool
ASKED = {"role": "user", "content": "a"}
THINKING = {"role": "assistant", "content": "a", "reasoning_content": "thought"}
ELLIPSIS = "..."
THOUGHT_TOKENS = 16  # more than the opening of a thought has in any vocabulary
SHOWN = 80  # characters of a call in a message
DEPTH = 100  # levels of the values of a call, at most

Message = dict[str, Any]


class Native(Frozen):
    """The settings of the dialect.

    ``options`` are those that the library's family takes, such as enable_thinking: false, or
    thinking_retention: all, with which thoughts stay when the user writes again.
    """

    renderer: str = family.AUTO  # auto, default, or the name of a family
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)


class NativeDialect:
    """The format of one family; see ``tasks.dialects.contract.Dialect``."""

    def __init__(
        self,
        name: str,
        renderer: Any,
        tokenizer: Any,
        dialogue: Dialogue,
        specs: Sequence[ToolSpec],
    ) -> None:
        self.name, self.renderer, self.tokenizer = name, renderer, tokenizer
        self.specs = {spec.name: spec for spec in specs}
        self.opened_thought, self.closing = IN_THOUGHT.get(name, USUAL_THOUGHT)
        self.free = [*self.specs] == [FREE_ACT]
        self.dialogue = dialogue.model_copy(
            update={"system": dialogue.system.replace(TOOLS, "").strip()}
        )
        self.tools: list[Message] | None = None
        self.call_ids = next(filter(self._takes_id, CALL_IDS), CALL_IDS[0])
        self.ends = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.opening = self._rendered([ASKED])
        self._find_marks()
        if self.specs and not self.free:
            self.tools = [quoted(_openai(spec), self._quote) for spec in specs]
        self.opening = self._rendered([ASKED])
        self.calls_together = self._may_call_together()

    def _find_marks(self) -> None:
        """Find which control tokens are the agent's own, and which it must not write."""
        added, end = self.tokenizer.added_tokens_decoder, self.tokenizer.eos_token or ""
        called = _calling(self.call_ids.format(0))
        plain, calling = (self._probe(message) for message in (THINKING, called))
        agent_tokens = {token for token in (*plain, *calling, *self.ends) if token in added}
        texts = {token: added[token].content for token in agent_tokens}
        own = OWN_MARKS.get(self.name, ())
        texts |= {token: mark.content for token, mark in added.items() if mark.content in own}
        ends = [self.tokenizer.decode([token]) for token in self.ends]
        self.marks = markers(self.tokenizer, tuple(sorted({*texts.values(), *THOUGHTS, *ends})))
        of_results = self._marks_of_results() - {*texts.values()}
        self.end_texts = any_of(ends)
        self.results = any_of({*RESULTS, *of_results})
        extra = FORGED.get(self.name)
        forged = self.marks.forged.pattern
        self.forged = re.compile(f"{forged}|{extra}") if extra else self.marks.forged
        rendered = [mark for mark in self.marks.rendered if mark not in texts.values()]
        stops = dict.fromkeys([*ends, *RESULTS, *sorted(of_results), *rendered])
        self.stop_strings = tuple(stop for stop in stops if stop != end)
        self.thinks = "thought" in self.tokenizer.decode(plain) and self._may_think()

    def _probe(self, message: Message) -> list[int]:
        """Return the tokens of a turn; [] where the family refuses it."""
        with suppress(Exception):  # a chat template raises what it likes
            return self._turn(message, [family.PROBE_TOOL])
        return []

    def _may_think(self) -> bool:
        """Return whether thoughts can follow the opening of a turn, which may have closed them."""
        whole = self.renderer.render_ids([ASKED, THINKING], tools=[family.PROBE_TOOL])
        opening = self._rendered([ASKED], [family.PROBE_TOOL])
        return whole[: len(opening)] == opening or self._thought_is_open(opening)

    def _thought_is_open(self, opening: Sequence[int]) -> bool:
        return bool(self.opened_thought.search(self.tokenizer.decode(opening[-THOUGHT_TOKENS:])))

    def _takes_id(self, form: str) -> bool:
        """Return whether the family's dialogues can have ids of calls in this form."""
        name = form.format(0)
        result = {"role": "tool", "name": "probe", "tool_call_id": name, "content": "a"}
        with suppress(Exception):  # a chat template raises what it likes
            return bool(self._rendered([ASKED, _calling(name), result], [family.PROBE_TOOL]))
        return False

    def _may_call_together(self) -> bool:
        """Return whether the family's format has turns of several calls, each with its result.

        gpt-oss has none: its agents end a turn with the mark that ends a call.
        """
        names = [self.call_id("probe", number) for number in range(2)]
        results = [
            {"role": "tool", "name": "probe", "tool_call_id": name, "content": f"result of {name}"}
            for name in names
        ]
        with suppress(Exception):  # some templates refuse a second call, others leave it out
            dialogue = [ASKED, _calling(*names), *results]
            text = self.tokenizer.decode(self._rendered(dialogue, [family.PROBE_TOOL]))
            places = [
                text.find(f"{word} {name}") for word in ("input", "result of") for name in names
            ]
            *said, _ = self._turn(dialogue[1], [family.PROBE_TOOL])
            in_order = places[0] >= 0 and places == sorted(set(places))
            return in_order and not any(token in self.ends for token in said)
        return False

    def _marks_of_results(self) -> set[str]:
        """Return the control tokens that only a tool's result has."""
        said: list[set[str]] = []
        called = _calling(name := self.call_ids.format(0))
        for role in ("tool", "user"):
            message = {"role": role, "name": "probe", "tool_call_id": name, "content": "a"}
            with suppress(Exception):  # a chat template raises what it likes
                tokens = self._rendered([ASKED, called, message], [family.PROBE_TOOL])
                texts = [self.marks.tokens.get(token, "") for token in tokens]
                said.append({text for text in texts if text})
        return said[0] - said[1] if len(said) == 2 else set()

    # ---------------------------------------------------------------- prompts

    def prompt(self, question: Question, shown: str = "") -> Tokens:
        expected = self._added(self._first(question, shown, lambda text: "a" * bool(text.strip())))
        for show in (self._quote, lambda text: BREAK + self._quote(text) + BREAK):
            tokens = self._first(question, shown, show)
            if self._added(tokens) == expected:
                break
        return np.array(tokens, np.int32)

    def _first(self, question: Question, shown: str, show: Callable[[str], str]) -> list[int]:
        return self._rendered(self._messages(question, shown, show), self.tools)

    def _messages(
        self, question: Question, shown: str, show: Callable[[str], str]
    ) -> list[Message]:
        """Return the messages before the agent's first turn, as ``show`` quotes them."""
        said = [message for message in question.before if message.role != "system"]
        told = [message.content for message in question.before if message.role == "system"]
        system = "\n\n".join(filter(None, [self.dialogue.system, *told]))
        text = "\n\n".join(filter(None, [question.text, shown]))
        messages = [{"role": "system", "content": show(system)}] if system else []
        messages += [{"role": each.role, "content": show(each.content)} for each in said]
        return [*messages, {"role": "user", "content": show(text)}]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[int]:
        tools = tools or self.tools
        return list(
            self.renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)
        )

    def _quote(self, text: str) -> str:
        return quote(self.tokenizer, talk.readable(text), self.marks.quoted)

    def _added(self, tokens: Sequence[int]) -> list[int]:
        return added_tokens(np.array(tokens, np.int32), self.marks)

    # ---------------------------------------------------------------- turns

    def read(self, prompt: Tokens, turn: Tokens, text: str, stopped: str) -> Turn:
        said = self._without_end(turn, text)
        if self.results.search(said):
            return Turn(Outcome.FORGED_RESULT)
        if self.forged.search(said) or self.end_texts.search(said):
            return Turn(Outcome.FORGED_TURN)
        if stopped == StopReason.LENGTH:
            return Turn(Outcome.CUT)
        return self._judged(self._parsed(turn.tolist(), prompt.tolist()))

    def _without_end(self, turn: Tokens, text: str) -> str:
        """Return a turn's text without its end, where that is one of the family's end tokens."""
        last = turn[-1] if len(turn) else -1
        return text.removesuffix(self.tokenizer.decode([last])) if last in self.ends else text

    def _parsed(self, turn: list[int], prompt: list[int] | None = None) -> Any:
        """Return what the library reads in a turn, or None where it fails."""
        before = self._known_before(prompt or self.opening)
        try:
            return self.renderer.parse_response(turn, tools=self.tools, prompt_ids=before)
        except Exception:  # on nested or endless values of JSON, among others: an agent wrote them
            return None

    def _known_before(self, prompt: list[int]) -> list[int]:
        """Return the tokens before a turn as the library needs them to read it.

        Of a template that it does not know, it knows no headers: an opened thought stands alone.
        """
        if self.name != family.DEFAULT:
            return prompt
        opened = self._thought_is_open(prompt)
        return list(self.renderer._tokenizer.encode(THOUGHTS[0])) if opened else []

    def _judged(self, parsed: Any) -> Turn:
        if parsed is None or not all(map(_sound, parsed.tool_calls)):
            return Turn(Outcome.BAD_CALL)
        said, calls = talk.readable(parsed.content or "").strip(), parsed.tool_calls
        if self.free and not calls:
            act = (Call(FREE_ACT, said),) if said else ()
            return Turn(Outcome.CALL if act else Outcome.NO_ANSWER, act, said)
        if calls:
            made = tuple(call for each in calls if (call := self._call(each)))
            sound = len(made) == len(calls) and not self.free
            sound = sound and (len(made) == 1 or self.calls_together)
            return Turn(Outcome.CALL if sound else Outcome.BAD_CALL, made if sound else (), said)
        if talk.boxed(said) is not None:
            return Turn(Outcome.ANSWER, (), said)
        return Turn(Outcome.BAD_CALL if ATTEMPT.search(said) else Outcome.NO_ANSWER, (), said)

    def _call(self, parsed: Any) -> Call | None:
        """Return a call as tools take it, or None for one without a name or parameters.

        None, too, where these are nested so deeply that they could not be written again.
        """
        arguments = object_of(parsed.arguments)
        if not isinstance(parsed.name, str) or arguments is None or depth(arguments) > DEPTH:
            return None
        spec = self.specs.get(parsed.name)
        written = talk.readable(json.dumps(arguments, ensure_ascii=False, sort_keys=True))
        name = talk.readable(parsed.id) if isinstance(parsed.id, str) else ""
        parameter = spec.text_parameter if spec else None
        if not parameter:
            return Call(parsed.name, written, id=name)
        text = arguments.get(parameter)
        if [*arguments] == [parameter] and isinstance(text, str):
            return Call(parsed.name, talk.readable(text), id=name)
        # the values say what does not fit the tool's schema
        return Call(parsed.name, written, arguments, name) if arguments else None

    def call_id(self, tool: str, number: int) -> str:
        """Return the id of a dialogue's call number ``number``, from 0."""
        if self.name in NAMED_CALLS:
            return f"functions.{tool}:{number}"
        return self.call_ids.format(number)

    # ---------------------------------------------------------------- observations

    def observe(
        self,
        prompt: Tokens,
        turn: Tokens,
        calls: Sequence[Call],
        observations: Sequence[Observation],
        limit: int,
    ) -> tuple[str, Tokens] | None:
        written = self._answered(prompt, turn, several(calls), several(observations), limit)
        if written is None:
            return None
        _, tokens = written
        return self.tokenizer.decode(tokens), np.array(tokens, np.int32)

    def texts(
        self,
        prompt: Tokens,
        turn: Tokens,
        calls: Sequence[Call],
        observations: Sequence[Observation],
        limit: int,
    ) -> list[str]:
        """Return what the agent reads of each observation; see the contract."""
        written = self._answered(prompt, turn, several(calls), several(observations), limit)
        return written[0] if written else [self._cut(each) for each in several(observations)]

    def _answered(
        self,
        prompt: Tokens,
        turn: Tokens,
        calls: Sequence[Call],
        observations: Sequence[Observation],
        limit: int,
    ) -> tuple[list[str], list[int]] | None:
        """Return what is read of each observation, and all tokens after a turn; None: no bridge.

        An observation is cut as if it were the only one.
        """
        before = prompt.tolist(), turn.tolist()
        if (together := self._framing(*before, calls)) is None:
            return None
        texts: list[str] = []
        tokens: list[int] = []
        for call, observation in zip(calls, observations, strict=True):
            alone = together if len(calls) == 1 else self._framing(*before, [call])
            if alone is None:
                return None
            text, tokens = shortened(observation, lambda text: alone([text]), limit)  # noqa: B023
            texts.append(text)
        return texts, tokens if len(calls) == 1 else together(texts)

    def _framing(
        self, prompt: list[int], turn: list[int], calls: Sequence[Call]
    ) -> Callable[[Sequence[str]], list[int]] | None:
        """Return what writes the tokens after a turn, given its results; None for no bridge.

        What the results quote stays text.
        """
        bridged = partial(self._bridged, prompt, turn, calls)
        if (frame := bridged(["a"] * len(calls))) is None:
            return None
        expected = self._added(frame)

        def framed(texts: Sequence[str]) -> list[int]:
            shown = [self._quote(text) for text in texts]
            tokens = bridged(shown) or []
            if self._added(tokens) != expected:
                tokens = bridged([BREAK + text + BREAK for text in shown]) or []
            return tokens

        return framed

    def _bridged(
        self, prompt: list[int], turn: list[int], calls: Sequence[Call], contents: Sequence[str]
    ) -> list[int] | None:
        """Return the tokens after a turn, for results that are quoted; None for no bridge."""
        messages = self._observed(calls, contents)
        bridge = self.renderer.bridge_to_next_turn(prompt, turn, messages, tools=self.tools)
        before = [*prompt, *turn]
        if bridge is None or bridge.token_ids[: len(before)] != before:
            return None
        return list(bridge.token_ids[len(before) :])

    def _observed(self, calls: Sequence[Call], contents: Sequence[str]) -> list[Message]:
        """Return the messages that answer the calls of a turn."""
        if self.free:
            return [{"role": "user", "content": content} for content in contents]
        named = numbered(self, calls, 0)  # only calls that no rollout has numbered lack an id
        return [
            {
                "role": "tool",
                "name": self._quote(call.tool),
                "tool_call_id": self._quote(call.id),
                "content": content,
            }
            for call, content in zip(named, contents, strict=True)
        ]

    def restart(self, question: Question, shown: str, past: Sequence[Exchange]) -> Tokens:
        messages = self._messages(question, shown, self._quote)
        made = 0
        for exchange in past:
            calls = numbered(self, exchange.calls, made)
            made += len(calls)
            parsed = self._parsed(exchange.turn.tolist())
            content = parsed.content if parsed else exchange.text
            thoughts = parsed.reasoning_content if parsed else None
            messages.append(self._message(calls, content or "", thoughts or ""))
            texts = [self._quote(self._cut(each)) for each in exchange.observations]
            messages += self._observed(calls, texts)
        return np.array(self._rendered(messages, self.tools), np.int32)

    def _cut(self, observation: Observation) -> str:
        """Return what the agent reads of an observation in a prompt that is rendered anew."""
        encode = self.renderer._tokenizer.encode
        most = self.dialogue.result_tokens
        _, tokens = shortened(observation, lambda text: encode(self._quote(text)), most)
        return str(self.tokenizer.decode(tokens))

    # ---------------------------------------------------------------- answers

    def answer(self, turns: Sequence[str]) -> str | None:
        parsed = self._said(turns[-1]) if turns else None
        return talk.boxed(parsed.content or "") if parsed else None

    def faults(self, turns: Sequence[str], outcome: str) -> list[str]:
        """Return "answer" without a final answer, "tool_call" for a bad call, and forgeries.

        An episode that its world has ended, or that is acted in free text, needs no answer.
        """
        needed = not self.free and outcome not in ENDED_BY_WORLD
        broken = outcome == Outcome.BAD_CALL or any(map(self._broken, turns))
        checks = {
            "answer": needed and self.answer(turns) is None,
            "tool_call": broken,
            "forged_result": outcome == Outcome.FORGED_RESULT,
            "forged_turn": outcome == Outcome.FORGED_TURN,
        }
        return [fault for fault, there in checks.items() if there]

    def calls(self, turn: str) -> tuple[Call, ...]:
        return self._judged(self._said(turn)).calls

    def call(self, turn: str) -> Call | None:
        """Return the first call in the text of a turn, or None."""
        return next(iter(self.calls(turn)), None)

    def _said(self, text: str) -> Any:
        """Return what the library reads in the text of a turn."""
        return self._parsed(self.tokenizer.encode(text, add_special_tokens=False))

    def _broken(self, text: str) -> bool:
        parsed = self._said(text)
        return parsed is None or not all(map(_sound, parsed.tool_calls))

    # ---------------------------------------------------------------- written trajectories

    def trace(
        self, question: Question, parts: Sequence[tuple[str, bool]], shown: str = ""
    ) -> list[Context]:
        """See ``tasks.dialects.contract.Dialect``.

        Where the family cannot go on from a turn, the trace goes on in a new prompt, in which the
        turns before it are read, not trained: each is trained where it is said, as in a rollout. A
        family without thoughts says them before the answer.
        """
        tokens = self.prompt(question, shown)
        mask = np.zeros(len(tokens), np.bool_)
        contexts: list[Context] = []
        past: list[Exchange] = []
        made = 0
        for text, answers in answered_turns(parts):
            thoughts, _, content = in_tags(text, [*self.specs])
            calls = numbered(self, talk.read_calls(text, [*self.specs]), made)
            if len(calls) > 1 and not self.calls_together:
                raise ValueError(
                    f"question {question.id}: a turn of its trace makes {len(calls)} calls, and a "
                    f"turn in the format {self.name} of the policy makes one: put each call, with "
                    "its result, into a turn of its own"
                )
            made += len(calls)
            if unread := [call for call in calls if not self._is_object(call)]:
                raise ValueError(
                    f"question {question.id}: its trace calls {unread[0].tool} with "
                    f"{unread[0].argument[:SHOWN]!r}, and this tool takes a JSON object of its "
                    "parameters: write one, such as "
                    f"<{unread[0].tool}>{self._example(unread[0].tool)}</{unread[0].tool}>"
                )
            message = self._message(calls, content, thoughts)
            before, turn = tokens, np.array(self._ended(message), np.int32)
            tokens = np.concatenate([tokens, turn])
            mask = np.concatenate([mask, np.ones(len(turn), np.bool_)])
            if not answers:
                continue
            seen = tuple(Observation(Outcome.OK, body) for body in answers)
            past.append(Exchange(turn, "", calls, seen))
            added = self.observe(before, turn, calls, seen, self.dialogue.result_tokens)
            if added is None:
                contexts.append((tokens, mask))
                tokens = self.restart(question, shown, past)
                mask = np.zeros(len(tokens), np.bool_)
                continue
            tokens = np.concatenate([tokens, added[1]])
            mask = np.concatenate([mask, np.zeros(len(added[1]), np.bool_)])
        return [*contexts, (tokens, mask)]

    def _message(self, calls: Sequence[Call], content: str, thoughts: str) -> Message:
        """Return a turn as a message; the agent's own words are quoted as text."""
        calls = numbered(self, several(calls), 0)
        if self.free and calls:
            content, calls = calls[0].argument, ()
        if not self.thinks:
            content, thoughts = "\n\n".join(filter(None, [thoughts, content])), ""
        message: Message = {"role": "assistant", "content": self._quote(content)}
        if thoughts:
            message["reasoning_content"] = self._quote(thoughts)
        if calls:
            message["tool_calls"] = [self._written(call) for call in calls]
        return message

    def _is_object(self, call: Call) -> bool:
        """Return whether a call has an object of parameters, or a tool that takes a text."""
        spec = self.specs.get(call.tool)
        takes_text = spec is not None and spec.text_parameter
        return bool(self.free or takes_text or object_of(call.argument or "{}") is not None)

    def _example(self, tool: str) -> str:
        """Return an object with the names of a tool's parameters."""
        spec = self.specs.get(tool)
        return json.dumps(
            dict.fromkeys(spec.parameters.get("properties", {}), "...") if spec else {}
        )

    def _written(self, call: Call) -> Message:
        """Return a call as part of a message."""
        spec = self.specs.get(call.tool)
        parameter = spec.text_parameter if spec else None
        whole = {parameter: call.argument} if parameter else object_of(call.argument or "{}")
        values = call.values or whole  # the values also tell a call that does not fit the tool
        name, arguments = self._quote(call.tool), quoted(values or {}, self._quote)
        function = {"name": name, "arguments": arguments}
        return {"id": self._quote(call.id), "type": "function", "function": function}

    def _ended(self, message: Message) -> list[int]:
        """Return the tokens of a turn with its end, as the family samples it."""
        turn = self._turn(message, self.tools)
        if turn and turn[-1] in self.ends:
            return turn
        # Some families end a turn with the mark of the next one.
        results = [
            {"role": "tool", "name": "probe", "tool_call_id": call["id"], "content": "a"}
            for call in message.get("tool_calls", [])
        ]
        after = results or [ASKED]
        whole = self._rendered([ASKED, message, *after], self.tools)[len(self.opening) :]
        return [*turn, next((token for token in whole if token in self.ends), self.ends[0])]

    def _turn(self, message: Message, tools: Sequence[Message] | None) -> list[int]:
        """Return the tokens of a turn, up to its end where the family renders one."""
        tools = tools or self.tools
        begun = self._rendered([ASKED], tools)
        rendered = self.renderer.render([ASKED, message], tools=tools)
        whole = list(rendered.token_ids)
        turn = self._after(self.tokenizer.decode(begun), whole)
        if turn is None:
            turn = self._without_thoughts(begun, rendered)
            if self._thought_is_open(begun):  # a template that drops all thoughts of the past
                closing = message.get("reasoning_content", "") + self.closing
                turn = [*self.renderer._tokenizer.encode(closing), *turn]
        last = [index for index, token in enumerate(turn) if token in self.ends]
        return turn[: last[-1] + 1] if last else turn

    def _after(self, opening: str, whole: list[int]) -> list[int] | None:
        """Return the tokens of a dialogue after its opening, or None where it begins otherwise.

        The opening may end inside a token, whose rest is encoded.
        """
        at, most = 0, len(whole)
        while at < most:  # the fewest tokens whose text is as long as the opening
            middle = (at + most) // 2
            longer = len(self.tokenizer.decode(whole[:middle])) >= len(opening)
            at, most = (at, middle) if longer else (middle + 1, most)
        begun = self.tokenizer.decode(whole[:at])
        if not begun.startswith(opening):
            return None
        rest = self.tokenizer.encode(begun[len(opening) :], add_special_tokens=False)
        return [*rest, *whole[at:]]

    def _without_thoughts(self, begun: list[int], rendered: Any) -> list[int]:
        """Return the tokens of a turn whose thoughts a template drops, though it opens them."""
        header = self.opened_thought.sub("", self.tokenizer.decode(begun))
        turn = self._after(header, list(rendered.token_ids))
        return self._sampled(rendered) if turn is None else turn

    def _sampled(self, rendered: Any) -> list[int]:
        """Return the tokens of a rendered turn that the library says the agent has sampled."""
        if not rendered.sampled_mask:
            raise ValueError(
                f"dialect.native.renderer {self.name}: the policy's chat template writes a turn "
                "otherwise than it opens one, and the library does not know which of its tokens "
                "the agent writes: name the template's family, or choose the dialect tags"
            )
        origins = zip(
            rendered.token_ids, rendered.sampled_mask, rendered.message_indices, strict=True
        )
        return [token for token, sampled, message in origins if sampled and message == 1]


def shortened(
    observation: Observation, encoded: Callable[[str], list[int]], limit: int
) -> tuple[str, list[int]]:
    """Return an observation in at most ``limit`` tokens if possible, its end being cut.

    Returns its text, and its tokens. The line of the admissible actions stays whole where it fits.
    ``encoded`` returns the tokens of a text, with the marks around it.
    """
    text, actions = observation.text.strip(), talk.actions_line(observation)
    whole = encoded(text + actions)
    if len(whole) <= limit:
        return text + actions, whole
    for body, ending in ((text, ELLIPSIS + actions), (text + actions, ELLIPSIS)):
        if len(best := encoded(ending)) > limit:
            continue
        fits, most = 0, len(body)  # the first characters that fit; those that may
        while fits < most:
            middle = (fits + most + 1) // 2
            tokens = encoded(body[:middle] + ending)
            if len(tokens) <= limit:
                fits, best = middle, tokens
            else:
                most = middle - 1
        return body[:fits] + ending, best
    return ELLIPSIS, encoded(ELLIPSIS)


def _calling(*ids: str) -> Message:
    """Return a probe's turn that makes a call of each id."""
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": "probe", "arguments": {"text": f"input {name}"}},
        }
        for name in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _sound(parsed: Any) -> bool:
    """Return whether the library could read a call; a tool that is unknown answers for itself."""
    return str(parsed.status) in ("ok", "unknown_tool")


def _openai(spec: ToolSpec) -> Message:
    parameters = json.loads(json.dumps(dict(spec.parameters)))
    function = {"name": spec.name, "description": spec.description, "parameters": parameters}
    return {"type": "function", "function": function}


def open_native(
    settings: Native, tokenizer: Any, dialogue: Dialogue, specs: Sequence[ToolSpec]
) -> NativeDialect:
    """Open the dialect.

    Raises ValueError where no family fits the policy's tokenizer and its chat template, where the
    prompt lacks a part, or where calls of tools could not be read or go on.
    """
    refuse("native", tokenizer_faults(tokenizer))
    if family.canonical(settings.renderer) in (family.AUTO, family.DEFAULT):
        with that_ends("native"):
            refuse("native", template_faults(tokenizer, dialogue))
    if family.canonical(settings.renderer) == family.DEFAULT and specs:
        tokenizer = with_calls(tokenizer)
    name, renderer = family.open_renderer(
        settings.renderer, settings.options, tokenizer, dialogue.date
    )
    if name == family.DEFAULT:
        refuse("native", end_faults(tokenizer, dialogue))
    told = [] if [spec.name for spec in specs] == [FREE_ACT] else [spec.name for spec in specs]
    opened: list[NativeDialect] = []

    def render(messages: Messages, begins: bool) -> str:
        tokens = renderer.render_ids(list(messages), tools=None, add_generation_prompt=begins)
        return str(tokenizer.decode(tokens))

    def prompt() -> str:
        opened.append(NativeDialect(name, renderer, tokenizer, dialogue, specs))
        return str(tokenizer.decode(opened[0].prompt(PROBE)))

    with that_ends("native"):
        refuse("native", prompt_faults(prompt, render, dialogue, told))
    return _reading(settings, opened[0], specs) if name == family.DEFAULT and told else opened[0]


def _reading(settings: Native, dialect: NativeDialect, specs: Sequence[ToolSpec]) -> NativeDialect:
    """Return a dialect of no family that reads the calls that its chat template writes.

    Where the options name no parser, the first of the library's that reads one is taken.

    Raises ValueError where there is none, or where the template has no calls.
    """
    tokenizer, dialogue = dialect.tokenizer, dialect.dialogue
    named = settings.options.get(family.PARSER)
    fault = ""
    for parser in [named] if named else family.parsers():
        options = {**settings.options, family.PARSER: parser}
        name, renderer = family.open_renderer(family.DEFAULT, options, tokenizer, dialogue.date)
        reading = NativeDialect(name, renderer, tokenizer, dialogue, specs)
        if not (fault := call_fault(reading, specs[0], str(named or ""))):
            return reading
    refuse("native", [fault])
    return dialect


def serving(settings: Native, dialect: NativeDialect) -> dict[str, Any]:
    """Return what an inference server needs to speak the dialect."""
    dated = dialect.name == family.HARMONY or has_clock(dialect.tokenizer)
    shown = {"date": dialect.dialogue.date.isoformat()} if dated else {}
    parser = {"tool_call_parser": TEXT_CALLS} if reads_text(dialect.renderer) else {}
    return family.serving(dialect.name, dialect.ends, dialect.stop_strings) | parser | shown


DIALECT = DialectKind(
    Native,
    open_native,
    faults=lambda settings: family.faults(settings.renderer, settings.options),
    serving=serving,
    several_calls=True,
)
