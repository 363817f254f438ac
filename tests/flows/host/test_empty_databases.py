import sqlite3
from contextlib import closing

import pytest

from flows.host import empty_databases


def create(database, table):
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"create table {table} (a)")


def tables(database):
    with closing(sqlite3.connect(database)) as connection:
        return [name for (name,) in connection.execute("select name from sqlite_master")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/beamline"


def test_database_is_kept_once_and_taken_often(tmp_path, cache):
    create(tmp_path / "first", "first")
    create(tmp_path / "second", "second")
    assert not empty_databases.take("mlflow", tmp_path / "third")
    empty_databases.keep("mlflow", tmp_path / "first")
    empty_databases.keep("mlflow", tmp_path / "second")
    assert empty_databases.take("mlflow", tmp_path / "third")
    assert tables(tmp_path / "third") == ["first"]
    assert not empty_databases.take("prefect", tmp_path / "fourth"), "each library has its own"
    assert len(list(cache.iterdir())) == 1


def test_taking_keeps_a_database_that_exists(tmp_path, cache):
    create(tmp_path / "old", "old")
    create(tmp_path / "new", "new")
    empty_databases.keep("mlflow", tmp_path / "new")
    assert empty_databases.take("mlflow", tmp_path / "old")
    assert tables(tmp_path / "old") == ["old"]
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "cache"}


def test_without_a_cache_nothing_is_kept(tmp_path, cache):
    create(tmp_path / "new", "new")
    cache.parent.touch()  # not a folder
    empty_databases.keep("mlflow", tmp_path / "new")
    assert not empty_databases.take("mlflow", tmp_path / "other")


def test_damaged_database_is_replaced(tmp_path, cache):
    create(tmp_path / "new", "new")
    empty_databases.keep("mlflow", tmp_path / "new")
    [kept] = cache.iterdir()
    kept.write_text("no database")
    assert not empty_databases.take("mlflow", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    empty_databases.keep("mlflow", tmp_path / "new")
    assert empty_databases.take("mlflow", tmp_path / "other")
