"""Read and check whole recipes: each section by the file that it names.

``params`` keeps the sections that name files of rooms (``tools``, ``environment``, ``dialect``) as
mappings from a name to settings. Here, above the rooms, the settings are checked against what the
names stand for.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from params import overrides, strict_yaml
from params.recipe_files import Resolved, read, resolve
from params.schema.agent import Agent
from params.schema.algorithms import Algorithm, load_algorithms
from params.schema.architectures import load_architectures
from params.schema.base import PARAMS, Frozen
from params.schema.prepare import PretrainedPolicy
from params.schema.reading import validate
from params.schema.recipe import Recipe, algorithm_of, named_sets
from tasks import scorers
from tasks.environments.own_world import environment_kind
from tasks.extensions import named
from tasks.policy import abilities, layer_kinds
from tasks.programs import program_faults
from tasks.programs.own_program import program_kind, program_sources
from tasks.questions import choice
from tasks.questions.sampled import Sampled, Teacher
from tasks.recipes import contradictions
from tasks.rewards import judging, reward_parts
from tasks.rewards.steps import Steps
from tasks.tools.own_tool import offered, tool_kind
from tasks.trees.labels import Labels

KINDS: dict[str, Callable[[str], Any]] = {
    "tools": tool_kind,
    "environment": environment_kind,
    "program": program_kind,
}
FAULTY_KEY = re.compile(r": (?:\w+ key )?'([^']+)'")  # in a fault
SECTIONS = ("tools", "environment", "program", "dialect")  # of a recipe, each a mapping by name


def load(name: str, folder: Path = PARAMS) -> Recipe:
    """Read and check ``<folder>/<name>.yaml``.

    Raises ValueError with file, key, value and remedy, one line for each fault.
    """
    written, file = resolve(name, folder), str(folder / f"{name}.yaml")
    try:
        recipe = check(written.values, file)
    except ValueError as error:
        raise ValueError(_in_their_files(str(error), file, written)) from None
    if faults := scorers.scorer_faults(scorers_of(recipe, folder)):
        raise ValueError("\n".join(f"{folder / 'benchmarks.yaml'}, {line}" for line in faults))
    faults = judging.faults(recipe, name, folder) + _unjudged(recipe, folder)
    if faults := faults + _layer_faults(recipe, folder):
        raise ValueError("\n".join(f"{file}: {line}" for line in faults))
    algorithm_of(recipe, folder)
    return recipe


def _in_their_files(faults: str, file: str, written: Resolved) -> str:
    """Return faults of a recipe, each with the file that says so: its own or that of a base."""
    lines = []
    for line in faults.splitlines():
        key = FAULTY_KEY.match(line.removeprefix(file))
        origin = written.origin(key[1].split(".")) if key else file
        lines.append(f"{origin}{line.removeprefix(file)}" if line.startswith(file) else line)
    return "\n".join(lines)


def _layer_faults(recipe: Recipe, folder: Path) -> list[str]:
    """Return a line for each policy that can be trained, or sampled from, in no form.

    One whose config.json is not here yet is checked when ``prepare`` has fetched that.
    """
    policy, expert = recipe.prepare.policy, recipe.prepare.expert
    policies: dict[str, PretrainedPolicy | Teacher] = {}
    if isinstance(policy, PretrainedPolicy):
        policies["prepare.policy.name"] = policy
    # vLLM has caches for all kinds of layers
    if isinstance(expert, Sampled) and expert.policy and recipe.engine.kind == "transformers":
        policies["prepare.expert.policy.name"] = expert.policy
    faults = []
    for key, named_policy in policies.items():
        config = _config_of(named_policy, folder)
        if config and (fault := layer_kinds.refusal(config, policy.context)):
            faults.append(f"'{key}' = {named_policy.name!r} is {fault}")
    return faults + ([] if faults else _ability_faults(recipe, folder))


def _ability_faults(recipe: Recipe, folder: Path) -> list[str]:
    """Return a line for each setting that the layers of the policy do not support."""
    policy = recipe.prepare.policy
    config = _config_of(policy, folder) if isinstance(policy, PretrainedPolicy) else None
    recompute = recipe.reinforce.update.recompute
    return abilities.faults(config, recipe.lora, recompute) if config else []


def _config_of(policy: PretrainedPolicy | Teacher, folder: Path) -> Mapping[str, Any] | None:
    """Return what is here of a policy's config.json, without a download."""
    row = load_architectures(folder).get(policy.name)
    if row and policy.revision in (row.revision, None):
        return row.config
    return layer_kinds.read(policy.name, policy.revision)


def _unjudged(recipe: Recipe, folder: Path) -> list[str]:
    """Return a line where answers of a sampled expert would need a judge."""
    if not isinstance(recipe.prepare.expert, Sampled):
        return []
    if not judging.asked_in_training(recipe, folder):
        return []
    return [
        "prepare.expert samples answers, and a set has the scorer 'judge', which is not asked "
        "then: give the set another scorer, or name another expert"
    ]


def scorers_of(recipe: Recipe, folder: Path = PARAMS) -> dict[str, list[str]]:
    """Return the names of the scorers of each set that a recipe names, by the place of the row.

    Raises ValueError for a set without a row.
    """
    rows = named_sets(recipe, folder)
    return {f"row {name}: 'scorer'": row.scorers for name, row in rows.items()}


def scorer_sources(recipe: Recipe, folder: Path = PARAMS) -> dict[str, str]:
    """Return digests of the sources of the scorers that questions of a recipe may name."""
    return scorers.sources([*scorers.names(), *_of_questions(recipe, folder)])


def reward_sources(recipe: Recipe, folder: Path = PARAMS) -> dict[str, str]:
    """Return digests of the sources of a recipe's reward and scorers, for the ledger's keys."""
    return reward_parts.sources(recipe.reinforce.reward, _of_questions(recipe, folder))


def _of_questions(recipe: Recipe, folder: Path) -> list[str]:
    return [name for of_row in scorers_of(recipe, folder).values() for name in of_row]


def load_changed(name: str, changes: Sequence[str], folder: Path = PARAMS) -> Recipe:
    """Read and check a recipe with ``changes``, each ``section.key=value``, and keep its file.

    Raises ValueError as ``load`` and ``overrides.apply_to`` do.
    """
    if not changes:
        return load(name, folder)
    with changed(name, changes, folder) as copy:
        return load(name, copy)


def row_changed(name: str, changes: Sequence[str], folder: Path = PARAMS) -> Algorithm | None:
    """Return the row that a recipe names with ``changes``; None where there is no such row.

    Whether the recipe fits the row is not checked. Raises ValueError as ``load_changed``.
    """
    with changed(name, changes, folder) as copy:
        return load_algorithms(copy).get(read(name, copy)["reinforce"]["algorithm"])


@contextmanager
def changed(name: str, changes: Sequence[str], folder: Path = PARAMS) -> Iterator[Path]:
    """Give a copy of ``folder`` with changes to a recipe; errors in it name ``folder``."""
    for file in folder.glob("*.yaml"):
        strict_yaml.check_regular(file)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(folder, Path(temporary, "params")))
        try:
            if (copy / f"{name}.yaml").is_file():
                overrides.apply_to(name, changes, copy)
            yield copy
        except ValueError as error:
            raise ValueError(str(error).replace(str(copy), str(folder))) from None


def check(values: Mapping[str, Any], where: str) -> Recipe:
    """Turn the parsed YAML of a recipe into its sections.

    Raises ValueError with all faults, one line each, which begins with ``where``.
    """
    whole, faults = dict(values), []
    for section in SECTIONS:
        if section in values:
            whole[section], section_faults = typed_section(section, values[section] or {}, where)
            faults += section_faults
    reinforce = values.get("reinforce")
    if isinstance(reinforce, dict) and "reward" in reinforce:
        typed, section_faults = reward_parts.parts_of(reinforce["reward"], where)
        whole["reinforce"] = {**reinforce, "reward": typed}
        faults += section_faults
    recipe = None
    try:
        recipe = validate(Recipe, whole, where)
    except ValueError as error:
        # what a faulty section would have given is not missed
        faults += [line for line in str(error).splitlines() if not (faults and "tools has" in line)]
    if recipe and not faults:
        faults = [f"{where}: {line}" for line in cross_faults(recipe)]
    if recipe and not faults:
        faults = [f"{where}: {line}" for line in contradictions.impossible(recipe)]
    if recipe:
        recipe, section_faults = with_expert(recipe, where)
        faults += [line for line in section_faults if not (faults and "tools has" in line)]
    if faults or recipe is None:
        raise ValueError("\n".join(faults))
    return recipe


def with_expert(recipe: Recipe, where: str) -> tuple[Recipe, list[str]]:
    """Return the recipe with its expert's settings as their file declares them, and faults."""
    prepare = recipe.prepare
    expert, faults = choice.typed(prepare.expert, prepare.questions, offered(recipe.tools), where)
    typed = prepare.model_copy(update={"expert": expert})
    return recipe.model_copy(update={"prepare": typed}), faults


def typed_section(section: str, given: Any, where: str) -> tuple[dict[str, Frozen], list[str]]:
    """Return the settings of a section by name, as the named files declare them, and faults."""
    if not isinstance(given, dict):
        return {}, [f"{where}: '{section}' = {given!r}: write it as names with their settings"]
    typed: dict[str, Frozen] = {}
    faults = []
    for name, settings in given.items():
        try:
            kind = kind_of(section, str(name))
        except ValueError as error:
            faults.append(f"{where}: '{section}.{name}': {error}")
            continue
        try:
            values = {} if settings is None else settings
            typed[str(name)] = validate(kind.settings, values, where, (section, str(name)))
        except ValueError as error:
            faults += str(error).splitlines()
    return typed, faults


def kind_of(section: str, name: str) -> Any:
    """Return the kind that a name in a section stands for. Raises ValueError as ``named.find``."""
    return KINDS.get(section, lambda name: named.find(section, name).held)(name)


def cross_faults(recipe: Recipe) -> list[str]:
    """Return what sections ask of each other and do not get, one line a fault."""
    source = recipe.prepare.questions.source
    faults = []
    if not recipe.tools and not recipe.environment and not recipe.program:
        faults.append(
            f"tools is empty: give at least one of {', '.join(named.names('tools'))}, or an "
            "environment"
        )
    if len(recipe.environment) > 1:
        faults.append(
            f"environment names {' and '.join(recipe.environment)}: an agent acts in one at most"
        )
    if len(recipe.dialect) != 1:
        faults.append(f"dialect names {list(recipe.dialect)}: name exactly one")
    if recipe.dialogue.prompt == "fresh" and not recipe.environment:
        faults.append("dialogue.prompt is fresh, and there is no environment: set it to growing")
    if recipe.reinforce.turns_per_policy is not None:
        faults += _not_repeatable(recipe)
    if reward_parts.has_model(recipe.reinforce.reward) and recipe.reward_model is None:
        faults.append(
            "reinforce.reward has the part 'model', and reward_model is null: write the section "
            "reward_model (docs/own-reward.md#a-learned-reward), or remove the part"
        )
    faults += program_faults.faults(recipe)
    for name, settings in recipe.tools.items():
        faults += kind_of("tools", name).faults(settings, source)
    for section in ("environment", "program", "dialect"):
        for name, settings in getattr(recipe, section).items():
            faults += kind_of(section, name).faults(settings)
    return faults


def _not_repeatable(recipe: Recipe) -> list[str]:
    """Return a line for each tool and world whose answers only a record brings back."""
    return [
        f"{section}.{name} is not repeatable, and reinforce.turns_per_policy "
        f"{recipe.reinforce.turns_per_policy} divides a rollout into parts, whose records are not "
        "joined: set turns_per_policy to null"
        for section in ("tools", "environment")
        for name in getattr(recipe, section)
        if not kind_of(section, name).repeatable
    ]


def agent_of(recipe: Recipe) -> Agent:
    """Return everything that decides how the recipe's agent acts, the named sources included."""
    sections = ("tools", "environment", "dialect")
    pairs = [(section, name) for section in sections for name in getattr(recipe, section)]
    sources = {
        name: named.find(section, name).sources
        + named.digest_of_mentioned(getattr(recipe, section)[name].model_dump(mode="json"))
        for section, name in pairs
    }
    return Agent(
        dialogue=recipe.dialogue,
        tools=recipe.tools,
        environment=recipe.environment,
        dialect=recipe.dialect,
        program=recipe.program,
        sources=sources | {name: program_sources() for name in recipe.program},
        engine=recipe.engine,
        machine=recipe.machine,
    )


def labels_of(recipe: Recipe) -> Labels:
    """Return which training questions have labels for the recipe's reward model.

    Raises ValueError for a recipe without one.
    """
    reward_model = recipe.reward_model
    if reward_model is None:
        raise ValueError("reward_model is null: write the section (docs/own-reward.md)")
    return Labels(seed=recipe.seed, share=reward_model.labels, held_out=reward_model.held_out)


def step_weight(recipe: Recipe) -> float:
    """Return what the rewards of an environment's steps are multiplied by in the reward."""
    parts = recipe.reinforce.reward
    return sum(part.settings.weight for part in parts if isinstance(part.settings, Steps))
