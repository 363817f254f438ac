import fcntl
import os
import time

import pytest

from tests.chaos import runs


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Make a checkout in the first worker that asks for it: ``make`` fills its folder."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def made(name, make):
        place = root / name
        place.mkdir(exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "made").exists():
                make(place / "main")
                (place / "made").touch()
        return place / "main"

    return made


@pytest.fixture(scope="session")
def bare(once):
    """A checkout that never ran anything."""
    return once("bare", runs.create)


@pytest.fixture(scope="session")
def prepared(once, bare):
    """A checkout in which reinforce comes next."""

    def make(folder):
        began = time.monotonic()
        runs.prepare(runs.copy(bare, folder), "reward_model")
        folder.with_name("seconds").write_text(str(time.monotonic() - began))

    return once("prepared", make)


@pytest.fixture(scope="session")
def world(once, bare):
    """The same in a recipe of a world."""

    def make(folder):
        runs.act_in_a_world(runs.copy(bare, folder))
        runs.prepare(folder, "cold_start")

    return once("world", make)


@pytest.fixture(scope="session")
def whole(once, prepared):
    """A checkout after a run that nothing has happened to, and the seconds that it took.

    Its first stages are those of ``prepared``, to save time.
    """

    def make(folder):
        runs.copy(prepared, folder)
        began = time.monotonic()
        runs.finish(folder)
        rest = time.monotonic() - began
        first = float(prepared.with_name("seconds").read_text())
        folder.with_name("seconds").write_text(str(first + rest))

    folder = once("whole", make)
    return folder, float(folder.with_name("seconds").read_text())


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
