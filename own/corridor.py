"""A corridor with a decision at its end: an example of a world of your own."""

import json
import random

from beamline.environments import Call, Observation, Question

SIGNS = (
    "anchor apple arrow bell boat candle cloud comet crown drum feather flame fox glove "
    "hammer harp kite lamp leaf moon rose star sword wheel"
).split()
DOORS = "abcdefgh"
RIGHT = {sign: random.Random(sign).choice(DOORS) for sign in SIGNS}  # what the agent has to learn
SHORTEST, LONGEST = 6, 10  # steps to the doors
ALL_SEEDS = {"train": 0, "validation": 10**6, "test": 2 * 10**6}


class Corridor:
    """Walk to the doors, then open the one that the sign stands for."""

    tools = [
        {
            "name": "go",
            "description": "Go forward, or through a door.",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": "string"}},
                "required": ["to"],
            },
        }
    ]

    @staticmethod
    def tasks(settings, split, count, seed):
        """Return tasks whose signs follow one another; no corridor is in two splits."""
        first = ALL_SEEDS[split] + seed * 1000
        return [
            Question(
                f"{split}-{number}",
                "corridor",
                "Open the right door.",
                answers=(),
                data=json.dumps({"seed": first + number, "sign": SIGNS[number % len(SIGNS)]}),
            )
            for number in range(count)
        ]

    def start(self, task, seed):
        """Begin an episode; the seed decides how long the corridor is."""
        self.sign = json.loads(task.data)["sign"]
        self.drawn = random.Random(seed)
        self.left = self.drawn.randint(SHORTEST, LONGEST)
        return f"sign {self.sign}, {self.left} steps"

    def act(self, call):
        """Go a step, or through a door, which ends the episode."""
        to = call.values["to"].strip()
        if not self.left:
            won = to == RIGHT[self.sign]
            known = "ok" if to in DOORS else "not_admissible"
            return Observation(known, "", float(won), True, info={"success": won})
        if to != "forward":
            return Observation("not_admissible", f"{self.left} steps")
        self.left -= 1
        return f"{self.left} steps" if self.left else "doors"

    def solve(self):
        """Return the next act of an expert that knows the way, and no door."""
        return Call("go", "forward" if self.left else self.drawn.choice(DOORS))
