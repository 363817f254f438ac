"""What shows that a text was damaged on its way, or that a template was never filled in."""

from __future__ import annotations

import re

# Line feeds and tabs may stand in a text; other control characters, halves of a surrogate pair and
# the replacement character show that it was damaged.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
CONTROL_TOKEN = re.compile(r"<\|\w{2,}\|>")  # of a chat template
BLOCK = re.compile(r"\{%")  # of Jinja and the like
# LaTeX is full of braces, so these count only in a text without a backslash.
PLACEHOLDER = re.compile(r"\{\{|(?<![\^_])\{[A-Za-z_]\w*\}")


def damage(text: str) -> str:
    """The first character that no sound text has, such as "control character U+0007", or a chat
    template's token, such as "template remains '<|im_end|>'"; "" where there is neither."""
    if control := CONTROL.search(text):
        return f"control character U+{ord(control[0]):04X}"
    return _remains(CONTROL_TOKEN.search(text))


def prose_fault(text: str) -> str:
    """As ``damage``, or a place that a template left open, such as "template remains '{name}'".

    Not for code, where braces have a meaning.
    """
    braces = None if "\\" in text else PLACEHOLDER.search(text)
    return damage(text) or _remains(BLOCK.search(text) or braces)


def _remains(found: re.Match[str] | None) -> str:
    return f"template remains {found[0]!r}" if found else ""
