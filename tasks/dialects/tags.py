"""The dialect of tags: thoughts, calls, results and answers stand in tags, in one answer.

``<think>...</think><move>left</move><result>...</result>...<answer>\\boxed{3}</answer>``. The whole
response is one message of the agent; a tool has a tag of its name. Between its tags stands the
text of its only parameter, or a JSON object of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects.arpo_format import format_faults
from tasks.dialects.contract import Context, DialectKind, Exchange, Tokens, Turn, several
from tasks.dialects.prompt_check import (
    PROBE,
    has_clock,
    lacking_parts,
    refuse,
    template_faults,
    that_ends,
)
from tasks.dialects.written_turns import said
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import ENDED_BY_WORLD, Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

TOOLS = "{tools}"  # in a system message; the description of the tools takes its place
RESULTS = 1024  # written results that are kept: trajectories of a group often get the same one
UNANSWERED = frozenset({"answer", "boxed"})  # faults of a response without a sound answer


class Tags(Frozen):
    """The settings of the dialect: it has none."""


class TagsReader:
    """What reads a whole response in tags; it needs no tokenizer."""

    def __init__(self, tools: Sequence[str] = talk.TOOL_TAGS) -> None:
        self.tools = tuple(tools)
        self.own = (*talk.TOOL_TAGS, *talk.own_tools(self.tools))  # tags of tools

    def answer(self, turns: Sequence[str]) -> str | None:
        """Return the final answer in the texts of an agent's turns, or None."""
        return talk.final_answer("".join(turns))

    def faults(self, turns: Sequence[str], outcome: str) -> list[str]:
        """Return the faults of the format; an episode that its world has ended needs no answer."""
        words = "".join(turns)
        faults = format_faults(words, self.own)
        if outcome in ENDED_BY_WORLD and "<answer>" not in words:
            faults = [fault for fault in faults if fault not in UNANSWERED]
        return faults + ["forged_turn"] * (outcome == Outcome.FORGED_TURN)

    def calls(self, turn: str) -> tuple[Call, ...]:
        """Return the tool call in the text of a turn: one at most, which ends it."""
        return several(self.call(turn))

    def call(self, turn: str) -> Call | None:
        """Return the tool call in the text of a turn, or None."""
        return talk.read_call(turn, self.tools)


class TagsDialect(TagsReader):
    """The dialect of tags; see ``tasks.dialects.contract.Dialect``."""

    def __init__(self, tokenizer: Any, dialogue: Dialogue, specs: Sequence[ToolSpec]) -> None:
        super().__init__([spec.name for spec in specs])
        self.specs = tuple(specs)
        self.tokenizer = tokenizer
        system = dialogue.system.replace(TOOLS, describe(specs))
        self.dialogue = dialogue.model_copy(update={"system": system})
        self.stop_strings = talk.stop_strings(tokenizer, self.tools)
        self.forged = talk.forged(tokenizer, self.tools)
        self._written = lru_cache(RESULTS)(self._write)

    def prompt(self, question: Question, shown: str = "") -> Tokens:
        if shown:
            question = replace(question, text=f"{question.text}\n\n{talk.readable(shown)}")
        return talk.prompt_tokens(self.tokenizer, self.dialogue, question, self.tools)

    def read(self, prompt: Tokens, turn: Tokens, text: str, stopped: str) -> Turn:
        outcome, call = talk.read_turn(text, stopped, self.forged, self.tools)
        return Turn(outcome, several(call), said(text, self.tools))

    def observe(
        self,
        prompt: Tokens,
        turn: Tokens,
        calls: Sequence[Call],
        observations: Sequence[Observation],
        limit: int,
    ) -> tuple[str, Tokens]:
        written = [self._written(each, limit) for each in several(observations)]
        if len(written) == 1:  # a turn ends with its first call; a dialect on top may read more
            return written[0]
        return "".join(text for text, _ in written), np.concatenate([each for _, each in written])

    def _write(self, observation: Observation, limit: int) -> tuple[str, Tokens]:
        return talk.result_tokens(self.tokenizer, observation, limit, self.tools)

    def restart(self, question: Question, shown: str, past: Sequence[Exchange]) -> Tokens:
        raise NotImplementedError("a dialogue in tags goes on from any tokens")

    def trace(
        self, question: Question, parts: Sequence[tuple[str, bool]], shown: str = ""
    ) -> list[Context]:
        prompt, limit = self.prompt(question, shown), self.dialogue.result_tokens
        return [talk.trace_tokens(self.tokenizer, prompt, parts, limit, self.tools)]


def describe(specs: Sequence[ToolSpec]) -> str:
    """Return what an agent is told about its tools, and how to call them."""
    lines = ["You can call these tools. Write a call as shown, then wait for its <result>."]
    for spec in specs:
        lines += [f"<{spec.name}>{_form(spec)}</{spec.name}>: {spec.description}"]
        lines += [f"  {name}: {_kind(schema)}" for name, schema in _parameters(spec).items()]
    return "\n".join(lines)


def _form(spec: ToolSpec) -> str:
    """Return what stands between the tags of a tool, with the names of its parameters."""
    if spec.text_parameter:
        return spec.text_parameter
    inside = ", ".join(f'"{name}": ...' for name in _parameters(spec))
    return f"{{{inside}}}" if inside else ""


def _parameters(spec: ToolSpec) -> dict[str, Any]:
    return dict(spec.parameters.get("properties", {}))


def _kind(schema: Any) -> str:
    """Describe a parameter: its type or its values, and what it is."""
    if not isinstance(schema, dict):
        return "any"
    values = schema.get("enum")
    kind = "one of " + ", ".join(map(str, values)) if values else str(schema.get("type", "any"))
    return f"{kind}. {schema['description']}" if schema.get("description") else kind


def open_tags(
    settings: Tags, tokenizer: Any, dialogue: Dialogue, specs: Sequence[ToolSpec]
) -> TagsDialect:
    """Open the dialect.

    Raises ValueError for a tool that is called as another tag, and a template that leaves out a
    part of the prompt.
    """
    taken = [spec.name for spec in specs if spec.name in talk.OTHER_TAGS]
    if taken:
        raise ValueError(
            f"no tool may be called {', '.join(taken)} in the dialect tags, whose own tags are "
            f"{', '.join(talk.OTHER_TAGS)}: rename it"
        )
    if tokenizer.eos_token_id is None:
        fault = "the policy's tokenizer has no eos_token, so no turn could end: set it in "
        refuse("tags", [f"{fault}tokenizer_config.json to the mark that ends a turn"])
    with that_ends("tags"):
        names = [spec.name for spec in specs]
        refuse("tags", template_faults(tokenizer, dialogue, talk.tags(names)))
    dialect = TagsDialect(tokenizer, dialogue, specs)
    told = [spec.name for spec in specs] if TOOLS in dialogue.system else []
    refuse("tags", lacking_parts(tokenizer.decode(dialect.prompt(PROBE)), dialogue, told))
    return dialect


def serving(settings: Tags, dialect: TagsDialect) -> dict[str, Any]:
    """Return what an inference server needs to speak the dialect."""
    told = {"dialect": "tags", "stop": list(dialect.stop_strings), "tools": list(dialect.tools)}
    shown = {"date": dialect.dialogue.date.isoformat()} if has_clock(dialect.tokenizer) else {}
    return told | shown


DIALECT = DialectKind(Tags, open_tags, tags=talk.tags, serving=serving)
