"""Print a dialogue or an episode in a terminal, block by block, as it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from tasks.engines import Sample
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation
from tasks.trees.words import printable

WIDTH = 10  # characters of a label
COLOURS = {  # label -> code of the terminal (SGR)
    "question": 1,
    "agent": 36,
    "call": 33,
    "world": 32,
    "result": 32,
    "actions": 32,
    "reward": 35,
    "answer": 1,
    "accepted": 2,
    "end": 1,
}
ENDINGS: Mapping[str, str] = {  # outcome of a trajectory without an answer -> why
    Outcome.NO_ANSWER: "the agent stopped without an answer",
    Outcome.CUT: "the turn used up its token budget",
    Outcome.OUT_OF_SPACE: "the result does not fit into the token budget of the response",
    Outcome.BAD_CALL: "the turn closed a call that it had not opened",
    Outcome.FORGED_RESULT: "the turn wrote a result, which only the tools may write",
    Outcome.FORGED_TURN: "the turn wrote a mark of turns, which only the template may write",
    Outcome.TOO_MANY_CALLS: "the agent made more calls than dialogue.tool_calls has left",
    Outcome.TERMINATED: "the world has ended the episode",
    Outcome.TRUNCATED: "a limit of the world has ended the episode",
    Outcome.REPLAY_DIFFERS: "the world answered the same acts differently when they were replayed",
    Outcome.WORLD_FAILED: "the world failed, and no act was the cause",
    Outcome.WORLD_TIMEOUT: "the world did not answer within its time limit",
    Outcome.WORLD_BROKEN: "the world failed twice at the same act, which may be the cause",
    Outcome.PROGRAM_FAILED: "the program raised an error, or returned no result",
    Outcome.PROGRAM_TIMEOUT: "the program worked for longer than the recipe allows",
    Outcome.PROGRAM_DIED: "a signal ended the program",
}


def has_colours(stream: TextIO) -> bool:
    """Return whether colours may be written: only to a terminal, and not where NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Transcript:
    """Prints what happens in a rollout; a ``Watcher`` of tasks/rollouts/watched.py.

    Characters that a terminal might act on are printed as escapes, whoever wrote them.
    """

    decode: Callable[[Any], str]
    end_token: str
    stream: TextIO
    colours: bool = False

    @classmethod
    def to_terminal(cls, tokenizer: Any) -> Transcript:
        """Return a transcript on standard output."""
        return cls(tokenizer.decode, tokenizer.eos_token, sys.stdout, has_colours(sys.stdout))

    def block(self, label: str, text: str) -> None:
        """Print a text with its label; further lines are indented."""
        name = f"{label}:".ljust(WIDTH)
        if self.colours:
            name = f"\x1b[{COLOURS[label]}m{name}\x1b[0m"
        body = printable(text).replace("\n", "\n" + " " * WIDTH)
        self.stream.write(f"{name}{body}".rstrip() + "\n")
        self.stream.flush()

    def began(self, observation: Observation | None) -> None:
        """Print what a world shows first."""
        if observation:
            self._seen("world", observation)

    def sampled(self, sample: Sample) -> None:
        """Print a turn of the agent."""
        self.block("agent", self.decode(sample.tokens).removesuffix(self.end_token).strip())

    def acted(self, call: Call, observation: Observation) -> None:
        """Print a call and its result, or an act and what the world shows next."""
        self.block("call", f"{call.tool} {call.argument}")
        self._seen("result", observation)

    def ended(self, observation: Observation | None) -> None:
        """Print what a world gives at the end."""
        if observation:
            self._seen("world", observation)

    def _seen(self, label: str, observation: Observation) -> None:
        text = observation.text.strip()
        if observation.outcome != Outcome.OK:
            text = f"({observation.outcome}) {text}"
        self.block(label, text)
        if observation.actions:
            self.block("actions", ", ".join(observation.actions))
        if observation.reward:
            self.block("reward", f"{observation.reward:+g}")
