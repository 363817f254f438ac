"""Name every outcome of a turn, a tool call and a trajectory, and why sampling stopped.

Tables and traces store the values as plain strings. The outcome of a trajectory is that of its last
turn. tasks/tools/python_worker.py runs alone inside the sandbox and repeats its names as literals.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a turn or a tool call ended."""

    # Of a turn. Every one but CALL and PART ends the trajectory.
    CALL = "call"  # The turn ends with complete, well-formed tool calls: one, or several.
    ANSWER = "answer"  # The turn closed an answer block.
    NO_ANSWER = "no_answer"  # The agent sampled the end token without an answer.
    CUT = "cut"  # The turn used up its token budget.
    BAD_CALL = "bad_call"  # The turn closed a tool tag that it had not opened.
    FORGED_RESULT = "forged_result"  # The agent wrote a result tag, which only the tools may write.
    FORGED_TURN = "forged_turn"  # The agent wrote a mark of turns, which the template alone writes.
    TOO_MANY_CALLS = "too_many_calls"  # The turn makes more calls than the recipe has left.
    OUT_OF_SPACE = "out_of_space"  # The tool result and one more token would exceed the budget.
    TERMINATED = "terminated"  # The environment has ended the episode with this turn's act.
    TRUNCATED = "truncated"  # A limit of the environment has ended the episode.
    REPLAY_DIFFERS = "replay_differs"  # A replay of the episode's acts was answered differently.
    WORLD_FAILED = "world_failed"  # The environment failed, and no act of the agent was the cause.
    WORLD_TIMEOUT = "world_timeout"  # The same: it did not answer within its time limit.
    WORLD_BROKEN = "world_broken"  # The environment failed twice at one act, maybe because of it.
    PROGRAM_FAILED = "program_failed"  # The agent's program raised an error, or returned no result.
    PROGRAM_TIMEOUT = "program_timeout"  # The program worked for longer than the recipe allows.
    PROGRAM_DIED = "program_died"  # A signal, or the end of its host, has ended the program.
    PART = "part"  # The next node continues this turn, because trajectories part inside it.

    # Of a tool call.
    OK = "ok"  # The tool ran to its end.
    NO_SUCH_TOOL = "no_such_tool"  # The agent called a tool that the recipe does not give it.
    BAD_ARGUMENTS = "bad_arguments"  # The arguments do not fit the tool's schema; nothing was run.
    NOT_ADMISSIBLE = "not_admissible"  # The environment does not allow the act in this state.
    UNAVAILABLE = "unavailable"  # A service of the recipe did not answer usably, in all retries.
    NO_PAGE = "no_page"  # A page at an address of the agent's choice cannot be had.
    REFUSED = "refused"  # A private address, or a site's own rules: nothing was fetched.
    TOOLS_CHANGED = "tools_changed"  # A server came back with another tool than the agent knows.
    OVER_BUDGET = "over_budget"  # The recipe's budget of such calls is spent; nothing was run.
    ERROR = "error"  # The code raised an exception.
    TIMEOUT = "timeout"  # The code used up its CPU seconds, or a server its seconds to answer.
    WALL_TIMEOUT = "wall_timeout"  # The code used up its wall-clock seconds.
    MEMORY = "memory"  # The code exceeded its memory limit.
    OUTPUT_LIMIT = "output_limit"  # The code printed more characters than allowed.
    KILLED = "killed"  # The code, or the worker that ran it, died of a signal or exited by itself.
    NO_RESULTS = "no_results"  # Nothing was found: no document for the query, no text on the page.
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
    Outcome.TERMINATED,
    Outcome.TRUNCATED,
    Outcome.REPLAY_DIFFERS,
    Outcome.WORLD_FAILED,
    Outcome.WORLD_TIMEOUT,
    Outcome.WORLD_BROKEN,
    Outcome.PROGRAM_FAILED,
    Outcome.PROGRAM_TIMEOUT,
    Outcome.PROGRAM_DIED,
)


ENDED_BY_WORLD = (  # outcomes of a trajectory whose environment has ended it
    Outcome.TERMINATED,
    Outcome.TRUNCATED,
    Outcome.REPLAY_DIFFERS,
    Outcome.WORLD_FAILED,
    Outcome.WORLD_TIMEOUT,
    Outcome.WORLD_BROKEN,
)
ENDED_BY_AGENT = (  # of one that ends with a turn which is no act
    Outcome.ANSWER,
    Outcome.NO_ANSWER,
    Outcome.CUT,
    Outcome.BAD_CALL,
    Outcome.FORGED_RESULT,
    Outcome.FORGED_TURN,
)
# of a turn whose act was executed
ACTED = (Outcome.CALL, Outcome.OUT_OF_SPACE, *ENDED_BY_WORLD)


class Cause(StrEnum):
    """What brings an outcome about."""

    AGENT = "agent"  # What the agent did, or may have done: it is trained.
    LIMIT = "limit"  # A limit of the recipe or the environment, which the agent ran into.
    INFRASTRUCTURE = "infrastructure"  # Nothing that the agent did: a row leaves it out.


CAUSES = dict.fromkeys(Outcome, Cause.AGENT) | {
    Outcome.CUT: Cause.LIMIT,
    Outcome.OUT_OF_SPACE: Cause.LIMIT,
    Outcome.TOO_MANY_CALLS: Cause.LIMIT,
    Outcome.TRUNCATED: Cause.LIMIT,
    Outcome.REPLAY_DIFFERS: Cause.INFRASTRUCTURE,
    Outcome.WORLD_FAILED: Cause.INFRASTRUCTURE,
    Outcome.WORLD_TIMEOUT: Cause.INFRASTRUCTURE,
    Outcome.PROGRAM_FAILED: Cause.LIMIT,  # of the program: what an agent says should not break it
    Outcome.PROGRAM_TIMEOUT: Cause.LIMIT,
    Outcome.PROGRAM_DIED: Cause.INFRASTRUCTURE,
    Outcome.UNAVAILABLE: Cause.INFRASTRUCTURE,
    Outcome.TOOLS_CHANGED: Cause.INFRASTRUCTURE,
    Outcome.OVER_BUDGET: Cause.INFRASTRUCTURE,
}
FAILURES_TO_BLAME = 2  # at one act or call, which may then be the cause
INFRASTRUCTURE = tuple(o for o in Outcome if CAUSES[o] == Cause.INFRASTRUCTURE)


class UnavailableError(Exception):
    """What a world or a tool needs is away, whatever the agent does.

    The episode ends as WORLD_FAILED, the call as UNAVAILABLE.
    """


class StopReason(StrEnum):
    """Why an engine stopped sampling a turn."""

    STOP = "stop"  # A stop string is complete.
    END = "end"  # The policy sampled its end token.
    LENGTH = "length"  # The turn's token budget ran out.
