"""Detect text that is damaged, or has remains of a template."""

from __future__ import annotations

import re

# Line feeds and tabs are allowed; other control characters, lone surrogates and the replacement
# character show that the text was damaged.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
CONTROL_TOKEN = re.compile(r"<\|\w{2,}\|>")  # of a chat template
BLOCK = re.compile(r"\{%")  # of Jinja and the like
# LaTeX uses braces, so these count only in a text without a backslash.
PLACEHOLDER = re.compile(r"\{\{|(?<![\^_])\{[A-Za-z_]\w*\}")


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
    braces = None if "\\" in text else PLACEHOLDER.search(text)
    return damage(text) or _remains(BLOCK.search(text) or braces)


def _remains(found: re.Match[str] | None) -> str:
    return f"template remains {found[0]!r}" if found else ""
