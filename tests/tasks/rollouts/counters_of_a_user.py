"""A world that adds numbers up, and ends at 3 or more. It cannot fork: its acts are replayed."""

from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation, ToolSpec

ADD = ToolSpec(
    "add",
    "Add a number.",
    {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)


class Counter:
    """It starts at 0. A step gives its number as reward; negative ones are not admissible."""

    tools = (ADD,)

    def __init__(self, settings):
        self.sum = 0

    def start(self, task, seed):
        return Observation("ok", "at 0", actions=("add",))

    def act(self, call):
        number = call.values["number"]
        if number < 0:
            return Observation(Outcome.NOT_ADMISSIBLE, f"still at {self.sum}", actions=("add",))
        self.sum += number
        end = self.sum >= 3
        info = {"score": 1.0} if end else {}
        return Observation("ok", f"at {self.sum}", float(number), end, actions=("add",), info=info)
