"""Examples run, and do what their first lines say."""

import re

from examples import one_file
from tasks import recipes


def test_one_file_imitates_and_improves(capsys):
    one_file.main(recipes.load("smoke"), imitations=100, iterations=2)
    imitated, *iterations = capsys.readouterr().out.splitlines()
    assert float(re.fullmatch(r"imitation 100: loss (\S+)", imitated)[1]) < 3
    line = r"iteration \d: success \S+%, (\d+) tokens for (\d+)"
    for tokens, views in (re.fullmatch(line, each).groups() for each in iterations):
        assert int(tokens) <= int(views), "a token that leaves share is computed once"
