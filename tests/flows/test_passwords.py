"""No password of an address is printed, shown to other processes, or left where others may read."""

import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import toy_project as toy

SECRET = "s3cr3t"
NOWHERE = "127.0.0.1:9"  # refuses every connection
STORE = f"http://worker:{SECRET}-store@{NOWHERE}/?token={SECRET}-token"
REMOTE = f"ssh://worker:{SECRET}-remote@{NOWHERE}/cache"
DATABASE = f"postgresql://worker:{SECRET}-database@{NOWHERE}/runs"
SERVER = f"http://worker:{SECRET}-server@{NOWHERE}/api"
MIRRORED = """
from flows.runs import ledger_mirror
from tasks.ledger import artifacts

def send():
    place = artifacts.ROOT / "toy/first/0000-verb-1"
    place.mkdir(parents=True, exist_ok=True)
    (place / artifacts.RECORD).write_text("{}")
    with ledger_mirror.opened() as ledger:
        ledger.mirrors[0].push(place)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passwords")
    toy.create(folder, flows=True)
    (folder / "mirrored.py").write_text(MIRRORED)
    toy.write_stage(folder, "first", flows=True, before="import mirrored; mirrored.send()")
    toy.commit(folder)
    local = folder / ".dvc/config.local"
    local.touch(mode=0o600)
    local.write_text(f"[core]\n    remote = far\n['remote \"far\"']\n    url = {REMOTE}\n")
    return folder


@contextmanager
def watched():
    """Collect the command lines with a password of new processes while the block lasts."""
    found, ended = set(), threading.Event()
    older = set(Path("/proc").glob("[0-9]*"))

    def look():
        while not ended.wait(0.02):
            for process in set(Path("/proc").glob("[0-9]*")) - older:
                with suppress(OSError):
                    line = (
                        (process / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found.update({line} if SECRET in line else ())

    watcher = threading.Thread(target=look)
    watcher.start()
    yield found
    ended.set()
    watcher.join()


def readable(folder):
    """Return the files with a password that other users may read."""
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes() and file.stat().st_mode & 0o077
    ]


ADDRESSES = {
    "MLFLOW_TRACKING_URI": STORE,
    "BEAMLINE_STORE": REMOTE,
    "PREFECT_API_AUTH_STRING": f"worker:{SECRET}-auth",
}


@pytest.mark.parametrize(
    ("program", "changes", "said"),
    [
        ("retrain toy", {}, "dvc push failed"),
        ("doctor", {}, "unsent"),
        ("lineage data/toy/first", {}, "cannot be read"),
        ("retrain toy --here", {"PREFECT_API_URL": SERVER}, "PREFECT_API_URL"),
        ("doctor", {"MLFLOW_TRACKING_URI": DATABASE.replace("postgresql", "carrier")}, "carrier"),
        ("ui", {"MLFLOW_TRACKING_URI": DATABASE}, "did not start"),
    ],
    ids=["run", "doctor", "lineage", "Prefect", "another store", "ui"],
)
def test_passwords_stay_secret(project, program, changes, said):
    command = [sys.executable, "-m", *f"flows.{program}".split()]
    with watched() as command_lines:
        ran = toy.run(project, *command, **(ADDRESSES | changes))
    print(ran.stdout)
    assert said in ran.stdout
    assert SECRET not in ran.stdout
    assert not command_lines
    assert not readable(project)
