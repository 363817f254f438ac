"""Which training questions have labels for the reward model, and what each is for. Pure.

The question alone decides, with the recipe's seed: all trajectories of a question have the same
role, in every iteration, so those that judge the model answer questions that it has never learned
from.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from params.schema.base import Float, Frozen, Integer

Role = Literal["train", "calibrate", "judge"]


class Labels(Frozen):
    """The questions with labels: a share, and the part of it that is held out of training."""

    seed: Integer  # of the recipe
    share: Float  # of the training questions
    held_out: Float  # share of those: one half calibrates the model, the other judges it

    def role(self, question: str) -> Role | None:
        """Return what a question's trajectories are for; None: it has no label."""
        if _uniform(self.seed, "label", question) >= self.share:
            return None
        draw = _uniform(self.seed, "role", question)
        if draw >= self.held_out:
            return "train"
        return "calibrate" if draw < self.held_out / 2 else "judge"


def _uniform(seed: int, purpose: str, question: str) -> float:
    """Return a number in [0, 1) that these three decide."""
    text = f"{seed}/{purpose}/{question}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) / 256**7
