"""The section ``prepare``: the first policy, the questions, and the expert that writes traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, model_validator

from params.schema.base import Frozen, Integer, Positive, PositiveFloat, check_below_sources

Operand = Annotated[Integer, Field(ge=2)]  # operands are drawn from 2 on
Reference = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]  # set/split of benchmarks.yaml


class TinyPolicy(Frozen):
    """A policy of the Qwen2 architecture with random weights and its own tokenizer."""

    kind: Literal["tiny"]
    vocabulary: Positive  # most tokens; training the tokenizer may end with fewer
    hidden: Positive
    layers: Positive
    heads: Positive
    key_value_heads: Positive
    feed_forward: Positive
    context: Positive  # tokens
    rotary_base: PositiveFloat = 100.0  # of positions (docs/worlds.md#household)

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyPolicy:
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads a "
                f"multiple of key_value_heads {self.key_value_heads}: change one of them"
            )
        return self


class PretrainedPolicy(Frozen):
    """A policy from the Hugging Face hub, from a local folder, or from a GGUF file."""

    kind: Literal["pretrained"]
    name: str  # name on the hub, or path of a folder; with gguf, also an installed Python package
    revision: str | None  # commit on the hub; null: a folder
    context: Positive  # tokens
    gguf: Annotated[str, Field(pattern=r"^[\w.-]+\.gguf$")] | None = None  # the file in it
    # Its name on the hub, where ``name`` is another one, for cards; it decides no result.
    origin: Annotated[Reference | None, Field(exclude=True)] = None


Policy = Annotated[TinyPolicy | PretrainedPolicy, Field(discriminator="kind")]


class ComputationQuestions(Frozen):
    """Questions about computations, generated from the seed (tasks/questions/computation.py)."""

    source: Literal["computation"]
    train: Positive  # questions
    validation: Positive
    test: Positive
    largest_operand: Operand  # in stories and chains
    largest_arithmetic_operand: Operand  # in training and validation; test numbers are larger
    largest_test_operand: Positive  # in arithmetic of the test split

    def rows(self) -> dict[str, int]:
        """Return the number of questions that each split must have."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @model_validator(mode="after")
    def _test_range_lies_outside(self) -> ComputationQuestions:
        if self.largest_test_operand <= self.largest_arithmetic_operand:
            raise ValueError(
                f"largest_test_operand {self.largest_test_operand} must exceed "
                f"largest_arithmetic_operand {self.largest_arithmetic_operand}, so that the test "
                "asks for numbers outside the training range: raise the former or lower the latter"
            )
        return self


class EncyclopediaQuestions(Frozen):
    """Questions about an invented encyclopedia (tasks/questions/encyclopedia.py)."""

    source: Literal["encyclopedia"]
    train: Positive  # questions
    validation: Positive
    test: Positive
    articles: Positive  # people, places and works together
    # Kinds of questions, which take turns.
    kinds: Annotated[tuple[Literal["fact", "hop", "age", "gap"], ...], Field(min_length=1)]

    def rows(self) -> dict[str, int]:
        """Return the number of questions that each split must have."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


class BenchmarkQuestions(Frozen):
    """Questions of sets that are rows of params/benchmarks.yaml, the user's own included."""

    source: Literal["benchmarks"]
    train: tuple[Reference, ...]
    validation: Positive  # questions drawn from the training questions, from each set in proportion
    test: tuple[Reference, ...]

    def rows(self) -> dict[str, int] | None:
        """Return None: the splits have as many questions as their sets."""
        return None

    @model_validator(mode="after")
    def _names_its_sets(self) -> BenchmarkQuestions:
        for split in ("train", "test"):
            if not getattr(self, split):
                raise ValueError(f"{split} is empty: name at least one set, such as gsm8k/{split}")
        return self


class EnvironmentQuestions(Frozen):
    """Tasks in the world that the section ``environment`` names, made by its own file."""

    source: Literal["environment"]
    train: Positive  # tasks
    validation: Positive
    test: Positive

    def rows(self) -> dict[str, int]:
        """Return the number of tasks that each split must have."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


Questions = Annotated[
    ComputationQuestions | EncyclopediaQuestions | BenchmarkQuestions | EnvironmentQuestions,
    Field(discriminator="source"),
]


class Expert(Frozen):
    """Who writes the SFT traces: a file of tasks/questions by its name, or one of the user's.

    That file declares the other keys; tasks/questions/choice.py checks them.
    """

    model_config = ConfigDict(extra="allow")

    kind: str


class Intake(Frozen):
    """A folder below data/sources/ for new files of training questions."""

    folder: Path  # it may be missing
    set: str  # the row of params/benchmarks.yaml that describes its records

    @model_validator(mode="after")
    def _folder_is_watched(self) -> Intake:
        check_below_sources(self.folder)
        return self


class Prepare(Frozen):
    """What the stage ``prepare`` makes: the first policy, the questions and the SFT traces."""

    policy: Policy
    questions: Questions
    intake: Intake | None = None  # null: none
    expert: SerializeAsAny[Expert] | None  # writes the SFT traces; null: there are none
    # What happens to a record of the user's files that is faulty, or too long for the context.
    faulty: Literal["stop", "drop"] = "stop"
    # A training question that shares this many words in a row with a question of validation or test
    # is left out if it was read from a file, and stops the run if it was generated.
    overlap_words: Positive
