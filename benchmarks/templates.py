"""Show what a run says of chat templates as they are, in both dialects.

    python -m benchmarks.templates            # each prompt as it is rendered, and what a run says
    python -m benchmarks.templates --table    # the table of docs/own-dialect.md

Templates are TRL's copies of those of published models, and shapes that are written here
(tests/tasks/dialects/families.py); tokenizers are small. gpt-oss in the native dialect is shown
where its own is, from which its library reads: ``make .venv/tokenizers/complete``.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from params.schema.agent import Dialogue
from tasks.dialects import native, tags
from tasks.trees.tree import Question, ToolSpec
from tests.tasks.dialects.families import REAL, harmony_folder, real_tokenizer, tokenizer

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = ToolSpec("python", "Run code.", CODE)
QUESTION = Question("q", "shown", "How many?", ("7",))
LIMITS: Any = {"turn_tokens": 99, "result_tokens": 99, "response_tokens": 999, "tool_calls": 3}
VOCABULARY = "TIKTOKEN_ENCODINGS_BASE"  # the folder from which the library of gpt-oss reads
ENDING = 70  # characters of a prompt in the table
FAMILIES = re.compile(r"no known family \(.*?\)")  # all that the library knows
DATED = re.compile(r"[^\n]*\b2026\b[\d-]*")  # the line of a prompt with the day


@dataclass(frozen=True)
class Shown:
    """A template, what it is an example of, and the renderer of the native dialect."""

    name: str  # in tests/tasks/dialects/families.py
    about: str
    renderer: str = "default"
    system: str = "Be brief."


TEMPLATES = [
    Shown("smolvlm", "contents as lists of parts (SmolVLM)"),
    Shown("no-generation-prompt", "no generation prompt"),
    Shown("gemma-3", "no tools (Gemma 3)"),
    Shown("qwq", "opens `<think>` (QwQ)"),
    Shown("r1-distill", "opens `<think>`, no tools (DeepSeek-R1's distillations)"),
    Shown("smollm3", "a date (SmolLM3)"),
    Shown("granite", "a date where no system message is (Granite)", system=""),
    Shown("llama-3.2", "a date (Llama 3.2)", "auto"),
    Shown("gemma", "refuses the system role (Gemma 1 and 2)"),
    Shown("qwen3-published", "Qwen3", "auto"),
    Shown("qwen3.5", "Qwen3.5, which opens `<think>`", "auto"),
    Shown("gemma-4", "Gemma 4", "auto"),
    Shown("gpt-oss", "gpt-oss, a date", "gpt-oss"),
]


def said(shown: Shown, kind: Any, settings: Any) -> tuple[str, bool]:
    """Return the prompt that a dialect renders, or why a run refuses the template; and which."""
    speaks = real_tokenizer("gptoss", shown.name) if is_harmony(settings) else tokenizer(shown.name)
    dialogue = Dialogue(system=shown.system, **LIMITS)
    try:
        dialect = kind.open(settings, speaks, dialogue, [PYTHON])
    except ValueError as refused:
        return FAMILIES.sub("no known family", str(refused)), False
    return str(speaks.decode(dialect.prompt(QUESTION))), True


def is_harmony(settings: Any) -> bool:
    """Return whether the library of gpt-oss renders, which takes its own vocabulary alone."""
    return getattr(settings, "renderer", "") == "gpt-oss"


def outcomes(shown: Shown) -> list[tuple[str, str, bool]]:
    """Return dialect, prompt or refusal, and whether it is taken, of both dialects."""
    kinds = [
        ("tags", tags.DIALECT, tags.Tags()),
        (f"native, {shown.renderer}", native.DIALECT, native.Native(renderer=shown.renderer)),
    ]
    there = [kind for kind in kinds if not is_harmony(kind[2]) or VOCABULARY in os.environ]
    return [(name, *said(shown, kind, settings)) for name, kind, settings in there]


def row(shown: Shown, dialect: str, text: str, taken: bool) -> str:
    """Return a row of the table: the end of a prompt, or the refusal."""
    ending = f"…{text[-ENDING:]}" if len(text) > ENDING else text
    dated = DATED.search(text)
    date = f"`{dated[0]}`; " if dated else ""
    cell = f"taken: {date}`{ending!r}`" if taken else f"refused: {text}"
    return f"| {shown.about} | {dialect} | {cell.replace('|', chr(92) + '|')} |"


def main(arguments: list[str] | None = None) -> int:
    """Print all templates; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.templates", description=__doc__)
    parser.add_argument("--table", action="store_true", help="as rows of a table")
    table = parser.parse_args(arguments).table
    with tempfile.TemporaryDirectory() as folder:
        if (REAL / "gptoss").is_dir():
            os.environ[VOCABULARY] = str(harmony_folder(Path(folder)))
        show(table)
    return 0


def show(table: bool) -> None:
    """Print all templates, as rows of a table or with their whole prompts."""
    if table:
        print("| template | dialect | what a run says, or how the prompt ends |\n|---|---|---|")
    for shown in TEMPLATES:
        for dialect, text, taken in outcomes(shown):
            if table:
                print(row(shown, dialect, text, taken))
                continue
            print(f"== {shown.about}; {dialect}: {'taken' if taken else 'REFUSED'}\n{text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
