"""Wait for what another process or thread does."""

import time

LONGEST = 600.0  # seconds: a busy machine may take minutes for what takes one second elsewhere


def wait_until(happened, what="what was waited for"):
    """Return once ``happened()`` is true; fail where it never is."""
    deadline = time.monotonic() + LONGEST
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)
