"""Sample the answers that programs wait for: all that wait together, in one pass of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.dialects.chat_format import ChatFormat, ChatMessage, TurnReply
from tasks.dialects.chats import open_chat
from tasks.dialects.written_turns import in_tags
from tasks.engines import Engine, Sample, SamplingRequest, SamplingSession
from tasks.policy.parallel import side_by_side
from tasks.programs.asking import Asked, FixedSampling
from tasks.programs.contract import ProgramSettings, task_of
from tasks.programs.episodes import (
    Placed,
    ProgramEpisode,
    SampledAnswer,
    before_stop,
    seed_of,
    until_stop,
)
from tasks.programs.messages import RefusedError, messages_of
from tasks.programs.request_queue import RequestQueue, WaitingRequest
from tasks.trees.outcomes import StopReason

OWN_CALL = re.compile(r"call_?(\d{1,5})")  # the ids that dialects give to calls
Job = tuple[WaitingRequest, Placed, int]  # a request, where it stands, and which of its choices


@dataclass
class Counts:
    """What a rollout by programs has cost."""

    requests: int = 0
    rounds: int = 0
    early_rounds: int = 0  # begun without some who worked: what was drawn together may differ
    idle: float = 0.0  # seconds in which nothing was sampled

    def add(self, other: Counts) -> None:
        """Add what another batch has cost."""
        self.requests += other.requests
        self.rounds += other.rounds
        self.early_rounds += other.early_rounds
        self.idle += other.idle


@dataclass
class Seat:
    """The sessions of one replica of the engine, each for turns that end at the same strings."""

    engine: Engine
    episodes: int
    sessions: dict[tuple[str, ...], SamplingSession] = field(default_factory=dict)
    handles: dict[tuple[tuple[str, ...], int], int] = field(default_factory=dict)


class Rounds:
    """The engine for some episodes, and the dialect in which their conversations are written."""

    def __init__(
        self,
        episodes: Sequence[ProgramEpisode],
        engine: Engine,
        tokenizer: Any,
        dialogue: Dialogue,
        sampling: FixedSampling,
        settings: ProgramSettings,
        dialect: Mapping[str, Frozen],
        queue: RequestQueue,
    ) -> None:
        """Episodes of one question follow each other; they are sampled in the same replica."""
        self.tokenizer, self.sampling, self.queue = tokenizer, sampling, queue
        self.counts = Counts()
        self.chats: dict[str, ChatFormat] = {}
        self.open = partial(open_chat, dialect, tokenizer, dialogue)
        self.questions = {
            name: place
            for place, name in enumerate(dict.fromkeys(each.question.id for each in episodes))
        }
        engines = engine.replicas(len(self.questions))
        self.seats = [Seat(each, len(episodes)) for each in engines]
        self.prompt_tokens = settings.prompt_tokens
        self.context = settings.prompt_tokens + dialogue.turn_tokens
        self.places = {id(episode): place for place, episode in enumerate(episodes)}

    def sample(self, requests: Sequence[WaitingRequest], stack: ExitStack) -> None:
        """Sample the answers of a round, and give them to those who wait."""
        self.counts.rounds += 1
        self.counts.requests += len(requests)
        placed: list[tuple[WaitingRequest, Placed]] = []
        for request in sorted(requests, key=self._order):
            if (recorded := request.episode.again(request.asked)) is not None:
                self.queue.give(request, recorded)
                continue
            try:
                place = request.episode.place(request.asked, self._chat(request.asked))
                placed.append((request, place))
            except RefusedError as error:
                self.queue.give(request, error)
            except (OSError, MemoryError):  # of this machine, and no doing of the program
                raise
            except Exception as error:  # of any kind: one request must not end a training
                reason = f"the request cannot be read ({type(error).__name__}: {error})"[:500]
                self.queue.give(request, RefusedError(reason))
        jobs = [(r, p, choice) for r, p in placed for choice in range(len(p.keys))]
        samples = self._sampled(jobs, stack)
        answers: dict[int, list[SampledAnswer]] = {id(request): [] for request, _ in placed}
        for (request, place, choice), sample in zip(jobs, samples, strict=True):
            answers[id(request)].append(self._answer(place, choice, sample))
        for episode in {id(request.episode): request.episode for request, _ in placed}.values():
            of_episode = [request for request, _ in placed if request.episode is episode]
            episode.reserved = 0
            episode.add([answer for each in of_episode for answer in answers[id(each)]])
        for request, _ in placed:
            self.queue.give(request, answers[id(request)])

    def _order(self, request: WaitingRequest) -> tuple[int, int, str]:
        messages = request.asked.messages
        return self.places[id(request.episode)], len(messages), repr(messages)

    def _chat(self, asked: Asked) -> ChatFormat:
        """Return the dialect for the tools of a request. Raises RefusedError where it has none."""
        # In their own spelling: what an agent reads of its tools depends on no other agent.
        key = json.dumps([[tool.name, tool.description, tool.parameters] for tool in asked.tools])
        if key not in self.chats:
            try:
                self.chats[key] = self.open(asked.tools)
            except ValueError as error:
                raise RefusedError(str(error)) from None
        return self.chats[key]

    def _answer(self, place: Placed, choice: int, sample: Sample) -> SampledAnswer:
        """Read a sampled turn, up to a stop string of its request."""
        tokenizer, sample = self.tokenizer, place.whole(sample)
        if place.begun:  # the engine has not seen a stop string that began in what was given
            sample, _ = until_stop(sample, tokenizer.decode, place.chat.stop_strings)
        sample, cut = until_stop(sample, tokenizer.decode, place.asked.stop)
        text = tokenizer.decode(sample.tokens)
        if sample.stopped == StopReason.END:
            text = text.removesuffix(tokenizer.eos_token)
        if cut:
            text = before_stop(text, place.asked.stop)
        made = calls_before(place.asked.messages)
        reply = place.chat.reply(place.prompt, sample.tokens, text, sample.stopped, made)
        if cut:
            thoughts, _, said = in_tags(text, ())
            reply = TurnReply(ChatMessage("assistant", said, thoughts=thoughts), reply.outcome)
        order = (self.counts.rounds, len(place.forms), place.keys[choice])
        return SampledAnswer(
            place.asked,
            place.forms,
            place.keys[choice],
            place.before,
            place.prompt,
            sample,
            reply,
            order,
            place.begun,
        )

    # ------------------------------------------------------------ the engine

    def _sampled(self, jobs: Sequence[Job], stack: ExitStack) -> list[Sample]:
        """Sample turns, those of a question always in the same replica."""
        samples: dict[int, Sample] = {}
        parts: list[list[int]] = [[] for _ in self.seats]
        for index, (request, _, _) in enumerate(jobs):
            question = self.questions[request.episode.question.id]
            parts[question % len(self.seats)].append(index)
        for seat, part in zip(self.seats, parts, strict=True):
            for index in part:
                self._session(seat, jobs[index][1].chat.stop_strings, stack)

        def sample(number: int) -> None:
            samples.update(self._of_seat(self.seats[number], jobs, parts[number]))

        side_by_side(sample, [number for number, part in enumerate(parts) if part])
        return [samples[index] for index in range(len(jobs))]

    def _of_seat(
        self, seat: Seat, jobs: Sequence[Job], part: Sequence[int]
    ) -> list[tuple[int, Sample]]:
        """Sample the turns of one replica; an episode has one turn in a pass."""
        waves: dict[tuple[tuple[str, ...], int], list[int]] = {}
        taken: dict[tuple[tuple[str, ...], int], int] = {}
        for index in part:
            request, place, _ = jobs[index]
            one = (tuple(place.chat.stop_strings), self.places[id(request.episode)])
            taken[one] = taken.get(one, 0) + 1
            waves.setdefault((one[0], taken[one]), []).append(index)
        drawn: list[tuple[int, Sample]] = []
        for (stops, _), indices in waves.items():
            session = seat.sessions[stops]
            turns = [self._turn(seat, stops, jobs[index]) for index in indices]
            drawn += zip(indices, session.sample(turns), strict=True)
        return drawn

    def _turn(self, seat: Seat, stops: tuple[str, ...], job: Job) -> SamplingRequest:
        request, place, choice = job
        key = (stops, self.places[id(request.episode)])
        if key not in seat.handles:
            seat.handles[key] = seat.sessions[stops].open()
        seed = seed_of(request.episode, place.keys[choice])
        tokens = np.concatenate([place.prompt, place.head])
        most = place.max_tokens - len(place.head)
        return SamplingRequest(seat.handles[key], tokens, seed, most)

    def _session(self, seat: Seat, stops: Sequence[str], stack: ExitStack) -> None:
        """Open the session of a replica for turns that end at these strings, if it is not open."""
        key = tuple(stops)
        if key not in seat.sessions:
            opened = seat.engine.session(
                seat.episodes, self.context, self.sampling.temperature, self.sampling.top_p, key
            )
            seat.sessions[key] = stack.enter_context(opened)

    # ------------------------------------------------------------ episodes that asked nothing

    def fill(self, ended: Sequence[ProgramEpisode], stack: ExitStack) -> None:
        """Sample a token for each of these whose program has asked nothing of its own.

        Nobody reads it. It gives the episode a place in the tree, which learns from its outcome, or
        leaves it out, as the recipe says.
        """
        for episode in ended:
            episode.close()
        silent = [each for each in ended if len(each.answers) == each.shared]
        if not silent:
            return
        self.counts.rounds += 1  # behind all that was asked
        jobs: list[Job] = []
        for episode in silent:
            episode.differs = episode.differs or episode.first >= 0
            asked = Asked(messages_of(task_of(episode.question)["messages"]), (), 1)
            chat = self._chat(asked)
            prompt = chat.prompt(asked.messages)[-self.prompt_tokens :]
            place = Placed(asked, (), ["silent/0"], None, prompt, 1, chat)
            jobs.append((WaitingRequest(episode, asked), place, 0))
        for (request, place, _), sample in zip(jobs, self._sampled(jobs, stack), strict=True):
            request.episode.add([self._answer(place, 0, sample)])


def calls_before(messages: Sequence[ChatMessage]) -> int:
    """Return the number of the next call: ids stay apart where a program has dropped messages."""
    ids = [call.id for message in messages for call in message.calls]
    own = [int(match[1]) + 1 for name in ids if (match := OWN_CALL.fullmatch(name))]
    return max([len(ids), *own])
