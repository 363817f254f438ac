"""Find what sections of a recipe contradict, although each of them holds by itself.

``load`` refuses what no recipe that works could have. What is found here may be meant, so nothing
stops for it: a plan, ``beamline doctor RECIPE`` and a run that is about to start print it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from params import suggestions
from params.schema.base import SOURCES
from params.schema.benchmarks import Benchmark
from params.schema.prepare import BenchmarkQuestions, PretrainedPolicy, TinyPolicy
from params.schema.recipe import Recipe, named_sets
from tasks.dialects.tags import TOOLS, describe
from tasks.environments.own_world import environment_kind
from tasks.extensions import named
from tasks.policy import layer_kinds
from tasks.questions import fields, record_files
from tasks.questions.faults import RecordError
from tasks.tools.contract import ToolKind
from tasks.tools.own_tool import offered, spec_of
from tasks.trees.dialogue import OTHER_TAGS, TOOL_TAGS
from tasks.trees.tree import ToolSpec

TAG = re.compile(r"<(/?)([A-Za-z][\w-]*)>")
# What calls are written in where other programs train agents; no tool here is called so.
CALLS_ELSEWHERE = ("code", "function", "function_call", "tool", "tool_call", "tools")
COMMIT = re.compile("[0-9a-f]{40}")
TOKENIZER = "tokenizer.json"
BYTES_A_TOKEN = 4  # of a text, where no tokenizer is here that could count
LEAST_HEAD = 32  # numbers of an attention head, of vLLM on a CPU
READ = 2000  # questions of a set whose lengths are looked at
HOTTEST = 2.0  # temperature of vLLM


def faults(recipe: Recipe) -> list[str]:
    """Return what contradicts in a recipe, one line each, with key, value and remedy.

    Nothing is started and nothing fetched; files of a user's own are imported.
    """
    return [line for find in FINDERS for line in find(recipe)]


def impossible(recipe: Recipe) -> list[str]:
    """Return what no recipe that works could have, which ``load`` refuses."""
    calls = names_of_calls(recipe)
    taken = [name for name in calls if name in OTHER_TAGS] if "tags" in recipe.dialect else []
    twice = sorted({name for name in calls if calls.count(name) > 1})
    return [
        *(
            f"'tools' has one that is called {name}, and in the dialect tags {_tags(OTHER_TAGS)} "
            "have meanings of their own: rename it, or set dialect to {native: {}}"
            for name in taken
        ),
        *(
            f"the agent would have several tools called {name}: rename or remove one"
            for name in twice
        ),
    ]


# ---------------------------------------------------------------- the system prompt


def names_of_calls(recipe: Recipe) -> list[str]:
    """Return the names that the agent calls tools and acts of its world by.

    Those that only a server or a user's code knows are not among them.
    """
    of_world = [spec.name for spec in _world_specs(recipe)]
    known = {name: settings for name, settings in recipe.tools.items() if not _many(name)}
    servers = recipe.tools.get("mcp")
    return [*of_world, *offered(known), *(offered({"mcp": servers}) if servers else [])]


def _many(name: str) -> bool:
    """Return whether a tool offers several, whose names its settings do not tell."""
    kind = _user_kind(name)
    return name == "mcp" or (kind is not None and kind.names is None)


def _user_kind(name: str) -> ToolKind | None:
    """Return a ToolKind that a user has written; None for functions, classes and other tools."""
    held = named.find("tools", name).held if ".py" in name else None
    return held if isinstance(held, ToolKind) else None


def all_are_known(recipe: Recipe) -> bool:
    """Return whether the names of all tools are known without opening them."""
    servers = getattr(recipe.tools.get("mcp"), "servers", {})
    told = all(server.only is not None for server in servers.values())
    return told and not any(_many(name) for name in recipe.tools if name != "mcp")


def _world_specs(recipe: Recipe) -> list[ToolSpec]:
    return [
        spec
        for name, settings in recipe.environment.items()
        for spec in environment_kind(name).specs(settings)
    ]


def shown_tags(system: str) -> list[str]:
    """Return the names in tags of a system message that a call might be written in.

    That is a name with both of its tags, or the name of a call here or elsewhere with one of them:
    ``<number>`` alone is a placeholder.
    """
    closings: dict[str, set[str]] = {}
    for slash, name in TAG.findall(system):
        closings.setdefault(name, set()).add(slash)
    calls = {*TOOL_TAGS, *CALLS_ELSEWHERE, *named.names("tools")}
    return [
        name
        for name, slashes in closings.items()
        if name not in OTHER_TAGS and (len(slashes) == 2 or name in calls)
    ]


def foreign_tags(recipe: Recipe) -> Iterator[str]:
    """Yield a line where the system message shows tags that call nothing."""
    calls, shown = names_of_calls(recipe), shown_tags(recipe.dialogue.system)
    if "native" in recipe.dialect and shown:
        yield (
            f"'dialogue.system' shows the tags {_tags(shown)}, and 'dialect' is native, in which "
            "calls are written as the policy's family does, and tags call nothing: take them out "
            "of the system message (the family's template describes the tools), or set dialect to "
            "{tags: {}}"
        )
    foreign = [name for name in shown if name not in calls]
    if "tags" in recipe.dialect and foreign and all_are_known(recipe):
        yield (
            f"'dialogue.system' shows the tags {_tags(foreign)}, which belong to no tool of the "
            f"recipe{suggestions.meant(foreign[0], calls)}; its tools are called by "
            f"{_tags(calls)}: correct the system message, or add the tool to the section tools"
        )


def untold_tools(recipe: Recipe) -> Iterator[str]:
    """Yield a line where a policy that has learned nothing is not told how to call its tools."""
    system, calls = recipe.dialogue.system, names_of_calls(recipe)
    untrained = (
        isinstance(recipe.prepare.policy, PretrainedPolicy)
        and recipe.cold_start is None
        and recipe.start == "scratch"
    )
    untold = [name for name in calls if f"<{name}>" not in system]
    if untrained and "tags" in recipe.dialect and TOOLS not in system and untold:
        what = "is empty" if not system.strip() else f"shows no {_tags(untold)}"
        yield (
            f"'dialogue.system' {what}, 'cold_start' is null and 'dialect' is tags, so that nobody "
            f"tells the policy how to call {', '.join(untold)}: write {TOOLS} into the system "
            "message, which describes all tools with their tags, or set dialect to {native: {}}"
        )


def no_calls(recipe: Recipe) -> Iterator[str]:
    """Yield a line where the agent may not call what it has."""
    if recipe.dialogue.tool_calls == 0:
        yield (
            f"'dialogue.tool_calls' = 0, and the agent has {', '.join(names_of_calls(recipe))}: "
            "raise it to the calls, or acts, that a task takes"
        )


def _tags(names: Sequence[str]) -> str:
    return ", ".join(f"<{name}>" for name in names)


# ---------------------------------------------------------------- the policy


def unpinned_policy(recipe: Recipe) -> Iterator[str]:
    """Yield a line for a policy of the hub that is not named with a whole commit."""
    policy = recipe.prepare.policy
    if not isinstance(policy, PretrainedPolicy) or Path(policy.name).exists() or policy.gguf:
        return
    if policy.revision is None or not COMMIT.fullmatch(policy.revision):
        yield (
            f"'prepare.policy.revision' = {policy.revision!r} is no commit, and the files of "
            f"{policy.name} may change under it: write all 40 letters; {where_commits(policy.name)}"
        )


def where_commits(name: str) -> str:
    """Return where the commit of a policy on the hub stands."""
    return (
        f"they stand at https://huggingface.co/{name}/commits/main, and `git ls-remote "
        f"https://huggingface.co/{name} HEAD` prints the last one"
    )


# ---------------------------------------------------------------- the context


def short_context(recipe: Recipe, folder: Path = SOURCES) -> Iterator[str]:
    """Yield a line where a prompt does not fit: system message, tools and the longest question.

    Questions that are generated or not here yet do not count: ``prepare`` counts them exactly.
    """
    dialogue, context = recipe.dialogue, recipe.prepare.policy.context
    fresh = dialogue.prompt_tokens  # of a prompt for each step
    room = context - dialogue.response_tokens if fresh is None else fresh
    question = longest_question(recipe, folder)
    tokens, how = counted(f"{told(recipe)}\n{question}", recipe)
    if tokens <= room:
        return
    key, value = ("prepare.policy.context", context)
    beside = f" and 'dialogue.response_tokens' = {dialogue.response_tokens}"
    if fresh is not None:
        key, value, beside = ("dialogue.prompt_tokens", fresh, "")
    asked = " and the longest question that is here" if question else ", before any question,"
    yield (
        f"'{key}' = {value}{beside} leave {room} tokens for a prompt, and the system message with "
        f"the tools{asked} has {how}: raise {key} to at least {value + tokens - room}, or shorten "
        "the prompt"
    )


def told(recipe: Recipe) -> str:
    """Return what an agent is told before its question: system message and descriptions.

    Those of Beamline's own tools are left out; they have some hundred letters each.
    """
    own = [name for name in recipe.tools if ".py" in name and _user_kind(name) is None]
    specs = [
        *_world_specs(recipe),
        *(spec_of(named.find("tools", name).held, name) for name in own),
    ]
    if "native" in recipe.dialect:
        described = [json.dumps([spec.name, spec.description, spec.parameters]) for spec in specs]
        return "\n".join([recipe.dialogue.system, *described])
    return recipe.dialogue.system.replace(TOOLS, describe(specs))


def longest_question(recipe: Recipe, folder: Path = SOURCES) -> str:
    """Return the longest of the first questions of each set whose file is here; "" without one."""
    questions = recipe.prepare.questions
    if not isinstance(questions, BenchmarkQuestions):
        return ""
    sets = named_sets(recipe)
    references = {*questions.train, *questions.test}
    return max(
        (
            text
            for reference in references
            for text in _questions(sets[reference.partition("/")[0]], folder / reference)
        ),
        key=len,
        default="",
    )


def _questions(row: Benchmark, stem: Path) -> Iterator[str]:
    """Yield the first questions of a set; none of files that nobody can read, as prepare says."""
    for file in stem.parent.glob(f"{stem.name}.*"):
        with suppress(ValueError, OSError, RecordError):
            found = record_files.records(file, row.records, [row.question])
            for location, record in islice(found, READ):
                text = fields.value(record, row.question, location)
                yield text if isinstance(text, str) else ""


def counted(text: str, recipe: Recipe) -> tuple[int, str]:
    """Return the tokens of a text, and how that is said: some by its bytes without a tokenizer."""
    policy = recipe.prepare.policy
    if isinstance(policy, PretrainedPolicy) and (
        file := layer_kinds.file_of(policy.name, policy.revision, TOKENIZER)
    ):
        from tokenizers import Tokenizer  # without transformers, which takes seconds to import

        with suppress(Exception):  # of any kind: loading the policy says what is wrong with it
            tokens = len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False))
            return tokens, f"{tokens}"
    tokens = len(text.encode()) // BYTES_A_TOKEN
    return tokens, f"some {tokens} (its {len(text.encode()):,} bytes, {BYTES_A_TOKEN} a token)"


# ---------------------------------------------------------------- the engine


def unfit_engine(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each thing that vLLM is known not to sample."""
    if recipe.engine.kind != "vllm":
        return
    size = _head(recipe)
    if size and size < LEAST_HEAD and recipe.machine.device == "cpu":
        yield (
            f"'engine.kind' = 'vllm', and the policy's attention heads have {size} numbers; on a "
            f"CPU vLLM needs {LEAST_HEAD}: set engine.kind to transformers, or take fewer heads"
        )
    for key, temperature in (
        ("reinforce.rollout.temperature", recipe.reinforce.rollout.temperature),
        ("evaluate.temperature", recipe.evaluate.temperature),
    ):
        if temperature > HOTTEST:
            yield (
                f"'{key}' = {temperature:g}, and vLLM, which 'engine.kind' names, takes at most "
                f"{HOTTEST:g}: lower it, or set engine.kind to transformers"
            )


def _head(recipe: Recipe) -> int | None:
    """Return how many numbers an attention head has, where that is known without a download."""
    policy = recipe.prepare.policy
    if isinstance(policy, TinyPolicy):
        return policy.hidden // policy.heads
    config: Mapping[str, Any] = layer_kinds.read(policy.name, policy.revision) or {}
    size, hidden, heads = (
        config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")
    )
    if isinstance(size, int):
        return size
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


# ---------------------------------------------------------------- reward and files


def reward_without_world(recipe: Recipe) -> Iterator[str]:
    """Yield a line where the reward counts rewards of a world, and there is none."""
    if not recipe.environment and any(part.name == "steps" for part in recipe.reinforce.reward):
        yield (
            "'reinforce.reward' has the part 'steps', which adds up what a world gives, and "
            "'environment' is null, so that it is always 0: name a world, or remove the part"
        )


def missing_files(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each file that a tool or an expert reads and that is not here.

    It contradicts nothing: ``prepare`` refuses to begin without it.
    """
    read = {
        "tools.search.corpus": getattr(recipe.tools.get("search"), "corpus", None),
        "prepare.expert.file": getattr(recipe.prepare.expert, "file", None),
    }
    for key, file in read.items():
        if file is not None and not Path(file).is_file():
            there = [str(other) for other in Path(file).parent.glob("*")]
            yield (
                f"'{key}' = {str(file)!r}: there is no such file here"
                f"{suggestions.meant(str(file), there)}: put it there, or correct the path"
            )


FINDERS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    foreign_tags,
    untold_tools,
    no_calls,
    unpinned_policy,
    short_context,
    unfit_engine,
    reward_without_world,
)
