"""Frozen lakes whose processes hold nothing of the tests: importing those takes them seconds."""

from dataclasses import replace

from tasks.environments.frozen_lake import FrozenLake


class Replayed(FrozenLake):
    """The same world, without a fork of its own."""

    fork = None


class Fading(FrozenLake):
    """A world that does not repeat: in each process, episodes see less than those before them."""

    begun = 0

    def start(self, task, seed):
        Fading.begun += 1
        self.number = Fading.begun
        return super().start(task, seed)

    def act(self, call):
        seen = super().act(call)
        return replace(seen, text=seen.text + f" ({self.number})")


class Silent(FrozenLake):
    """A world whose solver knows no act."""

    def solve(self):
        return None
