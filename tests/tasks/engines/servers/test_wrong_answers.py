"""A server that answers wrongly in each of many ways, alone and beside a good one."""

import re
from pathlib import Path

import pytest

from benchmarks.wrong_answers import matrix
from tests.sampling_server import WAYS

LONGEST_WORDS = 2000  # characters of an error


@pytest.fixture(scope="module")
def outcomes(made):
    """Of a good server, and of each way; most of the time is waiting, side by side."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TOKENIZERS_PARALLELISM", "false")
        yield matrix(Path(made.path))


@pytest.mark.parametrize("name", WAYS)
def test_wrong_server_alone_ends_the_run_by_name(outcomes, name):
    address, alone, _ = outcomes[1][name]
    assert address in alone.said and re.search(WAYS[name].says, alone.said), alone.said
    assert alone.said.isprintable() and len(alone.said) < LONGEST_WORDS


@pytest.mark.parametrize("name", WAYS)
def test_good_server_does_the_work_of_a_wrong_one(outcomes, name):
    good, (_, _, beside) = outcomes[0], outcomes[1][name]
    assert good.tokens and beside.tokens == good.tokens, beside.said
