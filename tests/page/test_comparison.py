"""The page of a comparison in a browser, from results as they are committed."""

import shutil

import pytest

from flows.commands import page as command
from flows.tracking.comparison_report import slug
from tests.checkout import ROOT
from tests.page.conftest import RECIPE


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with the recipe and the committed results of its comparison."""
    folder = tmp_path_factory.mktemp("comparison")
    shutil.copytree(ROOT / "params", folder / "params")
    kept = folder / "reports" / RECIPE / "comparison"
    shutil.copytree(ROOT / "reports" / RECIPE / "comparison", kept)
    return folder


@pytest.fixture
def file(results, monkeypatch, capsys):
    monkeypatch.chdir(results)
    assert command.main([RECIPE, "--comparison"]) == 0
    return results / capsys.readouterr().out.strip()


def test_shows_what_the_tables_have(opened, emulated, file):
    for width, scheme in ((390, "dark"), (1280, "light")):
        emulated(width, scheme=scheme)
        shown = opened(file).drawn("curves")
        assert shown.violations() == []
        assert shown.run("return document.documentElement.scrollWidth") <= width
    shown = opened(file).drawn("curves")
    assert shown.requests() == [] and shown.complaints() == []
    rows = [
        line.split("|")[1:3]
        for line in (ROOT / "reports" / RECIPE / "comparison.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 11
    ]
    found = shown.run(
        "return [...document.querySelector('#results tbody').rows]"
        ".map(row => [...row.cells].slice(0, 2).map(cell => cell.textContent))"
    )
    assert len(found) > 3
    assert sorted(found) == sorted([cell.strip() for cell in row] for row in rows[1:])
    lines = shown.run("return document.getElementById('curves').data.map(one => one.x[0])")
    shown.run(
        "const chosen = document.getElementById('spent'); chosen.value = 'tool_calls';"
        "performance.clearMarks(); chosen.dispatchEvent(new Event('change'))"
    )
    shown.drawn("curves")
    assert shown.run("return document.getElementById('curves').data.map(one => one.x[0])") != lines


def test_variant_with_tags_in_its_name_is_text(opened, results, monkeypatch, capsys):
    name = "<b><a href='https://example.org'>x</a></b><img src=x onerror=alert(1)>"
    for file in results.glob("reports/*/comparison/grpo/*.json"):
        text = file.read_text().replace('"variant": "grpo"', f'"variant": "{name}"')
        other = results / "other/reports" / RECIPE / "comparison" / slug(name) / file.name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text(text)
    shutil.copytree(results / "params", results / "other/params")
    shutil.copytree(
        results / "reports" / RECIPE / "comparison/cold_start",
        results / "other/reports" / RECIPE / "comparison/cold_start",
    )
    monkeypatch.chdir(results / "other")
    assert command.main([RECIPE, "--comparison"]) == 0
    shown = opened(capsys.readouterr().out.strip()).drawn("curves")
    assert shown.complaints() == []
    assert shown.run("return document.images.length") == 0
    assert name in shown.text("results") and name in shown.text("intervals")


def test_missing_results_name_the_command(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "params", tmp_path / "params")
    monkeypatch.chdir(tmp_path)
    assert command.main([RECIPE, "--comparison"]) == 2
    assert f"make compare RECIPE={RECIPE}" in capsys.readouterr().err
    assert command.main([RECIPE]) == 2
    assert f"make run RECIPE={RECIPE}" in capsys.readouterr().err
    assert command.main([RECIPE, "--comparison", "--iteration", "1"]) == 2
