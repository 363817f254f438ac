"""Check what a world has returned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.tools.guarded_tool import OUTCOMES
from tasks.trees.tree import Observation

TEXT_CHARACTERS = 100_000  # a longer text is cut
KEY_CHARACTERS = 100_000  # most of a state key
ACTIONS = 1000  # most admissible acts
ACTIONS_CHARACTERS = 100_000  # of all of them
INFO_CHARACTERS = 10_000  # of ``info`` as JSON
LARGEST_REWARD = 1e9  # of a step; sums and squares of larger ones leave the range of numbers


def observed(fields: Mapping[str, Any]) -> Observation:
    """Return the observation with these fields of JSON.

    Raises ValueError with each field that breaks the contract, its value, and what is expected.
    """
    reward, state, actions = fields["reward"], fields["state"], fields["actions"]
    texts = isinstance(actions, list) and all(isinstance(action, str) for action in actions)
    length = sum(map(len, actions)) if texts else 0
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    fits = number and -LARGEST_REWARD <= reward <= LARGEST_REWARD  # no NaN does
    checks = {
        "outcome": (
            isinstance(fields["outcome"], str) and fields["outcome"] in OUTCOMES,
            "one of a tool call in tasks/trees/outcomes.py",
        ),
        "text": (isinstance(fields["text"], str), "a text"),
        "reward": (fits, f"a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"),
        "terminated": (isinstance(fields["terminated"], bool), "true or false"),
        "truncated": (isinstance(fields["truncated"], bool), "true or false"),
        "state": (
            state is None or (isinstance(state, str) and len(state) <= KEY_CHARACTERS),
            f"None, or a text of at most {KEY_CHARACTERS} characters",
        ),
        "actions": (
            texts and len(actions) <= ACTIONS and length <= ACTIONS_CHARACTERS,
            f"at most {ACTIONS} texts of {ACTIONS_CHARACTERS} characters in all",
        ),
        "info": (
            isinstance(fields["info"], dict) and len(json.dumps(fields["info"])) <= INFO_CHARACTERS,
            f"a mapping of at most {INFO_CHARACTERS} characters as JSON",
        ),
    }
    wrong = [
        f"{name} is {str(fields[name])[:100]!r}, not {expected}"
        for name, (good, expected) in checks.items()
        if not good
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    cut = {"text": fields["text"][:TEXT_CHARACTERS], "actions": tuple(actions)}
    return Observation(**{**fields, **cut, "reward": float(reward)})
