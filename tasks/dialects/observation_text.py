"""What an agent is shown of an environment: the observation, and in a fresh prompt its history."""

from __future__ import annotations

from collections.abc import Sequence

from params.schema.agent import Dialogue
from tasks.dialects.contract import Exchange
from tasks.trees.dialogue import first_text
from tasks.trees.tree import Call, Observation


def shown_text(past: Sequence[Exchange], observation: Observation, dialogue: Dialogue) -> str:
    """Return what follows the task in a prompt: the last steps, the observation, the actions.

    ``past``: the episode's steps so far; the last ``dialogue.history`` of them are shown.
    """
    recent = past[max(0, len(past) - dialogue.history) :]
    first = len(past) - len(recent) + 1
    steps = [_step(number, exchange) for number, exchange in enumerate(recent, start=first)]
    return "\n".join(filter(None, [*steps, first_text(observation)]))


def _step(number: int, exchange: Exchange) -> str:
    """Return an earlier step: what was done, and what it led to, act by act."""
    acts = zip(exchange.calls, exchange.observations, strict=True)
    return "\n".join(f"step {number}: {_act(call)}\n{seen.text}" for call, seen in acts)


def _act(call: Call) -> str:
    # Indented, so that an agent does not write what looks like an observation or a step.
    argument = "\n    ".join(call.argument.splitlines())
    return f"{call.tool} {argument}"
