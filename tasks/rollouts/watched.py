"""Watch a rollout while it grows: each sampled turn, each act with its observation, each end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from tasks.engines import Engine, Sample, SamplingRequest, SamplingSession
from tasks.environments.contract import OpenEnvironment, Session
from tasks.trees.tree import Call, Observation, Question


class Watcher(Protocol):
    """What is called during a rollout, in the thread that samples."""

    def began(self, observation: Observation | None) -> None:
        """An episode has begun. None where there is nothing to see but the question."""

    def sampled(self, sample: Sample) -> None:
        """A turn has been sampled."""

    def acted(self, call: Call, observation: Observation) -> None:
        """An act has been answered."""

    def ended(self, observation: Observation | None) -> None:
        """The agent has stopped acting; a world may give a last reward."""


def watched(environment: OpenEnvironment, watcher: Watcher) -> OpenEnvironment:
    """Return the environment with sessions that report to ``watcher``."""

    @contextmanager
    def session() -> Iterator[Session]:
        with environment.session() as inner:
            yield WatchedEpisodes(inner, watcher)

    return replace(environment, session=session)


@dataclass(frozen=True)
class WatchedEngine:
    """An engine whose turns are reported. It has no replicas, so that turns come in order."""

    inner: Engine
    watcher: Watcher

    def replicas(self, most: int) -> Sequence[Engine]:
        return [self]

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[SamplingSession]:
        with self.inner.session(paths, context, temperature, top_p, stop) as opened:
            yield WatchedSampling(opened, self.watcher)

    def release(self) -> None:
        self.inner.release()


@dataclass(frozen=True)
class WatchedSampling:
    """A session of an engine. See ``tasks.engines.contract.SamplingSession``."""

    inner: SamplingSession
    watcher: Watcher

    def open(self) -> int:
        return self.inner.open()

    def fork(self, handle: int) -> int:
        return self.inner.fork(handle)

    def close(self, handle: int) -> None:
        self.inner.close(handle)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        samples = self.inner.sample(requests)
        for sample in samples:
            self.watcher.sampled(sample)
        return samples


@dataclass(frozen=True)
class WatchedEpisodes:
    """A session of an environment. See ``tasks.environments.contract.Session``."""

    inner: Session
    watcher: Watcher

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        begun = self.inner.open(tasks)
        _each(self.watcher.began, [observation for _, observation in begun])
        return begun

    def fork(self, handle: int, acts: int) -> int:
        return self.inner.fork(handle, acts)

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        observations = self.inner.act(moves)
        for (_, call), observation in zip(moves, observations, strict=True):
            self.watcher.acted(call, observation)
        return observations

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        return self.inner.solve(handles)

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        last = self.inner.end(endings)
        _each(self.watcher.ended, last)
        return last

    def close(self, handle: int) -> None:
        self.inner.close(handle)


def _each(
    report: Callable[[Observation | None], None], observations: Sequence[Observation | None]
) -> None:
    for observation in observations:
        report(observation)
