"""The expert ``sampled``: traces by rejection sampling, from the policy itself or from a teacher.

A policy answers training questions in the real tools or the real world, several times each; right
answers in a sound format are kept. The stage ``prepare`` samples once questions and the first
policy exist (tasks/select_traces.py), so nothing is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from params.schema.base import Float, Frozen, Positive, PositiveFloat
from params.schema.prepare import Questions
from params.schema.reinforce import Rollout
from tasks.questions.contract import ExpertKind, ExpertSettings


class Teacher(Frozen):
    """A policy that is sampled in place of the recipe's own."""

    name: str  # name on the Hugging Face hub, or path of a folder
    revision: str | None = None  # commit on the hub; null: a folder


class Sampled(ExpertSettings):
    """Who is sampled, how often, and how many traces of a question are kept."""

    policy: Teacher | None  # null: the recipe's own first policy
    questions: Positive | None  # training questions that are asked; null: all
    attempts: Positive  # answers a question
    most: Positive  # most traces of a question
    temperature: PositiveFloat
    top_p: Annotated[Float, Field(gt=0, le=1)]  # nucleus sampling
    rows: Positive  # most answers that are sampled side by side

    @model_validator(mode="after")
    def _fits_together(self) -> Sampled:
        if self.most > self.attempts:
            raise ValueError(
                f"most {self.most} exceeds attempts {self.attempts}: lower the former, or raise "
                "the latter"
            )
        if self.rows < self.attempts:
            raise ValueError(
                f"rows {self.rows} cannot hold the {self.attempts} attempts at one question: raise "
                "rows, or lower attempts"
            )
        return self

    def budget(self) -> Rollout:
        """Return the budget of a question: that many answers, without branches."""
        return Rollout(
            leaves=self.attempts,
            initial=self.attempts,
            branch=0,
            marks_per_rollout=1,
            entropy_window=1,
            base_probability=0.0,
            entropy_weight=0.0,
            threshold=0.0,
            draw=False,
            temperature=self.temperature,
            rows=self.rows,
        )


def faults(settings: Sampled, questions: Questions, tools: Sequence[str]) -> list[str]:
    """Return a line where more questions are asked than there are."""
    rows = questions.rows()
    if rows and settings.questions and settings.questions > rows["train"]:
        return [
            f"prepare.expert.questions {settings.questions} exceeds prepare.questions.train "
            f"{rows['train']}: lower it, or set it to null for all"
        ]
    return []


EXPERT = ExpertKind(Sampled, lambda *_: (lambda tools: ([], []), []), faults=faults, sampled=True)
