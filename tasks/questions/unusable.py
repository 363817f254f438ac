"""Stop at records that cannot be used, or leave them out; find those that are too long."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, compress
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from params.schema.agent import Dialogue
from tasks.dialects.contract import Dialect
from tasks.dialects.prompt_check import role_fault
from tasks.questions.entries import Problem
from tasks.questions.experts import Dropped, Material
from tasks.questions.faults import Fault, Place, summary, write_list
from tasks.questions.samples import TraceTable, TrainingSample
from tasks.questions.written import LONG_TRACE
from tasks.trees import dialogue as talk
from tasks.trees.tree import Message, Question

SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_FRAME = len("<answer>\\boxed{}</answer>")  # bytes, so tokens at most
LISTING = "faulty_records.jsonl"  # all faults of the last run, in the folder of its Data Docs

CHARACTERS_A_TOKEN = 64  # more than a text has on average, whatever the tokenizer
MERGED = 64  # tokens that a message's frame may have more beside another text, at most
MOST_FORMS = 1000  # accepted forms of an answer
LONG_PROMPT = "has a prompt that is too long"
LONG_ANSWER = "has a gold answer that is too long for a turn"
FAR_TOO_LONG = "is far too long"
TOO_LONG = (LONG_PROMPT, LONG_ANSWER, LONG_TRACE, FAR_TOO_LONG)


def leave_out(faults: Sequence[Fault], docs: Path, earlier: Sequence[Fault] = ()) -> list[Dropped]:
    """Print the faults, list them in ``docs`` after the earlier ones, and return the records.

    Their reason is "too_long" or "faulty_record".
    """
    if not faults:
        return []
    write_list([*earlier, *faults], docs / LISTING)
    by_location: dict[Place, list[Fault]] = {}
    for fault in faults:
        by_location.setdefault(fault.place, []).append(fault)
    records = "1 record is" if len(by_location) == 1 else f"{len(by_location):,} records are"
    words = f"prepare: {records} left out, each named in {docs / LISTING}:\n{summary(faults)}"
    print(words, flush=True)
    return [
        Dropped(
            faults_of_record[0].question_id or location,
            _reason(faults_of_record),
            "; ".join(map(str, faults_of_record)),
        )
        for location, faults_of_record in by_location.items()
    ]


def _reason(faults: Sequence[Fault]) -> str:
    return "too_long" if all(each.problem in TOO_LONG for each in faults) else "faulty_record"


def refuse(faults: Sequence[Fault], docs: Path) -> NoReturn:
    """Raise ValueError with the faults in groups; all of them are written to a file in ``docs``."""
    write_list(faults, docs / LISTING)
    count = len({fault.place for fault in faults if fault.place})
    records = "1 record" if count == 1 else f"{count:,} records"
    remedy = "correct them, or set prepare.faulty to drop, which leaves them out"
    if all(fault.problem == LONG_PROMPT for fault in faults):
        remedy = "make room for them as said there" + remedy.removeprefix("correct them")
    if any(not fault.place for fault in faults):
        records, remedy = f"files and {records}", "correct them"
    raise ValueError(
        f"{records} cannot be used:\n{summary(faults)}\n{remedy}; all of them are in "
        f"{docs / LISTING}"
    )


# ---------------------------------------------------------------- lengths


def far_too_long(question: Question, dialogue: Dialogue, context: int) -> list[Problem]:
    """Return what is too long by its characters alone.

    Tokenising a text of ten million characters takes a minute, and other checks take seconds, so
    this one comes before them.
    """
    texts = {"text": question.text}
    texts |= {f"before.{n}": message.content for n, message in enumerate(question.before)}
    return [*_far_too_long_prompt(texts, context), *_far_too_long_answers(question, dialogue)]


def _far_too_long_prompt(texts: Mapping[str, str], context: int) -> list[Problem]:
    characters, most = sum(map(len, texts.values())), context * CHARACTERS_A_TOKEN
    if characters <= most and len(texts) <= context:
        return []
    longest = max(texts, key=lambda part: len(texts[part]))
    room = f"prepare.policy.context {context} has room for {most:,} at most"
    messages = f" in {len(texts):,} messages" if len(texts) > 1 else ""
    detail = f" ({characters:,} characters{messages}, and {room})"
    return [(longest, FAR_TOO_LONG, detail, "shorten it, or drop the record")]


def _far_too_long_answers(question: Question, dialogue: Dialogue) -> list[Problem]:
    room = min(dialogue.turn_tokens, dialogue.response_tokens)
    longest, most = max(map(len, question.answers), default=0), room * CHARACTERS_A_TOKEN
    detail = ""
    if longest > most:
        detail = f" ({longest:,} characters, and a turn of {room} tokens has room for {most:,})"
    elif len(question.answers) > MOST_FORMS:
        detail = f" ({len(question.answers):,} accepted forms, and at most {MOST_FORMS:,} are read)"
    remedy = "give short forms, or drop the record"
    return [("answers", FAR_TOO_LONG, detail, remedy)] if detail else []


def long_questions(
    material: Material, tokenizer: Any, dialect: Dialect, dialogue: Dialogue, context: int
) -> list[Fault]:
    """Return a fault for each prompt and gold answer that is too long.

    A prompt and the response budget have to fit into the context (of prompts of single steps, a
    prompt and a turn), an answer into a turn.
    """
    name = "response_tokens" if dialogue.prompt == "growing" else "turn_tokens"
    response = getattr(dialogue, name)
    room = min(dialogue.turn_tokens, dialogue.response_tokens)
    length = _prompt_lengths(dialect, context - response)
    unfit = _unfit_roles(tokenizer, dialect)
    long = []  # (question, tokens of its prompt)
    for question in chain.from_iterable(material.questions.values()):
        prompt = unfit(_roles(question)) or length(question)
        if isinstance(prompt, str) or prompt + response > context or _may_be_long(question, room):
            long.append((question, prompt))
    needed = max((n for _, n in long if isinstance(n, int)), default=0) + response
    locations = material.places({question.id for question, _ in long}) if long else {}
    faults = []
    for question, prompt in long:
        if isinstance(prompt, str):
            problem = "does not fit the chat template of the policy"
            other = tuple(role for role in _roles(question) if role != "system")
            remedy, detail = "correct the roles and their order", f" ({prompt})"
            if other != _roles(question) and not unfit(other):
                remedy = "put what its system message says into its text"
        elif prompt + response > context:
            problem = LONG_PROMPT
            remedy = f"raise the context to {needed}, or lower {name}"
            detail = (
                f" ({prompt} tokens; with dialogue.{name} {response} it "
                f"exceeds prepare.policy.context {context})"
            )
        elif (answer := _answer_tokens(tokenizer, question)) > room:
            problem = LONG_ANSWER
            remedy = "raise dialogue.turn_tokens, or add a shorter form"
            detail = f" ({answer} tokens, and a turn has {room})"
        else:
            continue
        location = locations.get(question.id, f"questions, {question.id}")
        faults.append(Fault(location, problem, remedy, "", detail, question.id))
    return faults


def _roles(question: Question) -> tuple[str, ...]:
    return tuple(message.role for message in question.before)


def _unfit_roles(tokenizer: Any, dialect: Dialect) -> Callable[[tuple[str, ...]], str]:
    """Return a function from the roles of messages before a question to why none can be asked so.

    It returns "" where the prompt has what each of them says. That of a question alone is checked
    when the dialect is opened.
    """

    @cache
    def unfit(roles: tuple[str, ...]) -> str:
        return role_fault(lambda asked: str(tokenizer.decode(dialect.prompt(asked))), roles)

    return lambda roles: unfit(roles) if roles else ""


def _prompt_lengths(dialect: Dialect, room: int) -> Callable[[Question], int | str]:
    """Return a function from a question to what ``_prompt_length`` returns for it.

    For a prompt that is sure to fit into ``room`` tokens, it returns a number that may be too
    large: tokenising takes far longer than all else, and a token is at least one byte. What a
    template writes around the messages, and whether it takes them, depends on their roles.
    """
    frames: dict[tuple[str, ...], int] = {}  # roles -> tokens around the messages, at most

    def length(question: Question) -> int | str:
        texts = [question.text, *(message.content for message in question.before)]
        if not all(map(str.isascii, texts)):  # other characters may grow when normalised
            return _prompt_length(dialect, question)
        roles = _roles(question)
        if roles not in frames:
            before = tuple(Message(role, "a") for role in roles)
            frame = _prompt_length(dialect, replace(question, text="a", before=before))
            slack = MERGED * len(texts)
            frames[roles] = frame + slack if isinstance(frame, int) else room
        most = frames[roles] + sum(map(len, texts))
        return most if most <= room else _prompt_length(dialect, question)

    return length


def _prompt_length(dialect: Dialect, question: Question) -> int | str:
    """Return the tokens of a prompt, or why the chat template refuses it.

    A text that is not UTF-8, which is a fault of its own, counts none.
    """
    texts = [question.text, *(message.content for message in question.before)]
    if any(SURROGATE.search(text) for text in texts):
        return 0
    try:
        return len(dialect.prompt(question))
    except (TemplateError, ValueError) as error:  # of a template, or of a family's renderer
        return str(error)


def _answer_tokens(tokenizer: Any, question: Question) -> int:
    """Return the tokens of the shortest turn that gives an accepted answer."""
    shortest = min(question.answers, key=len)
    return len(talk.encode(tokenizer, f"<answer>\\boxed{{{shortest}}}</answer>"))


def _may_be_long(question: Question, room: int) -> bool:
    """Return whether an answer needs tokenising: a token is at least one byte."""
    lengths = [len(answer.encode(errors="replace")) for answer in question.answers]
    return bool(lengths) and min(lengths) + LONGEST_FRAME > room


def long_traces(
    samples: Sequence[TrainingSample], table: TraceTable, context: int
) -> dict[int, Fault]:
    """Return a fault for each trace of more tokens than the context, by the trace's ``id``."""
    lengths = table.longest
    remedy = f"raise prepare.policy.context to {max(lengths, default=0)}, or shorten it"
    return {
        id(sample.trace): Fault(
            sample.trace.place or f"traces, {sample.trace.question.id}",
            LONG_TRACE,
            remedy,
            detail=f" ({length} tokens, prepare.policy.context has {context})",
            question_id=sample.trace.question.id,
        )
        for sample, length in zip(samples, lengths, strict=True)
        if length > context
    }


def unsayable(table: TraceTable, dialogue: Dialogue) -> list[str]:
    """Return a line for each limit of an agent that traces exceed: rollouts cut what they teach.

    A long episode of a world is none: its beginning is what an agent could do, too.
    """
    samples = list(compress(table.samples, table.begins))
    calls = [
        0 if sample.trace.acts else sum(not is_turn for _, is_turn in sample.parts)
        for sample in samples
    ]
    lines = []
    for what, key, limit, counts in (
        (
            "a turn of more tokens",
            "dialogue.turn_tokens",
            dialogue.turn_tokens,
            table.longest_turns,
        ),
        ("more tool calls", "dialogue.tool_calls", dialogue.tool_calls, calls),
    ):
        if beyond := [count for count in counts if count > limit]:
            lines.append(
                f"{len(beyond):,} of {len(counts):,} traces have {what} than an agent may have: up "
                f"to {max(beyond)}, and {key} is {limit}. The cold start teaches what rollouts "
                f"cut: raise {key}, or shorten the traces"
            )
    return lines
