"""Check, before any work, that a chat template writes tool calls, and that they can be read.

A template that no family of the library knows can leave out calls or results without an error, and
write calls in a form that none of the library's parsers reads: no agent's call would be carried
out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tasks.dialects.contract import Exchange, numbered
from tasks.dialects.prompt_check import PROBE, plain, reason_of
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import Call, Observation, ToolSpec

# Texts that no template has; an argument of digits alone would be a number to some parsers.
ARGUMENT, RESULT = "print(11213)", "The outcome is 31415"
TAGS = "choose the dialect tags"


def call_fault(dialect: Any, spec: ToolSpec, parser: str = "") -> str:
    """Return why an agent's call would not be read, or not be seen later; "" where it is.

    ``dialect``: a ``tasks.dialects.native.NativeDialect``; ``spec``: of the tool that is called;
    ``parser``: what the recipe names to read calls; "" where all that are known are tried.

    Raises ValueError where the dialect does not know which tokens of a turn the agent writes.
    """
    calls = numbered(dialect, [_example(spec)], 0)
    try:
        turn = np.array(dialect._ended(dialect._message(calls, "", "")), np.int32)
        text = _text(dialect, turn)
        seen = Exchange(turn, text, calls, (Observation(Outcome.OK, RESULT),))
        later = dialect.tokenizer.decode(dialect.restart(PROBE, "", [seen]))
    except ValueError:  # the dialect's own, which says what to do
        raise
    except Exception as error:  # of a template: any kind
        reason = reason_of(error)
        return f"the policy's chat template refuses a call with its result ({reason}): {TAGS}"
    said = {"the question": PROBE.text, "calls": ARGUMENT, "results of calls": RESULT}
    lost = {name: plain(text) not in plain(later) for name, text in said.items()}
    if any(lost.values()):
        names = " and ".join(name for name, there in lost.items() if there)
        return f"the policy's chat template leaves out {names}, so no agent could go on: {TAGS}"
    read = dialect.read(dialect.prompt(PROBE), turn, text, StopReason.END)
    if (read.outcome, read.calls) == (Outcome.CALL, calls):
        return ""
    if parser:
        cause, remedy = f"options.tool_parser {parser} does not read", "leave it out"
    else:
        cause, remedy = "renderer default has no parser that reads", "name the policy's family"
    return f"{cause} a call as the policy's chat template writes it ({text!r}): {remedy}, or {TAGS}"


def _example(spec: ToolSpec) -> Call:
    """Return a call of a tool, as the dialect reads it."""
    return Call(spec.name, ARGUMENT if spec.text_parameter else f'{{"text": "{ARGUMENT}"}}')


def _text(dialect: Any, turn: Any) -> str:
    """Return the text of a turn without its end token."""
    ended = len(turn) and turn[-1] in dialect.ends
    return str(dialect.tokenizer.decode(turn[:-1] if ended else turn))
