"""The typed form of a recipe: every value that a run depends on, checked before any work starts.

A recipe is one complete YAML file, ``params/<recipe>.yaml``; its sections are named after the
stages that read them. Everything here is frozen; an unknown or a missing key is an error that names
the file, the key and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

PARAMS = Path(__file__).parent
TABLES = ("algorithms", "architectures", "benchmarks")  # files of params/ that are no recipes
MOST_BATCHES = 10  # that one iteration rolls out in search of groups with spread (DAPO)

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
    precision: Literal["float32", "bfloat16"]  # of passes; master weights are float32 always
    # What the recipe's files may take of the disk, at most; it decides no outcome and is in no key.
    disk_gib: Annotated[PositiveFloat | None, Field(exclude=True)] = None


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


Reference = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]  # set/split of benchmarks.yaml


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
    """Whole responses to training questions from a file of records below questions/."""

    kind: Literal["written"]
    file: Path
    question: str  # field
    response: str  # field

    def rates(self) -> dict[str, float]:
        """Nothing is known of flaws in them."""
        return {}

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> WrittenTraces:
        check_below_questions(self.file)
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


def check_below_questions(file: Path) -> None:
    """Raise ValueError for a user's file that lies where DVC would not watch it."""
    if file.is_absolute() or file.parts[:1] != ("questions",) or ".." in file.parts:
        raise ValueError(
            f"{file} lies outside the folder questions/, where DVC would not see that it "
            "changed: move it there"
        )


class Intake(Frozen):
    """A folder below questions/ into which new training questions are delivered, file by file."""

    folder: Path  # it need not be there
    set: str  # the row of benchmarks.yaml that says how a record is read

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> Intake:
        check_below_questions(self.folder)
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


class Dialogue(Frozen):
    """How an agent's trajectory is laid out, and where it is cut."""

    system: str
    tools: tuple[Literal["python", "search"], ...]
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


class Search(Frozen):
    """The search tool: BM25 (Robertson and Zaragoza 2009) over the recipe's corpus."""

    corpus: Path | None  # documents below questions/; null: those that the questions come with
    results: Positive  # documents a query, at most
    snippet_words: Positive  # of one document, at most
    query_characters: Positive  # a longer query is refused
    k1: PositiveFloat  # how soon a word that is repeated stops counting
    b: Probability  # how much a long document is held back

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> Search:
        if self.corpus:
            check_below_questions(self.corpus)
        return self


class Engine(Frozen):
    """What samples. Only its kind decides what comes out, and is in keys of the ledger."""

    kind: Literal["transformers", "vllm"]
    # Of vllm: what it may take for weights and for keys and values. On a GPU a share of its memory,
    # on a CPU the GiB of keys and values.
    memory: Annotated[PositiveFloat, Field(exclude=True)]
    # of vllm, elsewhere; null: here
    server: Annotated[str | None, Field(exclude=True, pattern="^https?://")]
    # Of vllm: groups of questions that go on by themselves, so that none waits for another's tools.
    # With 1 all go in rounds.
    lanes: Annotated[Positive, Field(exclude=True)]

    @model_validator(mode="after")
    def _only_vllm_has_a_server(self) -> Engine:
        if self.server and self.kind != "vllm":
            raise ValueError(
                f"server is {self.server} and kind {self.kind}, which samples here: set server to "
                "null, or kind to vllm"
            )
        return self


class Lora(Frozen):
    """Low-rank adapters instead of all weights (arXiv 2106.09685), through peft."""

    rank: Positive
    alpha: PositiveFloat  # the adapters' product is scaled by alpha / rank
    modules: Annotated[tuple[str, ...], Field(min_length=1)]  # names of linear layers


class ColdStart(Frozen):
    steps: Positive
    batch: Positive  # traces a step
    micro_batch: Positive  # traces a forward pass
    learning_rate: PositiveFloat
    warmup_steps: NonNegative
    weight_decay: Annotated[float, Field(ge=0)]
    save_every: Positive  # steps

    @model_validator(mode="after")
    def _micro_batches_fill_a_batch(self) -> ColdStart:
        if self.batch % self.micro_batch:
            raise ValueError(
                f"batch {self.batch} is no multiple of micro_batch {self.micro_batch}: change one"
            )
        return self


class Rollout(Frozen):
    """Budgets of one question's tree (ARPO section 3.1)."""

    leaves: Positive  # M, total budget a question
    initial: Positive  # N, rollouts from the prompt
    branch: NonNegative  # Z, extra paths a branching (GPG: N continuations of a mark)
    marks_per_rollout: Positive  # GPG: marks of each of the initial rollouts that branch
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
        """The lowest and the highest reward that can be given; a graded score may be near 0."""
        values = (self.broken_format, self.wrong, 0.0, 1.0, 1.0 + self.many_tools_bonus)
        return min(values), max(values)


class Update(Frozen):
    learning_rate: PositiveFloat
    warmup_updates: NonNegative
    weight_decay: Annotated[float, Field(ge=0)]
    adam_betas: tuple[Decay, Decay]
    gradient_clip: PositiveFloat  # global norm
    epochs: Positive  # passes over one batch of trees
    mini_batches: Positive  # optimizer steps a pass
    micro_batch_tokens: Positive  # tokens of a forward pass, at most; each of a tree once
    critic_learning_rate: PositiveFloat  # of a critic's own weights, where the algorithm has one
    recompute: bool  # activations in the backward pass instead of keeping them: memory for time


class Keep(Frozen):
    """What the ledger keeps of an iteration's update; trees, rewards and advantages always stay."""

    weights_every: Positive  # the weights of every so many iterations stay for ever
    optimizer_last: Positive  # newest iterations whose weights and optimizer state stay


class Reinforce(Frozen):
    algorithm: str  # a row of params/algorithms.yaml
    iterations: Positive
    questions: Positive  # an iteration
    rollout: Rollout
    reward: Reward
    update: Update
    ahead: Annotated[int, Field(ge=0, le=1)]  # updates that the policy that samples may lack
    keep: Keep
    trace_every: Positive  # iterations between those of which trajectories go to MLflow
    trace_questions: NonNegative  # of such an iteration, whose trajectories go there


class Evaluate(Frozen):
    questions: Positive  # of the test set, at most
    temperature: PositiveFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    bootstrap: Positive  # resamples


class Verdict(Frozen):
    """When a candidate takes the champion's place."""

    # A paired bootstrap of success over the held-out questions: the two-sided interval of
    # candidate - champion must lie above the margin.
    confidence: Annotated[float, Field(gt=0, lt=1)]
    margin: Annotated[float, Field(ge=-1, le=1)]  # of success, a share
    bootstrap: Positive  # resamples


class Champion(Frozen):
    """Which policy is to be beaten: a version of the recipe's registered model, and its files."""

    version: Positive
    # of the run that trained it; null: it was registered by hand, from a folder
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.dir$")]  # DVC's, of the policy's folder


class Recipe(Frozen):
    """One complete recipe."""

    seed: NonNegative
    start: Literal["scratch", "champion"]  # what training begins with
    champion: Champion | None  # a retraining writes it here; null: there is none yet
    machine: Machine
    prepare: Prepare
    dialogue: Dialogue
    python: PythonTool
    search: Search | None  # null where dialogue.tools has no search
    engine: Engine
    lora: Lora | None  # null: all weights learn
    cold_start: ColdStart
    reinforce: Reinforce
    evaluate: Evaluate
    verdict: Verdict

    @model_validator(mode="after")
    def _context_covers_response(self) -> Recipe:
        if self.dialogue.response_tokens >= self.prepare.policy.context:
            raise ValueError(
                f"dialogue.response_tokens {self.dialogue.response_tokens} leaves no room for a "
                f"prompt in prepare.policy.context {self.prepare.policy.context}: lower the former "
                "or raise the latter"
            )
        return self

    @model_validator(mode="after")
    def _search_has_a_corpus(self) -> Recipe:
        if ("search" in self.dialogue.tools) != (self.search is not None):
            raise ValueError(
                f"dialogue.tools is {list(self.dialogue.tools)} and search is "
                f"{'null' if self.search is None else 'given'}: a recipe with the tool search "
                "needs the section search, another one sets it to null"
            )
        own = self.prepare.questions.source == "encyclopedia"
        if self.search and own == (self.search.corpus is not None):
            raise ValueError(
                f"search.corpus is {self.search.corpus} and questions.source is "
                f"{self.prepare.questions.source}: an encyclopedia brings its corpus (null), other "
                "sources need a file of documents below questions/"
            )
        return self

    @model_validator(mode="after")
    def _expert_has_its_tools(self) -> Recipe:
        kind = self.prepare.expert.kind
        missing = [tool for tool in CALLED_BY[kind] if tool not in self.dialogue.tools]
        if missing:
            raise ValueError(
                f"dialogue.tools is {list(self.dialogue.tools)} and expert.kind {kind}, who calls "
                f"{' and '.join(missing)} too: add it to dialogue.tools"
            )
        return self

    def single_answers(self) -> Rollout:
        """The budget of an evaluation: one path a question, at the evaluation's temperature."""
        single = {"leaves": 1, "initial": 1, "branch": 0}
        return self.reinforce.rollout.model_copy(
            update={**single, "temperature": self.evaluate.temperature}
        )


class Hub(Frozen):
    """Files of a dataset on the Hugging Face hub, at one commit."""

    name: str
    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # a commit: branches move
    files: dict[str, str]  # split -> file in the dataset's repository


class Benchmark(Frozen):
    """A row of params/benchmarks.yaml: where a set of questions lies, and how to read a record.

    A field is a dotted path into the record ("prompt.0.content"); numbers are places in a list.
    """

    hub: Hub | None  # null: only files below questions/<set>/
    question: str  # field: a text, or a chat (a list of role and content)
    answer: str  # field: a text, a number, or a list of accepted forms
    answer_after: str | None  # the answer is what follows the last of these marks, such as "####"
    solution: str | None  # field of a worked solution
    records: str | None  # in a JSON file that is no list: the field of the list
    scorer: Literal["exact", "maths", "f1"]


class Architecture(Frozen):
    """A row of params/architectures.yaml: the shape of a model on the Hugging Face hub."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # the commit that has this shape
    config: dict[str, Any]  # of its config.json what decides memory and time


# ---------------------------------------------------------------- rows of algorithms.yaml


def _spelt_out(choice: Any) -> Any:
    """A choice without settings may be written as its kind alone."""
    return {"kind": choice} if isinstance(choice, str) else choice


class Marks(Frozen):
    """Where segments (macro actions of GPG, arXiv 2512.10365, section 4.2) end."""

    kind: Literal["none", "every_token", "tool_call", "paragraph", "entropy", "step"]
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None  # of a trajectory's entropies
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None  # of the entropy over ln|V|

    @model_validator(mode="after")
    def _entropy_is_measured_once(self) -> Marks:
        given = [name for name in ("quantile", "threshold") if getattr(self, name) is not None]
        if len(given) != (self.kind == "entropy"):
            raise ValueError(
                f"{self.kind} marks with {' and '.join(given) or 'neither'}: marks of kind entropy "
                "need either quantile or threshold, the other kinds need none of them"
            )
        return self


class Return(Frozen):
    """The trajectory's reward on every sampled token."""

    kind: Literal["return"]


class GroupRelative(Frozen):
    """(r - mean) / std over the leaves of a question; without ``std``: r - mean."""

    kind: Literal["group_relative"]
    std: bool = True


class LeaveOneOut(Frozen):
    """r - mean of the other leaves' rewards."""

    kind: Literal["leave_one_out"]


class BatchWhitened(Frozen):
    """Returns whitened over all sampled tokens of the batch; ``baseline``: group mean first."""

    kind: Literal["batch_whitened"]
    baseline: bool


class Gae(Frozen):
    """Generalised advantage estimation with a critic, then whitened."""

    kind: Literal["gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")


class TwoLevel(Frozen):
    """Group-relative over episodes, plus omega times the same over steps from equal states."""

    kind: Literal["two_level"]
    omega: Annotated[float, Field(ge=0)]
    gamma: Probability
    std: bool = True


class GroupedGae(Frozen):
    """GAE over environment steps; the value of a state is its mean return in the group."""

    kind: Literal["grouped_gae"]
    gamma: Probability
    lambda_: Probability = Field(alias="lambda")


class PrefixCalibrated(Frozen):
    """A token's credit: the mean over the trajectories that contain it."""

    kind: Literal["prefix_calibrated"]
    key: Literal["lineage", "token_ids"] = "lineage"  # token_ids also merges equal prefixes


Estimator = Annotated[
    Return
    | GroupRelative
    | LeaveOneOut
    | BatchWhitened
    | Gae
    | TwoLevel
    | GroupedGae
    | PrefixCalibrated,
    Field(discriminator="kind"),
    BeforeValidator(_spelt_out),
]


class ClipRange(Frozen):
    """The ratio is clipped to [1 - low, 1 + high]; a loss with A < 0 ends at -dual * A."""

    low: PositiveFloat
    high: PositiveFloat
    dual: Annotated[float, Field(gt=1)] | None = None


class Kl(Frozen):
    """A penalty on leaving the reference: the cold start, or the policy of every n iterations."""

    place: Literal["loss", "reward"]
    estimator: Literal["k1", "k2", "k3"]
    coefficient: PositiveFloat
    refresh: Positive | None = None  # iterations; null: the reference stays the cold start

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Kl:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "k1 in the loss has an on-policy gradient of mean zero: take k2 or k3, or place it "
                "in the reward"
            )
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(f"{self.estimator} in the reward: only k1 is defined there")
        return self


class Overlong(Frozen):
    """DAPO's soft penalty (arXiv 2503.14476, equation 13) on responses near the token budget."""

    buffer: Annotated[float, Field(gt=0, le=1)]  # share of the budget in which it rises
    factor: PositiveFloat  # the penalty at the end of the budget


class Critic(Frozen):
    """A value head for GAE: on the policy's own backbone, or on one that starts as its copy."""

    backbone: Literal["own", "shared"]
    value_clip: PositiveFloat | None  # how far a value may move from the old one in the loss
    coefficient: PositiveFloat  # of the value loss


class Row(Frozen):
    """The choices of one algorithm (algorithms section 1)."""

    branching: Literal["none", "marks", "entropy"]
    marks: Annotated[Marks, BeforeValidator(_spelt_out)]
    estimator: Estimator
    ratio: Literal["none", "token", "segment", "sequence"]
    clip: ClipRange | None
    averaging: Literal["token_mean", "sequence_mean", "unit_mean", "constant_length"]
    group_filter: Literal["none", "spread"] = "none"
    overlong: Overlong | None = None
    kl: Kl | None = None
    critic: Critic | None = None
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    importance_cap: PositiveFloat | None = 2.0  # of old policy over sampler; null: no weights

    @model_validator(mode="after")
    def _can_be_done(self) -> Row:
        faults = [reason for impossible, reason in self._impossible() if impossible]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _impossible(self) -> list[tuple[bool, str]]:
        """What cannot be, and what to do instead."""
        estimator, marks = self.estimator.kind, self.marks.kind
        has_critic, needs_critic = self.critic is not None, estimator == "gae"
        return [
            (
                has_critic and not needs_critic,
                f"critic is given, and the estimator {estimator} uses none: set critic to null, or "
                "the estimator to gae",
            ),
            (needs_critic and not has_critic, "the estimator gae needs the section critic"),
            (
                self.branching == "marks" and marks == "none",
                "branching at marks needs marks: choose a kind other than none",
            ),
            (
                self.branching == "entropy" and marks != "tool_call",
                f"branching by entropy is judged after tool results, and marks is {marks}: set it "
                "to tool_call",
            ),
            (
                (self.ratio == "none") != (self.clip is None),
                f"ratio is {self.ratio} and clip is {'null' if self.clip is None else 'given'}: a "
                "ratio needs its clip range, and without one there is nothing to clip",
            ),
            (
                self.ratio == "segment" and marks == "none",
                "a ratio of segments needs marks: choose a kind, or the ratio sequence",
            ),
            (
                self.averaging == "unit_mean" and self.ratio not in ("segment", "sequence"),
                f"unit_mean averages over the units of the ratio, which is {self.ratio}: set it to "
                "segment or sequence, or average by token_mean",
            ),
            (
                estimator in ("two_level", "grouped_gae") and marks != "step",
                f"the estimator {estimator} credits environment steps, and marks is {marks}: set "
                "it to step",
            ),
        ]


def load_rows(folder: Path = PARAMS) -> dict[str, Row]:
    """The rows of ``<folder>/algorithms.yaml`` by name; ValueError with file, row and reason."""
    file = folder / "algorithms.yaml"
    values = read_yaml(file) if file.is_file() else None
    if not isinstance(values, dict):
        raise ValueError(
            f"{file} is missing or holds no rows: it needs a name and choices for each"
        )
    return {name: validate(Row, row, f"{file}, row {name}") for name, row in values.items()}


def row_of(recipe: Recipe, folder: Path = PARAMS) -> Row:
    """The row that a recipe names; ValueError where there is none, or the budget is too small."""
    name, budget = recipe.reinforce.algorithm, recipe.reinforce.rollout
    rows = load_rows(folder)
    if name not in rows:
        raise ValueError(
            f"reinforce.algorithm '{name}' is no row of {folder / 'algorithms.yaml'}: choose one "
            f"of {list(rows)}, or add a row"
        )
    if rows[name].branching != "none" and not (budget.branch and budget.initial < budget.leaves):
        raise ValueError(
            f"reinforce.algorithm '{name}' branches, and reinforce.rollout leaves no room for it "
            f"(initial {budget.initial}, leaves {budget.leaves}, branch {budget.branch}): lower "
            "initial, raise leaves, or set branch to at least 1"
        )
    if recipe.reinforce.ahead and rows[name].importance_cap is None:
        raise ValueError(
            f"reinforce.ahead is {recipe.reinforce.ahead}, and algorithm '{name}' has no "
            "importance_cap, which weighs what an older policy has sampled: set ahead to 0, or a "
            "cap such as 2.0"
        )
    return rows[name]


def names(folder: Path = PARAMS) -> list[str]:
    """The recipes that lie in ``folder``."""
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in TABLES)


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
    recipe = check(read_yaml(file), file)
    named_sets(recipe, folder)  # a set or an algorithm without a row is said before any work
    row_of(recipe, folder)
    return recipe


def named_sets(recipe: Recipe, folder: Path = PARAMS) -> dict[str, Benchmark]:
    """The rows of ``<folder>/benchmarks.yaml`` that the recipe names; ValueError for none."""
    questions, intake = recipe.prepare.questions, recipe.prepare.intake
    references = [intake.set] if intake else []
    if isinstance(questions, BenchmarkQuestions):
        references += [*questions.train, *questions.test]
    if not references:
        return {}
    every = load_benchmarks(folder)
    return {reference.partition("/")[0]: benchmark_of(reference, every) for reference in references}


def benchmark_of(reference: str, sets: Mapping[str, Benchmark]) -> Benchmark:
    """How the records of a set, or of a reference (set/split), are read.

    ValueError for a set without a row.
    """
    name = reference.partition("/")[0]
    if name not in sets:
        raise ValueError(
            f"{reference} of prepare: params/benchmarks.yaml has no row '{name}': choose "
            f"one of {sorted(sets)}, or add a row"
        )
    return sets[name]


def load_benchmarks(folder: Path = PARAMS) -> dict[str, Benchmark]:
    """The rows of ``<folder>/benchmarks.yaml`` by name; ValueError as ``load``."""
    file = folder / "benchmarks.yaml"
    rows = read_yaml(file) if file.is_file() else None
    if not isinstance(rows, dict):
        raise ValueError(
            f"{file} is missing or holds no rows: it needs a name and keys for each set"
        )
    return {name: validate(Benchmark, row, f"{file}: {name}") for name, row in rows.items()}


def load_architectures(folder: Path = PARAMS) -> dict[str, Architecture]:
    """The rows of ``<folder>/architectures.yaml`` by the model's name; ValueError as ``load``."""
    file = folder / "architectures.yaml"
    rows = read_yaml(file) if file.is_file() else {}
    if not isinstance(rows, dict):
        raise ValueError(f"{file} holds no rows: it needs a revision and a config for each name")
    return {name: validate(Architecture, row, f"{file}: {name}") for name, row in rows.items()}


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


SEVERAL_KINDS = (["prepare", "policy"], ["prepare", "questions"], ["prepare", "expert"])


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    for section in (*SEVERAL_KINDS, ["estimator"]):
        if path[: len(section)] == section:
            del path[len(section) : len(section) + 1]  # pydantic adds the kind
    key = ".".join(path)
    remedies = {
        "extra_forbidden": f"unknown key '{key}': remove it, or correct its spelling",
        "missing": f"missing key '{key}': add it (the files of params/ explain every key)",
    }
    where = (
        f"'{key}' = {fault['input']!r}: " if key and not isinstance(fault["input"], dict) else ""
    )
    return remedies.get(fault["type"], f"{where}{fault['msg'].removeprefix('Value error, ')}")
