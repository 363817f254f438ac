"""Render the verdict of a gate as a page that needs no network, beside Great Expectations' own.

The tables that a gate judges contain text of agents and other authors, so every value is escaped,
and no page may run a script or load anything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from tasks.gates import gate
from tasks.gates.gate import found

# Great Expectations' own pages load scripts, styles and a logo from a dozen hosts.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color: #1b1f24; background: #fff }
table { border-collapse: collapse; margin: .4em 0 }
th, td { text-align: left; vertical-align: top; padding: .3em .8em .3em 0;
  border-bottom: 1px solid #d8dee4; overflow-wrap: anywhere }
th { font-weight: 600 }
.rows { font-size: 13px; font-family: ui-monospace, monospace; margin: .3em 0 .3em 1em }
.holds { color: #1a7f37 } .fails { color: #cf222e } .warns { color: #9a6700 }
.mark { font-weight: 600; white-space: nowrap }
"""
# For a page whose own styles came from the network: text marks in place of icons, and nothing that
# needs a script or the table of contents.
PLAIN_STYLE = (
    STYLE
    + """
.fa-check-circle::before { content: "\\2714"; color: #1a7f37 }
.fa-times::before { content: "\\2718"; color: #cf222e }
.fa-exclamation-triangle::before { content: "!"; color: #9a6700 }
nav .navbar-brand, .sticky, footer, [data-toggle="collapse"] { display: none }
h5, h6 { font-size: 1em; margin: 1em 0 .3em }
"""
)


@contextmanager
def pages(recipe: str) -> Iterator[None]:
    """Render a page for each gate of ``recipe`` at the end of the block, failed gates included."""
    try:
        yield
    finally:
        for verdict in sorted((gate.DOCS / recipe).glob("*/verdict.json")):
            publish(verdict.parent)


def publish(docs: Path) -> None:
    """Write the verdict's page as the index of Great Expectations' site in ``docs``."""
    index = docs / "index.html"
    if index.exists() and POLICY in index.read_text():
        return
    report = next((docs / "validations").rglob("*.html"))
    for file in docs.rglob("*.html"):
        head = f"<head>{POLICY}<style>{PLAIN_STYLE}</style>"
        file.write_text(file.read_text().replace("<head>", head, 1))
    shutil.rmtree(docs / "static", ignore_errors=True)  # fonts, logos, a tutorial
    # Great Expectations' own index needs a script from the network.
    record = json.loads((docs / "verdict.json").read_text())
    index.write_text(page(record, report.relative_to(docs).as_posix()))


def page(record: Mapping[str, Any], report: str) -> str:
    """Return the verdict on a table as HTML: failed expectations first, then those that hold.

    ``report`` is the address of Great Expectations' own page.
    """
    judged = sorted(record["expectations"], key=lambda each: _rank(each))
    held = sum(each["passed"] for each in judged)
    title = f"Table {escape(record['table'])}: {'passed' if record['passed'] else 'refused'}"
    state = "holds" if record["passed"] else "fails"
    lines = "\n".join(_line(each, record["rows"]) for each in judged)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>{POLICY}<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>
<body>
<h1 class="{state}">{title}</h1>
<p>{record["rows"]:,} rows; {held} of {len(judged)} expectations hold.
<a href="{escape(report)}">Great Expectations' own page</a>, <a href="verdict.json">verdict</a></p>
<table>
<tr><th></th><th>What must hold</th><th>What was found</th></tr>
{lines}
</table>
</body>
</html>
"""


def _rank(judged: Mapping[str, Any]) -> int:
    return 2 if judged["passed"] else 0 if judged["critical"] else 1


def _line(judged: Mapping[str, Any], count: int) -> str:
    state, mark = (
        ("fails", "✘ fails"),
        ("warns", "! warning"),
        ("holds", "✔ holds"),
    )[_rank(judged)]
    return (
        f'<tr><td class="mark {state}">{mark}</td><td>{escape(judged["expectation"])}</td>'
        f"<td>{found(judged, count)}{_samples(judged.get('rows', []))}</td></tr>"
    )


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return offending rows as a small HTML table, with the index's names as its header."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f'<table class="rows"><tr>{head}</tr>{body}</table>'
