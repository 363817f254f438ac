import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import refresh_global_settings_context
from prefect.states import Completed

from flows.runs.pipeline import Stage
from flows.workers import dispatch
from tests import toy_project as toy


@pytest.fixture
def here(project, api, monkeypatch):
    """A toy project whose configured server is that of the tests; nothing is printed yet."""
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    return project


@flow(name=dispatch.FLOW)
def stage(name: str) -> None:
    pass


def test_stage_without_a_deployment_runs_here(here, capsys):
    for _ in range(2):
        assert not dispatch.send(Stage("later@toy", "lonely", None))
    [line] = capsys.readouterr().out.splitlines()
    assert "'lonely' run here: Prefect has no deployment stage/lonely" in line
    assert not dispatch.send(Stage("later@toy", None, None))
    assert capsys.readouterr().out == ""


def test_stage_that_no_worker_could_get_runs_here(here, api, tmp_path_factory, capsys):
    with SyncPrefectClient(api) as client:
        client.create_deployment(client.create_flow(stage), "dispatch")
    later = Stage("later@toy", "dispatch", None)
    assert not dispatch.send(later)
    assert "no default remote" in capsys.readouterr().out
    toy.give_pool(here, "dispatch")
    assert dispatch.sent_elsewhere("toy") == set()
    remote = str(tmp_path_factory.mktemp("remote"))
    assert toy.run(here, "dvc", "remote", "add", "--default", "shared", remote).returncode == 0
    assert dispatch.sent_elsewhere("toy") == {"later"}
    toy.commit(here)
    toy.write_stage(here, "first", flows=True, before="0")
    assert not dispatch.send(later)
    assert "first.py" in capsys.readouterr().out


def test_result_of_a_stage_reaches_its_sender(here, api):
    @flow(name="sender")
    def give() -> object:
        dispatch.publish_result({"lock": {"a": [1]}, "files": {"b": "ü"}}, "later@toy")
        return Completed()

    with SyncPrefectClient(api) as client:
        run = give(return_state=True).state_details.flow_run_id
        assert dispatch.result_of(client, run) == {"lock": {"a": [1]}, "files": {"b": "ü"}}
        empty = client.create_flow_run(give)
        with pytest.raises(RuntimeError, match="without a result"):
            dispatch.result_of(client, empty.id)


def test_tag_is_that_of_the_work_and_not_of_where_it_is_logged():
    request = {"name": "a@b", "commit": "c", "files": {"params/b.yaml": "x: 1"}, "environment": {}}
    tag = dispatch.request_tag(request)
    assert dispatch.request_tag({**request, "environment": {"MLFLOW_TRACKING_URI": "x"}}) == tag
    others = [{"name": "d@b"}, {"commit": "d"}, {"files": {"params/b.yaml": "x: 2"}}]
    assert len({tag, *(dispatch.request_tag({**request, **other}) for other in others)}) == 4
