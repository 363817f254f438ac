import fcntl
import os
import threading

import pytest
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL

from flows.workers import connection, server

NOBODY = "http://127.0.0.1:9/api"


def test_configured_server_is_used_by_all_threads(project, api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    seen = []
    with connection.prefect_server() as configured:
        thread = threading.Thread(target=lambda: seen.append(PREFECT_API_URL.value()))
        thread.start()
        thread.join()
    assert seen == [configured.address] == [api]
    assert os.environ["PREFECT_API_URL"] == api
    assert not server.HOME.exists()


def test_configured_server_that_does_not_answer(project, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", NOBODY)
    refresh_global_settings_context()
    remedy = rf"PREFECT_API_URL is {NOBODY}.* unset"
    with pytest.raises(RuntimeError, match=remedy), connection.prefect_server():
        pytest.fail("there is no server")


def test_address_of_make_ui_counts_while_it_runs(project):
    server.HOME.mkdir(parents=True)
    assert connection.ui_server() is None
    connection.UI_ADDRESS.write_text("http://127.0.0.1:4200/api")
    assert connection.ui_server() is None, "nobody holds the file: it was left behind"
    with connection.UI_ADDRESS.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert connection.ui_server() == "http://127.0.0.1:4200/api"
