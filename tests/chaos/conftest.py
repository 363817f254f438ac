import time

import pytest

from tests.chaos import runs
from tests.checkout import call


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A checkout that never ran anything."""
    return runs.create(tmp_path_factory.mktemp("bare") / "main")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, bare):
    """A checkout in which reinforce comes next."""
    folder = runs.copy(bare, tmp_path_factory.mktemp("prepared") / "main")
    made = call(folder, "dvc", "repro", "reward_model@smoke")
    assert made.returncode == 0, made.stdout
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory, bare):
    """A checkout after a run that nothing has happened to, and the seconds that it took."""
    folder = runs.copy(bare, tmp_path_factory.mktemp("unbroken") / "main")
    began = time.monotonic()
    runs.finish(folder)
    return folder, time.monotonic() - began


@pytest.fixture(scope="session")
def unbroken(whole):
    """A checkout after a run that nothing has happened to."""
    return whole[0]


@pytest.fixture(scope="session")
def expected(unbroken):
    """What every run must come to: out -> digest."""
    return runs.outcome(unbroken)


@pytest.fixture
def folder(tmp_path):
    """Where the test's own checkout goes."""
    return tmp_path.resolve() / "main"
