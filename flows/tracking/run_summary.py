"""What a person reads of a run first: its name, and a description of about five lines.

A recipe's values are given as ``flows.tracking.run.flatten`` writes them, and so are parameters
that MLflow has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flows.host.addresses import without_password
from params.schema.defaults import defaults

Values = Mapping[str, str]  # "reinforce.iterations" -> "60"
Changes = dict[str, tuple[str, str]]  # key -> its value before and now

LONGEST_NAME = 60  # characters
LONGEST_VALUE = 24  # characters of a value
KEPT = 6_000  # characters of a parameter that MLflow keeps
MOST_CHANGES = 8  # that a description lists
ROW = "algorithm."  # begins the choices of the recipe's row in algorithms.yaml
BREAK = "  \n"  # between two lines, in Markdown
AGENTS = {"trained": "**Success**", "cold start": "before", "champion": "champion"}
NONE = "none"  # shown where there is no such key
UNTOLD = ("expect", "base", "champion")  # say nothing about how a run trains


def differing(before: Values, now: Values) -> Changes:
    """Return the values that differ, in the order of ``now``.

    A key that only one side has counts, unless it stands at its default: an earlier version did not
    know it. Runs of earlier versions did not keep the algorithm's row.
    """
    has_row = any(key.startswith(ROW) for key in before)
    return {
        key: (before.get(key, NONE), now.get(key, NONE))
        for key in [*now, *(key for key in before if key not in now)]
        if key.partition(".")[0] not in UNTOLD
        and before.get(key, _default(key))[:KEPT] != now.get(key, _default(key))[:KEPT]
        and (has_row or not key.startswith(ROW))
    }


def _default(key: str) -> str:
    """Return the value that a key without one has; one without a default has the text NONE."""
    value = defaults().get(key, NONE)
    return value if isinstance(value, str) else json.dumps(value)


def run_name(recipe: str, changes: Changes) -> str:
    """Return the name of a run: its recipe, and what is special in it; "" for nothing special.

    It has about LONGEST_NAME characters at most, and says how many values it leaves out.
    """
    parts = [f"{key}={_short(changes[path][1])}" for path, key in _keys(changes).items()]
    told = recipe
    for number, part in enumerate(parts):
        left = len(parts) - number
        more = f" +{left - 1}" if left > 1 else ""
        if len(f"{told} {part}{more}") > LONGEST_NAME:
            return f"{told} +{left}"
        told += f" {part}"
    return told if parts else ""


def _keys(changes: Changes) -> dict[str, str]:
    """Return the last part of each key, or the last two where several end alike or in a row."""
    ends = [key.rpartition(".")[2] for key in changes]
    return {
        key: ".".join(key.split(".")[-2:]) if key.startswith(ROW) or ends.count(end) > 1 else end
        for key, end in zip(changes, ends, strict=True)
    }


def description(
    measured: Mapping[str, Any], verdict: Mapping[str, Any], lines: Sequence[str]
) -> str:
    """Return a description in Markdown: success, verdict, and further lines.

    MLflow's UI shows the first five lines or so of a narrow column, and the rest on a click.
    """
    told = [*_success(measured.get("success", {}), verdict), *_verdict(verdict), *lines]
    return BREAK.join(told)


def _success(
    agents: Mapping[str, Mapping[str, float]], verdict: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the success before and after training with its intervals, and the champion's."""
    told = [f"{words} {_percent(agents[name])}" for name, words in AGENTS.items() if name in agents]
    questions = [f"{verdict['questions']} questions"] if "questions" in verdict else []
    if told:
        yield ", ".join([*told, *questions])


def _percent(values: Mapping[str, float]) -> str:
    mean, low, high = (100 * values[bound] for bound in ("mean", "low", "high"))
    return f"**{mean:.1f} %** [{low:.1f}, {high:.1f}]"


def _verdict(verdict: Mapping[str, Any]) -> Iterator[str]:
    if verdict:
        yield f"**{'Promote' if verdict['promote'] else 'Reject'}**: {verdict['reason']}"


def verdict_sentence(verdict: Mapping[str, Any]) -> str:
    """Return a verdict with its reason."""
    return f"{'promote' if verdict['promote'] else 'reject'}: {verdict['reason']}"


def changes_line(changes: Changes, than: str) -> str:
    """Return the line about what differs in the recipe; ``than``: from what."""
    told = [
        f"`{key}` {_short(before)} → {_short(now)}"
        for key, (before, now) in list(changes.items())[:MOST_CHANGES]
    ]
    more = [f"{len(changes) - MOST_CHANGES} more"] if len(changes) > MOST_CHANGES else []
    return f"**Recipe**: {', '.join(told + more) or 'the same'}, beside {than}"


def _short(value: str) -> str:
    """Return a value as one short word or so."""
    line = re.sub(r"[\s`]+", " ", without_password(value)).strip()
    return line if len(line) <= LONGEST_VALUE else f"{line[: LONGEST_VALUE - 1]}…"
