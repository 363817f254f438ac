"""A clean checkout of the project as it is now, and its commands as a user calls them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flows.host import warm

ROOT = Path(__file__).parents[1]
# Environment variables with the address of the process that tests have programs forked from
# (flows/host/warm.py): all of them, or those that no kill is meant for.
FOR_ALL, FOR_OTHERS = "TESTS_WARM", "TESTS_WARM_OTHERS"


def checkout(folder):
    """Copy the project's files to ``folder``, a repository of its own."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    for file in files:
        if (ROOT / file).is_file() and not file.startswith(("reports/", "dvc.lock")):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "as it is"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def environment(**changes):
    """This process's environment without what would tie a run to another one, and changes to it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "BEAMLINE_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | warm_parent() | {"PATH": path, "DO_NOT_TRACK": "1"} | changes


def warm_parent():
    """The variable that has programs forked from the tests' one process; none where there is none.

    There is none where kills are tested; a test that must see a program as a user starts it leaves
    it out.
    """
    return _variable(FOR_ALL)


def others_parent():
    """As ``warm_parent``, where kills are tested, too: for a program that no kill is meant for."""
    return _variable(FOR_ALL) or _variable(FOR_OTHERS)


def _variable(name):
    return {warm.VARIABLE: os.environ[name]} if name in os.environ else {}


def retrain(recipe):
    """What `make run` calls."""
    return (sys.executable, "-m", "flows.retrain", recipe, "--here")


def call(folder, *command, **changes):
    """Run a command in ``folder``; standard output and error come together."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**changes),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
