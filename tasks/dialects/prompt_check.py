"""Check prompts as they are rendered, before any work: that the agent reads what it is to read.

A chat template can leave out a message without an error, as one that takes contents only as lists
of parts does, or refuse one with an exception of any kind.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from params.schema.agent import Dialogue
from tasks.dialects.tokenizer_check import tokenizer_faults
from tasks.trees.dialogue import OPENED_THOUGHT, applied
from tasks.trees.markers import FIRST_DAY, OTHER_DAY
from tasks.trees.tree import Message, Question
from tasks.trees.words import compatible

PROBE = Question("probe", "probe", "How many legs do 7 spiders and 9 ants have?", ("110",))
# What a template must not change: case, spaces, lines, and what JSON and HTML write otherwise.
SIGNS = 'Is it "A" < b & c > d\'s?\r\n\n    x = [1,  2]\tÉ \U0001f600\nYes?'
MOST_SHOWN = 120  # characters of a prompt in a message
SECONDS = 30.0  # for the probes of a chat template, which take milliseconds
TEMPLATE = "<template>"  # the file of Jinja's compiled code
SAID = "The number that was asked for"  # an answer, after which no template puts a mark of a turn
REMEDY = "correct the chat template of the policy's tokenizer, or take another dialect or renderer"
IN_QUESTIONS = "leave dialogue.system empty, and put what it says into the questions"
TAKES_PARTS = "the policy's chat template takes contents only as lists of parts"
AS_TEXT = "let it write a content that is a text, or take another policy"
PLACE_OF_TOOLS = re.compile(r"\{tools\}")  # in a system message

Messages = Sequence[dict[str, Any]]
# messages, and whether the agent's header follows, -> their text
Render = Callable[[Messages, bool], str]


def refuse(dialect: str, faults: Sequence[str]) -> None:
    """Raise ValueError with a line for each of these faults of a policy's chat template, if any."""
    if faults:
        raise ValueError("\n".join(f"dialect.{dialect}: {fault}" for fault in faults))


class EndlessError(BaseException):
    """A chat template has taken too long. No Exception: those are what a template may raise."""


@contextmanager
def that_ends(dialect: str) -> Iterator[None]:
    """Check a policy's chat template. Raises ValueError where it takes longer than ``SECONDS``.

    Jinja's sandbox bounds one loop, and loops can be nested. Time is looked at between two lines of
    the template's compiled code, so this works in any thread.
    """
    end = time.monotonic() + SECONDS

    def look(frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != TEMPLATE:
            return None
        if time.monotonic() > end:
            raise EndlessError
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    except EndlessError:
        fault = f"the policy's chat template has not ended after {SECONDS:g} seconds: {REMEDY}"
        raise ValueError(f"dialect.{dialect}: {fault}") from None
    finally:
        sys.settrace(before)


def prompt_faults(
    prompt: Callable[[], str], render: Render, dialogue: Dialogue, tools: Sequence[str]
) -> list[str]:
    """Return a line for each cause by which a prompt lacks what it was made of.

    ``prompt`` returns that of PROBE as text; ``tools``: the names that it has to tell.
    """
    try:
        text = prompt()
    except Exception as error:  # of a template: any kind
        return [refusal(error, render, dialogue)]
    if plain(PROBE.text) not in plain(text):  # and with it all else, for the same cause
        if _renders(render, _parts(PROBE.text)):
            return [f"{TAKES_PARTS}, so the prompt lacks the question's text: {AS_TEXT}"]
        return [f"the prompt does not have the question's text: {REMEDY}"]
    lacking = lacking_parts(text, dialogue, tools, _writes_calls(render))
    header = header_fault(render)
    return [*lacking, *([header] if header else [])]


def refusal(error: Exception, render: Render, dialogue: Dialogue) -> str:
    """Return what an exception means that came while a prompt was rendered."""
    reason = reason_of(error)
    if dialogue.system.strip() and _renders(render, PROBE.text):
        return f"the policy's chat template takes no system message ({reason}): {IN_QUESTIONS}"
    if _renders(render, _parts(PROBE.text)):
        return f"{TAKES_PARTS} ({reason}): {AS_TEXT}"
    return f"the policy's chat template refuses a question ({reason}): {REMEDY}"


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _renders(render: Render, content: Any) -> bool:
    """Return whether a prompt has the text of PROBE, when it is given as this content."""
    with suppress(Exception):  # of a template: any kind
        return plain(PROBE.text) in plain(render([{"role": "user", "content": content}], True))
    return False


def _writes_calls(render: Render) -> bool:
    """Return whether a chat template writes a call and its result, though it describes no tool."""
    function = {"name": "probe", "arguments": {"text": "11213"}}
    call = {"id": "call00000", "type": "function", "function": function}  # nine signs: Mistral
    messages: Messages = [
        {"role": "user", "content": PROBE.text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "31415"},
    ]
    with suppress(Exception):  # of a template: any kind
        text = render(messages, True)
        return "11213" in text and "31415" in text
    return False


def lacking_parts(
    text: str, dialogue: Dialogue, tools: Sequence[str], writes_calls: bool = True
) -> list[str]:
    """Return what a prompt's text lacks of the system message, and which tools it does not name.

    ``writes_calls``: whether agents could call what the system message describes.
    """
    there = plain(text)
    system = [part for part in PLACE_OF_TOOLS.split(dialogue.system) if part.strip()]
    faults = []
    if any(plain(part) not in there for part in system):
        faults.append(
            "the prompt does not have the text of dialogue.system, which the policy's chat "
            f"template leaves out: {IN_QUESTIONS}"
        )
    remedy = "; describe them in dialogue.system, or" if writes_calls else " and writes no calls:"
    if missing := [name for name in tools if plain(name) not in there]:
        faults.append(
            f"the prompt does not name the tool {', '.join(missing)}, so no agent would call it: "
            f"the policy's chat template describes no tools{remedy} take the dialect tags"
        )
    return faults


def role_fault(prompt: Callable[[Question], str], roles: Sequence[str]) -> str:
    """Return why a prompt lacks messages of these roles before its question, or ""."""
    before = tuple(
        Message(role, f"This is what came before as number {number}.")
        for number, role in enumerate(roles, start=1)
    )
    try:
        text = plain(prompt(replace(PROBE, before=before)))
    except Exception as error:  # of a template: any kind
        return reason_of(error)
    lost = dict.fromkeys(each.role for each in before if plain(each.content) not in text)
    return f"it leaves out what these say: {', '.join(lost)}" if lost else ""


def reason_of(error: Exception) -> str:
    """Return what an exception says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def header_fault(render: Render) -> str:
    """Return what is wrong where a prompt ends before the header of the agent's turn, or "".

    A template may have no header at all (Mistral's), or refuse an answer.
    """
    asked = [{"role": "user", "content": PROBE.text}]
    with suppress(Exception):  # of a template: any kind
        answered = render([*asked, {"role": "assistant", "content": SAID}], False)
        return _header_fault(render(asked, True), render(asked, False), answered)
    return ""


def _header_fault(prompt: str, plain: str, answered: str) -> str:
    """Return the fault of a prompt, which is ``plain`` without the generation prompt."""
    added = OPENED_THOUGHT.sub("", prompt.removeprefix(plain))
    if added.strip() or not answered.startswith(plain) or SAID not in answered:
        return ""
    header = answered[len(plain) :].partition(SAID)[0]
    if not header.strip():
        return ""
    ending = f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
    return (
        f"the prompt ends before the header of the agent's turn ({header!r}), because the policy's "
        f"chat template has no generation prompt: add {ending} at its end, or take another policy"
    )


def template_faults(tokenizer: Any, dialogue: Dialogue, tags: Sequence[str] = ()) -> list[str]:
    """Return a line for each cause by which a tokenizer or its chat template fits no prompt.

    ``tags``: what the dialect writes around texts.
    """

    def render(messages: Messages, begins: bool) -> str:
        return applied(tokenizer, messages, dialogue.date, begins)

    system = {"role": "system", "content": dialogue.system}
    asked = [{"role": "user", "content": PROBE.text}]
    messages = [system, *asked] if dialogue.system.strip() else asked
    faults = unsound(tokenizer) or prompt_faults(
        lambda: render(messages, True), render, dialogue, []
    )
    return faults or changed(render) or tokenizer_faults(tokenizer, tags)


def changed(render: Render) -> list[str]:
    """Return a line where a template writes signs of a question otherwise than they are; or []."""
    text = render([{"role": "user", "content": SIGNS}], True)
    if SIGNS in text:
        return []
    shown = text[-MOST_SHOWN:]
    return [
        f"the policy's chat template changes what a question says: {SIGNS!r} becomes {shown!r}: "
        "let it write contents as they are, or take another policy"
    ]


def unsound(tokenizer: Any) -> list[str]:
    """Return what is wrong with a tokenizer that has no chat template, or one that draws."""
    template = tokenizer.chat_template
    if not template:
        return [
            "the policy's tokenizer has no chat template: put the one that the policy was trained "
            "with into its folder as chat_template.jinja, or take a policy that has one"
        ]
    texts = [*template.values()] if isinstance(template, dict) else [str(template)]
    drawing = sorted({name for text in texts for name in drawn(text)})
    if not drawing:
        return []
    return [
        f"the policy's chat template uses {' and '.join(drawing)}, so a prompt would be another "
        "one each time: correct the chat template of the policy's tokenizer"
    ]


def end_faults(tokenizer: Any, dialogue: Dialogue) -> list[str]:
    """Return a line where a template ends a turn otherwise than the tokenizer does; or [].

    Only the tokenizer's ends a turn where no family says more: the agent would go on after its own.
    """
    said = [{"role": "user", "content": PROBE.text}, {"role": "assistant", "content": SAID}]
    added = [mark.content for mark in tokenizer.added_tokens_decoder.values() if mark.special]
    with suppress(Exception):  # of a template: any kind
        after = applied(tokenizer, said, dialogue.date, False).rpartition(SAID)[2].lstrip()
        ends = sorted(filter(after.startswith, added), key=len)
        if ends and ends[-1] != tokenizer.eos_token:
            return [
                f"the policy's chat template ends a turn with {ends[-1]!r}, its tokenizer with "
                f"{tokenizer.eos_token!r}: set eos_token of tokenizer_config.json to {ends[-1]!r}"
            ]
    return []


def has_clock(tokenizer: Any) -> bool:
    """Return whether the prompts of a chat template show the day."""
    asked = [{"role": "user", "content": PROBE.text}]
    with suppress(Exception):  # of a template: any kind
        return len({applied(tokenizer, asked, day) for day in (FIRST_DAY, OTHER_DAY)}) > 1
    return False


def drawn(template: str) -> set[str]:
    """Return the names of what makes a template's text random."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        marks = [mark for mark in Environment().lex(template) if mark[1] != "whitespace"]
    except TemplateSyntaxError:  # rendering reports it
        return set()
    signs = ["", *(sign for _, _, sign in marks)]
    names = [
        (before, name)
        for before, (_, kind, name) in zip(signs, marks, strict=False)
        if kind == "name"
    ]
    return {name for before, name in names if name == "lipsum" or (before, name) == ("|", "random")}


def plain(text: str) -> str:
    """Return a text without what tokenizers may normalise: spaces, forms of characters, case."""
    return "".join(compatible(text).casefold().split())
