"""Arguments that do not fit the schema of a tool never reach it."""

import json
import time

import pytest

from tasks.tools.schema import with_values
from tasks.trees.tree import Call, ToolSpec
from tests.waiting import LONGEST

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0}},
}


def check(schema, argument):
    return with_values(Call("look", argument), ToolSpec("look", "", schema))


def test_values_are_read_by_name():
    values = {"city": "Oslo", "days": [0, 3]}
    assert check(PLACE, json.dumps(values)).values == values
    assert check({"type": "object"}, "").values == {}
    text = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    assert check(text, '{"q": 1}').values == {"q": '{"q": 1}'}


def test_whole_numbers_reach_integers_as_integers():
    days = {"type": "array", "items": {"type": ["integer", "null"]}}
    schema = {"type": "object", "properties": {"days": days, "cost": {"type": "number"}}}
    values = check(schema, '{"days": [1.0, 2, null], "cost": 3.0, "more": 4.0}').values
    assert repr(values) == "{'days': [1, 2, None], 'cost': 3.0, 'more': 4.0}"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("{", "the arguments of look are not a JSON object: "),
        ("[]", "the arguments of look are not a JSON object"),
        ("[" * 100_000, "the arguments of look are not a JSON object: "),
        ("1" * 10_000, "the arguments of look are not a JSON object: "),
        ('{"city": "Oslo"}', "look: 'days' is a required property"),
        ('{"city": 1, "days": []}', "look, city: 1 is not of type 'string'"),
        ('{"city": "", "days": [1, -2]}', "look, days.1: -2 is less than the minimum of 0"),
        ('{"city": "", "days": [], "x": 1}', "look: Additional properties are not allowed"),
        ('{"city": "", "days": [NaN]}', "the arguments of look have a number that is not finite"),
        ('{"city": "", "days": [1e999]}', "the arguments of look have a number that is not"),
    ],
)
def test_what_does_not_fit_is_said(argument, reason):
    refused = check(PLACE, argument)
    assert refused.outcome == "bad_arguments"
    assert refused.text.startswith(reason)
    assert len(refused.text) <= 300


@pytest.mark.parametrize(
    ("more", "fitting", "other"),
    [({"enum": ["up", "down"]}, " up\n", "north"), ({"pattern": "^[a-z]+$"}, "a", "A")],
)
def test_only_text_of_a_call_fits_its_schema(more, fitting, other):
    """The whole argument is the text; a schema may say which texts there are."""
    way = {"type": "object", "properties": {"way": {"type": "string", **more}}, "required": ["way"]}
    assert check(way, fitting).values == {"way": fitting.strip()}
    assert check(way, other).outcome == "bad_arguments"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "objekt"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/schema"}}},
        {"type": "object", "properties": {"a": {"pattern": "("}}},
    ],
)
def test_schema_that_is_none_refuses(schema):
    refused = check(schema, '{"a": "b"}')
    assert refused.outcome == "bad_arguments"
    assert refused.text.startswith("the schema of look cannot be used: ")


def test_a_pattern_is_searched_for_in_bounded_time():
    """A server writes the pattern, and an agent the text that makes it slow."""
    schema = {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}, "b": {}}}
    began = time.monotonic()
    assert check(schema, json.dumps({"a": "a" * 60 + "!"})).outcome == "bad_arguments"
    assert time.monotonic() - began < LONGEST
    assert check(schema, '{"a": "aa"}').values == {"a": "aa"}
    assert check(schema, '{"a": "ab"}').text.startswith("look, a: 'ab' does not match")


DOUBLED = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)}


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/$defs/d0"},
        {"unevaluatedProperties": False, "$ref": "#/$defs/d0"},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "allOf": [{"pattern": f"^(a|aa)+{end}?$"} for end in range(200)],
        },
        {"$ref": "#/$defs/tree"},
    ],
    ids=["doubled", "unevaluated", "patterns", "tree"],
)
def test_a_check_ends(monkeypatch, part):
    """References that double at each level, and many slow patterns of another dialect."""
    monkeypatch.setattr("tasks.tools.schema.CHECK_SECONDS", 0.3)
    tree = {"allOf": [{"properties": {"a": {"$ref": "#/$defs/tree"}}}] * 2}
    schema = {"type": "object", "properties": {"a": part}, "$defs": DOUBLED | {"d40": {}}}
    schema["$defs"]["tree"] = tree
    value = json.loads('{"a":' * 40 + "1" + "}" * 40) if "tree" in str(part) else "a" * 60 + "!"
    if "unevaluatedProperties" in part:
        value = {"b": 1}
    began = time.monotonic()
    assert "cannot be used: " in check(schema, json.dumps({"a": value})).text
    assert time.monotonic() - began < LONGEST
