"""Check the arguments of a call against the schema of its tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import regex
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry

from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec

SAYS_NOTHING = {"type", "description", "title", "default", "examples"}  # of which string fits
SHOWN = 300  # characters of a fault
PATTERN_SECONDS = 0.5  # to search a text for a pattern: a server writes the one, an agent the other


def with_values(call: Call, spec: ToolSpec) -> Call | Observation:
    """Return the call with its parameters by name, or an observation that says what does not fit.

    A tool whose only parameter is a string takes the whole argument, without the space around it
    where the schema says more of it; any other tool takes a JSON object. In a dialect that names
    all parameters, a call already has its values.
    """
    parameter = spec.text_parameter
    if parameter and not call.values:
        if not spec.parameters["properties"][parameter].keys() - SAYS_NOTHING:
            return replace(call, values={parameter: call.argument})
        return _fitting(call, spec, {parameter: call.argument.strip()})
    try:
        values = dict(call.values) or json.loads(call.argument or "{}")
    except (ValueError, RecursionError) as error:
        return _refused(f"the arguments of {call.tool} are not a JSON object: {error}")
    if not isinstance(values, dict):
        return _refused(f"the arguments of {call.tool} are not a JSON object")
    return _fitting(call, spec, values)


def _fitting(call: Call, spec: ToolSpec, values: dict[str, Any]) -> Call | Observation:
    """Return the call with these values, or an observation that says what does not fit."""
    try:
        # Without a check of the schema itself, which takes a hundred times as long. The empty
        # registry keeps references of a schema from being fetched.
        validator = Validator(_with_null(dict(spec.parameters)), registry=Registry())
        fault = best_match(validator.iter_errors(values))
    except RecursionError:
        return _refused(f"the arguments of {call.tool} are nested too deeply")
    except Exception as broken:  # of a schema that is none; a server may have sent it
        return _refused(f"the schema of {call.tool} cannot be used: {broken}")
    if fault:
        where = ".".join(map(str, fault.absolute_path))
        return _refused(f"{call.tool}{f', {where}' if where else ''}: {fault.message}")
    return replace(call, values=values)


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    """Check the keyword ``pattern`` in bounded time. Raises TimeoutError."""
    if isinstance(text, str) and not regex.search(pattern, text, timeout=PATTERN_SECONDS):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def _with_null(schema: Any) -> Any:
    """Return a schema in which ``nullable``, which JSON schema does not know, allows null."""
    if isinstance(schema, list):
        return [_with_null(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: _with_null(part) for name, part in schema.items()}
    return {"anyOf": [whole, {"type": "null"}]} if schema.get("nullable") is True else whole


def _refused(reason: str) -> Observation:
    return Observation(Outcome.BAD_ARGUMENTS, reason[:SHOWN])
