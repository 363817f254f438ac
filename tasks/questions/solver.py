"""The expert for worlds: it plays episodes with the world's own solver, and errs now and then.

Each act is the solver's, or at the rate ``wrong_act`` a random one of those that the world lists as
admissible (where it lists none, of the values that its only tool allows). At the rate ``give_up``
an episode ends early: the agent stops acting at a random act of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from params.schema.base import Frozen, Positive, Probability
from tasks.environments.contract import OpenEnvironment, Session
from tasks.questions.contract import ExpertKind, ExpertSettings, Lesson, Write
from tasks.questions.experts import Dropped, Parts, Trace
from tasks.questions.faults import Fault
from tasks.trees.outcomes import INFRASTRUCTURE, Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

SIDE_BY_SIDE = 256  # episodes
UNSOLVED = "unsolved"  # the reason of an episode that the solver knows no act for
FAILURES = (*INFRASTRUCTURE, Outcome.WORLD_BROKEN)


class Corrections(Frozen):
    """How often the cold start asks the solver about what the policy itself does (DAgger)."""

    rounds: Positive  # each: episodes of the policy, the solver's acts in their states, training
    episodes: Positive  # a round
    steps: Positive  # of training a round, on traces and on all corrections so far


class Solver(ExpertSettings):
    """How many episodes the solver plays, and how often it is wrong."""

    traces: Positive  # of the first training tasks
    wrong_act: Probability  # chance of each act to be a random one
    give_up: Probability  # share of the episodes that end before their goal
    corrections: Corrections | None = None


@dataclass
class PlayedEpisode:
    """An episode that is being played."""

    question: Question
    handle: int
    draw: random.Random
    gives_up: bool
    seen: list[Observation]
    acts: list[Call] = field(default_factory=list)
    wrong: bool = False  # whether an act was a random one

    @property
    def now(self) -> Observation:
        """Return the newest observation."""
        return self.seen[-1]


def write(expert: Solver, lesson: Lesson) -> tuple[Write, list[Fault]]:
    """Return what plays the first training tasks once the world is open."""
    taught = lesson.questions[: expert.traces]

    def write_traces(world: OpenEnvironment) -> tuple[list[Trace], list[Dropped]]:
        ended: list[Trace | Dropped] = []
        with world.session() as session:
            for start in range(0, len(taught), SIDE_BY_SIDE):
                tasks = taught[start:][:SIDE_BY_SIDE]
                ended += play(expert, tasks, session, world.specs, lesson.seed)
        traces = [each for each in ended if isinstance(each, Trace)]
        return traces, [each for each in ended if isinstance(each, Dropped)]

    return write_traces, []


def play(
    expert: Solver,
    tasks: Sequence[Question],
    session: Session,
    specs: Sequence[ToolSpec],
    seed: int,
) -> list[Trace | Dropped]:
    """Play an episode of each task, side by side, to its end; traces in the order of the tasks."""
    episodes = []
    for question, (handle, first) in zip(tasks, session.open(tasks), strict=True):
        draw = random.Random(f"{seed}/{question.id}")
        gives_up = draw.random() < expert.give_up
        seen = [first or Observation(Outcome.OK, "")]
        episodes.append(PlayedEpisode(question, handle, draw, gives_up, seen))
    acting = [episode for episode in episodes if not episode.now.ends]
    while acting:
        acting = _round(expert, acting, session, specs)
    for episode in episodes:
        session.close(episode.handle)
    return [_conclude(episode) for episode in episodes]


def _round(
    expert: Solver, acting: Sequence[PlayedEpisode], session: Session, specs: Sequence[ToolSpec]
) -> list[PlayedEpisode]:
    """Do one act in each episode; return those that go on."""
    solved = session.solve([episode.handle for episode in acting])
    known = [(episode, act) for episode, act in zip(acting, solved, strict=True) if act]
    moves = []
    for episode, act in known:
        if episode.draw.random() < expert.wrong_act:
            act = episode.draw.choice(choices(act, episode.now, specs))
            episode.wrong = True
        episode.acts.append(act)
        moves.append((episode.handle, act))
    for (episode, _), observation in zip(known, session.act(moves), strict=True):
        episode.seen.append(observation)
    return [episode for episode, _ in known if not episode.now.ends]


def choices(act: Call, observation: Observation, specs: Sequence[ToolSpec]) -> list[Call]:
    """Return the acts with the solver's tool that a random one is drawn from.

    Raises ValueError where the tool's only parameter is no text, or no values of it are known.
    """
    spec = next((each for each in specs if each.name == act.tool), None)
    if spec and spec.text_parameter:
        allowed = spec.parameters["properties"][spec.text_parameter].get("enum", ())
        if values := observation.actions or allowed:
            return [Call(spec.name, value) for value in values]
    raise ValueError(
        f"prepare.expert.wrong_act draws from the values of {act.tool}, and they are not known: "
        "its only parameter must be a text, and the world has to list its admissible actions, or "
        "the tool its values; else set wrong_act to 0"
    )


def _conclude(episode: PlayedEpisode) -> Trace | Dropped:
    """Return the trace of an episode that is over, or why there is none."""
    question, last = episode.question, episode.now
    if last.outcome in FAILURES:
        return Dropped(question.id, last.outcome, last.text)
    if not episode.acts or not last.ends:
        return Dropped(question.id, UNSOLVED, f"no act is known after {len(episode.acts)} acts")
    flaw = "wrong_act" if episode.wrong else "none"
    acts = episode.acts
    turns = [written(act) for act in acts]
    if episode.gives_up:
        flaw = "give_up"
        acts = acts[: episode.draw.randrange(len(acts))]
        turns = [*turns[: len(acts)], GIVEN_UP]
    seen = tuple(episode.seen[: len(turns)])
    return Trace(question, flaw, _alternating(turns, seen[1:]), acts=tuple(acts), seen=seen)


GIVEN_UP = "<think>I give up.</think>"


def written(act: Call) -> str:
    """Return an act as a turn in tags."""
    return f"<{act.tool}>{act.argument}</{act.tool}>"


def _alternating(turns: Sequence[str], seen: Sequence[Observation]) -> Parts:
    parts: Parts = []
    for number, turn in enumerate(turns):
        parts.append((turn, True))
        if number < len(seen):
            parts.append((seen[number].text, False))
    return parts


EXPERT = ExpertKind(Solver, write, ("environment",))
