"""The table of docs/benchmarks.md has what params/benchmarks.yaml has."""

from params.schema.benchmarks import load_benchmarks
from tests.checkout import ROOT

OWN = {"deep-search", "intake", "warehouse"}  # sets that the user delivers, and an example


def line(name, row):
    """Return the line of the table for a row."""
    hub = f"[{row.hub.name}](https://huggingface.co/datasets/{row.hub.name})" if row.hub else ""
    commit = f"`{row.hub.revision[:7]}`" if row.hub else ""
    splits = ", ".join(row.hub.files) if row.hub else "your files"
    scorer = ", ".join(dict.fromkeys(row.scorers))
    cells = (f"`{name}`", hub, commit, splits, scorer, row.papers_scorer, row.licence)
    return f"| {' | '.join(cells)} |"


def test_table_lists_rows():
    rows = {name: row for name, row in load_benchmarks().items() if name not in OWN}
    page = (ROOT / "docs/benchmarks.md").read_text().splitlines()
    assert [each for each in page if each.startswith("| `") and each.count("|") == 8] == [
        line(name, row) for name, row in rows.items()
    ]
