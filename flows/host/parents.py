"""End this process with the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "BEAMLINE_PARENT"  # environment variable: id of the process that a child must not outlive
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL.

    Exits where the parent named by BEAMLINE_PARENT ended before this call. From here on, this
    process is the parent in the environment of its children.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("the process that started this one has ended")
    os.environ[PARENT] = str(os.getpid())
