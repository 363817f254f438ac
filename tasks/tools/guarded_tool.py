"""Guard the trainer from a tool that a user has written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tasks.extensions.user_code_worker import describe, ending_forks, well_formed
from tasks.tools.contract import OpenTool
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome, UnavailableError
from tasks.trees.tree import Call, Observation

TEXT_CHARACTERS = 100_000  # most of one result; the dialogue cuts it to its tokens
OUTCOMES = frozenset(Outcome) - {*TURN_OUTCOMES, Outcome.PART}  # that a result may have


def guarded(tool: OpenTool) -> OpenTool:
    """Return a tool that turns an exception, or a wrong number or kind of results, into ERROR.

    UnavailableError becomes UNAVAILABLE.
    """
    return OpenTool(tool.specs, partial(_run, tool))


def _run(tool: OpenTool, calls: Sequence[Call]) -> list[Observation]:
    try:
        with ending_forks():
            results = list(tool.run(calls))
        if len(results) != len(calls):
            raise ValueError(f"{len(results)} results for {len(calls)} calls")
    except Exception as error:
        away = isinstance(error, UnavailableError)
        outcome = Outcome.UNAVAILABLE if away else Outcome.ERROR
        return [Observation(outcome, describe(error))] * len(calls)
    return [sound(result) for result in results]


def sound(result: object) -> Observation:
    """Return an observation that can be stored; an ERROR in place of anything else."""
    if not isinstance(result, Observation):
        kind = type(result).__name__
        return Observation(Outcome.ERROR, f"the tool returned {kind}: return a text")
    if not isinstance(result.text, str) or not isinstance(result.outcome, str):
        return Observation(Outcome.ERROR, "outcome and text of the tool's observation are no texts")
    if result.outcome not in OUTCOMES:
        fault = (
            f"the tool returned the outcome {well_formed(result.outcome)[:100]!r}, which is none"
        )
        return Observation(Outcome.ERROR, f"{fault} of a call")
    # The rest of an observation is a world's: no tool gives rewards, or ends an episode.
    return Observation(result.outcome, well_formed(result.text)[:TEXT_CHARACTERS])
