"""What an expert of your own may import (tasks/questions/contract.py)."""

from params.schema.base import Frozen
from tasks.questions.experts import Trace
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

__all__ = ["Call", "Frozen", "Observation", "Outcome", "Question", "Trace"]
