"""Write one HTML file that opens offline: scripts, styles and data are in it.

The trees of each iteration are one compressed block, which the browser unpacks when the iteration
is asked for. The page's content security policy allows its own scripts by their digests, and no
network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flows.host import files
from flows.pages import results

TREES = ("common.js", "run.js", "conversation.js", "tree.js")
SCRIPTS = {"run": TREES, "runs": TREES, "comparison": ("common.js", "comparison.js")}


def write(file: Path, data: dict[str, Any], blocks: dict[str, str]) -> Path:
    """Write a page and return its file; ``blocks``: by the number of their iteration."""
    script = "\n".join(_source(part) for part in SCRIPTS[data["kind"]])
    text = (
        _environment()
        .get_template("page.html")
        .render(
            data=results.rounded(data),
            blocks=blocks,
            plotly=compressed(plotly_source()),
            script=script,
            style=_source("page.css"),
            digests=[digest_of(script), digest_of(plotly_source())],
        )
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(file) as partial:
        partial.write_text(text, encoding="utf-8")
    return file


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flows.pages", "."), autoescape=True, undefined=StrictUndefined
    )


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def plotly_source() -> str:
    """Return the source of plotly.js, which draws in the page."""
    from plotly.offline import get_plotlyjs  # it takes a second to import

    return str(get_plotlyjs())


def digest_of(script: str) -> str:
    """Return a script's digest as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def bounded_block(block: Mapping[str, Any], most: int) -> str:
    """Return a block of questions as a page has it, in at most ``most`` bytes.

    Its first half is taken as often as it is too large; one question is kept in any case.
    """
    shown = compressed(as_json(block))
    questions = block["questions"]
    if len(shown) <= most or len(questions) < 2:
        return shown
    return bounded_block({**block, "questions": questions[: len(questions) // 2]}, most)


def as_json(value: Any) -> str:
    """Return compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def compressed(text: str) -> str:
    """Return a text as base64 of gzip, equal for equal texts."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
