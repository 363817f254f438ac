"""An MLflow store in a folder of its own, and what tests write to it."""

import sqlite3
from contextlib import closing
from itertools import count

import pytest

from flows.tracking import run, store
from tests import mlflow_store
from tests.child_process import Child


@pytest.fixture
def folder(tmp_path, monkeypatch, empty_store):
    """A working directory with a store that has no runs yet."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", run.PIPELINE_RUN, "PREFECT__FLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".beamline").mkdir()
    (tmp_path / ".beamline" / "mlflow.db").write_bytes(empty_store)
    return tmp_path


@pytest.fixture
def client(folder):
    return store.connect(store.store_uri())


@pytest.fixture
def database(folder):
    file = folder / ".beamline" / "mlflow.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield connection


@pytest.fixture
def child(tmp_path_factory):
    """Starts code in a process of its own."""
    outputs = tmp_path_factory.mktemp("children")
    numbers = count()
    return lambda code: Child(code, outputs / f"{next(numbers)}.txt")


@pytest.fixture
def saved(folder):
    """Trees and rewards of two questions with three leaves each."""
    trees = [mlflow_store.branched(name) for name in ("train-00007", "train-00008")]
    return mlflow_store.save_iteration(folder / "iteration", *trees)
