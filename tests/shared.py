"""What all workers of one call of pytest share: the first one that needs it makes it."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def of_all_workers(tmp_path_factory, name):
    """Yield a folder that the workers of one call of pytest share, to one of them at a time."""
    base = tmp_path_factory.getbasetemp().resolve()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
