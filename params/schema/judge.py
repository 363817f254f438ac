"""The section ``judge``: models that score answers (docs/own-reward.md#a-judge)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from params.schema.base import Flag, Float, Frozen, NonNegative, Positive
from params.schema.chat import ChatEndpoint, ChatLimits

PROMPTS = Path("prompts")  # folder of the files of prompts, below params/


class JudgePolicy(Frozen):
    """A policy of this machine, sampled by the recipe's engine. Its digest is in keys, too."""

    kind: Literal["policy"]
    name: Annotated[str, Field(min_length=1)]  # its folder, such as models/other/trained


Model = Annotated[ChatEndpoint | JudgePolicy, Field(discriminator="kind")]


class Judge(ChatLimits):
    """The models that judge an answer, by vote, and how they are asked.

    An answer is right where more than half of all verdicts say so.
    """

    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    prompt: Path  # file below params/, such as prompts/judge.txt; its text counts, not its name
    votes: Positive  # verdicts of each model
    temperature: Annotated[Float, Field(ge=0)]
    max_tokens: Positive  # of a verdict with its reasons
    ask_again: NonNegative  # times, with another seed, where a text has no verdict
    # whether the trained policy may be a judge
    own_policy: Annotated[Flag, Field(exclude=True)] = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Judge:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(
                f"judge.models names {', '.join(names)}: name each model once, and set votes for "
                "several verdicts of one"
            )
        if ".." in self.prompt.parts or self.prompt.parent != PROMPTS:
            raise ValueError(
                f"judge.prompt is {self.prompt}: put the file into params/{PROMPTS}/, which DVC "
                f"watches, and write {PROMPTS}/<file>"
            )
        return self
