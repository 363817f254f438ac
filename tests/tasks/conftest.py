"""Fixtures of what computes."""

import pytest


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy, in a process that is set up for equal runs."""
    from tasks.policy.machine import use_machine
    from tests.sections import MACHINE

    use_machine(MACHINE)
    folder = tmp_path_factory.mktemp("initial") / "policy"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
