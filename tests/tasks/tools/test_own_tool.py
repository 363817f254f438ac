"""A user's tools: what the agent is told of them, and all that their calls may do."""

import os
import sys
from pathlib import Path

import pytest

from tasks.tools.contract import Opening
from tasks.tools.guarded_tool import TEXT_CHARACTERS
from tasks.tools.own_tool import open_tool, tool_kind
from tasks.trees.tree import Call, Observation

CODE = '''
from __future__ import annotations
import asyncio, datetime, os, time
from contextlib import contextmanager
from typing import Literal
from params.schema.base import Frozen
import numpy as np
from tasks.tools.contract import OpenTool, ToolKind, text_spec
from tasks.trees.outcomes import UnavailableError
from tasks.trees.tree import Observation


def away(text):
    raise UnavailableError(text)


def weather(city: str) -> str:
    """Return the weather of a city,
    in words.

    city: its name,
        in English
    """
    print("asked for", city)
    return {
        "raise": lambda: {}["no such city"],
        "away": lambda: away("no satellite"),
        "hang": lambda: time.sleep(60),
        "large": lambda: "x" * 10_000_000,
        "long": lambda: "x" * 200_000,
        "bytes": lambda: b"rain",
        "surrogate": lambda: "ra\\ud800in",
        "end": lambda: os._exit(2),
        "none": lambda: None,
        "list": lambda: ["rain", 7],
        "numpy": lambda: {"rain": np.int64(7), "wind": np.array([1.5, 2.5])},
        "own": lambda: Observation("no_results", "no such city"),
        "wrong": lambda: Observation("answer", "42"),
        "odd": lambda: Observation("ok", 42),
    }.get(city, lambda: f"rain in {city}")()


def days(start: datetime.date, count: int = 1, unit: Literal["days", "weeks"] = "days") -> str:
    """Return a later date.

    Args:
        start (date): the first day
        count: how many
    """
    days = count * {"days": 1, "weeks": 7}[unit]
    return (start + datetime.timedelta(days=days)).isoformat()


class NightSky:
    """Name what is in the sky."""

    repeatable = False

    class Settings(Frozen):
        star: str

    def __init__(self, settings):
        self.star = settings.star
        self.client = None

    async def __call__(self, hour: Literal["dusk", "dawn"]) -> str:
        """Look.

        hour: when
        """
        self.client = self.client or asyncio.get_running_loop()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.client))
        return f"{self.star} at {hour}"


def undescribed(city: str): return city
def untyped(city):
    """Do."""
def starred(*cities: str):
    """Do."""
def strange(city: object()):
    """Do."""
def hidden(city: Missing):
    """Do."""
class Silent:
    """Do."""
class Needy:
    """Do."""
    def __init__(self, path): pass
    def __call__(self, a: str): pass
class Unset:
    """Do."""
    class Settings: pass
    def __call__(self, a: str): pass
SEVEN = 7


@contextmanager
def _open(settings, opening):
    def run(calls):
        if calls[0].argument == "raise":
            raise LookupError("no")
        if calls[0].argument == "away":
            raise UnavailableError("no line")
        return [Observation("ok", call.argument) for call in calls if call.argument != "drop"]
    yield OpenTool([text_spec("raw", "Repeat.", "text", "it")], run)

RAW = ToolKind(Frozen, _open)
'''


@pytest.fixture(scope="module", autouse=True)
def user(tmp_path_factory):
    """A working folder with own/sky.py."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "own").mkdir()
    (folder / "own/sky.py").write_text(CODE)
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    yield folder
    os.chdir(before)
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


def opened(name, workers=1, **settings):
    kind = tool_kind(f"own/sky.py:{name}")
    return open_tool(f"own/sky.py:{name}", kind.settings(**settings), Opening(Path(), workers))


@pytest.fixture(scope="module")
def weather(user):
    with opened("weather", 2, seconds=3.0) as tool:
        yield tool


def ask(tool, *cities):
    return tool.run([Call("weather", city, {"city": city}) for city in cities])


def test_function_tells_the_agent_what_it_is(weather):
    (spec,) = weather.specs
    assert spec.name == "weather"
    assert spec.description == "Return the weather of a city, in words."
    assert spec.parameters == {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "its name, in English"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert spec.text_parameter == "city"


@pytest.mark.parametrize(
    ("city", "outcome", "text"),
    [
        ("raise", "error", "KeyError: 'no such city'"),
        ("away", "unavailable", "no satellite"),
        ("hang", "wall_timeout", "no answer within 3 seconds"),
        ("large", "output_limit", "more than 1048576"),
        ("bytes", "error", "TypeError: the tool returned bytes: return a text"),
        ("surrogate", "ok", "ra\ufffdin"),
        ("end", "killed", "exit status 2"),
        ("none", "ok", ""),
        ("list", "ok", '["rain", 7]'),
        ("numpy", "ok", '{"rain": 7, "wind": [1.5, 2.5]}'),
        ("own", "no_results", "no such city"),
        ("wrong", "error", "the outcome 'answer', which is none of a call"),
        ("odd", "error", "of the tool's observation are no texts"),
    ],
)
def test_whatever_a_call_does_is_an_outcome(weather, city, outcome, text):
    before, seen, after = ask(weather, "Rome", city, "Oslo")
    assert (before, after) == tuple(Observation("ok", f"rain in {c}") for c in ("Rome", "Oslo"))
    assert seen.outcome == outcome
    assert text in seen.text


def test_long_text_is_cut(weather):
    assert len(ask(weather, "long")[0].text) == TEXT_CHARACTERS


def test_values_get_the_types_of_the_parameters():
    with opened("days") as tool:
        (spec,) = tool.specs
        assert spec.parameters["properties"]["start"] == {
            "type": "string",
            "format": "date",
            "description": "the first day",
        }
        assert spec.parameters["required"] == ["start"]
        values = [{"start": "2024-02-28", "unit": "weeks"}, {"start": "tomorrow"}]
        later, refused = tool.run([Call("days", "", one) for one in values])
        assert later == Observation("ok", "2024-03-06")
        assert refused.outcome == "bad_arguments"
        assert refused.text.startswith("start: Input should be a valid date")


def test_class_has_settings_and_may_be_asynchronous():
    with opened("NightSky", star="Vega") as tool:
        (spec,) = tool.specs
        assert (spec.name, spec.description) == ("night_sky", "Name what is in the sky.")
        assert spec.parameters["properties"]["hour"]["description"] == "when"
        calls = [Call("night_sky", hour, {"hour": hour}) for hour in ("dusk", "noon", "dawn")]
        seen, refused, later = tool.run(calls)
        assert (seen.text, later.text) == ("Vega at dusk", "Vega at dawn")  # on one event loop
        assert refused.outcome == "bad_arguments"
    kind = tool_kind("own/sky.py:NightSky")
    assert not kind.repeatable
    assert tool_kind("own/sky.py:weather").repeatable
    with pytest.raises(ValueError, match=r"star\n.*required"):
        kind.settings()


def test_tool_that_runs_in_the_trainer_is_guarded():
    with opened("RAW") as tool:
        run = lambda *texts: [seen.text for seen in tool.run([Call("raw", t) for t in texts])]  # noqa: E731
        assert run("a", "\ud800") == ["a", "\ufffd"]
        assert run("raise", "a") == ["LookupError: no"] * 2
        assert [seen.outcome for seen in tool.run([Call("raw", "away")])] == ["unavailable"]
        assert run("a", "drop") == ["ValueError: 1 results for 2 calls"] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undescribed", "sky.py:undescribed: it has no docstring: say there what the tool does"),
        ("untyped", "sky.py:untyped: the parameter city has no type: write city: str"),
        ("starred", r"the parameter \*cities: 'str' has no fixed name"),
        ("strange", "type"),
        ("hidden", "sky.py:hidden: its type hints cannot be read: name 'Missing' is not defined"),
        ("Silent", "the class has no __call__"),
        (
            "Needy",
            r"sky.py:Needy: __init__\(self, path\) wants more than self, and the class has no",
        ),
        ("Unset", r"its Settings are no section: write class Settings\(Frozen\)"),
        ("SEVEN", "sky.py:SEVEN is a int: name a function"),
    ],
)
def test_what_is_no_tool_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        tool_kind(f"own/sky.py:{name}")
