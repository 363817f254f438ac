"""Episodes of worlds that are not repeatable: what they answered is recorded, and replayed.

An episode is named by its question and by its number among the episodes of this question, in the
order in which they were opened or forked. A rollout that samples the same opens the same, so its
replay finds every answer by name and number, and asks no world.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count

from tasks.environments.contract import Session
from tasks.tools.recording import NOT_RECORDED, Recorder, whole
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

WORLD = "world"  # in place of a tool's name, in the table of calls
NOT_FOUND = Observation(Outcome.WORLD_FAILED, NOT_RECORDED, truncated=True)


@dataclass
class RecordedEpisode:
    """An episode: its name, the world's own handle for it, and how often it has answered."""

    name: str
    question: str
    handle: int
    answers: int = 0


class RecordedEpisodes:
    """A ``Session`` (contract.py) over another one, whose answers it records or replays."""

    def __init__(self, inner: Session, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.handles = count()
        self.episodes: dict[int, RecordedEpisode] = {}

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        replays = self.recorder.replays
        begun = [(0, None) for _ in tasks] if replays else self.inner.open(tasks)
        opened = [
            (self._named(task.id, handle), first)
            for task, (handle, first) in zip(tasks, begun, strict=True)
        ]
        answers = self._answered([handle for handle, _ in opened], [seen for _, seen in opened])
        return [(handle, seen) for (handle, _), seen in zip(opened, answers, strict=True)]

    def fork(self, handle: int, acts: int) -> int:
        parent = self.episodes[handle]
        inner = 0 if self.recorder.replays else self.inner.fork(parent.handle, acts)
        return self._named(parent.question, inner)

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        observations = self._ask(self.inner.act, moves)
        return [seen or NOT_FOUND for seen in self._answered([h for h, _ in moves], observations)]

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        observations = self._ask(self.inner.end, endings)
        return self._answered([handle for handle, _ in endings], observations)

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        if self.recorder.replays:
            return [_call(self._found(handle)) for handle in handles]
        acts = self.inner.solve([self.episodes[handle].handle for handle in handles])
        for handle, act in zip(handles, acts, strict=True):
            self._keep(handle, Observation("", json.dumps(asdict(act)) if act else ""))
        return acts

    def close(self, handle: int) -> None:
        episode = self.episodes.pop(handle)
        if not self.recorder.replays:
            self.inner.close(episode.handle)

    def _named(self, question: str, inner: int) -> int:
        """Return the handle of a new episode of a question."""
        with self.recorder.lock:  # a task that is asked once more has a session of its own
            number = self.recorder.episodes[question]
            self.recorder.episodes[question] += 1
        handle = next(self.handles)
        self.episodes[handle] = RecordedEpisode(f"{question}/{number}", question, inner)
        return handle

    def _ask(
        self,
        method: Callable[..., Sequence[Observation | None]],
        requests: Sequence[tuple[int, object]],
    ) -> Sequence[Observation | None]:
        """Ask the world, unless this is a replay."""
        if self.recorder.replays:
            return [None] * len(requests)
        return method([(self.episodes[handle].handle, given) for handle, given in requests])

    def _answered(
        self, handles: Sequence[int], seen: Sequence[Observation | None]
    ) -> list[Observation | None]:
        """Record what was seen, or return what is recorded in its place."""
        if self.recorder.replays:
            recordings = [self._found(handle) for handle in handles]
            return [_read(each.text) if each else NOT_FOUND for each in recordings]
        for handle, observation in zip(handles, seen, strict=True):
            text = "" if observation is None else json.dumps(asdict(observation))
            outcome = "" if observation is None else observation.outcome
            self._keep(handle, Observation(outcome, text))
        return list(seen)

    def _found(self, handle: int) -> Observation | None:
        """Return the next answer of an episode in the record; None where there is none."""
        return self.recorder.results.get(self._next_key(handle))

    def _keep(self, handle: int, answer: Observation) -> None:
        """Record the next answer of an episode."""
        key = self._next_key(handle)
        with self.recorder.lock:
            self.recorder.results[key] = replace(answer, text=whole(answer.text))

    def _next_key(self, handle: int) -> tuple[str, str]:
        """Return the key of the next answer of an episode, and count it."""
        episode = self.episodes[handle]
        episode.answers += 1
        return WORLD, f"{episode.name}/{episode.answers - 1}"


def _read(text: str) -> Observation | None:
    """Return the observation that was recorded; None where the world gave none."""
    if not text:
        return None
    values = json.loads(text)
    return Observation(**{**values, "actions": tuple(values["actions"])})


def _call(recording: Observation | None) -> Call | None:
    """Return the expert's act that was recorded; None where it had none."""
    return Call(**json.loads(recording.text)) if recording and recording.text else None


@contextmanager
def recorded_session(
    session: Callable[[], AbstractContextManager[Session]], recorder: Recorder
) -> Iterator[RecordedEpisodes]:
    """Open a session whose answers are recorded, or replayed."""
    with session() as inner:
        yield RecordedEpisodes(inner, recorder)
