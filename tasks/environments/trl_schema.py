"""The schema of a method from its types and its docstring, as transformers derives it for TRL.

transformers itself is not imported here: it takes seconds, and brings torch.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tasks.trees.tree import ToolSpec

PLAIN = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
SECTIONS = ("Args:", "Returns:", "Raises:")  # of a docstring in Google style
_ARGUMENT = re.compile(r"(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def spec_of(method: Callable[..., Any]) -> ToolSpec:
    """Return what an agent is told of a method.

    Raises ValueError with the remedy for a method without a docstring, and for a parameter without
    a type or a description.
    """
    docstring = inspect.getdoc(method)
    if not docstring:
        raise ValueError("has no docstring: say what it does, and describe each parameter")
    description, described = parsed(docstring)
    hints = _hints(method)
    properties, required = {}, []
    for name, parameter in _parameters(method).items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"parameter {name} must be one that can be given by its name")
        if name not in hints:
            raise ValueError(f"parameter {name} has no type: write {name}: str, or what it is")
        if name not in described:
            raise ValueError(
                f"parameter {name} is not described: add a line '{name}: ...' below 'Args:' in the "
                "docstring"
            )
        properties[name] = _described(_schema(hints[name]), described[name])
        if parameter.default is parameter.empty:
            required.append(name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return ToolSpec(
        method.__name__, description, schema | ({"required": required} if required else {})
    )


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(method).parameters)
    parameters.pop("self", None)
    return parameters


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(method)
    except Exception as error:
        raise ValueError(f"has a type that cannot be read: {error}") from error


# ---------------------------------------------------------------- docstrings


def parsed(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring of Google style, and that of each parameter."""
    section, description = "", []
    described: dict[str, str] = {}
    name = ""
    for line in docstring.splitlines():
        text = line.strip()
        if text.startswith(SECTIONS):
            section = text.partition(":")[0]
        elif not section:
            description.append(line)
        elif section == "Args" and (matched := _ARGUMENT.match(text)):
            name, described[matched[1]] = matched[1], matched[2]
        elif section == "Args" and name and text:
            described[name] = f"{described[name]} {text}".strip()
    return "\n".join(description).strip(), described


def _described(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Add a description; ``(choices: ["a", "b"])`` at its end lists the values."""
    matched = _CHOICES.search(description)
    if matched:
        try:
            schema["enum"] = json.loads(matched[1])
        except ValueError as error:
            raise ValueError(f"choices must be a list of JSON, not {matched[1]}") from error
        description = description[: matched.start()].strip()
    return schema | {"description": description}


# ---------------------------------------------------------------- types


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises ValueError for one that has none."""
    if hint is Any:
        return {}
    origin = get_origin(hint)
    if origin is None:
        return {"type": PLAIN.get(hint, "object")}
    if origin not in _MADE_OF:
        raise ValueError(f"the type {hint} has no JSON schema: use str, int, list[...], dict, ...")
    return _MADE_OF[origin](get_args(hint))


def _union(options: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_schema(option) for option in options if option is not type(None)]
    plain = all(set(schema) == {"type"} and isinstance(schema["type"], str) for schema in schemas)
    if len(schemas) == 1:
        (schema,) = schemas
    elif plain:
        names = sorted({schema["type"] for schema in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in options else {})


def _literal(values: tuple[Any, ...]) -> dict[str, Any]:
    if any(type(value) not in PLAIN for value in values):
        raise ValueError("Literal may hold texts, numbers, booleans and None only")
    names = list(dict.fromkeys(PLAIN[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _list(items: tuple[Any, ...]) -> dict[str, Any]:
    return {"type": "array"} | ({"items": _schema(items[0])} if items else {})


def _tuple(items: tuple[Any, ...]) -> dict[str, Any]:
    if not items:
        return {"type": "array"}
    if len(items) == 1 or ... in items:
        raise ValueError("write list[...] instead of a tuple of one entry or of any length")
    return {"type": "array", "prefixItems": [_schema(item) for item in items]}


def _dict(entries: tuple[Any, ...]) -> dict[str, Any]:
    pair = len(entries) == 2
    return {"type": "object"} | ({"additionalProperties": _schema(entries[1])} if pair else {})


_MADE_OF: Mapping[Any, Callable[[tuple[Any, ...]], dict[str, Any]]] = {
    Union: _union,
    types.UnionType: _union,
    Literal: _literal,
    list: _list,
    tuple: _tuple,
    dict: _dict,
}
