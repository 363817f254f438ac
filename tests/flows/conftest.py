import contextlib
import os

import pytest
from prefect.context import refresh_global_settings_context

from flows.workers import server
from tests import toy_project as toy


@pytest.fixture(scope="session")
def api(tmp_path_factory):
    """Address of a server's API that the tests share: starting one takes 3 s."""
    folder = tmp_path_factory.mktemp("server")
    with (
        contextlib.chdir(folder),
        (folder / "log").open("wb") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(toy.ROOT))
        server.HOME.mkdir(parents=True)
        process, port = server.start_prefect("run", 0, log)
        server.await_answer(process, port, "/api/health", log.name)
    yield f"http://{server.HOST}:{port}/api"
    server.stop(process)
    assert (folder / "log").read_text() == "", "the server complains"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A toy project whose stages are Prefect flows, as the working folder."""
    folder = tmp_path.resolve()
    toy.create(folder, flows=True)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "BEAMLINE_"))]:
        monkeypatch.delenv(name)
    refresh_global_settings_context()
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    return folder
