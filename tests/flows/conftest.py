import contextlib
import os
import shutil
from unittest.mock import patch

import pytest
from prefect.context import refresh_global_settings_context

from flows.workers import server
from tests import toy_project as toy
from tests import toy_training as training
from tests.checkout import warm_parent
from tests.shared import of_all_workers


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


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """The bytes of an MLflow store without runs: the migrations of a new one take seconds."""
    from flows.tracking import store

    with of_all_workers(tmp_path_factory, "empty-store") as folder:
        made = folder / "made"
        if not made.exists():
            (folder / "mlflow.db").unlink(missing_ok=True)  # of a worker that failed
            with contextlib.chdir(folder):
                store.connect(f"sqlite:///{folder}/mlflow.db")
            made.write_bytes((folder / "mlflow.db").read_bytes())
        return made.read_bytes()


@pytest.fixture(scope="session")
def finished_training(tmp_path_factory, request):
    """A project of stages with records and with a local remote, and its run; see ``trained``."""
    with of_all_workers(tmp_path_factory, "finished-training") as place:
        folder, made = place / "project", place / "made"
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            training.create(folder, str(place / "remote"))
            api = request.getfixturevalue("api")
            made.write_text(training.retrain(folder, api, "reinforce.update.learning_rate=0.5"))
        return folder, made.read_text()


@pytest.fixture
def trained(finished_training, api, tmp_path, monkeypatch):
    """A copy of a project with a finished run, as the working folder, and the run's branch.

    The environment is a user's, with the tests' Prefect server.
    """
    source, branch = finished_training
    folder = tmp_path.resolve() / "project"
    shutil.copytree(source, folder, symlinks=True)
    monkeypatch.chdir(folder)
    with patch.dict(os.environ, toy.environment(PREFECT_API_URL=api), clear=True):
        yield folder, branch


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A toy project whose stages are Prefect flows, as the working folder."""
    folder = tmp_path.resolve()
    toy.create(folder, flows=True)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "BEAMLINE_"))]:
        monkeypatch.delenv(name)
    for name, value in warm_parent().items():
        monkeypatch.setenv(name, value)
    refresh_global_settings_context()
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    return folder
