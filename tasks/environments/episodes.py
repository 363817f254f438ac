"""Episodes of worlds with a state, in processes of their own.

An episode and its forks live in one process. What was done and seen is kept here, by handle, so an
episode that its process does not have (it forked without a copy, or the process was replaced) is
replayed from its seed before its next act, and what it shows is compared with what was seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from typing import Any

from params.schema.base import Frozen
from tasks.environments.contract import FREE_TEXT, EnvironmentKind
from tasks.environments.question import Respond
from tasks.environments.record import (
    Episode,
    WorldStep,
    act_request,
    differs,
    failed,
    read,
    same,
    seed_of,
)
from tasks.extensions.pool import Pool, Reply, open_pool
from tasks.extensions.user_code_worker import AWAY, DIED, TIMEOUT
from tasks.tools.schema import with_values
from tasks.trees.outcomes import FAILURES_TO_BLAME, Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

SECONDS = 10.0  # of one act, where the settings of the environment do not say
HOST = "tasks/extensions/world_host.py:WorldHost"
ADAPTER = "tasks/environments/trl.py:world_of"  # of a class that is no World


@dataclass(frozen=True)
class Worlds:
    """The processes of an environment, and what its agent may do."""

    name: str  # of the world, as its recipe names it
    pool: Pool
    specs: Mapping[str, ToolSpec]
    abilities: frozenset[str]  # optional methods that the world has
    handles: Iterator[int]

    @contextmanager
    def session(
        self, respond: Respond = lambda calls: [], tools: frozenset[str] = frozenset()
    ) -> Iterator[Episodes]:
        """Begin a batch of episodes; they are released with the block.

        Calls of ``tools`` are answered by ``respond``; no world sees them.
        """
        episodes = Episodes(self, respond, tools)
        try:
            yield episodes
        finally:
            episodes.close_all()


@contextmanager
def open_worlds(
    kind: EnvironmentKind, settings: Frozen, workers: int, seconds: float | None = None
) -> Iterator[Worlds]:
    """Start the processes of an environment, for the length of the block.

    Each start, act and end of an episode may take ``seconds``; None: what the settings say.
    Raises RuntimeError where the world cannot be imported.
    """
    limit = getattr(settings, "seconds", SECONDS) if seconds is None else seconds
    job = {"world": kind.world, "adapter": ADAPTER, **_dumped(settings)}
    with open_pool(HOST, job, workers, limit) as pool:
        (reply,) = pool.ask([(0, "abilities", [])])
        if reply.failure:
            raise RuntimeError(f"{kind.world}: {reply.message}")
        specs = {spec.name: spec for spec in kind.specs(settings) or [FREE_TEXT]}
        yield Worlds(kind.world, pool, specs, frozenset(reply.value), count())


def _dumped(settings: Frozen) -> dict[str, Any]:
    """Return settings for a process: of their first class that can be imported by its name."""
    for kind in type(settings).__mro__:
        if kind is Frozen or not issubclass(kind, Frozen):
            break
        attribute: Any = sys.modules.get(kind.__module__)
        for part in kind.__qualname__.split("."):
            attribute = getattr(attribute, part, None)
        if attribute is kind:
            values = settings.model_dump(mode="json", include=set(kind.model_fields))
            return {"settings_type": f"{kind.__module__}:{kind.__qualname__}", "settings": values}
    return {"settings_type": None, "settings": None}


class Episodes:
    """The episodes of a batch of tasks: a ``Session`` of contract.py."""

    def __init__(self, worlds: Worlds, respond: Respond, tools: frozenset[str]) -> None:
        self.worlds, self.respond, self.tools = worlds, respond, tools
        self.episodes: dict[int, Episode] = {}
        self.dealt = count()  # tasks are dealt over the processes in turn
        self.starts: dict[tuple[Question, int], Observation] = {}
        self.released: list[tuple[int, int]] = []  # slot and handle, to be told to the process

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        """Start an episode of each task; return its handle and its first observation.

        Raises ValueError for a task whose data or seed cannot be read.
        """
        opened = []
        for task in tasks:
            handle = next(self.worlds.handles)
            place = next(self.dealt) % len(self.worlds.pool.team)
            episode = Episode(task, place, seed_of(task))
            self.episodes[handle] = episode
            opened.append(handle)
        answers = self._ask({handle: self.episodes[handle].beginning() for handle in opened})
        for handle in opened:
            self.episodes[handle].first = self._like_its_equals(handle, read(answers[handle]))
        return [(handle, self.episodes[handle].first) for handle in opened]

    def fork(self, handle: int, acts: int) -> int:
        """Return a new episode in the state after the first ``acts`` acts of another.

        The world copies its state where it can, and where no later act has reached it; otherwise
        the new episode is replayed before its next act.
        """
        parent = self.episodes[handle]
        if not 0 <= acts <= len(parent.steps):
            raise ValueError(f"episode {handle} has {len(parent.steps)} acts, not {acts}")
        new = next(self.worlds.handles)
        later = any(step.reached for step in parent.steps[acts:])
        copied = parent.live and not later and "fork" in self.worlds.abilities
        if copied:
            (reply,) = self.worlds.pool.ask([(parent.place, "fork", [handle, new])])
            copied = reply.value is True
        self.episodes[new] = replace(parent, steps=parent.steps[:acts], live=copied)
        return new

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        """Do one act in each of these episodes, side by side; observations in the order of moves.

        An act that does not fit the world's tools is answered here, and does not end the episode.
        Raises ValueError for an episode that has ended, or that is there twice.
        """
        self._check_open([handle for handle, _ in moves])
        called = [(handle, call) for handle, call in moves if call.tool in self.tools]
        results = self.respond([call for _, call in called]) if called else []
        for (handle, call), result in zip(called, results, strict=True):
            self._answer_beside(handle, call, result, f"\n{result.text}")
        acts: dict[int, Call] = {}
        for handle, call in moves:
            if call.tool not in self.tools:
                checked = self._checked(call)
                if isinstance(checked, Call):
                    acts[handle] = checked
                else:
                    self._answer_beside(handle, call, checked)
        answers = self._ask({handle: act_request(call) for handle, call in acts.items()})
        for handle, call in acts.items():
            step = WorldStep(call, _answered(answers[handle]), reached=True)
            self.episodes[handle].steps.append(step)
        return [self.episodes[handle].last for handle, _ in moves]

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        """Tell episodes that their agent has stopped acting; return their last observations."""
        told = {handle: text for handle, text in endings if self._hears_of_its_end(handle)}
        answers = self._ask({handle: ("end", [text]) for handle, text in told.items()})
        for handle in told:
            self.episodes[handle].live = False  # its forks are not to start from its end
        return [
            _answered(answers[handle]) if _has_seen(answers.get(handle)) else None
            for handle, _ in endings
        ]

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        """Return the world's expert act for each episode; None where it has none.

        Raises ValueError, with the task, where the world's ``solve`` fails.
        """
        if "solve" not in self.worlds.abilities:
            return [None] * len(handles)
        going = [handle for handle in handles if not self.episodes[handle].last.ends]
        answers = self._ask({handle: ("solve", []) for handle in going})
        for handle in going:
            if isinstance(failure := answers[handle], Observation):
                task = self.episodes[handle].task.id
                raise ValueError(
                    f"{self.worlds.name}, task {task}: solve failed ({failure.outcome}): "
                    f"{failure.text.strip()[-300:]}: correct it, or return None where it knows none"
                )
        calls = (answers.get(handle) for handle in handles)
        return [Call(*call["call"]) if call and _has(call, "call") else None for call in calls]

    def close(self, handle: int) -> None:
        """Release an episode; its process is told with the next requests."""
        self.released.append((self.episodes.pop(handle).place, handle))

    def close_all(self) -> None:
        """Release all episodes."""
        for handle in list(self.episodes):
            self.close(handle)
        self._ask({})

    # ------------------------------------------------------------ what needs no world

    def _check_open(self, handles: Sequence[int]) -> None:
        for handle, times in Counter(handles).items():
            if times > 1:
                raise ValueError(f"episode {handle} has {times} moves in one round")
            if self.episodes[handle].last.ends:
                raise ValueError(f"episode {handle} has ended, so no act can follow")

    def _checked(self, call: Call) -> Call | Observation:
        spec = self.worlds.specs.get(call.tool)
        if spec is None:
            return Observation(Outcome.NO_SUCH_TOOL, f"no tool {call.tool}")
        return with_values(call, spec)

    def _answer_beside(self, handle: int, call: Call, seen: Observation, more: str = "") -> None:
        """Keep an act that the world does not see: all that the world has said last stays.

        Of what has answered it only outcome and text count: no tool gives rewards of a world.
        """
        last = self.episodes[handle].last
        seen = Observation(
            seen.outcome,
            seen.text,
            state=f"{last.key}{more}",
            actions=last.actions,
            info=last.info,
        )
        self.episodes[handle].steps.append(WorldStep(call, seen, reached=False))

    def _hears_of_its_end(self, handle: int) -> bool:
        return "end" in self.worlds.abilities and not self.episodes[handle].last.ends

    def _like_its_equals(self, handle: int, first: Observation) -> Observation:
        """Return the first observation, or a failure where an equal task has started otherwise."""
        episode = self.episodes[handle]
        if first.outcome in (Outcome.WORLD_FAILED, Outcome.WORLD_TIMEOUT):
            return first
        before = self.starts.setdefault((episode.task, episode.seed), first)
        return first if same(before, first) else differs(before, first)

    # ------------------------------------------------------------ what the processes answer

    def _ask(self, requests: Mapping[int, tuple[str, list[Any]]]) -> dict[int, Any]:
        """Make one request for each episode, after the replay of those that need it.

        Returns, by handle, what the host has answered, or an observation that ends the episode. A
        process may be killed from outside, and what a world needs may be away for a moment: such
        an episode is replayed, and asked once more. If it fails again, its act may be the cause,
        and the outcome is WORLD_BROKEN. It comes last in its slot, and the others there are
        replayed in the new process.
        """
        answers: dict[int, Any] = {}
        failures: dict[int, list[bool]] = {handle: [] for handle in requests}  # at its own act?
        # Each round settles an episode or adds a failure, unless processes are killed from outside.
        for _ in range(3 * len(requests) + 10):
            left = sorted((h for h in requests if h not in answers), key=lambda h: len(failures[h]))
            if not left and not self.released:
                break
            replies = self._exchange({handle: requests[handle] for handle in left})
            for handle in left:
                settled = self._settle(self.episodes[handle], replies[handle], failures[handle])
                self.episodes[handle].live = isinstance(settled, dict)
                if settled is not AGAIN:
                    answers[handle] = settled
        lost = failed(Outcome.WORLD_FAILED, "its processes ended again and again")
        return {handle: answers.get(handle, lost) for handle in requests}

    def _exchange(self, by_handle: Mapping[int, tuple[str, list[Any]]]) -> dict[int, list[Reply]]:
        """Send the requests with the replays before them; return the replies by handle."""
        requests: list[tuple[int, str, list[Any]]] = [
            (slot, "close", [handle]) for slot, handle in self.released
        ]
        self.released, owners = [], [-1] * len(requests)
        for handle, request in by_handle.items():
            episode = self.episodes[handle]
            for method, arguments in [*((m, a) for m, a, _ in episode.past()), request]:
                requests.append((episode.place, method, [handle, *arguments]))
                owners.append(handle)
        replies: dict[int, list[Reply]] = {handle: [] for handle in [-1, *by_handle]}
        for owner, reply in zip(owners, self.worlds.pool.ask(requests), strict=True):
            replies[owner].append(reply)
        return replies

    def _settle(self, episode: Episode, replies: Sequence[Reply], failures: list[bool]) -> Any:
        """Return the host's answer to the last request; or an observation that ends the episode.

        AGAIN where the request is to be made once more. A failure is added to ``failures``, with
        whether it was at the act that is asked for, and not in the replay of what was done before.
        """
        for reply, (_, _, before) in zip_longest(replies, episode.past(), fillvalue=_LAST):
            if reply.failure == AWAY:
                return failed(Outcome.WORLD_FAILED, reply.message)
            if reply.failure:
                acts = before is None and episode.first is not None
                failures.append(acts)
                if len(failures) < FAILURES_TO_BLAME and (acts or reply.failure == DIED):
                    return AGAIN
                outcome = (
                    Outcome.WORLD_TIMEOUT if reply.failure == TIMEOUT else Outcome.WORLD_FAILED
                )
                return _maybe_broken(failed(outcome, reply.message), failures)
            if "lost" in reply.value:
                return AGAIN
            if before and not same(before, read(reply.value)):
                return _maybe_broken(differs(before, read(reply.value)), failures)
        return replies[-1].value


AGAIN = object()  # in place of an answer
_LAST: Any = (None, None, None)  # beside the last request, which nothing was seen of before


def _maybe_broken(failure: Observation, failures: Sequence[bool]) -> Observation:
    """Return the failure, as WORLD_BROKEN where the agent's act may be its cause.

    Such a failure stays trained. If it were left out, an agent could avoid a low reward by breaking
    its world.
    """
    return replace(failure, outcome=Outcome.WORLD_BROKEN) if any(failures) else failure


def _answered(answer: Any) -> Observation:
    """Return the observation that answers an act; WORLD_BROKEN where it breaks the contract."""
    if isinstance(answer, Observation):
        return answer
    seen = read(answer)
    return _maybe_broken(seen, [seen.outcome == Outcome.WORLD_FAILED])


def _has(answer: Any, name: str) -> bool:
    return isinstance(answer, dict) and answer.get(name) is not None


def _has_seen(answer: Any) -> bool:
    return isinstance(answer, Observation) or _has(answer, "seen")
