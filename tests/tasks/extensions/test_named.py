"""Which files of ``own/`` decide what a named thing does."""

from pathlib import Path

import pytest

from tasks.extensions import named


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A project with a tool, what it imports, starts and reads, and another tool."""
    monkeypatch.chdir(tmp_path)
    files = {
        "tool.py": "import subprocess, sys\nfrom own.near import near\n"
        "def tool(text: str):\n    'Ask.'\n"
        "    return subprocess.run([sys.executable, 'own/started.py', text])\n",
        "near.py": "def near(): ...\n",
        "started.py": "import helpers.deep\n",
        "helpers/deep.py": "SEVEN = 7\n",
        "server.py": "from __future__ import annotations\nprint 'of another Python'\n",
        "other.py": "def other(): ...\n",
        "data/table.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text(text)
    return tmp_path / "own"


def changes(own, digest):
    """Return the files without which, or with other contents, the digest is another one."""
    first, found = digest(), set()
    for file in [path for path in own.rglob("*") if path.is_file()]:
        text = file.read_text()
        file.write_text(text + " ")
        if digest() != first:
            found.add(file.relative_to(own).as_posix())
        file.write_text(text)
    assert digest() == first
    return found


def test_what_a_file_imports_starts_or_reads_counts(own):
    started = {"started.py", "helpers/deep.py"}
    counted = {"tool.py", "near.py", "data/table.json"} | started
    assert changes(own, lambda: named.own_digest(Path("own/tool.py"))) == counted


def test_what_settings_name_counts(own):
    command = {"servers": {"notes": {"command": ["python", "own/server.py"]}}}
    found = changes(own, lambda: named.digest_of_mentioned(command))
    assert found == {"server.py", "data/table.json"}
    assert named.digest_of_mentioned({"command": ["python", "server.py"]}) == ""


def test_a_file_that_is_moved_counts(own):
    first = named.own_digest(Path("own/tool.py"))
    (own / "moved").mkdir()
    (own / "data/table.json").rename(own / "moved/table.json")
    assert named.own_digest(Path("own/tool.py")) != first
