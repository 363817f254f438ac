"""Check the arguments of a call against the schema of its tool."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import regex
from jsonschema import FormatChecker
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry

from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, ToolSpec

SAYS_NOTHING = {"type", "description", "title", "default", "examples"}  # of which string fits
SHOWN = 300  # characters of a fault
# Of one check: a server writes the schema, an agent the arguments, and either may make it slow.
STEPS = 20_000  # parts of the schema that are applied; arguments of a prompt's size take hundreds
CHECK_SECONDS = 1.0  # patterns and all other keywords together


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


def first_fault(schema: Mapping[str, Any], values: Any) -> ValidationError | None:
    """Return what fits least of values, in bounded time.

    Raises an exception of any type for a schema that is none, or takes too long.
    """
    # Without a check of the schema itself, which takes a hundred times as long. The empty
    # registry keeps references of a schema from being fetched.
    validator = Validator(_with_null(dict(schema)), registry=Registry(), format_checker=Work())
    return best_match(validator.iter_errors(values))


def _fitting(call: Call, spec: ToolSpec, values: dict[str, Any]) -> Call | Observation:
    """Return the call with these values, or an observation that says what does not fit.

    JSON knows neither NaN nor infinity, which pass every comparison with a limit. A whole number
    may be written as 1.0, and reaches an integer as 1.
    """
    try:
        json.dumps(values, allow_nan=False)
        fault = first_fault(spec.parameters, values)
    except RecursionError:
        return _refused(f"the arguments of {call.tool} are nested too deeply")
    except ValueError:
        return _refused(f"the arguments of {call.tool} have a number that is not finite")
    except Exception as broken:  # of a schema that is none; a server may have sent it
        return _refused(f"the schema of {call.tool} cannot be used: {broken}")
    if fault:
        where = ".".join(map(str, fault.absolute_path))
        return _refused(f"{call.tool}{f', {where}' if where else ''}: {fault.message}")
    return replace(call, values=_with_integers(spec.parameters, values))


def _with_integers(schema: Any, value: Any) -> Any:
    """Return a value that fits a schema, with integers where the schema asks for them."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict):
        parts = schema.get("properties")
        of_name = parts if isinstance(parts, Mapping) else {}
        return {name: _with_integers(of_name.get(name), part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_integers(schema.get("items"), part) for part in value]
    kinds = schema.get("type")
    integer = "integer" in (kinds if isinstance(kinds, list) else [kinds])
    return int(value) if integer and isinstance(value, float) else value


class Work(FormatChecker):
    """The work that one check may still do.

    The library hands the checker of formats, and nothing else, to each part of a check.
    """

    def __init__(self) -> None:
        super().__init__(formats=())
        self.steps = 0
        self.end = time.monotonic() + CHECK_SECONDS

    def step(self) -> float:
        """Count a step; return the seconds that are left. Raises TimeoutError at the bounds."""
        self.steps += 1
        left = self.end - time.monotonic()
        if self.steps > STEPS or left <= 0:
            raise TimeoutError(
                f"a check takes more than {STEPS} steps or {CHECK_SECONDS:g} s: simplify its "
                "references and patterns"
            )
        return left


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    """Check the keyword ``pattern`` in bounded time. Raises TimeoutError."""
    if isinstance(text, str) and not regex.search(
        pattern, text, timeout=validator.format_checker.step()
    ):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _evolve(validator: Any, **changes: Any) -> Any:
    """Return a validator of another part of the schema, and count it.

    It is of the same class whatever ``$schema`` the part names, so all its patterns are bounded.
    """
    validator.format_checker.step()
    return type(validator)(
        changes.get("schema", validator.schema),
        format_checker=validator.format_checker,
        registry=validator._registry,
        _resolver=changes.get("_resolver", validator._resolver),
    )


Validator: Any = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _pattern}
)
Validator.evolve = _evolve


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
