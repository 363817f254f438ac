"""Check a prompt as it is rendered, before any work: that the agent reads what it is to read.

A chat template can leave out a message without an error, as one that takes contents only as lists
of parts does, or refuse one with an exception of any kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from params.schema.agent import Dialogue
from tasks.trees.tree import Question
from tasks.trees.words import compatible

PROBE = Question("probe", "probe", "How many legs do 7 spiders and 9 ants have?", ("110",))
SAID = "The number that was asked for"  # an answer, after which no template puts a mark of a turn
REMEDY = "correct the chat template of the policy's tokenizer, or take another dialect or renderer"
PLACE_OF_TOOLS = re.compile(r"\{tools\}")  # in a system message


def check_prompt(
    rendered: Callable[[], str], dialogue: Dialogue, tools: Sequence[str], dialect: str
) -> None:
    """Raise ValueError, a line for each, where a rendered prompt lacks what it was made of.

    ``rendered`` returns the prompt of PROBE as text; ``tools``: the names that it has to tell.
    """
    try:
        text = rendered()
    except Exception as error:  # of a template: any kind
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        told = " a system message and" if dialogue.system.strip() else ""
        raise ValueError(
            f"dialect.{dialect}: the policy's chat template refuses{told} a question ({reason}): "
            f"{_empty_system(dialogue)}{REMEDY}"
        ) from error
    if faults := prompt_faults(text, dialogue, tools):
        raise ValueError("\n".join(f"dialect.{dialect}: {fault}" for fault in faults))


def _empty_system(dialogue: Dialogue) -> str:
    if not dialogue.system.strip():
        return ""
    return "if it takes no system message, leave dialogue.system empty; else "


def prompt_faults(text: str, dialogue: Dialogue, tools: Sequence[str]) -> list[str]:
    """Return what the text of a rendered prompt of PROBE lacks, each with the remedy."""
    there = _plain(text)
    system = [part for part in PLACE_OF_TOOLS.split(dialogue.system) if part.strip()]
    faults = []
    if _plain(PROBE.text) not in there:
        faults.append(f"the prompt does not have the question's text: {REMEDY}")
    if any(_plain(part) not in there for part in system):
        faults.append(f"the prompt does not have the text of dialogue.system: {REMEDY}")
    if missing := [name for name in tools if _plain(name) not in there]:
        faults.append(
            f"the prompt does not name the tool {', '.join(missing)}, so no agent would call it: "
            "the policy's chat template describes no tools; describe them in dialogue.system, or "
            "take the dialect tags"
        )
    return faults


def header_fault(prompt: str, plain: str, answered: str) -> str:
    """Return what is wrong where a prompt ends before the header of the agent's turn, or "".

    ``prompt``: with the template's generation prompt, ``plain``: without; ``answered``: the same
    messages with SAID as the agent's answer. A template may have no header at all (Mistral's).
    """
    rest = answered[len(prompt) :]
    if prompt != plain or not answered.startswith(prompt) or rest.lstrip().startswith(SAID):
        return ""
    if SAID not in rest:
        return ""
    return (
        f"the prompt ends before the header of the agent's turn ({rest.partition(SAID)[0]!r}), "
        f"because the policy's chat template has no generation prompt: {REMEDY}"
    )


def _plain(text: str) -> str:
    """Return a text without what tokenizers may normalise: spaces, forms of characters, case."""
    return "".join(compatible(text).casefold().split())
