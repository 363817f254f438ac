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
    r"\{\{\s*[A-Za-z_]\w+(?:\.\w+)*\s*(?:\||\}\})"
    r"|(?<![\^_{}])\{(?=[A-Za-z_]*[A-Za-z]{2})[A-Za-z_]\w*\}"
)
FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$]*\$", re.DOTALL)
# JSON's escapes of commands such as \\boxed, \\frac and \\alpha, read with one backslash too few
LOST_BACKSLASH = re.compile(
    r"([\x07\x08\x0b\x0c\r])(?=[a-z]{2})"
    r"|(\t)(?=imes(?![a-z])|heta(?![a-z])|frac *\{|ext[a-z]* *\{)"
)
ESCAPES = {"\x07": "a", "\x08": "b", "\t": "t", "\x0b": "v", "\x0c": "f", "\r": "r"}


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
    matched = LOST_BACKSLASH.search(text)
    if not matched:
        return ""
    rest = re.match("[a-z]+", text[matched.end() :])
    return f"\\{ESCAPES[matched[0]]}{rest[0] if rest else ''}"


def lost_fault(text: str) -> str:
    """Describe a LaTeX command that has lost its backslash, or return "". Not for code."""
    command = lost_command(text)
    return f"{command} without its backslash" if command else ""


def lost_remedy(command: str) -> str:
    """Return what to do about a command that has lost its backslash."""
    return f"a backslash was lost: write {command} (in JSON with two backslashes)"


def _remains(matched: re.Match[str] | None) -> str:
    return f"template remains {matched[0]!r}" if matched else ""
