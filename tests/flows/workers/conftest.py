"""What a Prefect server's database holds, and a server that can be stopped and started."""

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.workers import server


@pytest.fixture
def query():
    """Runs a query on the database of the server in a folder, the current one unless given."""

    def rows(text, folder=Path()):
        with closing(sqlite3.connect(folder / server.HOME / "prefect.db")) as database:
            return database.execute(text).fetchall()

    return rows


class Server:
    """A server in a folder of its own that can be stopped and started at the same address."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0
        self.start()

    def start(self):
        with contextlib.chdir(self.folder), (self.folder / "log").open("ab") as log:
            server.HOME.mkdir(parents=True, exist_ok=True)
            self.process, self.port = server.start_prefect("run", self.port, log)
            server.await_answer(self.process, self.port, "/api/health", log.name)
        self.address = f"http://{server.HOST}:{self.port}/api"

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def remote(project, tmp_path_factory):
    """A server that is not the project's own."""
    started = Server(tmp_path_factory.mktemp("remote"))
    yield started
    started.stop()
