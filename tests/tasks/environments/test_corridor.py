"""The corridor of own/: its expert knows the way and no door, and one door is right."""

import json

import pytest

from own.corridor import DOORS, RIGHT, SIGNS, Corridor
from tasks.trees.tree import Call


def begun(task):
    world = Corridor()
    return world, world.start(task, json.loads(task.data)["seed"])


def go(world, to):
    return world.act(Call("go", to, {"to": to}))


@pytest.mark.parametrize("task", Corridor.tasks(None, "test", len(SIGNS), 0), ids=SIGNS)
def test_the_door_of_the_sign_is_right_and_no_other(task):
    for door in DOORS:
        world, shown = begun(task)
        steps = int(shown.split()[2])
        assert f"sign {RIGHT[world.sign]}" not in shown
        for left in range(steps - 1, -1, -1):
            assert world.solve() == Call("go", "forward")
            assert go(world, "back").outcome == "not_admissible"
            assert go(world, "forward") == (f"{left} steps" if left else "doors")
        end = go(world, door)
        assert end.terminated and end.reward == (door == RIGHT[world.sign]) == end.info["success"]


def test_the_expert_opens_doors_at_random():
    opened = []
    for task in Corridor.tasks(None, "train", 400, 0):
        world, _ = begun(task)
        while (act := world.solve()).argument == "forward":
            go(world, act.argument)
        opened.append(act.argument == RIGHT[world.sign])
    assert set(opened) == {True, False} and 0.06 < sum(opened) / 400 < 0.19


def test_no_corridor_is_in_two_splits():
    splits = ("train", "validation", "test")
    seeds = [
        {json.loads(task.data)["seed"] for task in Corridor.tasks(None, split, 1000, 3)}
        for split in splits
    ]
    assert len(set.union(*seeds)) == 3000
