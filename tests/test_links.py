"""Links lead somewhere: between Markdown files with their anchors, and from code to pages."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.checkout import ROOT

FENCE = re.compile(r"^ {0,3}(```|~~~)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$")
LINK = re.compile(r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
MENTION = re.compile(r"docs/[\w-]+\.md(?:#[\w-]+)?")
ELSEWHERE = ("http:", "https:", "mailto:")
# Recipes of earlier commits name pages of then, and one test names a page that is made up.
OTHER_PAGES = ("tests/params/old/", "tests/flows/runs/test_commit_check.py")


@cache
def tracked():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


MARKDOWN = [name for name in tracked() if name.endswith(".md")]


def prose(name):
    """Yield the lines of a Markdown file that are not in a block of code."""
    inside = False
    for line in (ROOT / name).read_text().splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield line


def slug(heading):
    """Return the anchor that GitHub gives a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


@cache
def anchors(name):
    found, times = set(), {}
    for line in prose(name):
        if heading := HEADING.match(line):
            each = slug(heading[1])
            number = times[each] = times.get(each, -1) + 1
            found.add(f"{each}-{number}" if number else each)
    return found


def fault(name, target):
    """Return what is wrong with a link of a file, or None."""
    path, _, anchor = target.partition("#")
    place = (ROOT / name).parent / path if path else ROOT / name
    if not place.exists():
        return f"{name}: {target}: there is no such file"
    where = place.resolve().relative_to(ROOT).as_posix()
    if anchor and where.endswith(".md") and anchor not in anchors(where):
        return f"{name}: {target}: no heading of {where} has this anchor"
    return None


def links(name):
    """Return the link targets of a file within the repository; pictures, too."""
    text = "\n".join(re.sub(r"`[^`]*`", "", line) for line in prose(name))
    return [each for _, each in LINK.findall(text) if not each.startswith(ELSEWHERE)]


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_of_a_page_lead_somewhere(name):
    assert [wrong for target in links(name) if (wrong := fault(name, target))] == []


def test_pages_that_files_mention_are_there():
    wrong = []
    for name in tracked():
        if name.startswith(OTHER_PAGES):
            continue
        text = (ROOT / name).read_bytes().decode(errors="ignore")
        faults = (fault("README.md", target) for target in MENTION.findall(text))
        wrong += [f"{name}: {each}" for each in faults if each]
    assert wrong == []


def test_every_page_and_picture_is_linked():
    linked = {
        (ROOT / name).parent.joinpath(target.partition("#")[0]).resolve()
        for name in MARKDOWN
        for target in links(name)
        if target.partition("#")[0]
    }
    there = {path.resolve() for path in Path(ROOT, "docs").iterdir()}
    assert {path.name for path in there - linked} == set()


def test_an_index_links_every_page_and_the_readme_links_it_first():
    pages = {f"docs/{path.name}" for path in Path(ROOT, "docs").glob("*.md")}
    of_index = {f"docs/{target.partition('#')[0]}" for target in links("docs/index.md")}
    assert pages - of_index == {"docs/index.md"}
    assert next(each for each in links("README.md") if each.endswith(".md")) == "docs/index.md"


def test_faults_are_seen():
    assert fault("docs/results.md", "none.md")
    assert fault("docs/results.md", "#no-such-heading")
    assert fault("docs/results.md", "../README.md#no-such-heading")
    assert slug("The same seed on `another` CPU, twice") == "the-same-seed-on-another-cpu-twice"
