"""Problems in ALFWorld's domain: a room, things in it, and one of six types of task.

The rooms are the 120 of AI2-THOR, whose receptacles and kinds of things the package alfworld lists;
which things fit where, and the goals in PDDL, are ALFWorld's too. A problem is first a small
description, from which its PDDL follows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.environments.alfworld import alfworld_game

TYPES = {  # ALFWorld's name of a type of task -> ours
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
NEEDS = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}  # a receptacle in the room
ABLE = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}  # what the thing has to be
LAMPS = ("DeskLamp", "FloorLamp")
STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "TVStand", "Shelf")
# Goals of the test split alone ask for these. They stand around in other games, too.
HELD_OUT = frozenset(
    {"Tomato", "Cup", "Pan", "Spatula", "Laptop", "CellPhone", "Pencil", "SoapBar"}
)
COPIES = 2  # most things of a kind
SHORTEST = {"pick": 5, "look": 5, "clean": 8, "heat": 7, "cool": 7, "two": 9}  # acts of a plan
SHORTEST_OF_MOST = {"heat": 8, "cool": 8}  # in three of four games
CHARACTERS = {"|": "_bar_", "+": "_plus_", "-": "_minus_", ".": "_dot_", ",": "_comma_"}


@dataclass(frozen=True)
class RoomTask:
    """A room and a goal. Receptacles and things are named by kind and number: "Cabinet|2"."""

    kind: str  # of TYPES' values
    room: str  # of the floor plan
    receptacles: tuple[str, ...]
    things: Mapping[str, str]  # -> the receptacle that it is in at first
    target: str  # kind of thing
    destination: str  # kind of receptacle; of the lamp for "look"
    wording: int  # which of the two wordings of the goal

    def as_data(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {**vars(self), "receptacles": list(self.receptacles), "things": dict(self.things)}

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> RoomTask:
        """Return the problem that ``as_data`` wrote."""
        return RoomTask(**{**data, "receptacles": tuple(data["receptacles"])})


@dataclass(frozen=True)
class Lists:
    """What the package alfworld knows of rooms and things."""

    fits: Mapping[str, frozenset[str]]  # kind of receptacle -> kinds of things
    able: Mapping[str, frozenset[str]]  # "Heatable" -> kinds of things
    openable: frozenset[str]  # kinds of receptacles
    rooms_of: Mapping[str, frozenset[str]]  # type of task -> kinds of rooms
    numbers: Mapping[str, range]  # kind of room -> numbers of its floor plans
    test_numbers: frozenset[int]  # floor plans of the test split
    goals: Mapping[str, Mapping[str, Any]]  # type of task -> PDDL and wordings


@functools.lru_cache(maxsize=1)
def lists() -> Lists:
    """Return the lists of the package. Raises RuntimeError where it is missing."""
    alfworld_game.check_installed()
    from alfworld.gen import constants, goal_library

    carried = set(constants.MOVABLE_RECEPTACLES)
    fixed = {
        receptacle: things
        for receptacle, things in constants.VAL_RECEPTACLE_OBJECTS.items()
        if receptacle not in carried
    }
    return Lists(
        fits={receptacle: frozenset(things) for receptacle, things in fixed.items()},
        able={name: frozenset(things) for name, things in constants.VAL_ACTION_OBJECTS.items()},
        openable=frozenset(constants.OPENABLE_CLASS_SET),
        rooms_of={TYPES[each]: frozenset(constants.GOALS_VALID[each]) for each in TYPES},
        numbers=dict(constants.SCENE_TYPE),
        test_numbers=frozenset(constants.TEST_SCENE_NUMBERS),
        goals={TYPES[each]: goal_library.gdict[each] for each in TYPES},
    )


@functools.lru_cache(maxsize=120)
def floor_plan(number: int) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the kinds of receptacles of a room, one entry each, and its kinds of things."""
    folder = alfworld_game.package_folder() / "gen/layouts"
    listed = json.loads((folder / f"FloorPlan{number}-openable.json").read_text())
    kinds = frozenset(json.loads((folder / f"FloorPlan{number}-objects.json").read_text()))
    receptacles = [_kind_of_place(receptacle) for receptacle in sorted(listed)]
    missing = sorted(kind for kind in kinds & set(lists().fits) if kind not in receptacles)
    fitting = frozenset().union(*lists().fits.values())
    return (*receptacles, *missing), (kinds & fitting) | (kinds & set(LAMPS))


def _kind_of_place(receptacle: str) -> str:
    """Return the kind of a receptacle; "Sink|...|SinkBasin" is a SinkBasin."""
    first, *others = receptacle.split("|")
    return others[-1] if others and others[-1].isalpha() else first


# ---------------------------------------------------------------- drawing


def draw(
    kind: str,
    split: str,
    most_receptacles: int,
    most_things: int,
    held_out: float,
    chance: random.Random,
) -> RoomTask | None:
    """Draw a problem of a type; None where the room that was drawn allows none.

    Rooms of the test split are met in no other, and the share ``held_out`` of its goals asks for
    things that no goal of another split asks for (HELD_OUT).
    """
    number = chance.choice(_numbers(kind, split))
    places, kinds = floor_plan(number)
    new = split == "test" and chance.random() < held_out
    target = _target(kind, kinds, new, chance)
    lamp = next((each for each in LAMPS if each in kinds), "")
    stands = [receptacle for receptacle in places if receptacle in STANDS]
    if target is None or (kind == "look" and not (lamp and stands)):
        return None
    destination = lamp if kind == "look" else _destination(kind, places, target, chance)
    if destination is None:
        return None
    needed = chance.choice(stands) if kind == "look" else destination
    receptacle_kinds = _chosen(
        places, target, [needed, NEEDS.get(kind, "")], most_receptacles, chance
    )
    receptacles = tuple(_numbered(receptacle_kinds))
    things = _placed(kind, receptacles, kinds, target, destination, most_things, chance)
    room, wording = f"FloorPlan{number}", chance.randrange(2)
    if things is None:
        return None
    return RoomTask(kind, room, receptacles, things, target, destination, wording)


def split_of(problem: RoomTask) -> str:
    """Return the split that a problem of a training room belongs to, by its digest."""
    text = json.dumps(problem.as_data(), sort_keys=True).encode()
    return "validation" if hashlib.blake2b(text).digest()[0] % 4 == 0 else "train"


def shortest(kind: str, number: int) -> int:
    """Return how many acts the plan of a game takes at least.

    Of all games, in the order of their numbers, seven of twelve take eight or more.
    """
    longer = {} if (number // len(TYPES)) % 4 == 3 else SHORTEST_OF_MOST
    return {**SHORTEST, **longer}[kind]


def fewest_acts(problem: RoomTask) -> int:
    """Return how many acts the goal takes: go, open, take, go, change, go, open, put."""
    receptacles = [
        _kind(at) for each, at in problem.things.items() if _kind(each) == problem.target
    ]
    opened = sum(receptacle in lists().openable for receptacle in receptacles)
    fetched = 2 * len(receptacles) + opened  # the way to each of them, and taking it
    if problem.kind == "look":
        return fetched + 2
    changed = 2 if problem.kind in NEEDS else 0
    put = 2 * len(receptacles) + (problem.destination in lists().openable)
    return fetched + changed + put


def _numbers(kind: str, split: str) -> list[int]:
    known = lists()
    numbers = [n for room in sorted(known.rooms_of[kind]) for n in known.numbers[room]]
    return [n for n in numbers if (n in known.test_numbers) == (split == "test")]


def _target(kind: str, kinds: frozenset[str], new: bool, chance: random.Random) -> str | None:
    able = lists().able[ABLE[kind]] if kind in ABLE else kinds
    targets = sorted((kinds & able) - set(LAMPS))
    targets = [each for each in targets if (each in HELD_OUT) == new]
    return chance.choice(targets) if targets else None


def _destination(
    kind: str, places: Sequence[str], target: str, chance: random.Random
) -> str | None:
    """Return a kind of receptacle that takes the thing and is not the one of the task itself."""
    taking = {receptacle for receptacle in places if target in lists().fits[receptacle]} - {
        NEEDS.get(kind, "")
    }
    return chance.choice(sorted(taking)) if taking else None


def _chosen(
    places: Sequence[str],
    target: str,
    needed: Sequence[str],
    most: int,
    chance: random.Random,
) -> list[str]:
    """Return the kinds of receptacles of a room of at most ``most``, with all that are needed."""
    left = list(places)
    kinds = []
    for kind in filter(None, needed):
        if kind in left:
            left.remove(kind)
        kinds.append(kind)
    holding = [
        receptacle
        for receptacle in left
        if target in lists().fits[receptacle] and receptacle not in needed
    ]
    if holding:  # where the thing can be at first
        kinds.append(chance.choice(holding))
        left.remove(kinds[-1])
    chance.shuffle(left)
    return sorted([*kinds, *left[: max(0, most - len(kinds))]])


def _numbered(kinds: Sequence[str]) -> list[str]:
    """Name each of its kind: Cabinet|1, Cabinet|2, ..."""
    counted: Counter[str] = Counter()
    names = []
    for kind in kinds:
        counted[kind] += 1
        names.append(f"{kind}|{counted[kind]}")
    return names


def _placed(
    kind: str,
    receptacles: Sequence[str],
    kinds: frozenset[str],
    target: str,
    destination: str,
    most: int,
    chance: random.Random,
) -> dict[str, str] | None:
    """Return where each thing is at first; None where the goal's things have no place.

    They are in closed receptacles if there are some, and neither where the goal wants them nor
    where they are changed.
    """
    places = [each for each in receptacles if _kind(each) not in (destination, NEEDS.get(kind))]
    fit = [receptacle for receptacle in places if target in lists().fits[_kind(receptacle)]]
    closed = [receptacle for receptacle in fit if _kind(receptacle) in lists().openable]
    if not fit:
        return None
    placements = {
        f"{target}|{number}": chance.choice(closed or fit)
        for number in range(1, 3 if kind == "two" else 2)
    }
    if kind == "look":
        stands = [receptacle for receptacle in receptacles if _kind(receptacle) in STANDS]
        placements[f"{destination}|1"] = chance.choice(stands)
    others = sorted(kinds - {target, *LAMPS})
    for other in chance.sample(others, min(len(others), max(0, most - len(placements)))):
        taking = [each for each in receptacles if other in lists().fits[_kind(each)]]
        for number in range(1, chance.randint(1, COPIES) + 1):
            if taking and len(placements) < most:
                placements[f"{other}|{number}"] = chance.choice(taking)
    return dict(sorted(placements.items()))


def _kind(name: str) -> str:
    return name.split("|")[0]


# ---------------------------------------------------------------- words and PDDL


def wording(problem: RoomTask) -> str:
    """Return the goal in words, as ALFWorld puts it."""
    words = {"obj": problem.target, "recep": problem.destination, "toggle": problem.destination}
    template: str = lists().goals[problem.kind]["templates"][problem.wording]
    return template.format(**{name: word.lower() for name, word in words.items()}, mrecep="")


def pddl(problem: RoomTask) -> str:
    """Return the problem in PDDL, for ALFWorld's domain."""
    things = sorted({_kind(each) for each in problem.things} | {"Knife", "ButterKnife"})
    receptacles = sorted({_kind(each) for each in problem.receptacles} | set(NEEDS.values()))
    objects = [
        "agent1 - agent",
        *(f"{_id(each)} - receptacle" for each in problem.receptacles),
        *(f"{_id(each)} - object" for each in problem.things),
        *(f"{_location(number)} - location" for number in range(len(problem.receptacles) + 1)),
        *(f"{kind}Type - rtype" for kind in receptacles),
        *(f"{kind}Type - otype" for kind in things),
    ]
    facts = [
        "(= (total-cost) 0)",
        f"(atLocation agent1 {_location(0)})",
        *_facts_of_receptacles(problem),
        *_facts_of_things(problem),
        *(
            f"(canContain {receptacle}Type {thing}Type)"
            for receptacle in receptacles
            for thing in things
            if thing in lists().fits[receptacle]
        ),
    ]
    goal = lists().goals[problem.kind]["pddl"].replace("#", "-")
    names = {"obj": problem.target, "recep": problem.destination, "toggle": problem.destination}
    lines = "\n ".join
    return (
        f"(define (problem made)\n(:domain alfred)\n(:objects\n {lines(objects)}\n)\n"
        f"(:init\n {lines(facts)}\n)\n{goal.format(**names)}"
    )


def _facts_of_receptacles(problem: RoomTask) -> list[str]:
    facts = []
    for number, each in enumerate(problem.receptacles, 1):
        facts += [
            f"(receptacleType {_id(each)} {_kind(each)}Type)",
            f"(receptacleAtLocation {_id(each)} {_location(number)})",
        ]
        facts += [f"(openable {_id(each)})"] if _kind(each) in lists().openable else []
    return facts


def _facts_of_things(problem: RoomTask) -> list[str]:
    facts = []
    for each, receptacle in problem.things.items():
        location = _location(1 + problem.receptacles.index(receptacle))
        facts += [
            f"(objectType {_id(each)} {_kind(each)}Type)",
            f"(inReceptacle {_id(each)} {_id(receptacle)})",
            f"(objectAtLocation {_id(each)} {location})",
        ]
        can = [name for name, kinds in lists().able.items() if _kind(each) in kinds]
        facts += [f"({name.lower()} {_id(each)})" for name in can]
        facts += [] if _kind(each) in LAMPS else [f"(pickupable {_id(each)})"]
    return facts


def _id(name: str) -> str:
    """Return the name as ALFWorld writes it in PDDL; basins belong to a sink or a bathtub."""
    kind, number = name.split("|")
    if kind.endswith("Basin"):
        kind, number = kind.removesuffix("Basin"), f"{number}|{kind}"
    return "".join(CHARACTERS.get(character, character) for character in f"{kind}|{number}")


def _location(number: int) -> str:
    return f"loc_bar_{number}"
