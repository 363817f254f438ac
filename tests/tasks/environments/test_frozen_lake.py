"""The frozen lake: its rules, its levels, its solver, and what an agent sees."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.environments import frozen_lake
from tasks.environments.frozen_lake import (
    DIRECTIONS,
    ENVIRONMENT,
    FrozenLake,
    FrozenLakeSettings,
    distances,
    find,
    split_of,
    step,
    tasks,
)
from tasks.extensions import named
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Question

LEVEL = ("S.O", "..O", "O.G")
WAYS = st.lists(st.sampled_from(list(DIRECTIONS)), max_size=12)


def settings(**changes):
    usual = {
        "smallest": 4,
        "largest": 5,
        "largest_test": 6,
        "holes": 0.25,
        "distance": 4,
        "slippery": 0.0,
        "steps": 20,
        "sight": None,
        "hidden": False,
        "goal": 1.0,
        "penalty": -0.1,
    }
    return FrozenLakeSettings(**usual | changes)


def task(level=LEVEL):
    return Question("t", "3x3", "Go to G.", (), data=json.dumps({"level": level}))


def started(level=LEVEL, seed=0, **changes):
    lake = FrozenLake(settings(**changes))
    return lake, lake.start(task(level), seed)


def walk(lake, *directions):
    return [lake.act(Call("move", direction)) for direction in directions]


def episode(lake, choose):
    """Act until the episode ends; return the observations."""
    seen = []
    while not seen or not seen[-1].ends:
        seen.append(lake.act(choose(lake)))
    return seen


# ---------------------------------------------------------------- rules


def test_a_way_to_the_goal():
    lake, first = started()
    assert first.text == "A . O\n. . O\nO . G" and first.actions == ("right", "down")
    *way, last = walk(lake, "down", "right", "down", "right")
    assert [seen.text for seen in way] == [
        ". . O\nA . O\nO . G",
        ". . O\n. A O\nO . G",
        ". . O\n. . O\nO A G",
    ]
    assert not any(seen.ends or seen.reward or seen.info["success"] for seen in way)
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert last.info == {"success": True} and last.outcome == Outcome.OK


def test_a_hole_ends_the_episode_without_a_reward():
    lake, _ = started()
    last = walk(lake, "right", "right")[-1]
    assert (last.reward, last.terminated, last.truncated) == (0.0, True, False)
    assert last.info == {"success": False} and "hole" in last.text


@pytest.mark.parametrize("direction", ["up", "left", "", "north", "LEFT", "move left", "\0"])
def test_an_act_that_is_not_possible_costs_the_penalty(direction):
    lake, first = started()
    seen = lake.act(Call("move", direction))
    assert (seen.outcome, seen.reward) == (Outcome.NOT_ADMISSIBLE, -0.1)
    assert not seen.ends and seen.key == first.key and seen.text == first.text
    assert walk(lake, "down")[0].outcome == Outcome.OK


def test_space_around_a_direction_does_not_count():
    lake, _ = started()
    assert lake.act(Call("move", " right\n")).outcome == Outcome.OK


def test_the_limit_truncates():
    lake, _ = started(steps=4)
    *before, last = walk(lake, "down", "up", "up", "down")
    assert not any(seen.ends for seen in before)
    assert last.truncated and not last.terminated and last.reward == 0


def test_the_last_act_may_still_reach_the_goal():
    lake, _ = started(steps=4)
    last = walk(lake, "down", "right", "down", "right")[-1]
    assert last.terminated and not last.truncated and last.reward == 1


def test_sight_is_limited_and_the_state_is_not():
    lake, first = started(sight=1)
    assert first.text == "# # #\n# A .\n# . ." and "G" in first.key
    assert walk(lake, "down", "right")[-1].text == ". . O\n. A O\nO . G"


def test_hidden_actions_are_not_listed():
    assert started(hidden=True)[1].actions == ()


def test_equal_places_are_one_state_on_any_way():
    one, other = started()[0], started()[0]
    assert walk(one, "down", "right")[-1].key == walk(other, "right", "down")[-1].key


# ---------------------------------------------------------------- slips, seeds and forks


@given(WAYS, st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0]))
def test_equal_seeds_give_equal_episodes(way, seed, slippery):
    first, second = (started(seed=seed, slippery=slippery) for _ in range(2))
    assert first[1] == second[1]
    for direction in way:
        seen = [lake.act(Call("move", direction)) for lake, _ in (first, second)]
        assert seen[0] == seen[1]
        if seen[0].ends:
            break


@given(WAYS, WAYS, st.sampled_from([0.0, 0.4]))
def test_a_fork_goes_on_like_a_replay(before, after, slippery):
    lake, replay = (started(level=open_ice(4), seed=3, slippery=slippery)[0] for _ in range(2))
    walk(lake, *before)
    branch = lake.fork()
    walk(lake, "down", "down")  # the branch does not see it
    walk(replay, *before)
    assert walk(branch, *after) == walk(replay, *after)


def open_ice(size):
    cells = ["S", *"." * (size**2 - 2), "G"]
    return tuple("".join(cells[row * size :][:size]) for row in range(size))


def test_slips_go_to_the_sides_at_their_rate():
    level = ("......", "...S..", "......", ".....G")
    ends = Counter()
    for seed in range(2000):
        lake, _ = started(level=level, seed=seed, slippery=0.3)
        walk(lake, "left")
        ends[lake.cell] += 1
    assert set(ends) == {(1, 2), (0, 3), (2, 3)}
    assert 0.66 < ends[1, 2] / 2000 < 0.74 and abs(ends[0, 3] - ends[2, 3]) < 120


# ---------------------------------------------------------------- levels


@pytest.fixture(scope="module")
def splits():
    counts = {"train": 600, "validation": 60, "test": 240}
    return {split: tasks(settings(), split, count, 7) for split, count in counts.items()}


def levels(questions):
    return [tuple(json.loads(question.data)["level"]) for question in questions]


def images(level):
    """The level, turned and mirrored in all ways."""
    turned = [level]
    for _ in range(3):
        turned.append(tuple("".join(column) for column in zip(*turned[-1][::-1], strict=True)))
    return {*turned, *(tuple(row[::-1] for row in each) for each in turned)}


def test_every_level_can_be_solved_and_none_too_soon(splits):
    for level in (level for questions in splits.values() for level in levels(questions)):
        assert Counter("".join(level))["S"] == Counter("".join(level))["G"] == 1
        assert 4 <= distances(level)[find(level, "S")] <= 20


def test_no_level_is_met_again_not_even_turned(splits):
    for split, questions in splits.items():
        assert len(set(levels(questions))) == len(questions)
        others = {level for name in splits if name != split for level in levels(splits[name])}
        assert not others & {image for level in levels(questions) for image in images(level)}
        assert {split_of(image) for level in levels(questions) for image in images(level)} == {
            split
        }


def test_sizes_are_graded_and_those_of_the_test_reach_further(splits):
    kinds = {split: Counter(q.kind for q in questions) for split, questions in splits.items()}
    assert kinds["train"] == {"4x4": 300, "5x5": 300}
    assert kinds["test"] == {"4x4": 80, "5x5": 80, "6x6": 80}
    assert all(
        question.kind.startswith(f"{len(level)}x")
        for q in splits.values()
        for question, level in zip(q, levels(q), strict=True)
    )


def test_levels_depend_on_the_seed_alone(splits):
    assert tasks(settings(), "test", 240, 7) == splits["test"]
    assert tasks(settings(), "test", 240, 8) != splits["test"]
    assert tasks(settings(), "test", 100, 7) == splits["test"][:100]


def test_too_few_levels_are_said_with_a_remedy(monkeypatch):
    monkeypatch.setattr(frozen_lake, "TRIES", 50)
    small = settings(smallest=2, largest=2, largest_test=2, distance=2)
    with pytest.raises(ValueError, match="no new one of size 2 is found: lower holes or distance"):
        tasks(small, "train", 100, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"largest": 3}, "smallest 4, largest 3 and largest_test 6 must ascend"),
        ({"distance": 7}, "distance 7 must be at most steps 20, and at most 6"),
        ({"steps": 3}, "distance 4 must be at most steps 3"),
        ({"smallest": 1}, "greater than or equal to 2"),
        ({"slippery": 1.5}, "less than or equal to 1"),
        ({"holes": 1.0}, "less than 1"),
    ],
)
def test_impossible_settings_are_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        settings(**changes)


def test_the_lake_is_found_by_its_name():
    assert named.find("environment", "frozen_lake").held is ENVIRONMENT
    (spec,) = ENVIRONMENT.specs(settings())
    assert (spec.name, spec.text_parameter) == ("move", "direction")
    assert spec.parameters["properties"]["direction"]["enum"] == ["left", "right", "up", "down"]


# ---------------------------------------------------------------- who plays


def successes(questions, choose, **changes):
    won = 0
    for seed, question in enumerate(questions):
        lake = FrozenLake(settings(**changes))
        lake.start(question, seed)
        won += episode(lake, choose)[-1].info["success"]
    return won / len(questions)


def test_the_solver_takes_a_shortest_way(splits):
    for question, level in zip(splits["test"], levels(splits["test"]), strict=True):
        lake = FrozenLake(settings())
        lake.start(question, 0)
        seen = episode(lake, FrozenLake.solve)
        assert seen[-1].info["success"] and len(seen) == distances(level)[find(level, "S")]


def test_chance_rarely_succeeds_and_the_solver_always(splits):
    dice = random.Random(0)
    by_chance = lambda lake: Call("move", dice.choice(list(DIRECTIONS)))  # noqa: E731
    assert successes(splits["test"], by_chance) < 0.15
    assert successes(splits["test"], FrozenLake.solve) == 1


def test_the_solver_reckons_with_slips(splits):
    def blind(lake):
        left = distances(lake.level)
        ahead = {name: step(lake.level, lake.cell, name) for name in DIRECTIONS}
        return Call("move", min(ahead, key=lambda name: left.get(ahead[name], 99)))

    some = splits["test"][:60]
    careful = successes(some, FrozenLake.solve, slippery=0.3)
    assert careful > successes(some, blind, slippery=0.3) + 0.1


def test_the_solver_keeps_away_from_holes_where_it_slips():
    level = ("S.....G", ".......", "O.OOO.O")
    lake, _ = started(level=level, slippery=0.5)
    lake.cell = (1, 2)
    assert lake.solve() != Call("move", "right")  # beside a row of holes
    firm, _ = started(level=level)
    firm.cell = (1, 2)
    assert step(level, firm.cell, firm.solve().argument) in {(1, 3), (0, 2)}
