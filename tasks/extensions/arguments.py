"""The parameters of a user's function: their JSON schema, and a call with checked values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError

_NAMED = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?:\s+(\S.*)")  # "name: text", "name (type): text"
_FIXED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def model_of(
    call: Callable[..., Any], where: str, doc: str = "", hinted: Any = None
) -> type[BaseModel]:
    """Return a model of a function's parameters, from its type hints and ``doc``.

    ``hinted``: the function with the hints, where that is another object. Raises ValueError, which
    names ``where`` and the parameter, for what has no JSON schema.
    """
    try:
        hints = get_type_hints(hinted or _plain(call), include_extras=True)
    except Exception as error:
        raise ValueError(f"{where}: its type hints cannot be read: {error}") from error
    meanings = described(doc)
    fields: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(inspect.signature(call).parameters.items()):
        if parameter.kind not in _FIXED:
            raise ValueError(f"{where}: the parameter {parameter} has no fixed name: name it")
        if name not in hints:
            raise ValueError(f"{where}: the parameter {name} has no type: write {name}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        # A field's own name may be none of a model's methods, so that is the alias.
        fields[f"field_{index}"] = (
            hints[name],
            Field(default, alias=name, description=meanings.get(name)),
        )
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where}: a parameter's type has no JSON schema: {reason}") from error
    return model


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model, without the titles that pydantic adds."""
    schema = model.model_json_schema()
    for part in [schema, *schema.get("$defs", {}).values()]:
        part.pop("title", None)
        for field in part.get("properties", {}).values():
            field.pop("title", None)
    return schema


def checked(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as the types of the parameters. Raises pydantic's ValidationError."""
    read = model.model_validate(dict(values))
    given = read.model_fields_set
    return {
        field.alias or name: getattr(read, name)
        for name, field in model.model_fields.items()
        if name in given
    }


def summary(doc: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())


def described(doc: str) -> dict[str, str]:
    """Return what a docstring says of parameters after its first paragraph, by name."""
    meanings: dict[str, str] = {}
    current, margin = "", 0
    for line in inspect.cleandoc(doc).partition("\n\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        matched = _NAMED.fullmatch(line)
        if current and line.strip() and indent > margin:
            meanings[current] += f" {line.strip()}"
        elif matched:
            current, margin = matched[1], indent
            meanings[current] = matched[2].strip()
        else:
            current = ""
    return meanings


def _plain(call: Any) -> Any:
    """Return the function whose hints count: of an object with ``__call__``, that method."""
    return call if inspect.isroutine(call) else type(call).__call__
