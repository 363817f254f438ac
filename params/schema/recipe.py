"""A whole recipe: one complete YAML file, ``params/<recipe>.yaml``, checked before any work starts.

Sections are named after the stages that read them. Everything is frozen; an unknown or missing key
is an error that names the file, the key and the remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import SerializeAsAny, model_validator

from params.schema.agent import Agent, Dialogue, Engine
from params.schema.algorithms import Algorithm, load_algorithms
from params.schema.base import (
    PARAMS,
    SOURCES,
    TABLES,
    Frozen,
    Machine,
    NonNegative,
    read_yaml,
    validate,
)
from params.schema.benchmarks import Benchmark, benchmark_of, load_benchmarks
from params.schema.champion import Champion
from params.schema.cold_start import ColdStart
from params.schema.evaluate import Evaluate
from params.schema.prepare import CALLED_BY, BenchmarkQuestions, Prepare
from params.schema.reinforce import Lora, Reinforce, Rollout
from params.schema.verdict import Verdict


class Recipe(Frozen):
    """One complete recipe."""

    seed: NonNegative
    start: Literal["scratch", "champion"]  # what training begins with
    champion: Champion | None  # a retraining writes it here; null: there is none yet
    machine: Machine
    prepare: Prepare
    dialogue: Dialogue
    tools: SerializeAsAny[Frozen]  # what the agent can call; tasks/settings.py knows each one
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
    def _expert_has_its_tools(self) -> Recipe:
        kind, given = self.prepare.expert.kind, list(self.tool_settings)
        if missing := [tool for tool in CALLED_BY[kind] if tool not in given]:
            raise ValueError(
                f"tools is {given} and prepare.expert.kind {kind}, which calls "
                f"{' and '.join(missing)} too: add it to tools"
            )
        return self

    @property
    def tool_settings(self) -> dict[str, Frozen]:
        """Return the settings of the tools that the agent has, by name."""
        return {name: settings for name, settings in self.tools if settings is not None}

    @property
    def agent(self) -> Agent:
        """Return what decides how the agent acts."""
        return Agent(
            dialogue=self.dialogue,
            tools=self.tool_settings,
            engine=self.engine,
            machine=self.machine,
        )

    def single_answers(self) -> Rollout:
        """The budget of an evaluation: one path a question, at the evaluation's temperature."""
        single = {"leaves": 1, "initial": 1, "branch": 0}
        return self.reinforce.rollout.model_copy(
            update={**single, "temperature": self.evaluate.temperature}
        )


def algorithm_of(recipe: Recipe, folder: Path = PARAMS) -> Algorithm:
    """The row that a recipe names; ValueError where there is none, or the budget is too small."""
    name, budget = recipe.reinforce.algorithm, recipe.reinforce.rollout
    rows = load_algorithms(folder)
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


def load(name: str, model: type[Recipe], folder: Path = PARAMS) -> Recipe:
    """Read and check ``<folder>/<name>.yaml``. ``model`` is the form with all tools.

    Raises ValueError with file, key and remedy for an unknown recipe, YAML that does not parse, a
    missing, unknown or impossible key, and for a recipe of an older form.
    """
    if name == SOURCES.name:
        raise ValueError(
            f"no recipe can be called '{name}': its outputs would go to {SOURCES}/, where your own "
            "files are; rename the recipe"
        )
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(
            f"no recipe '{name}': {file} does not exist; recipes here: {names(folder)}"
        )
    values = read_yaml(file)
    if changes := older_form(values):
        lines = "\n".join(f"{file}: {change}" for change in changes)
        raise ValueError(f"{file} has an older form; change it as follows:\n{lines}")
    recipe = validate(model, values, str(file))
    named_sets(recipe, folder)  # a set or an algorithm without a row is an error before any work
    algorithm_of(recipe, folder)
    return recipe


def older_form(values: Any) -> list[str]:
    """Return the changes that a recipe of an older form needs, a line each."""
    if not isinstance(values, dict):
        return []
    dialogue = values.get("dialogue")
    tools: list[str] = []
    changes = []
    if isinstance(dialogue, dict) and "tools" in dialogue:
        tools = dialogue["tools"] or []
        changes.append("remove 'dialogue.tools': the keys of the section 'tools' name the tools")
    for name in ("python", "search"):
        if name in values:
            used = name in tools and values[name] is not None
            move = f"move '{name}' below 'tools', as 'tools.{name}'"
            changes.append(move if used else f"remove '{name}': the agent does not have this tool")
    return changes


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
