"""Tables of params/ after a merge in git: what both sides have added at the end stays."""

import os
import shutil
import subprocess

import pytest

from params.schema.algorithms import load_algorithms
from params.schema.base import PARAMS
from params.schema.benchmarks import load_benchmarks

LOAD = {"algorithms": load_algorithms, "benchmarks": load_benchmarks}
ROWS = {
    "algorithms": "{branching: none, marks: none, estimator: {kind: group_relative, std: true}, "
    "ratio: token, clip: {low: 0.2, high: 0.2}, averaging: token_mean}",
    "benchmarks": "{question: question, answer: answer, scorer: exact}",
}
AUTHOR = {
    f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


@pytest.mark.parametrize("table", ROWS)
def test_rows_of_both_sides_stay(tmp_path, table):
    def git(*arguments):
        command = ["git", "-C", tmp_path, *arguments]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | AUTHOR)

    def commit_row(name):
        file.write_text(f"{before.rstrip()}\n\n{name}: {ROWS[table]}\n")
        git("commit", "--all", "--message", name)

    file = tmp_path / "params" / f"{table}.yaml"
    file.parent.mkdir()
    shutil.copy(PARAMS.parent / ".gitattributes", tmp_path)
    before = (PARAMS / file.name).read_text()
    file.write_text(before)
    git("init", "--initial-branch", "main")
    git("add", ".")
    git("commit", "--message", "before")
    git("checkout", "-b", "mine")
    commit_row("mine")
    git("checkout", "main")
    commit_row("theirs")
    git("merge", "mine")
    assert LOAD[table](file.parent).keys() == LOAD[table](PARAMS).keys() | {"mine", "theirs"}
