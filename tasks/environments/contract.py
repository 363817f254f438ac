"""The contracts of an environment: what a sampler knows, and what a world's author writes.

A rollout knows ``Session``: the episodes of a batch of tasks, side by side, by handle. Single
questions with tools are one implementer of it (question.py), worlds with a state are the other
(episodes.py), which runs one object a world, a ``World``, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from params.schema.base import Frozen
from tasks.tools.recording import Origin
from tasks.trees.tree import Call, Observation, Question, ToolSpec


class Session(Protocol):
    """The episodes of a batch of tasks. Each of them has a handle."""

    def open(self, tasks: Sequence[Question]) -> list[tuple[int, Observation | None]]:
        """Start an episode of each task: its handle, and the first observation.

        None where there is nothing to see but the question. An episode that could not start has an
        observation that ``ends``, whose outcome says why.
        """

    def fork(self, handle: int, acts: int) -> int:
        """Return the handle of a new episode in the state after the first ``acts`` acts of another.

        Where the world cannot copy its state, the acts are replayed from the seed, and what is
        observed is compared. A difference shows at the next ``act``: its observation ends the
        episode with the outcome REPLAY_DIFFERS.
        """

    def act(self, moves: Sequence[tuple[int, Call]]) -> list[Observation]:
        """Do one act in each of these episodes, side by side; observations in the order of moves.

        Nothing that a world does raises an error here: a failure is an observation that ``ends``.
        """

    def end(self, endings: Sequence[tuple[int, str]]) -> list[Observation | None]:
        """Tell episodes that their agent has stopped acting, with its last text.

        The observation's reward belongs to the agent's last turn; its text is shown to nobody.
        None for questions, whose answers are scored later.
        """

    def solve(self, handles: Sequence[int]) -> list[Call | None]:
        """Return an expert's next act in each of these episodes; None where it has none."""

    def close(self, handle: int) -> None:
        """Release an episode."""


@dataclass(frozen=True)
class OpenEnvironment:
    """An environment that is ready: the tools of its agent, and how to begin a batch of tasks."""

    specs: Sequence[ToolSpec]
    session: Callable[[], AbstractContextManager[Session]]
    # Begin to record, for one sub-step, results of tools that are not repeatable; None: all are.
    # Takes the sub-step, and a function that makes its scratch folder.
    recorded: Callable[[Origin, Callable[[], Path]], AbstractContextManager[Recorded]] | None = None
    program: Any = None  # the agent, where it is somebody else's (tasks/programs/opening.py)


@dataclass(frozen=True)
class Recorded:
    """An environment whose unrepeatable results are recorded, and how to save the record."""

    environment: OpenEnvironment
    save_calls: Callable[[Path], None]  # into a folder, as calls.parquet
    # From now on, ask once more for results that the infrastructure failed to give.
    ask_again: Callable[[], None] = lambda: None


def recording(
    environment: OpenEnvironment, origin: Origin, scratch: Callable[[], Path]
) -> AbstractContextManager[Recorded]:
    """Record what no second run of a sub-step would get again; nothing where all is repeatable."""
    if environment.recorded is None:
        return nullcontext(Recorded(environment, lambda folder: None))
    return environment.recorded(origin, scratch)


class World(Protocol):
    """One episode of a world: what its author writes. Only ``start`` and ``act`` are required.

    ``World(settings)`` makes an object for one episode. It may hold any state of its own. A user's
    file imports what it needs from ``beamline.environments``.
    """

    tools: Sequence[ToolSpec]  # what the agent may do; without it, the agent acts in free text

    def start(self, task: Question, seed: int) -> Observation | str:
        """Begin the task and return what the agent sees first. Equal seeds give equal episodes."""

    def act(self, call: Call) -> Observation | str:
        """Do one act. ``call.values`` are its parameters, which fit the tool's schema."""

    def fork(self) -> World:
        """Optional: return a copy of this episode that goes its own way."""

    def end(self, text: str) -> Observation | None:
        """Optional: the agent stops acting, with its last text; may return a last reward."""

    def solve(self) -> Call | None:
        """Optional: return an expert's next act; None where it has none."""

    def close(self) -> None:
        """Optional: release what the episode holds."""


FREE_TEXT = ToolSpec(
    "act",
    "Act in the world.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)


@dataclass(frozen=True)
class EnvironmentKind:
    """A kind of environment: its settings in a recipe, and its worlds.

    ``world`` is the class of an episode, by reference, such as "own/lake.py:Lake": processes of its
    own import it there. ``specs(settings)`` are its tools. ``tasks(settings, split, count, seed)``
    makes the questions of a split ("train", "validation" or "test"). A world that is not
    ``repeatable`` depends on more than task, seed and acts (a server, a clock).
    """

    settings: type[Frozen]
    world: str
    specs: Callable[[Any], Sequence[ToolSpec]]
    tasks: Callable[[Any, str, int, int], list[Question]]
    faults: Callable[[Any], list[str]] = lambda settings: []
    repeatable: bool = True
