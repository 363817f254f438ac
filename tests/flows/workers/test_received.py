"""What another machine sends: nothing of it is written outside the places that it belongs to."""

import pytest
from prefect.context import refresh_global_settings_context
from prefect.exceptions import ParameterTypeError

from flows import deploy
from flows.workers import received
from tests import toy_project as toy

RECIPE = "params/toy.yaml"
ALLOWED = [RECIPE, "reports/toy"]


@pytest.mark.parametrize("path", [RECIPE, "reports/toy", "reports/toy/a/table.md"])
def test_file_in_its_place_is_allowed(tmp_path, path):
    received.check_paths([path], ALLOWED, tmp_path)


@pytest.mark.parametrize(
    "path",
    ["../x", "/tmp/x", "reports/toy/../../x", "params", "params/other.yaml", "reports/toyx", ""],
)
def test_other_file_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="may not be written"):
        received.check_paths([RECIPE, path], ALLOWED, tmp_path)


@pytest.mark.parametrize("link", [RECIPE, "params", "reports/toy", "reports"])
def test_link_is_refused(tmp_path, link):
    place = tmp_path / "place"
    (place / link).parent.mkdir(parents=True)
    (place / link).symlink_to(tmp_path)
    with pytest.raises(ValueError, match="may not be written"):
        received.check_paths([RECIPE, "reports/toy/table.md"], ALLOWED, place)


OUTSIDE = "../../../outside"  # of the worktree and of the checkout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"files": {OUTSIDE: "text"}}, "outside"),
        ({"files": {"flows/deploy.py": "text"}}, "deploy.py"),
        ({"name": "../../outside@toy"}, "name"),
        ({"commit": "--upload-pack=touch outside"}, "commit"),
        ({"environment": {"LD_PRELOAD": "outside"}}, "LD_PRELOAD"),
        ({"environment": {"MLFLOW_TRACKING_URI": "sqlite:///../outside"}}, "MLFLOW_TRACKING_URI"),
    ],
    ids=["path", "code", "name", "commit", "environment", "store"],
)
def test_stage_refuses_what_would_leave_its_place(project, api, monkeypatch, change, named):
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    toy.set_remote(project, "remote")
    before = sorted(project.parent.iterdir()), sorted(project.rglob("outside"))
    request = {"name": "first@toy", "commit": toy.commit(project), "files": {}, "environment": {}}
    with pytest.raises((ValueError, ParameterTypeError), match=named):
        deploy.stage(**request | change)
    assert not (project / ".beamline/runs").exists()
    assert (sorted(project.parent.iterdir()), sorted(project.rglob("outside"))) == before
