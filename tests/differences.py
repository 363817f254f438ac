"""A pytest plugin that prints how large the differences were which tests of losses allow.

    python -m pytest -p tests.differences tests/tasks/learning/test_losses_trl.py

For each test, the largest absolute difference that ``torch.testing.assert_close`` was asked about.
"""

import pytest
import torch

LARGEST = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[LARGEST] = {}


@pytest.fixture(autouse=True)
def differences(request, monkeypatch):
    """Note the largest difference of a test."""
    largest, compare = request.config.stash[LARGEST], torch.testing.assert_close

    def noting(actual, expected, **tolerance):
        if isinstance(actual, torch.Tensor) and actual.numel():
            apart = float((actual.double() - expected.double()).abs().max())
            largest[request.node.name] = max(apart, largest.get(request.node.name, 0.0))
        return compare(actual, expected, **tolerance)

    monkeypatch.setattr(torch.testing, "assert_close", noting)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("largest differences")
    for name, apart in config.stash[LARGEST].items():
        terminalreporter.write_line(f"{apart:.1e}  {name}")
