"""What a reward or a scorer of your own may import (docs/own-reward.md)."""

from tasks.rewards.contract import Ending
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, RESULT, TURN, CallResult, Message, Node, Observation, Question

__all__ = [
    "PROMPT",
    "RESULT",
    "TURN",
    "CallResult",
    "Ending",
    "Message",
    "Node",
    "Observation",
    "Outcome",
    "Question",
]
