"""Hold a run before a sub-step gets its final name: Python imports this first in each program.

A kill would else have to come between two moments that a busy machine has in one.
"""

import os
import sys
import time
from pathlib import Path

HELD = Path(os.environ["TESTS_HELD"])  # file with the name of the sub-step, as "0001-update"


def _hold(event: str, arguments: tuple[object, ...]) -> None:
    """Wait while the file is there, before a folder gets the name of the sub-step in it."""
    if event == "os.rename" and HELD.exists():
        if Path(os.fspath(arguments[1])).name.startswith(f"{HELD.read_text()}-"):
            while HELD.exists():
                time.sleep(0.01)


sys.addaudithook(_hold)
