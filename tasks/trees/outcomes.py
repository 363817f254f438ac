"""Name every outcome of a turn, a tool call and a trajectory, and why sampling stopped.

Tables and traces store the values as plain strings. The outcome of a trajectory is that of its last
turn. tasks/tools/python_worker.py runs alone inside the sandbox and repeats its names as literals.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a turn or a tool call ended."""

    # Of a turn. Every one but CALL and PART ends the trajectory.
    CALL = "call"  # The turn ends with a complete, well-formed tool call.
    ANSWER = "answer"  # The turn closed an answer block.
    NO_ANSWER = "no_answer"  # The agent sampled the end token without an answer.
    CUT = "cut"  # The turn used up its token budget.
    BAD_CALL = "bad_call"  # The turn closed a tool tag that it had not opened.
    FORGED_RESULT = "forged_result"  # The agent wrote a result tag, which only the tools may write.
    FORGED_TURN = "forged_turn"  # The agent wrote a mark of turns, which the template alone writes.
    TOO_MANY_CALLS = "too_many_calls"  # The turn makes one call more than the recipe allows.
    OUT_OF_SPACE = "out_of_space"  # The tool result and one more token would exceed the budget.
    PART = "part"  # The next node continues this turn, because trajectories part inside it.

    # Of a tool call.
    OK = "ok"  # The tool ran to its end.
    NO_SUCH_TOOL = "no_such_tool"  # The agent called a tool that the recipe does not give it.
    ERROR = "error"  # The code raised an exception.
    TIMEOUT = "timeout"  # The code used up its CPU seconds.
    WALL_TIMEOUT = "wall_timeout"  # The code used up its wall-clock seconds.
    MEMORY = "memory"  # The code exceeded its memory limit.
    OUTPUT_LIMIT = "output_limit"  # The code printed more characters than allowed.
    KILLED = "killed"  # The code, or the worker that ran it, died of a signal or exited by itself.
    NO_RESULTS = "no_results"  # No document has a word of the search query.
    EMPTY_QUERY = "empty_query"  # The search query has no word.
    QUERY_TOO_LONG = "query_too_long"  # The search query exceeds its limit and was not run.


TURN_OUTCOMES = (  # of a whole turn, and so of a trajectory
    Outcome.CALL,
    Outcome.ANSWER,
    Outcome.NO_ANSWER,
    Outcome.CUT,
    Outcome.BAD_CALL,
    Outcome.FORGED_RESULT,
    Outcome.FORGED_TURN,
    Outcome.TOO_MANY_CALLS,
    Outcome.OUT_OF_SPACE,
)


class StopReason(StrEnum):
    """Why an engine stopped sampling a turn."""

    STOP = "stop"  # A stop string is complete.
    END = "end"  # The policy sampled its end token.
    LENGTH = "length"  # The turn's token budget ran out.
