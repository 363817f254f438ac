"""A whole recipe, as ``params/<recipe>.yaml`` and its base say it, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from params import suggestions
from params.schema.agent import Dialogue, EngineSettings, Sections
from params.schema.algorithms import Algorithm, load_algorithms
from params.schema.base import PARAMS, Frozen, Machine, NonNegative
from params.schema.benchmarks import Benchmark, benchmark_of, load_benchmarks
from params.schema.champion import Champion
from params.schema.cold_start import ColdStart
from params.schema.evaluate import Evaluate
from params.schema.judge import Judge
from params.schema.prepare import BenchmarkQuestions, Prepare
from params.schema.reading import HAPPENED_BEFORE
from params.schema.reinforce import Lora, Reinforce, Rollout
from params.schema.reward_model import LEAST_LABELLED, RewardModel
from params.schema.teacher import ServerTeacher, Teacher
from params.schema.verdict import Verdict

TABLES = ("algorithms", "architectures", "benchmarks", "suites")  # files that are no recipes
REWARD_BEFORE = {"broken_format": -1.0, "wrong": 0.0, "many_tools_bonus": 0.1}  # now a list
NEED_SCORES = ("answer", "many_tools", "scorer")  # parts of the reward
SHORTEST_PROMPT = 32  # tokens; no smaller context has room for a prompt and a response
LONGEST_LINE = 400  # characters of a line that a run prints
TOOLS_BEFORE = ("python", "search")  # sections of older recipes that are in ``tools`` now
SOURCES_BEFORE = "questions/"  # where files of a user's own were
PATHS_BEFORE = {  # keys of older recipes that name such files -> these keys today
    "prepare.intake.folder": "prepare.intake.folder",
    "prepare.expert.file": "prepare.expert.file",
    "search.corpus": "tools.search.corpus",
}


def _one_line(text: str | None) -> str | None:
    if text is not None and (len(text) > LONGEST_LINE or not text.isprintable()):
        raise ValueError(f"is printed as one line: write at most {LONGEST_LINE} printable letters")
    return text


class Recipe(Frozen):
    """One complete recipe. Sections are named after the stages that read them.

    Here and in the sections, a key with a default may be left out. Its default is neutral: none of
    it, or what happened before there was the key. What a run learns with and from has none.
    """

    # What a run of it shows, in a line that the run prints beside its results; null: nothing. It
    # decides no result, so it is in no key.
    expect: Annotated[str | None, AfterValidator(_one_line), Field(exclude=True)] = None
    seed: NonNegative  # of every random draw
    start: Literal["scratch", "champion"] = "scratch"  # the policy that training starts from
    champion: Champion | None = None  # null: there is none yet
    teacher: Teacher | None = None  # null: there is none; rows with a teacher need one
    machine: Machine
    prepare: Prepare
    dialogue: Dialogue
    # Settings by name; tasks/recipes has their types.
    tools: Sections
    # the world that the agent acts in; none: single questions
    environment: Sections = Field(default_factory=dict)
    # an agent that somebody else has written; none: the dialogue of this project
    program: Sections = Field(default_factory=dict)
    dialect: Sections  # how turns and calls are written
    judge: Judge | None = None  # null: no answer is scored by a model
    engine: EngineSettings
    lora: Lora | None = None  # null: train all weights
    cold_start: ColdStart | None  # null: reinforcement learning starts from the first policy
    reward_model: RewardModel | None = None  # null: no model learns which trajectories succeed
    reinforce: Reinforce
    evaluate: Evaluate
    verdict: Verdict

    @model_validator(mode="before")
    @classmethod
    def _without_keys_that_said_nothing(cls, values: Any) -> Any:
        """Leave out keys of older recipes where their value is that of not having them."""
        if _at(values, "engine.server", "") is not None:
            return values
        engine = {key: value for key, value in values["engine"].items() if key != "server"}
        return {**values, "engine": engine}

    @model_validator(mode="after")
    def _context_covers_response(self) -> Recipe:
        context, dialogue = self.prepare.policy.context, self.dialogue
        if dialogue.prompt_tokens is not None:
            if dialogue.prompt_tokens + dialogue.turn_tokens > context:
                raise ValueError(
                    f"dialogue.prompt_tokens {dialogue.prompt_tokens} and turn_tokens "
                    f"{dialogue.turn_tokens} do not fit into prepare.policy.context {context}: "
                    "lower one of the former, or raise the latter"
                )
        elif dialogue.response_tokens >= context:
            lower = ", or lower the former" if context > SHORTEST_PROMPT else ""
            raise ValueError(
                f"dialogue.response_tokens {dialogue.response_tokens} leaves no room for a prompt "
                f"in prepare.policy.context {context}: raise the latter to more than the former "
                f"and the longest prompt together{lower}"
            )
        return self

    @model_validator(mode="after")
    def _cold_start_has_its_traces(self) -> Recipe:
        if self.cold_start is None and self.prepare.expert is not None:
            raise ValueError(
                f"cold_start is null and prepare.expert.kind is {self.prepare.expert.kind}, whose "
                "traces nothing would learn from: set prepare.expert to null, or write the section "
                "cold_start"
            )
        if self.cold_start is not None and self.prepare.expert is None:
            raise ValueError(
                "prepare.expert is null, so cold_start has no traces to learn from: set cold_start "
                "to null too, or name an expert"
            )
        return self

    @model_validator(mode="after")
    def _papers_have_a_judge(self) -> Recipe:
        if self.evaluate.protocol == "papers" and self.judge is None:
            raise ValueError(
                "evaluate.protocol is papers, which asks a judge, and judge is null: write the "
                "section judge (docs/own-reward.md#a-judge), or set the protocol to verified"
            )
        return self

    @model_validator(mode="after")
    def _labels_suffice_where_others_are_not_scored(self) -> Recipe:
        reward_model, questions = self.reward_model, self.reinforce.questions
        if reward_model is None or reward_model.scored == "all":
            return self
        named = [part.name for part in self.reinforce.reward if part.name in NEED_SCORES]
        if named:
            raise ValueError(
                f"reward_model.scored is labelled, and reinforce.reward has {', '.join(named)}, "
                "which needs the score of each answer: set scored to all, or take the part model "
                "instead"
            )
        if questions * reward_model.labels < LEAST_LABELLED:
            raise ValueError(
                f"reward_model.scored is labelled, and reinforce.questions {questions} times "
                f"reward_model.labels {reward_model.labels:g} is below {LEAST_LABELLED}, the "
                "questions that tell an iteration's success: raise one of the two, or set scored "
                "to all"
            )
        return self

    def evaluation_budget(self, samples: int | None = None) -> Rollout:
        """Return an evaluation's budget, at its own temperature.

        ``samples`` paths a question, which do not branch; None: as many as the recipe says.
        """
        paths = samples or self.evaluate.samples
        return self.reinforce.rollout.model_copy(
            update={
                **{"leaves": paths, "initial": paths, "branch": 0},
                "temperature": self.evaluate.temperature,
            }
        )

    def training_budget(self) -> Rollout:
        """Return the budget of training, with paths that do not branch."""
        rollout = self.reinforce.rollout
        return rollout.model_copy(update={"initial": rollout.leaves, "branch": 0})


def algorithm_of(recipe: Recipe, folder: Path = PARAMS) -> Algorithm:
    """Return the row of ``<folder>/algorithms.yaml`` that a recipe names.

    Raises ValueError for a name without a row, and for budgets and updates that the algorithm
    cannot use.
    """
    return row_for(recipe, recipe.reinforce.algorithm, folder)


def row_for(recipe: Recipe, name: str, folder: Path = PARAMS) -> Algorithm:
    """Return a row of the table for a recipe. Raises as ``algorithm_of``."""
    rows = load_algorithms(folder)
    if name not in rows:
        raise ValueError(
            f"reinforce.algorithm '{name}' is no row of {folder / 'algorithms.yaml'}"
            f"{suggestions.meant(name, rows)}: choose one of {list(rows)}, or add a row"
        )
    faults = [reason for applies, reason in _misfits(recipe, rows[name]) if applies]
    if faults:
        raise ValueError(f"reinforce.algorithm '{name}' " + "; and it ".join(faults))
    return rows[name]


def _misfits(recipe: Recipe, row: Algorithm) -> list[tuple[bool, str]]:
    """Return (whether it applies, message with remedy) of what a recipe cannot ask of a row."""
    section, learned = recipe.reinforce, recipe.reward_model
    budget, learning = section.rollout, section.update
    steps = learning.epochs * learning.mini_batches
    negative = [
        f"{part.name}.{key} {value}"
        for part in section.reward
        for key, value in part.settings.model_dump().items()
        if isinstance(value, (int, float)) and value < 0
    ]
    parts = [part.name.rpartition(":")[2] for part in section.reward] + ["length_penalty"]
    unknown = [
        name
        for name in getattr(row.estimator, "weights", {})
        if not any(name == part or name.startswith(f"{part}_") for part in parts)
    ]
    return [
        (
            bool(unknown),
            f"weighs parts that reinforce.reward does not have ({', '.join(unknown)}): name some "
            f"of {', '.join(parts)} in estimator.weights",
        ),
        (
            row.branching != "none" and not (budget.branch and budget.initial < budget.leaves),
            "branches, and reinforce.rollout leaves no room for it "
            f"(initial {budget.initial}, leaves {budget.leaves}, branch {budget.branch}): lower "
            "initial, raise leaves, or set branch to at least 1",
        ),
        (
            row.ratio == "none" and steps > 1,
            f"has the ratio none, and reinforce.update takes {steps} optimizer steps a batch "
            f"(epochs {learning.epochs} x mini_batches {learning.mini_batches}), of which the "
            "later ones would learn from another policy's samples without a correction: set both "
            "to 1, or choose a row with a ratio",
        ),
        (
            row.ratio == "none" and section.ahead > 0,
            f"has the ratio none, and reinforce.ahead is {section.ahead}, so it would learn from "
            "an older policy's samples without a correction: set ahead to 0, or choose a row with "
            "a ratio",
        ),
        (
            row.teacher is not None and recipe.teacher is None,
            "learns from a teacher, and the recipe names none: write the section teacher",
        ),
        (
            isinstance(recipe.teacher, ServerTeacher) and section.rollout.temperature != 1.0,
            "learns from the probabilities of a server, which are those at temperature 1, and "
            f"reinforce.rollout.temperature is {section.rollout.temperature:g}: set it to 1, or "
            "name the teacher's files (kind: pretrained or run)",
        ),
        (
            row.estimator.kind == "mean_relative" and bool(negative),
            "divides by the mean reward, and reinforce.reward has what is below 0 "
            f"({', '.join(negative)}): set that to 0, or choose a row with the estimator "
            "group_relative",
        ),
        (
            row.group_filter != "none" and any(part.name == "model" for part in section.reward),
            f"has the group_filter {row.group_filter}, which reads scores of the rule, and "
            "reinforce.reward has the part 'model', which stands in for it: choose a row with the "
            "group_filter none",
        ),
        (
            row.group_filter != "none" and learned is not None and learned.scored == "labelled",
            f"has the group_filter {row.group_filter}, which reads the scores of all answers, and "
            "reward_model.scored is labelled: set scored to all, or choose a row with the "
            "group_filter none",
        ),
        (
            row.group_filter != "none" and section.turns_per_policy is not None,
            f"has the group_filter {row.group_filter}, which asks for more batches once one is "
            f"there, and with reinforce.turns_per_policy {section.turns_per_policy} the policies "
            "that would have begun them are gone: set turns_per_policy to null, or choose a row "
            "with the group_filter none",
        ),
        (
            row.surplus == "next" and section.ahead > 0,
            f"has surplus next, and with reinforce.ahead {section.ahead} the next batch is sampled "
            "before it is known what is left over: set ahead to 0, or surplus to wasted",
        ),
        (
            row.surplus == "next" and learned is not None,
            "has surplus next, and the reward model, which estimates each batch by itself, has no "
            "estimates of groups that are carried on: set surplus to wasted",
        ),
    ]


def older_form(values: Any) -> list[str]:
    """Return the changes that a recipe of an older form needs, one line each; [] for none."""
    if not isinstance(values, dict):
        return []
    changes = []
    dialogue = values.get("dialogue")
    listed = dialogue.get("tools") if isinstance(dialogue, dict) else None
    used = listed if isinstance(listed, list) else []
    if isinstance(dialogue, dict) and "tools" in dialogue:
        changes.append(f"remove 'dialogue.tools' = {listed!r}: the keys of 'tools' name the tools")
    for name in TOOLS_BEFORE:
        if name in values and name in used and values[name] is not None:
            changes.append(f"move the section '{name}' into 'tools', as 'tools.{name}'")
        elif name in values:
            changes.append(f"remove the section '{name}': the agent does not have this tool")
    changes += [*_older_reward(values.get("reinforce")), *_older_server(values)]
    changes += _older_paths(values)
    return [*changes, *(_keys_since(values) if changes else [])]


def _older_server(values: Any) -> list[str]:
    """Return how the one server of older recipes is written now."""
    server = _at(values, "engine.server")
    if server is None:
        return []
    return [
        f"write 'engine.servers: [{server}]' in place of 'engine.server', and start that server "
        "again, with a token (docs/gpu.md#sampling-with-vllm)"
    ]


def _older_paths(values: Any) -> list[str]:
    """Return where files are now that older recipes name."""
    paths = {key: _at(values, key) for key in PATHS_BEFORE}
    return [
        f"write '{PATHS_BEFORE[key]}: data/sources/{path.removeprefix(SOURCES_BEFORE)}', and move "
        f"it there from {path}"
        for key, path in paths.items()
        if isinstance(path, str) and path.startswith(SOURCES_BEFORE)
    ]


def _keys_since(values: Mapping[str, Any]) -> list[str]:
    """Return the sections that a whole recipe of an older form lacks, as it acted without them."""
    lacking = [key for key in HAPPENED_BEFORE if "." not in key and key not in values]
    return [
        f"add '{key}: {HAPPENED_BEFORE[key]}', which is what happened before there was the section"
        for key in lacking
        if "base" not in values
    ]


def _at(values: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key such as "engine.server"; ``default`` where there is none."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def _older_reward(reinforce: Any) -> list[str]:
    """Return how a reward of three numbers is written now."""
    reward = reinforce.get("reward") if isinstance(reinforce, dict) else None
    if not isinstance(reward, dict) or not set(reward) & set(REWARD_BEFORE):
        return []
    broken, wrong, bonus = (reward.get(name, given) for name, given in REWARD_BEFORE.items())
    return [
        "write 'reinforce.reward' as a list: reward: "
        f"[answer: {{weight: 1.0, wrong: {wrong}}}, format: {{broken: {broken}}}, "
        f"many_tools: {{bonus: {bonus}}}]"
    ]


def named_sets(recipe: Recipe, folder: Path = PARAMS) -> dict[str, Benchmark]:
    """Return the rows of ``<folder>/benchmarks.yaml`` that the recipe names, by name.

    Raises ValueError for a set without a row.
    """
    questions, intake = recipe.prepare.questions, recipe.prepare.intake
    references = [intake.set] if intake else []
    if isinstance(questions, BenchmarkQuestions):
        references += [*questions.train, *questions.test]
    if not references:
        return {}
    every = load_benchmarks(folder)
    return {reference.partition("/")[0]: benchmark_of(reference, every) for reference in references}
