"""Turns as engines outside this process get them, and the sessions that ask for turns.

A session keeps no state of its paths: whole contexts go in, and the engine finds the part that it
has computed, so a branch costs only its new tokens. Each turn has a seed of its own, so a turn can
be sampled again, anywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.engines.contract import Sample, SamplingRequest
from tasks.trees import marks
from tasks.trees.markers import any_of
from tasks.trees.outcomes import StopReason

# tokens, logprobs and entropies [T] of a turn
Drawn = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]


class EngineDiedError(RuntimeError):
    """An engine outside this process has ended, or does not answer."""


@dataclass(frozen=True)
class TurnRequest:
    """One turn to sample, as an engine outside this process gets it."""

    tokens: NDArray[np.int32]  # [context]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]  # strings that end a turn, as the end token does
    stop_tokens: tuple[int, ...]  # tokens that hold one of them, and the end token
    stop_texts: tuple[str, ...]  # those to find in the text; empty where tokens suffice
    tree: bytes = b""  # which tree it is of; turns of a tree share prefixes


class Sampler(Protocol):
    """What a session asks for turns."""

    tokenizer: Any

    def pieces(self) -> list[str]:
        """Return the text of each token of the vocabulary."""

    def sample(self, turns: Sequence[TurnRequest]) -> list[Drawn]:
        """Sample turns; results are in their order."""


class TurnSession:
    """The paths of one batch of dialogues. See ``tasks.engines.Session``."""

    def __init__(
        self,
        engine: Sampler,
        paths: int,
        context: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str],
    ) -> None:
        self.engine, self.paths, self.context = engine, paths, context
        self.temperature, self.top_p, self.strings = temperature, top_p, tuple(stop)
        self.pieces, self.end = engine.pieces(), engine.tokenizer.eos_token_id
        self.stop = re.compile("|".join(map(re.escape, stop))) if stop else None
        self.stop_tokens = (self.end, *stop_tokens(self.pieces, stop))
        self.stop_texts = stop_texts(self.pieces, stop)
        self.open_handles: set[int] = set()
        self.trees: dict[int, bytes] = {}  # handle -> digest of the prompt that its path began with
        self.handles = 0

    def open(self) -> int:
        if len(self.open_handles) == self.paths:
            raise RuntimeError(f"all {self.paths} paths of this session are in use")
        self.handles += 1
        self.open_handles.add(self.handles)
        return self.handles

    def fork(self, handle: int) -> int:
        branch = self.open()
        if handle in self.trees:
            self.trees[branch] = self.trees[handle]
        return branch

    def close(self, handle: int) -> None:
        self.open_handles.remove(handle)
        self.trees.pop(handle, None)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        if not requests:
            return []
        longest = max(len(request.tokens) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ValueError(f"a turn may reach {longest} tokens, the session has {self.context}")
        turns = [self._turn(request) for request in requests]
        return [self._sample(*drawn) for drawn in self.engine.sample(turns)]

    def _turn(self, request: SamplingRequest) -> TurnRequest:
        if request.handle not in self.trees:  # its first turn: the tokens are the prompt
            digest = hashlib.blake2b(request.tokens.tobytes(), digest_size=16).digest()
            self.trees[request.handle] = digest
        return TurnRequest(
            request.tokens,
            request.seed,
            request.max_tokens,
            self.temperature,
            self.top_p,
            self.strings,
            self.stop_tokens,
            self.stop_texts,
            self.trees[request.handle],
        )

    def _sample(self, tokens: Any, logprobs: Any, entropies: Any) -> Sample:
        """Cut the turn at its end, which vLLM may notice some tokens later; add why it stopped.

        The text of the end token is no text of the turn, whatever strings it contains.
        """
        ended = tokens[-1] == self.end
        texts = [self.pieces[token] for token in (tokens[:-1] if ended else tokens)]
        stopped = StopReason.END if ended else StopReason.LENGTH
        if self.stop and len(ends := marks.completed(self.stop, texts)):
            tokens, stopped = tokens[: ends[0] + 1], StopReason.STOP
        return Sample(tokens, logprobs[: len(tokens)], entropies[: len(tokens)], stopped)


def stop_tokens(pieces: Sequence[str], stop: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens whose text contains a whole stop string."""
    whole = any_of(stop)
    return tuple(token for token, piece in enumerate(pieces) if whole.search(piece))


def stop_texts(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings that vLLM has to find in text: none if each is one token.

    Making text costs vLLM more than half of its speed for a small policy. A policy that spells such
    a tag letter by letter is still cut there, but only after its turn has ended in another way.
    """
    return () if all(text in pieces for text in stop) else tuple(stop)
