"""The frozen lake: walk over ice to a goal, and fall into no hole. A world to try a recipe with.

A level is a square of cells, in text one character a cell and one line a row, with spaces between:

    S . .        S start, G goal, O hole, . ice; the agent sees itself as A
    O . O
    . . G

Every level has a path from start to goal. Which split a level belongs to is decided by its digest,
the same for its rotations and mirror images, so that no test level is met in training. Sizes of a
split take turns.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from params.schema.base import Flag, Float, Frozen, Integer, Positive, Probability
from tasks.environments.contract import EnvironmentKind
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question, ToolSpec

ICE, HOLE, START, GOAL, AGENT, EDGE = ".", "O", "S", "G", "A", "#"
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # row, column
SHARES = {"train": range(6, 16), "validation": range(6), "test": range(16, 32)}  # of a digest
TRIES = 2000  # levels that are drawn for one that is new and fits
DISCOUNT = 0.97  # of the plan on slippery ice, so that it hurries
SWEEPS = 200  # of value iteration, at most

MOVE = ToolSpec(
    "move",
    "Walk one cell over the ice. A is you, G the goal, O a hole, # the edge.",
    {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": list(DIRECTIONS)}},
        "required": ["direction"],
    },
)

Cell = tuple[int, int]  # row, column
Level = tuple[str, ...]  # rows

Size = Annotated[Integer, Field(ge=2, le=32)]


class FrozenLakeSettings(Frozen):
    """How levels are drawn, what an agent sees of them, and what a step is worth."""

    smallest: Size  # cells a side
    largest: Size  # in training and validation
    largest_test: Size
    holes: Annotated[Float, Field(ge=0, lt=1)]  # chance that a cell is one
    distance: Positive  # fewest moves from start to goal
    slippery: Probability  # chance that a move goes to one of its two sides instead
    steps: Positive  # most acts of an episode
    sight: Positive | None  # cells that the agent sees to each side; null: the whole level
    hidden: Flag  # true: the agent is not told which directions are open
    goal: Float  # reward at the goal
    penalty: Float  # reward of an act that is not possible

    @model_validator(mode="after")
    def _sizes_fit(self) -> FrozenLakeSettings:
        if not self.smallest <= self.largest <= self.largest_test:
            raise ValueError(
                f"smallest {self.smallest}, largest {self.largest} and largest_test "
                f"{self.largest_test} must ascend: change one of them"
            )
        if self.distance > min(self.steps, 2 * self.smallest - 2):
            raise ValueError(
                f"distance {self.distance} must be at most steps {self.steps}, and at most "
                f"{2 * self.smallest - 2}, the way from corner to corner of the smallest level: "
                "lower it, or raise these"
            )
        return self


class FrozenLake:
    """One episode on a level."""

    tools = (MOVE,)

    def __init__(self, settings: FrozenLakeSettings) -> None:
        self.settings = settings

    def start(self, task: Question, seed: int) -> Observation:
        """Put the agent on the start of the level in ``task.data``; ``seed`` decides the slips."""
        self.level: Level = tuple(json.loads(task.data)["level"])
        self.seed = seed
        self.taken = 0  # acts so far
        self.cell = find(self.level, START)
        return self._seen(Outcome.OK, 0.0)

    def act(self, call: Call) -> Observation:
        """Walk one cell, or slip; a direction that is not open costs the penalty."""
        self.taken += 1
        direction = str(call.values.get("direction", call.argument)).strip()
        if direction not in self._open():
            return self._seen(Outcome.NOT_ADMISSIBLE, self.settings.penalty)
        self.cell = step(self.level, self.cell, self._slipped(direction))
        at_goal = self._here() == GOAL
        return self._seen(Outcome.OK, self.settings.goal if at_goal else 0.0)

    def fork(self) -> FrozenLake:
        """Return a copy that goes on from here."""
        return copy.copy(self)

    def solve(self) -> Call | None:
        """Return the move that most surely leads to the goal."""
        values = worth(self.level, self.settings.slippery)

        def after(direction: str) -> float:
            return expected(self.level, self.settings.slippery, self.cell, direction, values)

        return Call(MOVE.name, max(self._open(), key=after))

    def _open(self) -> tuple[str, ...]:
        """Return the directions that do not lead over the edge."""
        return tuple(name for name in DIRECTIONS if step(self.level, self.cell, name) != self.cell)

    def _here(self) -> str:
        return self.level[self.cell[0]][self.cell[1]]

    def _slipped(self, direction: str) -> str:
        """Return where a move goes. It depends on the seed and the number of acts so far."""
        if not self.settings.slippery:
            return direction
        draw = random.Random(f"{self.seed}/{self.taken}")
        return (
            draw.choice(sides(direction)) if draw.random() < self.settings.slippery else direction
        )

    def _seen(self, outcome: str, reward: float) -> Observation:
        here = self._here()
        state = picture(self.level, self.cell, None)
        return Observation(
            outcome,
            ENDINGS.get(here) or picture(self.level, self.cell, self.settings.sight),
            reward,
            terminated=here in ENDINGS,
            truncated=here not in ENDINGS and self.taken >= self.settings.steps,
            state=state,
            actions=() if self.settings.hidden else self._open(),
            info={"success": here == GOAL},
        )


ENDINGS = {GOAL: "You reach the goal.", HOLE: "You fall into a hole."}  # cell -> what is said there

# ---------------------------------------------------------------- the ice


def find(level: Level, character: str) -> Cell:
    """Return the first cell with this character."""
    return next(
        (row, column)
        for row, cells in enumerate(level)
        for column, cell in enumerate(cells)
        if cell == character
    )


def step(level: Level, cell: Cell, direction: str) -> Cell:
    """Return the next cell in a direction, or the same one at the edge."""
    row, column = cell[0] + DIRECTIONS[direction][0], cell[1] + DIRECTIONS[direction][1]
    inside = 0 <= row < len(level) and 0 <= column < len(level[0])
    return (row, column) if inside else cell


def sides(direction: str) -> tuple[str, str]:
    """Return the two directions across this one."""
    return ("up", "down") if direction in ("left", "right") else ("left", "right")


def picture(level: Level, agent: Cell, sight: int | None) -> str:
    """Return the level as text, or the part of it that lies within ``sight`` of the agent."""
    rows, columns = range(len(level)), range(len(level[0]))
    if sight is not None:
        rows = range(agent[0] - sight, agent[0] + sight + 1)
        columns = range(agent[1] - sight, agent[1] + sight + 1)

    def shown(row: int, column: int) -> str:
        if not (0 <= row < len(level) and 0 <= column < len(level[0])):
            return EDGE
        return AGENT if (row, column) == agent else level[row][column].replace(START, ICE)

    return "\n".join(" ".join(shown(row, column) for column in columns) for row in rows)


# ---------------------------------------------------------------- the way to the goal


@functools.lru_cache(maxsize=4096)
def distances(level: Level) -> Mapping[Cell, int]:
    """Return the fewest moves from each cell to the goal, without slips; others cannot reach it."""
    goal = find(level, GOAL)
    result, waiting = {goal: 0}, deque([goal])
    while waiting:
        cell = waiting.popleft()
        for before in (step(level, cell, direction) for direction in DIRECTIONS):
            if before not in result and level[before[0]][before[1]] != HOLE:
                result[before] = result[cell] + 1
                waiting.append(before)
    return result


@functools.lru_cache(maxsize=4096)
def worth(level: Level, slippery: float) -> Mapping[Cell, float]:
    """Return the discounted chance of each cell to reach the goal; 0 for holes."""
    values = {cell: DISCOUNT**moves for cell, moves in distances(level).items()}
    if not slippery:
        return values
    inner = [cell for cell in values if level[cell[0]][cell[1]] != GOAL]
    for _ in range(SWEEPS):
        change = 0.0
        for cell in inner:
            ahead = (expected(level, slippery, cell, each, values) for each in DIRECTIONS)
            new = DISCOUNT * max(ahead)
            change, values[cell] = max(change, abs(new - values[cell])), new
        if change < 1e-6:
            break
    return values


def expected(
    level: Level, slippery: float, cell: Cell, direction: str, values: Mapping[Cell, float]
) -> float:
    """Return the mean value of the cells that a move may lead to."""
    chances = {direction: 1 - slippery, **dict.fromkeys(sides(direction), slippery / 2)}
    return sum(chance * values.get(step(level, cell, d), 0.0) for d, chance in chances.items())


# ---------------------------------------------------------------- levels


def tasks(settings: FrozenLakeSettings, split: str, count: int, seed: int) -> list[Question]:
    """Draw ``count`` levels of a split, none twice, of sizes that take turns.

    Raises ValueError where the settings allow too few levels.
    """
    largest = settings.largest_test if split == "test" else settings.largest
    sizes = range(settings.smallest, largest + 1)
    draw = random.Random(f"{seed}/{split}")
    taken: set[Level] = set()
    questions = []
    for number in range(count):
        size = sizes[number % len(sizes)]
        level = next(
            (each for each in _drawn(settings, size, split, draw) if each not in taken), None
        )
        if level is None:
            raise ValueError(
                f"environment.frozen_lake: after {number} levels for {split} no new one of size "
                f"{size} is found: lower holes or distance, raise the sizes, or ask for fewer "
                "questions"
            )
        taken.add(level)
        data = json.dumps({"level": level, "seed": draw.randrange(2**31)})
        questions.append(
            Question(f"{split}-{number:05d}", f"{size}x{size}", "Go to G.", (), data=data)
        )
    return questions


def _drawn(
    settings: FrozenLakeSettings, size: int, split: str, draw: random.Random
) -> Iterator[Level]:
    """Yield levels of a split whose goal can be reached, but not too soon."""
    for _ in range(TRIES):
        cells = [HOLE if draw.random() < settings.holes else ICE for _ in range(size**2)]
        start, goal = draw.sample(range(size**2), 2)
        cells[start], cells[goal] = START, GOAL
        level = tuple("".join(cells[row * size :][:size]) for row in range(size))
        moves = distances(level).get(divmod(start, size), 0)
        if settings.distance <= moves <= settings.steps and split_of(level) == split:
            yield level


def split_of(level: Level) -> str:
    """Return the split that a level belongs to, with its rotations and mirror images."""
    first = min(_images(level))
    letter = hashlib.blake2b("\n".join(first).encode(), digest_size=1).digest()[0] % 32
    return next(split for split, letters in SHARES.items() if letter in letters)


def _images(level: Level) -> Iterator[Level]:
    for _ in range(4):
        level = tuple("".join(column) for column in zip(*level[::-1], strict=True))  # a rotation
        yield level
        yield level[::-1]


ENVIRONMENT = EnvironmentKind(
    settings=FrozenLakeSettings,
    world="tasks/environments/frozen_lake.py:FrozenLake",
    specs=lambda settings: [MOVE],
    tasks=tasks,
)
