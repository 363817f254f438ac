import pytest

from tests.tasks.ledger.toy import Run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder, which the ledger is in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder):
    """A run with nothing in its ledger."""
    return Run()
