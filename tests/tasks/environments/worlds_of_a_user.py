"""Worlds as a user may write them; the tests copy this file to own/worlds.py of a folder."""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from params.schema.base import Frozen
from tasks.trees.outcomes import UnavailableError
from tasks.trees.tree import Call, Observation, Question, ToolSpec

MOVE = ToolSpec(
    "move",
    "Move along the line.",
    {
        "type": "object",
        "properties": {"steps": {"type": "integer"}, "how": {"type": "string"}},
        "required": ["steps"],
    },
)


class Line:
    """Walk along a line to the goal.

    The acts of some kinds fail, as a test asks for.
    """

    class Settings(Frozen):
        length: int = 9

    tools = (MOVE,)

    def __init__(self, settings):
        self.length = settings.length

    def start(self, task, seed):
        print("prints do no harm", task.text)
        self.random = random.Random(seed)
        self.goal, self.place, self.drawn = self.random.randrange(self.length), 0, 0
        return self.look()

    def look(self):
        return Observation(
            "ok",
            f"at {self.place} of {self.length}, drawn {self.drawn}",
            reward=float(self.place == self.goal),
            terminated=self.place == self.goal and self.place > 0,
            state=f"{self.place}",
            actions=("left", "right"),
            info={"goal": self.goal},
        )

    def act(self, call):
        how = call.values.get("how", "")
        self.spoil(how)
        if how in RUBBISH:
            return RUBBISH[how]
        self.place = max(0, min(self.length - 1, self.place + call.values["steps"]))
        self.drawn = self.random.randrange(1000)
        return self.look()

    def spoil(self, how):
        if how == "raise":
            raise LookupError("no way")
        if how == "hang":
            time.sleep(60)
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "away":
            raise UnavailableError("the database is down")
        if how.startswith("first "):  # fails the first time that it is asked for
            with suppress(FileExistsError):
                Path(how.removeprefix("first ")).touch(exist_ok=False)
                self.spoil(how.split("/")[-1])

    def end(self, text):
        return Observation("ok", "", reward=float(text == str(self.goal)))

    def solve(self):
        return Call("move", json.dumps({"steps": 1 if self.goal > self.place else -1}))


class ForkingLine(Line):
    """Walk along a line that forks."""

    def fork(self):
        copy = ForkingLine(Line.Settings(length=self.length))
        copy.random = random.Random()
        copy.random.setstate(self.random.getstate())
        copy.goal, copy.place, copy.drawn = self.goal, self.place, self.drawn
        return copy


class CheatingLine(Line):
    """Walk along a line that forgets its seed once it has started."""

    def start(self, task, seed):
        shown = super().start(task, seed)
        self.random = random.Random()
        return shown


class CheatingStart(Line):
    """Start elsewhere each time."""

    def start(self, task, seed):
        return f"at {time.perf_counter_ns()}"


class Echo:
    """Repeat what is said."""

    repeatable = False

    def start(self, task, seed):
        return f"{task.text} {sorted({'a', 'b', 'c', 'd'}, key=hash)} {'torch' in sys.modules}"

    def act(self, call):
        return call.values["text"]


class NoStart:
    """Fail to start where the task says so."""

    def start(self, task, seed):
        if task.text == "raise":
            raise LookupError("no level")
        if task.text == "die":
            os._exit(1)
        return "ready"

    def act(self, call):
        return "done"


class Wrong:
    """Have the wrong methods."""

    def start(self, seed):
        return ""


class Needy:
    """Want more to be made."""

    def __init__(self, size):
        pass

    def start(self, task, seed):
        return ""

    def act(self, call):
        return ""


class Graded(Echo):
    """Have tasks and tools of its own."""

    tools = ({"name": "say", "description": "Say it.", "parameters": {"type": "object"}},)

    @classmethod
    def tasks(cls, settings, split, count, seed):
        return [Question(f"{split}{i}", "graded", "x", (), data="{}") for i in range(count)]


class Malformed(Echo):
    """Describe a tool wrongly."""

    tools = ({"name": "say it", "description": "", "parameters": {"type": "objekt"}},)


RUBBISH = {
    "number": 7,
    "none": None,
    "bytes": Observation("ok", b"x"),
    "nan": Observation("ok", "", reward=float("nan")),
    "word": Observation("ok", "", reward="much"),
    "flag": Observation("ok", "", terminated="yes"),
    "actions": Observation("ok", "", actions=(1, 2)),
    "info": Observation("ok", "", info={"it": object()}),
    "outcome": Observation("answer", ""),
    "state": Observation("ok", "", state=5),
    "large": "x" * 2_000_000,
}


class Solved(Line):
    """Walk along a line whose solver fails, as the goal says."""

    def solve(self):
        if self.goal % 3 == 0:
            raise KeyError("no plan")
        return Call("move", {"steps": 1}) if self.goal % 3 == 1 else "move"
