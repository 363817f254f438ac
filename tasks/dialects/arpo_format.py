"""Check the format of a response as ARPO's reward does (arXiv 2507.19849)."""

from __future__ import annotations

import re
from collections.abc import Sequence


def format_faults(own_words: str, tool_tags: Sequence[str]) -> list[str]:
    """Return the names of the faults in a response without its tool results.

    A good response has at least one pair of think tags, and all balanced; exactly one answer block,
    with ``\\boxed{}`` inside; every tool call closed; no tool result written by the agent.
    """
    faults = []
    if not _balanced(own_words, "think") or "<think>" not in own_words:
        faults.append("think")
    if own_words.count("<answer>") != 1 or not _balanced(own_words, "answer"):
        faults.append("answer")
    elif "\\boxed{" not in own_words.partition("<answer>")[2].partition("</answer>")[0]:
        faults.append("boxed")
    if not all(_balanced(own_words, tag) for tag in tool_tags):
        faults.append("tool_call")
    if "<result>" in own_words or "</result>" in own_words:
        faults.append("forged_result")
    return faults


def _balanced(text: str, tag: str) -> bool:
    """Return whether every opening tag is closed before the next one opens."""
    marks = re.findall(f"</?{tag}>", text)
    return marks == [f"<{tag}>", f"</{tag}>"] * (len(marks) // 2)
