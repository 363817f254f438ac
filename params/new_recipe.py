"""The text of a new recipe over a base: what must be its own, and comments for what one changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from params import suggestions
from params.recipe_files import MOST_BASES, names, resolve
from params.schema.base import SOURCES
from params.schema.recipe import TABLES
from params.whole_file import RESOLVED

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TAKEN = (*TABLES, SOURCES.name, RESOLVED)  # of other files and folders
SHOWN = {"tiny": ("hidden", "layers"), "pretrained": ("name", "revision")}  # of a policy
POLICIES = {"tiny": "kind: pretrained takes one of the hub", "pretrained": "a commit of the hub"}
EXAMPLE = "own/warehouse.py:look_up"  # a function of own/ that comes with Beamline
ENDS = {  # how a prompt asks for the answer, by dialect
    "tags": "{tools} End with <answer>\\boxed{the answer}</answer>.",
    "native": "Use the tools. End with \\boxed{the answer}.",
}


def check_name(name: str, folder: Path) -> None:
    """Raise ValueError, with the remedy, for a name that a new recipe cannot have."""
    if not NAME.fullmatch(name) or name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"{name!r} is no name of a recipe: write letters, digits, '.', '-' and '_', such as "
            "'mine' for params/mine.yaml"
        )
    if name in TAKEN:
        raise ValueError(
            f"a recipe can't be called '{name}': other files have this name; take another"
        )
    if any(name.casefold() == known.casefold() for known in names(folder)):
        raise ValueError(
            f"{folder / name}.yaml is there already: take another name, or edit that file"
        )


def text_of(name: str, base: str, folder: Path) -> str:
    """Return the recipe as a file.

    A line that begins with "# key:" is valid without its "# ", below the key of its section. It
    shows what holds in the base, where that is short.

    Raises ValueError for an unknown or unsound base, and one with too many of its own.
    """
    if base not in names(folder):
        known = names(folder)
        raise ValueError(
            f"no recipe '{base}' to start from{suggestions.meant(base, known)}: recipes here: "
            f"{known}"
        )
    resolved = resolve(base, folder)
    if len(resolved.chain) > MOST_BASES:
        raise ValueError(
            f"{base} has {MOST_BASES} bases already, one above the other: start from one of "
            f"{[written.name for written in resolved.chain[1:]]}"
        )
    values = resolved.values
    head = [
        f"# What differs from {base}. All that holds: beamline recipe {name}",
        f"base: {base}",
        "",
        "# What one changes most; take the hash away where you do (docs/own-recipe.md).",
    ]
    return "\n".join([*head, *_lines(name, values)]) + "\n"


def _lines(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"# seed: {values['seed']}"
    yield f"# machine: {_flow(values['machine'], ('device', 'precision'))} # cuda, bfloat16: a GPU"
    yield f"# engine: {_flow(values['engine'], ('kind', 'memory'))} # transformers | vllm"
    yield from _prepare(name, values["prepare"])
    yield f"# dialogue: {{system: {json.dumps(_prompt(values))}}} # names the tools"
    yield "# tools:"
    yield from _tools(values)
    yield from _world(values)
    if values["cold_start"]:
        yield "# cold_start: null"
    yield f"# reinforce: {_flow(values['reinforce'], ('algorithm', 'iterations', 'questions'))}"


def _prepare(name: str, prepare: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section; new questions go into a folder of the recipe's own."""
    if intake := prepare.get("intake"):
        folder = f"{SOURCES}/intake/{name}"
        yield "prepare:"
        yield f"  intake: {_flow({**intake, 'folder': folder}, ('folder', 'set'))} # its own"
    else:
        yield "# prepare:"
    policy = prepare["policy"]
    yield f"  # policy: {_flow(policy, SHOWN[policy['kind']])} # {POLICIES[policy['kind']]}"
    yield f"  # questions: {_flow(prepare['questions'], ('train', 'test'))}"
    if prepare["expert"]:
        yield "  # expert: null # without traces; then cold_start: null, too"


def _world(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the setting of the base's world that stands first, or where worlds are explained."""
    for world, settings in (values.get("environment") or {}).items():
        first = {key: settings[key] for key in list(settings)[:1]}
        yield f"# environment: {{{_scalar(world)}: {_flow(first, tuple(first))}}}"
        return
    yield "# (a world that the agent acts in: docs/own-environment.md)"


def _tools(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an example of a function of own/, and how the base's tools are taken away."""
    if EXAMPLE in values["tools"]:
        yield f"  # {EXAMPLE}: {{}} # null takes it away; add yours (docs/own-tool.md)"
    else:
        yield f"  # {EXAMPLE}: {{}} # a function of yours (docs/own-tool.md)"
    where = ", where no expert calls it" if values["prepare"]["expert"] else ""
    others = [tool for tool in values["tools"] if tool != EXAMPLE]
    yield from (f"  # {_key(tool)}: null # takes it away{where}" for tool in others)


def _prompt(values: Mapping[str, Any]) -> str:
    if values.get("environment"):
        return "{tools}"
    return ENDS["native" if "native" in values["dialect"] else "tags"]


def _flow(values: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return some keys as a mapping in braces."""
    return f"{{{', '.join(f'{key}: {_scalar(values[key])}' for key in keys)}}}"


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value)
    is_word = plain and value not in ("null", "true", "false", "yes", "no", "on", "off")
    return value if is_word else json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z][\w./:-]*", name) else json.dumps(name)
