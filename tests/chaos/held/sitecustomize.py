"""Hold a run before a sub-step gets its final name: Python imports this first in each program.

A kill would else have to come between two moments that a busy machine has in one.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

HELD = Path(os.environ["TESTS_HELD"])  # file with the sub-step, as "reinforce/0001-update"


def _hold(event: str, arguments: tuple[Any, ...]) -> None:
    """Wait while the file is there, before a folder gets the name of the sub-step in it."""
    if event == "os.rename":
        *_, stage, name = ("", *Path(os.fspath(arguments[1])).parts)
        while f"{stage}/{name}".startswith(_held()):
            time.sleep(0.01)


def _held() -> str:
    """Return what a name must start with to be held; something that no name has, without one."""
    try:
        return f"{HELD.read_text()}-"
    except FileNotFoundError:
        return "//"


sys.addaudithook(_hold)
