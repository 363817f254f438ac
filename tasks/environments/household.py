"""household: tasks in the rooms of a house, as in ALFWorld (arXiv 2010.03768), with its own engine.

The agent goes to receptacles, opens them, takes a thing, cleans, heats or cools it, and puts it
where the task wants it. Games are ALFWorld's own, or made in its domain (alfworld/problems.py).
It needs the packages of the extra ``worlds``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tqdm import tqdm

from params.schema.base import Flag, Float, Frozen, Positive, Probability
from tasks.environments.alfworld import alfworld_game, game_files, problems
from tasks.environments.alfworld.problems import RoomTask
from tasks.environments.contract import FREE_TEXT, EnvironmentKind
from tasks.extensions.pool import open_pool
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import REFUSAL, Call, Observation, Question

TRIES = 400  # draws of a problem that can be solved and fits its split
SOLVABLE = "tasks/environments/household.py:solvable"
AT_ONCE = 24  # problems that are given to the processes together
SOLVE_SECONDS = 600.0  # for one of them
NOTHING = "Nothing happens."  # ALFWorld's answer to a command that is not admissible
INSIDE = re.compile(r"On the (.+?), you see|The (.+?) is open\. In it, you see")
NAMED = re.compile(r"an? (\w+ \d+)")
AT = re.compile(r"You arrive at (.+?)\. ")
TAKEN_FROM = re.compile(r"take .+ from (.+)")
NAME = re.compile(r"[a-z]+ \d+")


class HouseholdSettings(Frozen):
    """Which games are played, what an agent sees, and what a step is worth."""

    games: Literal["made", "alfworld", "available"]  # available: ALFWORLD_DATA where it is set
    receptacles: Positive  # of a room that is made, at most; those that the goal needs always stay
    things: Positive  # in such a room, at most; those of the goal always stay
    held_out: Probability  # of a made test game: to ask for what no other split's games ask for
    steps: Positive  # acts of an episode, at most
    hidden: Flag  # true: the agent is not told which commands are admissible
    success: Float  # reward at the end of an episode that reaches its goal
    penalty: Float  # reward of a command that is not admissible
    expert: Literal["planner", "searcher"]  # searcher: looks for things; planner: knows where
    wrong_act: Probability  # chance that an act of the expert is a random admissible one
    seconds: Positive = 60  # of a start or an act; a room of 40 receptacles takes some to load


class Household:
    """One episode of a game."""

    def __init__(self, settings: HouseholdSettings) -> None:
        self.settings = settings

    def start(self, task: Question, seed: int) -> Observation:
        """Put the agent in the middle of the room; ``seed`` decides the expert's mistakes."""
        self.play = alfworld_game.Play(_game(json.loads(task.data)))
        self.seed, self.taken, self.here = seed, 0, ""
        self.seen: frozenset[str] = frozenset()  # receptacles whose content has been seen
        self.next: tuple[str, ...] = ()  # the planner's commands, while they are followed
        self.wanted = ""  # the receptacle from which the plan takes a thing next
        text = self.play.look()
        self.receptacles = tuple(NAMED.findall(text))
        return self._seen(Outcome.OK, text, 0.0)

    def act(self, call: Call) -> Observation:
        """Do a command of ALFWorld; one that is not admissible costs the penalty."""
        self.taken += 1
        command = " ".join(str(call.values.get("text", call.argument)).lower().split())
        text = self.play.act(command)
        if text is None:
            refused = self._seen(Outcome.NOT_ADMISSIBLE, NOTHING, self.settings.penalty)
            info = {**refused.info, REFUSAL: self._refusal(command)}
            # the state is the one before: all rooms would share that of NOTHING
            return replace(refused, state=self.key, info=info)
        self.next = self.next[1:] if self.next[:1] == (command,) else ()
        self.here = next(iter(AT.findall(text)), self.here)
        self.seen |= {name for pair in INSIDE.findall(text) for name in pair if name}
        return self._seen(Outcome.OK, text, 0.0)

    def _refusal(self, command: str) -> str:
        """Return why a command is not admissible.

        ``form``: it is no command; ``unknown``: it names what this room does not have;
        ``elsewhere``: what it names is not at hand, closed, or not what it takes.
        """
        if NAME.sub("#", command) not in self.play.forms():
            return "form"
        return "elsewhere" if self.play.names().issuperset(NAME.findall(command)) else "unknown"

    def fork(self) -> Household:
        """Return a copy that goes on from here."""
        new = copy.copy(self)
        new.play = self.play.copy()
        return new

    def solve(self) -> Call | None:
        """Return the expert's next command, or at the rate ``wrong_act`` a random one."""
        chance = random.Random(f"{self.seed}/{self.taken}/expert")
        if chance.random() < self.settings.wrong_act:
            return Call(FREE_TEXT.name, chance.choice(list(self.play.admissible())))
        if self._looks():
            return Call(FREE_TEXT.name, self._search())
        self.next = self.next or tuple(self.play.plan())
        taken = (TAKEN_FROM.fullmatch(command) for command in self.next)
        self.wanted = next((matched[1] for matched in taken if matched), "")
        if not self.next:
            return None
        return Call(FREE_TEXT.name, self._search() if self._looks() else self.next[0])

    def _looks(self) -> bool:
        """Return whether the expert does not know yet where the thing is that it wants."""
        return self.settings.expert == "searcher" and self.wanted not in {"", *self.seen}

    def _search(self) -> str:
        """Return the command that looks into the next receptacle, in the order of the room."""
        if f"open {self.here}" in self.play.admissible() and self.here not in self.seen:
            return f"open {self.here}"
        unseen = (name for name in self.receptacles if name not in self.seen)
        return f"go to {next(unseen, self.receptacles[0])}"

    def _seen(self, outcome: str, text: str, reward: float) -> Observation:
        won = self.play.won()
        observation = Observation(
            outcome,
            text,
            reward + self.settings.success * won,
            terminated=won,
            truncated=not won and self.taken >= self.settings.steps,
            actions=() if self.settings.hidden else tuple(self.play.admissible()),
            info={"success": won},
        )
        if outcome == Outcome.OK:
            self.key = observation.key
        return observation


def _game(data: dict[str, Any]) -> alfworld_game.Game:
    """Return the game of a task. Raises ValueError where its file is missing or has changed."""
    if "file" in data:
        game = game_files.read(data)
        return alfworld_game.open_game(game["problem"], game["domain"], game["grammar"])
    problem = problems.pddl(RoomTask.of_data(data["problem"]))
    return alfworld_game.open_game(problem, alfworld_game.domain(), alfworld_game.grammar())


# ---------------------------------------------------------------- tasks


def tasks(settings: HouseholdSettings, split: str, count: int, seed: int) -> list[Question]:
    """Return ``count`` games of a split, of all types in turn where they are made.

    Each made game has been solved by the planner. Raises ValueError where there are too few, and
    RuntimeError where ALFWorld's packages are missing.
    """
    alfworld_game.check_installed()
    if settings.games == "alfworld" or (settings.games == "available" and game_files.folder()):
        games = game_files.listed(split, count, seed)
        return [
            _question(split, n, kind, game_files.read(data)["task"], data)
            for n, (kind, data) in enumerate(games)
        ]
    questions = []
    for number, data in enumerate(_made(settings, split, count, seed)):
        problem = RoomTask.of_data(data["problem"])
        task = problems.wording(problem)
        questions.append(_question(split, number, problem.kind, task, data))
    return questions


def _question(split: str, number: int, kind: str, task: str, data: dict[str, Any]) -> Question:
    text = f"Your task is to: {task}."
    return Question(
        f"{split}-{number:05d}", kind, text, (), data=json.dumps({"seed": number, **data})
    )


def _made(settings: HouseholdSettings, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return what ``solvable`` returns for each number; which problems depends on no process."""
    dumped_settings = settings.model_dump(mode="json")
    orders = [[dumped_settings, split, number, seed] for number in range(count)]
    games: list[dict[str, Any]] = []
    with (
        open_pool(SOLVABLE, {}, min(count, os.cpu_count() or 1), SOLVE_SECONDS) as pool,
        tqdm(total=count, desc=f"games for {split}", disable=None) as progress,
    ):
        for start in range(0, count, AT_ONCE):
            for reply in pool.call_all(orders[start:][:AT_ONCE]):
                if not reply.value:
                    raise ValueError(
                        f"environment.household: after {len(games)} games for {split} no other "
                        "one that can be solved is found: raise steps, receptacles or things"
                        + (f" ({reply.message})" if reply.failure else "")
                    )
                games.append(reply.value)
                progress.update()
    return games


def solvable(
    dumped_settings: Mapping[str, Any], split: str, number: int, seed: int
) -> dict[str, Any] | None:
    """Return the first problem drawn for a number that fits and can be solved, as data.

    ``acts`` is the length of the planner's plan.
    """
    settings = HouseholdSettings(**dumped_settings)
    chance = random.Random(f"{seed}/{split}/{number}")
    kind = list(problems.TYPES.values())[number % len(problems.TYPES)]
    shortest = problems.shortest(kind, number)
    for _ in range(TRIES):
        most = settings.receptacles, settings.things
        problem = problems.draw(kind, split, *most, settings.held_out, chance)
        if (
            problem
            and shortest <= problems.fewest_acts(problem) <= settings.steps
            and split in ("test", problems.split_of(problem))
            and shortest <= (acts := len(plan_of(problem))) <= settings.steps
        ):
            return {"acts": acts, "problem": problem.as_data()}
    return None


def plan_of(problem: RoomTask) -> list[str]:
    """Return the planner's commands for a problem; [] where it finds none."""
    game = alfworld_game.open_game(
        problems.pddl(problem), alfworld_game.domain(), alfworld_game.grammar()
    )
    play = alfworld_game.Play(game)
    plan = play.plan()
    done = all(play.act(command) is not None for command in plan)
    return plan if done and play.won() else []


ENVIRONMENT = EnvironmentKind(
    settings=HouseholdSettings,
    world="tasks/environments/household.py:Household",
    specs=lambda settings: [FREE_TEXT],
    tasks=tasks,
)
