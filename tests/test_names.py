"""One word, one thing: names of classes, imports under another name, and the glossary."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "params", "beamline")
FILES = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
TREES = {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in FILES}


def classes():
    """Return the files of each class by its name."""
    found = defaultdict(list)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    return found


def test_no_two_classes_have_one_name():
    assert {name: files for name, files in classes().items() if len(files) > 1} == {}


def test_glossary_names_classes_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \|(.*?)\|$", text.split("## Glossary")[1], re.M)[1:]
    assert 30 <= len(rows) <= 40
    words = [word for row in rows for word in row[0].split(", ")]
    assert len(set(words)) == len(words)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 20 and named <= set(classes())


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_nothing_of_ours_is_imported_under_another_name():
    renamed = [
        f"{file}:{node.lineno}: {alias.name} as {alias.asname}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOMS
        for alias in node.names
        if alias.asname not in (None, alias.name) and not is_module(f"{node.module}.{alias.name}")
    ]
    assert renamed == []
