"""One episode of a program: the answers that were sampled for it, and how they follow each other.

A request whose messages extend those of an earlier one, and what it was answered, goes on from the
tokens that were sampled there. Any other one, after a compaction, with another system message or of
a sub-agent, begins with a prompt of its own. What an answer is drawn with comes from the messages
before it, never from the time at which they came.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tasks.dialects.chat_format import FORGED, ChatFormat, ChatMessage, TurnReply
from tasks.dialects.contract import Tokens
from tasks.engines import Sample
from tasks.programs.asking import Asked
from tasks.programs.contract import Result
from tasks.programs.messages import Canonical, RefusedError, canonical, digest, tool_form
from tasks.trees.outcomes import StopReason
from tasks.trees.tree import Question

# No token of a text is longer on average, so a longer text is refused before it is tokenized, which
# takes seconds for megabytes and lets all other programs wait.
CHARACTERS_A_TOKEN = 128


@dataclass(frozen=True)
class SampledAnswer:
    """One sampled answer, and where it stands."""

    asked: Asked
    forms: tuple[Canonical, ...]  # of the messages that it answers
    key: str  # of these messages, the tools and its number among equal ones
    before: SampledAnswer | None  # from whose tokens it goes on; None: its prompt is its own
    prompt: Tokens  # all tokens before the turn
    sample: Sample
    reply: TurnReply
    order: tuple[int, int, str]  # of its turn in the trajectory: round, depth, key
    begun: Beginning | None = None  # what it goes on from inside a turn

    @property
    def observed(self) -> Tokens:
        """Return the tokens between the turn before and this one, or the whole prompt."""
        return self.prompt[0 if self.before is None else self.before.end :]

    @property
    def end(self) -> int:
        """Return how many tokens there are with this turn."""
        return len(self.prompt) + len(self.tokens)

    @property
    def tokens(self) -> Tokens:
        """Return the sampled tokens."""
        return self.sample.tokens


@dataclass(frozen=True)
class Beginning:
    """The first tokens of an answer, from which an episode that branches inside it goes on."""

    answer: SampledAnswer
    tokens: int


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may use."""

    requests: int
    prompt_tokens: int  # of a request
    response_tokens: int  # sampled and observed tokens of the episode, prompts aside
    tool_calls: int


@dataclass
class ProgramEpisode:
    """What the program of one episode has asked so far; the thread that samples changes it."""

    question: Question
    index: int  # of the leaf
    seed: str  # of the batch
    limits: EpisodeLimits
    answers: list[SampledAnswer] = field(default_factory=list)
    asked: int = 0  # requests that were taken
    used: int = 0  # response tokens so far
    reserved: int = 0  # more of them, for answers that are being sampled
    counts: dict[str, int] = field(default_factory=dict)  # of equal conversations
    result: Result | None = None  # what the program has returned
    recorded: list[SampledAnswer] = field(default_factory=list)  # to be given once more, in order
    begun: Beginning | None = None  # of the answer after these
    first: int = -1  # the leaf that began where the branches that lead here do; -1: this one
    shared: int = 0  # its first answers that it shares with the episode that it branches from
    results: int = 0  # of tools, that have been read
    differs: bool = False  # it asked something else than was recorded
    outcome: str = ""  # an Outcome, where the program has failed
    fault: str = ""  # what is known of that

    @property
    def root(self) -> int:
        """Return the leaf from the prompt that this one has branched from, at once or by others."""
        return self.index if self.first < 0 else self.first

    def branch(self, other: ProgramEpisode, shared: int, tokens: int = 0) -> None:
        """Begin as another episode did: so many of its answers, and so many tokens of the next."""
        answers = other.in_order()
        self.recorded, self.first = answers[:shared], other.root
        self.begun = Beginning(answers[shared], tokens) if tokens else None

    def again(self, asked: Asked) -> list[SampledAnswer] | None:
        """Return the recorded answers to a request; None where it is to be sampled.

        Requests of one moment may come in another order, and with others that were answered later.
        """
        if not self.recorded:
            return None
        prefix = _prefix(asked)
        number, recorded = self.counts.get(prefix, 0), {each.key: each for each in self.recorded}
        keys = [f"{prefix}/{number + choice}" for choice in range(asked.choices)]
        if not all(key in recorded for key in keys):
            return None
        expected = [recorded[key] for key in keys]
        self.recorded = [each for each in self.recorded if each.key not in keys]
        self.counts[prefix] = number + asked.choices
        self.asked += asked.choices
        self.shared += asked.choices
        self.results += _results_before(expected[0])
        self.add(expected)
        return expected

    def place(self, asked: Asked, chat: ChatFormat) -> Placed:
        """Return where an answer to a request stands, for its sampling.

        Raises RefusedError where the episode has used up a limit, or the prompt has no room.
        """
        self._check_limits(asked)
        self.asked += asked.choices  # also of one that is refused below, since it costs time
        forms, prefix = tuple(canonical(asked.messages)), _prefix(asked)
        before, following = self._continued(asked, forms, tool_form(asked.tools))
        results = sum(message.role == "tool" for message in following)
        if self.results + results > self.limits.tool_calls:
            raise self._too_many_calls(self.results + results)
        prompt, before = _prompt(chat, asked, before, following)
        observed = len(prompt) - before.end if before else 0
        limit = min(asked.max_tokens, self._room(prompt, observed) // asked.choices)
        if limit < 1:
            raise self._spent()
        number = self.counts.get(prefix, 0)
        self.counts[prefix] = number + asked.choices
        self.results += results
        self.reserved += observed + limit * asked.choices
        keys = [f"{prefix}/{number + choice}" for choice in range(asked.choices)]
        begun = self._begun(keys, prompt, limit)
        return Placed(asked, forms, keys, before, prompt, limit, chat, begun)

    def _begun(self, keys: Sequence[str], prompt: Tokens, limit: int) -> Beginning | None:
        """Return what an answer begins with, once; None for the other answers."""
        begun = self.begun
        if begun is None or keys != [begun.answer.key] or limit <= begun.tokens:
            return None
        if not np.array_equal(prompt, begun.answer.prompt):
            return None
        self.begun = None
        return begun

    def close(self) -> None:
        """Note whether a program that has ended by itself has asked all that was recorded."""
        left = bool(self.recorded) or self.begun is not None
        self.differs = self.differs or (left and self.result is not None)

    def _check_limits(self, asked: Asked) -> None:
        limits = self.limits
        if self.asked + asked.choices > limits.requests:
            raise RefusedError(
                f"the episode has made {self.asked} requests, and 'requests' allows "
                f"{limits.requests}",
                429,
                "too_many_requests",
            )
        results = sum(message.role == "tool" for message in asked.messages)
        if results > limits.tool_calls:
            raise self._too_many_calls(results)
        characters = sum(len(message.content) for message in asked.messages)
        if characters > CHARACTERS_A_TOKEN * limits.prompt_tokens:  # too many to be counted first
            raise RefusedError(
                f"the conversation has {characters} characters, and program's 'prompt_tokens' "
                f"allows {limits.prompt_tokens} tokens",
                400,
                "context_length_exceeded",
            )

    def _too_many_calls(self, results: int) -> RefusedError:
        allowed = f"dialogue.tool_calls allows {self.limits.tool_calls}"
        said = f"with these the agent has had {results} tool results, and {allowed}"
        return RefusedError(said, 400, "too_many_calls")

    def _room(self, prompt: Tokens, observed: int) -> int:
        """Return how many tokens are left. Raises RefusedError for a prompt that is too long."""
        limits = self.limits
        if len(prompt) > limits.prompt_tokens:
            raise RefusedError(
                f"the conversation has {len(prompt)} tokens, and program's 'prompt_tokens' allows "
                f"{limits.prompt_tokens}",
                400,
                "context_length_exceeded",
            )
        return limits.response_tokens - self.used - self.reserved - observed

    def _spent(self) -> RefusedError:
        most = self.limits.response_tokens
        said = f"the episode has used its {most} tokens (dialogue.response_tokens)"
        return RefusedError(said, 400, "context_length_exceeded")

    def _continued(
        self, asked: Asked, forms: tuple[Canonical, ...], tools: str
    ) -> tuple[SampledAnswer | None, Sequence[ChatMessage]]:
        """Return the answer that a request goes on from, and the messages after it."""
        fitting = [
            answer
            for answer in self.answers
            if len(forms) > len(answer.forms) + 1
            and forms[: len(answer.forms)] == answer.forms
            and forms[len(answer.forms)] == canonical([answer.reply.message])[0]
            and tool_form(answer.asked.tools) == tools
            and answer.reply.outcome not in FORGED
        ]
        if not fitting:
            return None, ()

        def closest(answer: SampledAnswer) -> tuple[int, bool, tuple[int, int]]:
            thoughts = asked.messages[len(answer.forms)].thoughts
            same = bool(thoughts) and answer.reply.message.thoughts == thoughts
            return len(answer.forms), same, answer.order[:2]

        last = max(fitting, key=closest)  # the newest of those; the first choice of a request
        following = asked.messages[len(last.forms) + 1 :]
        if any(message.role in ("assistant", "system") for message in following):
            return None, ()
        return last, following

    def add(self, answers: Sequence[SampledAnswer]) -> None:
        """Keep the answers that have been sampled for the requests that were placed."""
        for answer in answers:
            self.answers.append(answer)
            self.used += len(answer.tokens) + (len(answer.observed) if answer.before else 0)

    def in_order(self) -> list[SampledAnswer]:
        """Return all answers in the order of the trajectory, which no clock decides."""
        return sorted(self.answers, key=lambda answer: answer.order)


@dataclass(frozen=True)
class Placed:
    """A request that is about to be sampled."""

    asked: Asked
    forms: tuple[Canonical, ...]
    keys: list[str]  # of each answer
    before: SampledAnswer | None
    prompt: Tokens
    max_tokens: int
    chat: ChatFormat
    begun: Beginning | None = None

    @property
    def head(self) -> Tokens:
        """Return the tokens of the answer that are given."""
        return self.begun.answer.tokens[: self.begun.tokens] if self.begun else self.prompt[:0]

    def whole(self, sample: Sample) -> Sample:
        """Return a sample with what its turn began with."""
        if self.begun is None:
            return sample
        before, count = self.begun.answer.sample, self.begun.tokens
        return replace(
            sample,
            tokens=np.concatenate([before.tokens[:count], sample.tokens]),
            logprobs=np.concatenate([before.logprobs[:count], sample.logprobs]),
            entropies=np.concatenate([before.entropies[:count], sample.entropies]),
        )


def _results_before(answer: SampledAnswer) -> int:
    """Return how many results of tools were read between an answer and the one it goes on from."""
    if answer.before is None:
        return 0
    following = answer.asked.messages[len(answer.before.forms) + 1 :]
    return sum(message.role == "tool" for message in following)


def _prefix(asked: Asked) -> str:
    """Return what the messages and tools of a request are known by."""
    return digest(tuple(canonical(asked.messages)), tool_form(asked.tools))


def _prompt(
    chat: ChatFormat, asked: Asked, before: SampledAnswer | None, following: Sequence[ChatMessage]
) -> tuple[Tokens, SampledAnswer | None]:
    """Return all tokens before the answer; where no bridge leads on, those of a fresh prompt."""
    if before is not None:
        more = chat.extend(before.prompt, before.tokens, following)
        if more is not None:
            return np.concatenate([before.prompt, before.tokens, more]), before
    try:
        return chat.prompt(asked.messages), None
    except ValueError as error:
        raise RefusedError(str(error)) from None


def seed_of(episode: ProgramEpisode, key: str) -> int:
    """Return the seed of an answer: from run, question, episode, messages and their count."""
    words = (episode.seed, episode.question.id, str(episode.index), key)
    return int.from_bytes(hashlib.blake2b("/".join(words).encode(), digest_size=8).digest())


def until_stop(
    sample: Sample, decode: Callable[[Tokens], str], stops: Sequence[str]
) -> tuple[Sample, bool]:
    """Return a sample cut behind the token that completes one of a request's stop strings.

    What was drawn after it was never read. Also whether it was cut. Strings are looked for in the
    text of all tokens together: a character may have several, and a space may belong to none. The
    end token ends a turn by itself, also where a string names it.
    """

    def holds(count: int) -> bool:
        text = decode(sample.tokens[:count])
        return any(stop in text for stop in stops)

    most = len(sample.tokens) - (sample.stopped == StopReason.END)
    if not stops or not holds(most):
        return sample, False
    count = bisect_left(range(most), True, key=holds)
    parts = (sample.tokens[:count], sample.logprobs[:count], sample.entropies[:count])
    return Sample(*parts, StopReason.STOP, sample.experts), True


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the strings in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
