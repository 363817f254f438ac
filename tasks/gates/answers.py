"""Detect gold answers that an agent's answer could hardly equal, with the remedy for each."""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftfy import fix_encoding

from tasks.gates.texts import damage, lost_command, lost_fault, lost_remedy
from tasks.trees.dialogue import final_answer

DROP = "or drop the record"
# What tables hold where an answer is missing. "none" in small letters may be an answer.
PLACEHOLDER = re.compile(
    r"None|nan|NaN|NAN|null|Null|NULL|<NA>|NaT|#?[nN]/[aA]|N\.A\.|[uU]nknown|UNKNOWN|TB[AD]|tb[ad]"
    r"|[-\u2013\u2014_]+|\?+|\.\.\.|\u2026"
)
ANSWER_TAG = re.compile("</?answer>")
# What is left of a mark-up that holds nothing, and what stands between words.
NOTHING = re.compile(
    r"\\(?:text\w*|math\w+|mbox|emph|operatorname|underline|boldsymbol|bm|boxed|frac|sqrt)(?:\s*\{\s*\})+"
    r"|\\(?:[,;:! ]|q?quad|displaystyle)|\\[()\[\]]|\$\s*\$|\*\*\s*\*\*|``|\"\"|''|\u201c\u201d"
    r"|[\s.,;:\u3002\uff0c\uff1b\uff1a\u3001]"
)
ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);")
HTML = re.compile(
    r"<(b|i|u|p|em|strong|sub|sup|span|div|font|code|a|td|li)(?:\s[^<>]*)?>.*</\1>|(?<=\S)\s*<br\s*/?>",
    re.IGNORECASE | re.DOTALL,
)
SPACES = re.compile("[\u00ad\u200b\u2060-\u2064\ufeff]")  # soft hyphen, characters without width
JOINERS = re.compile("[\u200c-\u200f\u202a-\u202e\u2066-\u2069]")  # some scripts need them


@dataclass(frozen=True)
class AnswerFault:
    """What is wrong with a gold answer; ``words`` are the same for every answer that has it."""

    words: str
    remedy: str


def answer_problem(answer: str) -> AnswerFault | None:
    """Return the first problem of one accepted form of a gold answer, or None."""
    return next(filter(None, (check(answer) for check in CHECKS)), None)


def _empty(answer: str) -> AnswerFault | None:
    return None if answer.strip() else AnswerFault("is empty", f"fill it in, {DROP}")


def _says_nothing(answer: str) -> AnswerFault | None:
    """Find punctuation and mark-up without a word, such as "." and "\\text{}"."""
    rest, before = answer, None
    while rest != before:
        before, rest = rest, NOTHING.sub("", rest)
    return None if rest else AnswerFault("says nothing", f"give the answer, {DROP}")


def _html(answer: str) -> AnswerFault | None:
    for matched in ENTITY.finditer(answer):
        sign = html.unescape(matched[0])
        if sign != matched[0]:
            remedy = f"write {sign.strip() or 'a space'} for it, {DROP}"
            return AnswerFault(f"has the HTML entity {matched[0]}", remedy)
    if HTML.search(answer):
        return AnswerFault("has HTML in it", f"write plain text or LaTeX, {DROP}")
    return None


def _placeholder(answer: str) -> AnswerFault | None:
    if not PLACEHOLDER.fullmatch(answer.strip()):
        return None
    return AnswerFault("is a placeholder", f"give the answer, {DROP}")


def _damaged(answer: str) -> AnswerFault | None:
    if command := lost_command(answer):
        return AnswerFault(f"has {lost_fault(answer)}", lost_remedy(command))
    fault = damage(answer)
    return AnswerFault(f"has {fault}", f"remove it, {DROP}") if fault else None


def _invisible(answer: str) -> AnswerFault | None:
    matched = SPACES.search(answer)
    if not matched and JOINERS.sub("", answer).isascii():
        matched = JOINERS.search(answer)
    if not matched:
        return None
    return AnswerFault(f"has the invisible character U+{ord(matched[0]):04X}", f"remove it, {DROP}")


def _mojibake(answer: str) -> AnswerFault | None:
    """Find text that was decoded with the wrong encoding, such as "CafÃ©"."""
    if answer.isascii() or fix_encoding(answer) == answer:
        return None
    return AnswerFault("was decoded with the wrong encoding", f"read its source as UTF-8, {DROP}")


def _written_list(answer: str) -> AnswerFault | None:
    """Find a list of texts in Python's or JSON's spelling, such as '["72", "x"]'."""
    text = answer.strip()
    if not (text.startswith("[") and text.endswith("]") and re.search("[\"']", text)):
        return None
    if not any(isinstance(each, str) for each in _items(text)):
        return None
    remedy = "make it a list of accepted forms, which JSON lines and Parquet can hold"
    return AnswerFault("is a list written as a text", remedy)


def _items(text: str) -> list[Any]:
    """Return the items of a list in JSON's or Python's spelling; [] for another text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return list(read(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return []


def _answer_tag(answer: str) -> AnswerFault | None:
    if not ANSWER_TAG.search(answer):
        return None
    return AnswerFault("has an answer tag in it", f"give only what is inside, {DROP}")


def _boxed(answer: str) -> AnswerFault | None:
    if "\\boxed" not in answer:
        return None
    return AnswerFault("has a \\boxed{} in it", f"give only what is inside, {DROP}")


def _braces(answer: str) -> AnswerFault | None:
    if boxed_answer(answer) == answer.strip():
        return None
    return AnswerFault(
        "has unbalanced braces, so \\boxed{} ends elsewhere", f"balance them, {DROP}"
    )


def boxed_answer(answer: str) -> str | None:
    """Return what a reward reads from a response that gives exactly this answer."""
    return final_answer(f"<answer>\\boxed{{{answer}}}</answer>")


CHECKS: tuple[Callable[[str], AnswerFault | None], ...] = (
    _empty,
    _placeholder,
    _says_nothing,
    _html,
    _damaged,
    _invisible,
    _mojibake,
    _written_list,
    _answer_tag,
    _boxed,
    _braces,
)
