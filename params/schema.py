"""The typed form of a recipe: every value that a run depends on, checked before any work starts.

A recipe is one complete YAML file, ``params/<recipe>.yaml``; its sections are named after the
stages that read them. Everything here is frozen; an unknown or a missing key is an error that names
the file, the key and the remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PARAMS = Path(__file__).parent

Positive = Annotated[int, Field(gt=0)]
Operand = Annotated[int, Field(ge=2)]  # operands are drawn from 2 on
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Base of every section: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Section = TypeVar("Section", bound=Frozen)


class Machine(Frozen):
    """What the run may use of the machine it is on."""

    threads: Positive  # of torch, and warm sandboxes side by side
    device: Literal["cpu", "cuda"]
    precision: Literal["float32"]  # bfloat16 needs float32 master weights, which are to come


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


class GeneratedQuestions(Frozen):
    """Computation questions generated from the seed; tasks/questions/computation.py makes them."""

    source: Literal["generated"]
    train: Positive  # questions
    validation: Positive
    test: Positive
    largest_operand: Operand  # of stories and chains
    largest_arithmetic_operand: Operand  # in training and validation; test numbers are larger
    largest_test_operand: Positive  # of arithmetic in the test split

    def files(self) -> tuple[Path, ...]:
        """No file is read."""
        return ()

    def rows(self) -> dict[str, int] | None:
        """How many questions each split must hold."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @model_validator(mode="after")
    def _test_range_lies_outside(self) -> GeneratedQuestions:
        if self.largest_test_operand <= self.largest_arithmetic_operand:
            raise ValueError(
                f"largest_test_operand {self.largest_test_operand} must exceed "
                f"largest_arithmetic_operand {self.largest_arithmetic_operand}: test numbers lie "
                "outside the training range"
            )
        return self


class FileQuestions(Frozen):
    """Questions from the user's own JSON-lines files below questions/, one object a line."""

    source: Literal["files"]
    train: Path
    validation: Path
    test: Path
    question_field: str
    answer_field: str
    traces: Path  # SFT traces: a question of ``train`` and a whole response a line
    response_field: str

    def files(self) -> tuple[Path, ...]:
        """Every file that is read."""
        return self.train, self.validation, self.test, self.traces

    def rows(self) -> dict[str, int] | None:
        """How many questions each split must hold: as many as its file has."""
        return None

    @model_validator(mode="after")
    def _files_lie_where_dvc_looks(self) -> FileQuestions:
        for file in self.files():
            if file.is_absolute() or file.parts[:1] != ("questions",) or ".." in file.parts:
                raise ValueError(
                    f"{file} lies outside the folder questions/, where DVC would not see that it "
                    "changed: move it there"
                )
        return self


Questions = Annotated[GeneratedQuestions | FileQuestions, Field(discriminator="source")]


class Expert(Frozen):
    """The scripted expert behind the SFT traces, and the rates at which it is wrong."""

    traces: Positive
    wrong_operator: Probability
    wrong_digit: Probability
    wrong_answer: Probability
    missing_call: Probability

    def rates(self) -> dict[str, float]:
        """The share of traces with each flaw; a trace has at most one."""
        return {name: rate for name, rate in self if name != "traces"}

    @model_validator(mode="after")
    def _rates_leave_room(self) -> Expert:
        if sum(self.rates().values()) > 1:
            raise ValueError(
                f"the rates of wrong traces add up to {sum(self.rates().values())}: a trace has at "
                "most one flaw, so lower them to at most 1 together"
            )
        return self


class Prepare(Frozen):
    policy: Policy
    questions: Questions
    expert: Expert | None  # null: questions from files bring their own traces

    @model_validator(mode="after")
    def _generated_questions_need_the_expert(self) -> Prepare:
        if (self.questions.source == "generated") != (self.expert is not None):
            raise ValueError(
                f"questions.source is {self.questions.source} and expert is "
                f"{'null' if self.expert is None else 'given'}: generated questions need the "
                "expert, files bring their own traces"
            )
        rows = self.questions.rows()
        if self.expert and rows and self.expert.traces > rows["train"]:
            raise ValueError(
                f"expert.traces {self.expert.traces} exceeds questions.train {rows['train']}: the "
                "expert answers each question once; lower it"
            )
        return self


class Dialogue(Frozen):
    """How an agent's trajectory is laid out, and where it is cut."""

    system: str
    tools: tuple[Literal["python"], ...]
    turn_tokens: Positive  # sampled tokens a turn, at most
    result_tokens: Positive  # tokens of one tool result, at most
    response_tokens: Positive  # tokens after the prompt, sampled and observed, at most
    tool_calls: NonNegative  # a trajectory, at most

    @model_validator(mode="after")
    def _has_a_tool(self) -> Dialogue:
        if not self.tools:
            raise ValueError("tools is empty: name at least one, such as python")
        return self


class PythonTool(Frozen):
    """Limits of one call of the Python tool (design decision 9)."""

    sandbox: Literal["auto", "bubblewrap", "unshare", "none"]
    cpu_seconds: Positive
    wall_seconds: PositiveFloat  # backstop only: outcomes must not depend on load
    memory_mib: Positive
    processes: Positive
    file_mib: Positive
    output_characters: Positive


class ColdStart(Frozen):
    steps: Positive
    batch: Positive  # traces a step
    learning_rate: PositiveFloat
    warmup_steps: NonNegative
    weight_decay: Annotated[float, Field(ge=0)]
    save_every: Positive  # steps


class Rollout(Frozen):
    """Budgets of one question's tree (ARPO section 3.1)."""

    leaves: Positive  # M, total budget a question
    initial: Positive  # N, rollouts from the prompt
    branch: NonNegative  # Z, extra paths a branching
    entropy_window: Positive  # k, tokens
    base_probability: float  # alpha
    entropy_weight: float  # beta
    threshold: float  # tau
    draw: bool  # branch with probability P instead of iff P > tau
    temperature: PositiveFloat
    rows: Positive  # paths that are sampled side by side, at most

    @model_validator(mode="after")
    def _budget_covers_start(self) -> Rollout:
        if self.initial > self.leaves:
            raise ValueError(
                f"initial {self.initial} exceeds leaves {self.leaves}: the total budget must cover "
                "the rollouts that it starts with; lower initial or raise leaves"
            )
        if self.rows < self.leaves:
            raise ValueError(
                f"rows {self.rows} cannot hold the {self.leaves} leaves of one question: raise "
                "rows, or lower leaves"
            )
        return self


class Reward(Frozen):
    broken_format: float
    wrong: float
    many_tools_bonus: float

    def range(self) -> tuple[float, float]:
        """The lowest and the highest reward that can be given."""
        values = (self.broken_format, self.wrong, 1.0, 1.0 + self.many_tools_bonus)
        return min(values), max(values)


class Update(Frozen):
    learning_rate: PositiveFloat
    warmup_updates: NonNegative
    weight_decay: Annotated[float, Field(ge=0)]
    adam_betas: tuple[Decay, Decay]
    gradient_clip: PositiveFloat  # global norm
    epochs: Positive  # passes over one batch of trees
    mini_batches: Positive  # optimizer steps a pass
    micro_batch_tokens: Positive  # padded tokens a forward pass, at most


class Reinforce(Frozen):
    algorithm: str  # a row of params/algorithms.yaml
    iterations: Positive
    questions: Positive  # an iteration
    rollout: Rollout
    reward: Reward
    update: Update
    keep_checkpoints: Positive  # newest iterations whose weights stay in the ledger


class Evaluate(Frozen):
    questions: Positive  # of the test set, at most
    temperature: PositiveFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    bootstrap: Positive  # resamples


class Recipe(Frozen):
    """One complete recipe."""

    seed: NonNegative
    machine: Machine
    prepare: Prepare
    dialogue: Dialogue
    python: PythonTool
    cold_start: ColdStart
    reinforce: Reinforce
    evaluate: Evaluate

    @model_validator(mode="after")
    def _context_covers_response(self) -> Recipe:
        if self.dialogue.response_tokens >= self.prepare.policy.context:
            raise ValueError(
                f"dialogue.response_tokens {self.dialogue.response_tokens} leaves no room for a "
                f"prompt in prepare.policy.context {self.prepare.policy.context}: lower the former "
                "or raise the latter"
            )
        return self

    def single_answers(self) -> Rollout:
        """The budget of an evaluation: one path a question, at the evaluation's temperature."""
        single = {"leaves": 1, "initial": 1, "branch": 0}
        return self.reinforce.rollout.model_copy(
            update={**single, "temperature": self.evaluate.temperature}
        )


def names(folder: Path = PARAMS) -> list[str]:
    """The recipes that lie in ``folder``."""
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in ("algorithms",))


def load(name: str, folder: Path = PARAMS) -> Recipe:
    """Read and check ``<folder>/<name>.yaml``.

    Raises ValueError with file, key and remedy for an unknown recipe, YAML that does not parse, a
    missing, unknown or impossible key.
    """
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(
            f"no recipe '{name}': {file} does not exist; recipes here: {names(folder)}"
        )
    return check(read_yaml(file), file)


def read_yaml(file: Path) -> Any:
    """Parse a YAML file; a syntax error names file and line."""
    try:
        return yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from None


def check(values: Any, file: Path) -> Recipe:
    """Turn parsed YAML into a Recipe."""
    return validate(Recipe, values, str(file))


def validate(model: type[Section], values: Any, where: str) -> Section:
    """Turn parsed YAML into a section; every fault in one ValueError, a line each."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ValueError("\n".join(f"{where}: {line}" for line in lines)) from None


def _explain(fault: Any) -> str:
    key = ".".join(
        str(part)
        for part in fault["loc"]
        if part not in ("tiny", "pretrained", "generated", "files")
    )
    remedies = {
        "extra_forbidden": f"unknown key '{key}': remove it, or correct its spelling",
        "missing": f"missing key '{key}': add it (params/tiny.yaml has every key, with its unit)",
    }
    where = (
        f"'{key}' = {fault['input']!r}: " if key and not isinstance(fault["input"], dict) else ""
    )
    return remedies.get(fault["type"], f"{where}{fault['msg'].removeprefix('Value error, ')}")
