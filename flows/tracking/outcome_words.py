"""Say in a few lines what a run has changed, for the better or for the worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.tracking.progress import duration
from flows.tracking.run_summary import verdict_sentence

CHANCE = 0.05  # a p-value below it is a difference beyond chance
COSTS = ("tool errors a question", "tool calls a question", "response length")
STAGES = 3  # that are named with their seconds, the longest first
COLD_START = "cold start"

Measured = Mapping[str, Any]  # what metrics.json has


def lines(
    measured: Measured,
    verdict: Mapping[str, Any],
    alarms: Sequence[str] | None,
    seconds: Mapping[str, float],
) -> list[str]:
    """Return at most six lines; those that have nothing to say are left out.

    ``alarms``: None where nothing was trained. ``seconds``: those of each stage in this call.
    """
    against = compared_with(verdict)
    found = [
        _success(measured, against),
        _kinds(measured, against),
        _costs(measured, against),
        "" if alarms is None else f"alarms: {', '.join(alarms) or 'none'}",
        sentence(verdict),
        _time(seconds),
    ]
    return [line for line in found if line]


def compared_with(verdict: Mapping[str, Any]) -> str:
    """Return the agent that a verdict compares with, which is the cold start without one."""
    return str(verdict.get("against", COLD_START))


def sentence(verdict: Mapping[str, Any]) -> str:
    """Return a verdict with its reason; "" for none."""
    return f"verdict: {verdict_sentence(verdict)}" if verdict else ""


def worse_kinds(measured: Measured, against: str) -> list[str]:
    """Return the kinds of question that are worse beyond chance."""
    return [kind for kind, points in _beyond_chance(measured, against) if points < 0]


def _success(measured: Measured, against: str) -> str:
    agents = measured.get("success", {})
    if "trained" not in agents:
        return ""
    shown = _percent(agents["trained"], ".1f", " %")
    if against not in agents:
        return f"success {shown}"
    text = f"success {100 * agents[against]['mean']:.1f} % ({against}) → {shown} (trained)"
    gained = measured.get("differences", {}).get("success", {}).get(against)
    if not gained:
        return text
    return f"{text}: {_percent(gained, '+.1f', ' points')}, {_judged(gained)}"


def _percent(values: Mapping[str, float], form: str, unit: str) -> str:
    # none of them is a minus zero
    mean, low, high = (round(100 * values[name], 1) + 0.0 for name in ("mean", "low", "high"))
    return f"{mean:{form}}{unit} [{low:.1f}, {high:.1f}]"


def _judged(gained: Mapping[str, float]) -> str:
    if gained["low"] > 0:
        return "better beyond chance"
    return "worse beyond chance" if gained["high"] < 0 else "no difference beyond chance"


def _kinds(measured: Measured, against: str) -> str:
    kinds = _gains_by_kind(measured, against)
    if not kinds:
        return ""
    beyond = sorted(_beyond_chance(measured, against), key=lambda one: -abs(one[1]))
    if not beyond:
        return f"none of {len(kinds)} kinds of question is better or worse beyond chance"
    sides = {
        "better": [f"{kind} {points:+.1f}" for kind, points in beyond if points > 0],
        "worse": [f"{kind} {points:+.1f}" for kind, points in beyond if points < 0],
    }
    said = [f"{side} {', '.join(named) or 'none'}" for side, named in sides.items()]
    return f"of {len(kinds)} kinds of question, beyond chance: {'; '.join(said)}"


def _gains_by_kind(measured: Measured, against: str) -> dict[str, Mapping[str, float]]:
    return {
        name.removeprefix("success, "): agents[against]
        for name, agents in measured.get("differences", {}).items()
        if name.startswith("success, ") and against in agents
    }


def _beyond_chance(measured: Measured, against: str) -> list[tuple[str, float]]:
    """Return kinds with their points, by p-values that allow for the number of kinds."""
    return [
        (kind, 100 * gained["mean"])
        for kind, gained in _gains_by_kind(measured, against).items()
        if gained.get("p_holm", gained["p"]) < CHANCE
    ]


def _costs(measured: Measured, against: str) -> str:
    said = []
    for name in COSTS:
        agents = measured.get(name, {})
        if {"trained", against} <= {*agents}:
            before, now = agents[against]["mean"], agents["trained"]["mean"]
            unit = " tokens" if name == "response length" else ""
            digits = 0 if unit else 2
            said.append(f"{name} {before:.{digits}f} → {now:.{digits}f}{unit}")
    return ", ".join(said)


def _time(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    longest = sorted(seconds.items(), key=lambda one: -one[1])[:STAGES]
    named = ", ".join(f"{stage} {duration(spent)}" for stage, spent in longest)
    return f"took {duration(sum(seconds.values()))}: {named}"
