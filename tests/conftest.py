"""What many tests share: a very small policy with its tokenizer, benchmark files."""

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import examples
from tests.checkout import FOR_ALL, FOR_OTHERS
from tests.shared import of_all_workers

examples.load_profile()

TEXTS = [
    "What is 12 times 34?",
    "A farmer has 7 baskets with 15 apples each. How many apples are there?",
    "<think>multiply</think><python>print(12*34)</python><result>408</result>",
    "<think>that is it</think><answer>\\boxed{408}</answer>",
]


def pytest_configure(config):
    """Where several workers run the tests, have programs that they start forked from one process.

    tests/checkout.py passes its address on: to all programs, or, where kills are tested, to those
    around the one that is killed.
    """
    several = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if several:
        from flows.host import warm

        config.stash[WARM_FOLDER] = folder = tempfile.TemporaryDirectory(prefix="beamline-")
        chosen = config.option.markexpr
        kills = not chosen or "kills" in chosen.replace("not kills", "")
        name = FOR_OTHERS if kills else FOR_ALL
        os.environ[name] = f"{folder.name}/warm"
        config.stash[WARM_PROCESS] = warm.start(os.environ[name], (*warm.LIBRARIES, SERVER))


def pytest_unconfigure(config):
    if process := config.stash.get(WARM_PROCESS, None):
        process.kill()
        process.wait()
        config.stash[WARM_FOLDER].cleanup()


SERVER = "prefect.server.api.server"  # of each run; in a run it is imported once anyway
WARM_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()
WARM_PROCESS = pytest.StashKey[subprocess.Popen]()

FLOWS = Path(__file__).parent / "flows"
ROOMS = ("flows", "params", "tasks", "own")
SETS = ("gsm8k", "math500", "aime24", "hotpotqa", "bamboogle")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Put the tests of whole flows first; with BEAMLINE_DATA, mark those of whole files.

    A flow's test takes up to a minute: at the end it would leave the other worker idle.
    """
    items.sort(key=lambda item: item.path.parent != FLOWS)
    for item in items if os.environ.get("BEAMLINE_DATA") else ():
        if "data" in getattr(item, "fixturenames", ()):
            item.add_marker("whole_files")


@pytest.fixture(scope="session")
def data():
    """A folder with a folder of JSON lines for each of SETS.

    They are a few records of the project's own, shaped as the real ones are; the real ones where
    BEAMLINE_DATA names their folder (make test-data DATA=<folder>).
    """
    folder = Path(os.environ.get("BEAMLINE_DATA") or Path(__file__).parent / "data")
    missing = [name for name in SETS if not (folder / name / "test.jsonl").is_file()]
    if missing:
        raise ValueError(
            f"{folder} has no {missing[0]}/test.jsonl: a folder for BEAMLINE_DATA, or make "
            f"test-data DATA=<folder>, has one for each of {', '.join(SETS)}"
        )
    return folder


@pytest.fixture(autouse=True)
def loggers():
    """Turn the project's loggers on, which a library in an earlier test may have turned off."""
    logging.disable(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(ROOMS) and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True


BEHIND_PROXY = dict.fromkeys(("HTTP_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
BEHIND_PROXY |= {"NO_PROXY": "", "no_proxy": ""}


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory):
    """A checkout with a finished run of the recipe smoke, to be left as it is; and what it said.

    It ran behind a proxy where nobody listens: all its servers are on this machine.
    """
    from tests.checkout import call, checkout, retrain

    with of_all_workers(tmp_path_factory, "smoke") as place:
        folder, said = place / "checkout", place / "said"
        if not said.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            checkout(folder)
            ran = call(folder, *retrain("smoke"), **BEHIND_PROXY)
            assert ran.returncode == 0, ran.stdout
            said.write_text(ran.stdout)
        return folder, said.read_text()


@pytest.fixture(scope="session")
def tiny():
    """Settings of the smallest policy that still has two layers and shares key-value heads."""
    from params.schema.prepare import TinyPolicy

    return TinyPolicy(
        kind="tiny",
        vocabulary=300,
        hidden=32,
        layers=2,
        heads=2,
        key_value_heads=1,
        feed_forward=64,
        context=256,
    )


@pytest.fixture(scope="session")
def tokenizer(tiny):
    """A byte-level tokenizer in which each tag is one token."""
    from tasks.policy.tiny import build_tokenizer

    return build_tokenizer(TEXTS, tiny)


@pytest.fixture(scope="session")
def policy(tiny, tokenizer):
    """A Qwen2 policy with random weights from a seed; tests leave it as it is."""
    from tasks.policy.tiny import build_policy

    return build_policy(tiny, tokenizer, seed=0).eval()
