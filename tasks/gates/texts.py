"""Detect text that is damaged, or has remains of a template."""

from __future__ import annotations

import re

# Line feeds and tabs are allowed; other control characters, lone surrogates and the replacement
# character show that the text was damaged.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
CONTROL_TOKEN = re.compile(r"<\|\w{2,}\|>")  # of a chat template
BLOCK = re.compile(r"\{%")  # of Jinja and the like
# LaTeX uses braces, so these count only in a text without a backslash, and not between dollar
# signs. A sequence or a power, such as {a_n} or {{2002}^{2001}}, is mathematics, too.
PLACEHOLDER = re.compile(
    r"\{\{\s*[A-Za-z_](?!_\w{1,2}\b)|(?<![\^_{])\{(?![A-Za-z]_\w{1,2}\})[A-Za-z_]\w*\}"
)
FORMULA = re.compile(r"\$[^$]*\$")
# JSON's escapes of commands such as \\boxed, \\frac and \\alpha, read with one backslash too few
LOST_BACKSLASH = re.compile(r"([\x07\x08\x0b\x0c])(?=[a-z]{2})")
ESCAPES = {"\x07": "a", "\x08": "b", "\x0b": "v", "\x0c": "f"}


def damage(text: str) -> str:
    """Describe the first control character or chat template token in a text, or return "".

    Such as "control character U+0007" or "template remains '<|im_end|>'".
    """
    if control := CONTROL.search(text):
        return f"control character U+{ord(control[0]):04X}"
    return _remains(CONTROL_TOKEN.search(text))


def prose_fault(text: str) -> str:
    """Return ``damage``, or describe a placeholder that was not filled; "" if neither.

    Such as "template remains '{name}'". Not for code, where braces have a meaning.
    """
    braces = None if "\\" in text else PLACEHOLDER.search(FORMULA.sub("$", text))
    return damage(text) or _remains(BLOCK.search(text) or braces)


def lost_command(text: str) -> str:
    """Return the LaTeX command, such as "\\boxed", that begins with a control character, or "".

    A program that reads "\\b" of JSON as one character makes U+0008 of it.
    """
    found = re.search(rf"{LOST_BACKSLASH.pattern}[a-z]+", text)
    return f"\\{ESCAPES[found[1]]}{found[0][1:]}" if found else ""


def _remains(found: re.Match[str] | None) -> str:
    return f"template remains {found[0]!r}" if found else ""
