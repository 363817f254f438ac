"""The section ``prepare``: the first policy, questions, and who writes the SFT traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from params.schema.base import (
    Frozen,
    Operand,
    Positive,
    Probability,
    Reference,
    check_below_sources,
)


class TinyPolicy(Frozen):
    """A Qwen2-architecture policy built from random weights, with a tokenizer of its own."""

    kind: Literal["tiny"]
    vocabulary: Positive  # tokens, at most; the tokenizer's training may end with fewer
    hidden: Positive
    layers: Positive
    heads: Positive
    key_value_heads: Positive
    feed_forward: Positive
    context: Positive  # tokens

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyPolicy:
        if self.hidden % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads of "
                f"key_value_heads {self.key_value_heads}: change one of the three"
            )
        return self


class PretrainedPolicy(Frozen):
    """A policy from the Hugging Face hub (revision pinned) or from a local folder."""

    kind: Literal["pretrained"]
    name: str
    revision: str | None
    context: Positive  # tokens


Policy = Annotated[TinyPolicy | PretrainedPolicy, Field(discriminator="kind")]


class ComputationQuestions(Frozen):
    """Computation questions generated from the seed; tasks/questions/computation.py makes them."""

    source: Literal["computation"]
    train: Positive  # questions
    validation: Positive
    test: Positive
    largest_operand: Operand  # of stories and chains
    largest_arithmetic_operand: Operand  # in training and validation; test numbers are larger
    largest_test_operand: Positive  # of arithmetic in the test split

    def rows(self) -> dict[str, int]:
        """How many questions each split must hold."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @model_validator(mode="after")
    def _test_range_lies_outside(self) -> ComputationQuestions:
        if self.largest_test_operand <= self.largest_arithmetic_operand:
            raise ValueError(
                f"largest_test_operand {self.largest_test_operand} must exceed "
                f"largest_arithmetic_operand {self.largest_arithmetic_operand}: test numbers lie "
                "outside the training range"
            )
        return self


class EncyclopediaQuestions(Frozen):
    """An invented encyclopedia and questions about it; tasks/questions/encyclopedia.py."""

    source: Literal["encyclopedia"]
    train: Positive  # questions
    validation: Positive
    test: Positive
    articles: Positive  # people, places and works together
    kinds: Annotated[tuple[Literal["fact", "hop", "age", "gap"], ...], Field(min_length=1)]
    # of questions, which take turns

    def rows(self) -> dict[str, int]:
        """How many questions each split must hold."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


class BenchmarkQuestions(Frozen):
    """Questions of the sets in params/benchmarks.yaml, or of the user's own rows there."""

    source: Literal["benchmarks"]
    train: tuple[Reference, ...]
    validation: Positive  # questions set aside from the end of the training questions
    test: tuple[Reference, ...]

    def rows(self) -> dict[str, int] | None:
        """How many questions each split must hold: as many as the sets have."""
        return None

    @model_validator(mode="after")
    def _names_its_sets(self) -> BenchmarkQuestions:
        for split in ("train", "test"):
            if not getattr(self, split):
                raise ValueError(f"{split} is empty: name at least one set, such as gsm8k/{split}")
        return self


Questions = Annotated[
    ComputationQuestions | EncyclopediaQuestions | BenchmarkQuestions,
    Field(discriminator="source"),
]


class Expert(Frozen):
    """A scripted expert that writes the SFT traces, and the rates at which it is wrong."""

    traces: Positive

    def rates(self) -> dict[str, float]:
        """The share of traces with each flaw; a trace has at most one."""
        return {name: rate for name, rate in self if name not in ("kind", "traces")}

    @model_validator(mode="after")
    def _rates_leave_room(self) -> Expert:
        if sum(self.rates().values()) > 1:
            raise ValueError(
                f"the rates of wrong traces add up to {sum(self.rates().values())}: a trace has at "
                "most one flaw, so lower them to at most 1 together"
            )
        return self


class ComputationExpert(Expert):
    kind: Literal["computation"]
    wrong_operator: Probability  # one operator of its code is another one
    wrong_digit: Probability  # one digit of its code is another one
    wrong_answer: Probability  # one digit of the copied result is another one
    missing_call: Probability  # it gives up: answers 0 without a tool call


class EncyclopediaExpert(Expert):
    kind: Literal["encyclopedia"]
    wrong_query: Probability  # it looks up another entry than the question's
    wrong_fact: Probability  # it copies another word of what it found
    missing_call: Probability  # it gives up: answers "unknown" without a tool call


class CalculatorExpert(Frozen):
    """Traces from the calculator notes of worked solutions, as GSM8K has them (2110.14168)."""

    kind: Literal["calculator"]

    def rates(self) -> dict[str, float]:
        """Its traces are verified: none is flawed."""
        return {}


class WrittenTraces(Frozen):
    """Whole responses to training questions from a file of records below data/sources/."""

    kind: Literal["written"]
    file: Path
    question: str  # field
    response: str  # field

    def rates(self) -> dict[str, float]:
        """Nothing is known of flaws in them."""
        return {}

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> WrittenTraces:
        check_below_sources(self.file)
        return self


AnyExpert = Annotated[
    ComputationExpert | EncyclopediaExpert | CalculatorExpert | WrittenTraces,
    Field(discriminator="kind"),
]
EXPERTS_OF = {  # who can write traces for the questions of a source
    "computation": ("computation",),
    "encyclopedia": ("encyclopedia",),
    "benchmarks": ("calculator", "written"),
}
CALLED_BY = {  # the tools that an expert calls
    "computation": ("python",),
    "encyclopedia": ("search", "python"),
    "calculator": ("python",),
    "written": (),
}


class Intake(Frozen):
    """A folder below data/sources/ into which new files of training questions are put."""

    folder: Path  # it need not be there
    set: str  # the row of benchmarks.yaml that says how a record is read

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> Intake:
        check_below_sources(self.folder)
        return self


class Prepare(Frozen):
    policy: Policy
    questions: Questions
    intake: Intake | None
    expert: AnyExpert  # who writes the SFT traces
    # A training question that shares so many words in a row with one of validation or test is left
    # out where it is read from a file, and stops the run where it was generated.
    overlap_words: Positive

    @model_validator(mode="after")
    def _expert_knows_the_questions(self) -> Prepare:
        able = EXPERTS_OF[self.questions.source]
        if self.expert.kind not in able:
            raise ValueError(
                f"questions.source is {self.questions.source} and expert.kind {self.expert.kind}, "
                f"who cannot answer them: set expert.kind to {' or '.join(able)}"
            )
        rows = self.questions.rows()
        if isinstance(self.expert, Expert) and rows and self.expert.traces > rows["train"]:
            raise ValueError(
                f"expert.traces {self.expert.traces} exceeds questions.train {rows['train']}: the "
                "expert answers each question once; lower it"
            )
        return self
