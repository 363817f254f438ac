"""Measure how fast households are acted in side by side, beside TextWorld's own environment.

    python -m benchmarks.households

Eight made games, each played by eight agents at once, as in an iteration of the recipe household;
every agent takes admissible commands at random. ``ours`` runs them through the processes of the
environment, as a rollout does; ``textworld`` plays the same games one after the other in
TextWorld's own environment, in one process, which is what its speed a core is. Writes
benchmarks/households.json. Both are run in turns, since a machine is never quite quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from params.schema.base import PARAMS
from tasks import recipes
from tasks.environments import household
from tasks.environments.alfworld import engine, problems
from tasks.environments.contract import FREE_TEXT
from tasks.environments.episodes import open_worlds
from tasks.environments.household import ENVIRONMENT, HouseholdSettings
from tasks.trees.tree import Call, Question

FILE = Path(__file__).with_name("households.json")
GAMES, AGENTS, STEPS = 8, 8, 25


def ours(
    tasks: list[Question], household_settings: HouseholdSettings, workers: int
) -> dict[str, float]:
    """Play all agents side by side; return seconds of starting and of acting, and the steps."""
    with (
        open_worlds(ENVIRONMENT, household_settings, workers) as worlds,
        worlds.session() as session,
    ):
        began = time.perf_counter()
        opened = session.open([task for task in tasks for _ in range(AGENTS)])
        starting = time.perf_counter() - began
        chance, now = random.Random(0), dict(opened)
        began, steps = time.perf_counter(), 0
        for _ in range(STEPS):
            moves = []
            for handle, seen in now.items():
                text = chance.choice(seen.actions) if seen and seen.actions else "look"
                moves.append((handle, Call(FREE_TEXT.name, text, {"text": text})))
            answers = dict(zip(now, session.act(moves), strict=True))
            now = {handle: seen for handle, seen in answers.items() if not seen.ends}
            steps += len(moves)
        return {"start": starting, "act": time.perf_counter() - began, "steps": steps}


def textworld(tasks: list[Question]) -> dict[str, float]:
    """Play each game once in TextWorld's environment; return seconds and steps."""
    play = engine.textworld_environment
    starting = acting = 0.0
    chance, steps = random.Random(0), 0
    for task in tasks:
        problem = problems.RoomTask.of_data(json.loads(task.data)["problem"])
        began = time.perf_counter()
        environment, commands = play(problems.pddl(problem))
        starting += time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(STEPS):
            state, _, done = environment.step(chance.choice(commands))
            commands, steps = state["admissible_commands"], steps + 1
            if done:
                break
        acting += time.perf_counter() - began
    return {"start": starting, "act": acting, "steps": steps}


def measure(repetitions: int, workers: int) -> dict[str, Any]:
    """Return medians over repetitions, in turns."""
    recipe = recipes.load("household", PARAMS)
    (household_settings,) = recipe.environment.values()
    assert isinstance(household_settings, HouseholdSettings)
    shown = household_settings.model_copy(update={"hidden": False, "steps": STEPS + 1})
    tasks = household.tasks(shown, "train", GAMES, 0)
    pairs = [(ours(tasks, shown, workers), textworld(tasks)) for _ in range(repetitions)]
    rates = sorted(one["steps"] / one["act"] for one, _ in pairs)
    theirs = sorted(one["steps"] / one["act"] for _, one in pairs)
    middle = repetitions // 2
    return {
        "episodes": GAMES * AGENTS,
        "processes": workers,
        "steps_a_second": rates,
        "textworld_steps_a_second_in_one_process": theirs,
        "ratio_of_medians": rates[middle] / theirs[middle],
        "seconds_to_start_all": sorted(one["start"] for one, _ in pairs)[middle],
        "textworld_seconds_to_start_one": sorted(one["start"] for _, one in pairs)[middle] / GAMES,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.households", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    measurements = measure(given.repetitions, given.processes)
    FILE.write_text(json.dumps(measurements, indent=1) + "\n")
    print(json.dumps(measurements, indent=1))


if __name__ == "__main__":
    main()
