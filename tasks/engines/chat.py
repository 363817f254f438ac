"""A policy of this machine as a chat model, through the engine that the recipe names.

Messages become a prompt by the tokenizer's chat template. A policy that speaks the dialect of tags
has learned to read tool results inside its own message: where ``<result>`` follows a message of the
agent, both are written that way, as in a rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.agent import Agent, Dialogue
from tasks.chat.contract import ChatReply, ChatRequest
from tasks.engines import ENGINES, Engine, SamplingRequest
from tasks.engines.contract import most_positions
from tasks.ledger.artifacts import Artifact
from tasks.trees import dialogue as talk
from tasks.trees.markers import encode
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Message, Observation, Question

OPENING, CLOSING = talk.RESULT_TAGS
NO_LAST_POSITION = 2**31  # tokens of a policy that takes contexts of any length
TOO_LONG = "context"  # fault of a request whose prompt leaves no room for a token
FINISHES = {StopReason.STOP: "stop", StopReason.END: "stop", StopReason.LENGTH: "length"}


@dataclass(frozen=True)
class PolicyModel:
    """A ChatModel (tasks/chat/contract.py) over an engine."""

    name: str
    engine: Engine
    tokenizer: Any
    dialogue: Dialogue
    in_tags: bool  # whether the policy speaks the dialect of tags
    context: int  # tokens of the policy, at most
    rows: int  # requests that are sampled side by side, at most

    def ask(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """Sample the answers; a prompt that does not fit has a reply with the fault "context"."""
        prompts = [self.prompt(request.messages) for request in requests]
        replies: list[ChatReply | None] = [
            ChatReply("", len(prompt), fault=TOO_LONG) if len(prompt) >= self.context else None
            for prompt in prompts
        ]
        waiting = [index for index, reply in enumerate(replies) if reply is None]
        # a session has one temperature, top-p and set of stop strings
        waiting.sort(key=lambda index: _way(requests[index]))
        for way, indices in groupby(waiting, key=lambda index: _way(requests[index])):
            alike = list(indices)
            for start in range(0, len(alike), self.rows):
                part = alike[start : start + self.rows]
                sampled = self._sample([(requests[at], prompts[at]) for at in part], *way)
                for index, reply in zip(part, sampled, strict=True):
                    replies[index] = reply
        return [reply for reply in replies if reply is not None]

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Return the tokens of a prompt, up to where the policy begins. [T]

        A system message is the recipe's own, as in a rollout: tags in it are no quotations.
        """
        joined = self._joined_from(messages)
        *before, last = messages[:joined]
        said = [message.content for message in before if message.role == "system"]
        others = tuple(message for message in before if message.role != "system")
        question = Question("", "", last.content, (), before=others)
        asked = self.dialogue.model_copy(update={"system": "\n\n".join(said)})
        opening = talk.prompt_tokens(self.tokenizer, asked, question)
        return np.concatenate([opening, *map(self._inside, messages[joined:])])

    def _joined_from(self, messages: Sequence[Message]) -> int:
        """Return from which message on all stand in one message of the agent."""
        roles = [message.role for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(messages)
        results = [message for message in messages[first:] if message.role == "user"]
        inside = all(message.content.startswith(OPENING) for message in results)
        return first if self.in_tags and inside else len(messages)

    def _inside(self, message: Message) -> NDArray[np.int32]:
        """Return the tokens of a turn, or of a result, inside the agent's message."""
        if message.role == "assistant":
            return encode(self.tokenizer, message.content)
        text = message.content.removeprefix(OPENING).removesuffix(CLOSING).strip()
        observation = Observation(Outcome.OK, text)
        return talk.result_tokens(self.tokenizer, observation, self.dialogue.result_tokens)[1]

    def _sample(
        self,
        requests: Sequence[tuple[ChatRequest, NDArray[np.int32]]],
        temperature: float,
        top_p: float,
        stop: tuple[str, ...],
    ) -> list[ChatReply]:
        """Sample requests that differ in prompt, seed and length alone."""
        rooms = [min(one.max_tokens, self.context - len(prompt)) for one, prompt in requests]
        most = max(len(prompt) + room for (_, prompt), room in zip(requests, rooms, strict=True))
        with self.engine.session(len(requests), most, temperature, top_p, stop) as session:
            samples = session.sample(
                [
                    SamplingRequest(session.open(), prompt, one.seed, room)
                    for (one, prompt), room in zip(requests, rooms, strict=True)
                ]
            )
        return [
            ChatReply(
                self._text(sample.tokens, stop),
                len(prompt),
                len(sample.tokens),
                FINISHES[StopReason(sample.stopped)],
            )
            for sample, (_, prompt) in zip(samples, requests, strict=True)
        ]

    def _text(self, tokens: NDArray[np.int32], stop: Sequence[str]) -> str:
        """Return a reply's text, without the end token, up to the first stop string."""
        text: str = self.tokenizer.decode(tokens).removesuffix(self.tokenizer.eos_token or "")
        ends = [at for mark in stop if (at := text.find(mark)) >= 0]
        return text[: min(ends, default=len(text))]


def _way(request: ChatRequest) -> tuple[float, float, tuple[str, ...]]:
    return request.temperature, request.top_p, request.stop


@contextmanager
def open_policy(folder: Path, agent: Agent, rows: int, name: str = "") -> Iterator[PolicyModel]:
    """Load a policy as a recipe's engine samples it, for the length of the block.

    ``rows``: requests that are sampled side by side, at most.

    Raises ValueError or RuntimeError, with the remedy, for an engine or a policy that is missing.
    """
    kind = ENGINES[agent.engine.kind]
    if missing := kind.installed(agent.engine):
        raise ValueError(f"'engine.kind' = {agent.engine.kind!r}, {missing}")
    from tasks.policy.resident import Resident  # with torch: a model at a server needs none

    actor = Resident().load_learner(folder, agent.machine)
    engine = kind.open(actor, Artifact.at(folder), agent.engine, agent.machine, rows)
    yield PolicyModel(
        name=name or folder.name,
        engine=engine,
        tokenizer=actor.tokenizer,
        dialogue=agent.dialogue,
        in_tags="tags" in agent.dialect,
        context=most_positions(actor.model.config) or NO_LAST_POSITION,
        rows=rows,
    )
    engine.release()
