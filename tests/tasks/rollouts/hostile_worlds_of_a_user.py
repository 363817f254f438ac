"""Worlds that attack the agent's trainer, or that an agent attacks; tests copy this to own/."""

import json
import os
import random
import time
from pathlib import Path

import numpy as np

from beamline.environments import UnavailableError
from params.schema.base import Frozen
from tasks.trees.tree import Observation, ToolSpec

SAY = ToolSpec(
    "say",
    "Say something.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
PICK = ToolSpec(
    "pick",
    "Pick a number.",
    {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "more": {}},
        "required": ["number"],
    },
)


class Forger:
    """Say what the task says, in every place of an observation."""

    tools = (SAY, PICK)

    def start(self, task, seed):
        self.said = json.loads(task.data)["said"]
        return self.seen(0)

    def seen(self, number):
        return Observation("ok", f"{self.said} {number}", state=self.said, actions=(self.said, "b"))

    def act(self, call):
        return self.seen(1)


class Walk:
    """Walk at random; pays for each step and ends at the limit."""

    class Settings(Frozen):
        limit: int = 4

    tools = (SAY, PICK)

    def __init__(self, settings):
        self.limit = settings.limit

    def start(self, task, seed):
        self.random, self.place, self.taken = random.Random(seed), 0, 0
        return self.look(0.0)

    def look(self, reward):
        return Observation(
            "ok",
            f"place {self.place}",
            reward=reward,
            terminated=self.place >= 5,
            truncated=self.taken >= self.limit,
            actions=("1", "2"),
            info={"success": self.place >= 5},
        )

    def act(self, call):
        self.taken += 1
        self.place += self.random.randrange(3) + call.values.get("number", 0)
        return self.look(self.place / 8)

    def end(self, text):
        return Observation("ok", "", reward=0.25 * len(text) % 1)


class ForkingWalk(Walk):
    """A walk that forks."""

    def fork(self):
        copy = ForkingWalk(Walk.Settings(limit=self.limit))
        copy.random = random.Random()
        copy.random.setstate(self.random.getstate())
        copy.place, copy.taken = self.place, self.taken
        return copy


class Rich:
    """Pay a fortune a step."""

    tools = (SAY,)

    def start(self, task, seed):
        return "ready"

    def act(self, call):
        return Observation("ok", "paid", reward=float(call.argument or "1e308"))


class Late:
    """Answer the first start of all too late."""

    tools = (SAY,)

    def start(self, task, seed):
        try:
            Path("started").touch(exist_ok=False)
        except FileExistsError:
            return "a door"
        return time.sleep(60)

    def act(self, call):
        return Observation("ok", "open", reward=1.0, terminated=True)


class Long:
    """Start with a very long text, or with acts that are too many to be listed."""

    tools = (SAY,)

    def start(self, task, seed):
        long = "word " * 15_000
        return long if task.text == "text" else Observation("ok", "a", actions=("left", long))

    def act(self, call):
        return "done"


class Broken:
    """Never start."""

    tools = (SAY,)

    def start(self, task, seed):
        if task.text == "die":
            os._exit(1)
        raise LookupError("<answer>\\boxed{7}</answer> no level")

    def act(self, call):
        return "done"


class Ends:
    """A world that fails when its agent has stopped acting, as its settings say."""

    class Settings(Frozen):
        how: str

    tools = (SAY,)

    def __init__(self, settings):
        self.how, self.said = settings.how, []

    def start(self, task, seed):
        if self.how == "no start":
            raise OSError("no level")
        return "Say something."

    def act(self, call):
        self.said.append(call.argument)
        info = {"success": np.bool_(True), "path": np.arange(2), "score": np.float32(0.5)}
        return Observation("ok", "said", reward=np.float32(0.5), info=info)

    def end(self, text):
        if self.how == "away":
            raise UnavailableError("the judge is away")
        if self.how == "no JSON":
            return Observation("ok", "", info={"seen": {1, 2}})
        return Observation("ok", "", reward=1.0 if self.said[-1] == "a" else -1.0)
