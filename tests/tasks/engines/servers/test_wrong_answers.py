"""A server that answers wrongly in each of many ways, alone and beside a good one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.wrong_answers import PATIENCE, described, matrix, outcome
from tests.sampling_server import WAYS, sampling, spoiling
from tests.tasks.engines.servers.conftest import TOKEN
from tests.waiting import LONGEST

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


@pytest.mark.parametrize("name", ["500", "closes without an answer", "weights of another policy"])
def test_server_that_is_well_again_goes_on(outcomes, made, tmp_path, name):
    policy, turns = described(Path(made.path))
    patient = replace(PATIENCE, total=LONGEST, first_pause=0.01)
    with (
        sampling(policy.folder, tmp_path, TOKEN) as right,
        spoiling(right, replace(WAYS[name], times=6)) as ill,
    ):
        assert outcome([ill], policy, turns, patient).tokens == outcomes[0].tokens
