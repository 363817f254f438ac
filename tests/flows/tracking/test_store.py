import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from flows.tracking import store
from flows.tracking.run import pipeline_run, stage_run


def test_processes_that_start_at_once_share_a_store(tmp_path, monkeypatch, child):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no empty store is kept yet
    # of one key, the second would resume the first
    code = "from flows.tracking.run import stage_run\nwith stage_run('tiny', {0!r}, key={0!r}): 0"
    started = [child(code.format(name)) for name in ("prepare", "evaluate")]
    assert [process.wait() for process in started] == [(0, ""), (0, "")]
    with closing(sqlite3.connect(tmp_path / ".beamline" / "mlflow.db")) as connection:
        found = connection.execute("SELECT name, status FROM runs").fetchall()
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert sorted(found) == [("evaluate@tiny", "FINISHED"), ("prepare@tiny", "FINISHED")]
    assert [path.name for path in (tmp_path / ".beamline").iterdir()] == ["mlflow.db"]

    other = tmp_path / "other"  # a copy of the empty one that the first has left
    other.mkdir()
    monkeypatch.chdir(other)
    client = store.connect(f"sqlite:///{other}/mlflow.db")
    [default] = client.search_experiments()
    assert default.artifact_location.startswith(str(other))


def test_new_store_is_made_where_the_environment_says(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere/runs.db")
    with stage_run("tiny", "prepare", "k") as run:
        run.log_table([{"a": 1}], "a.json")
    assert (tmp_path / "elsewhere/mlartifacts" / run.id / "artifacts/a.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert capfd.readouterr() == ("", "")


def test_only_abandoned_runs_are_found_and_ended(client, child):
    killed = child(
        "import os, signal\n"
        "from flows.tracking.run import stage_run\n"
        "with stage_run('tiny', 'reinforce', 'a'), stage_run('tiny', 'evaluate', 'b'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert killed.wait()[0] == -signal.SIGKILL
    ours = client.create_run(client.get_experiment_by_name("beamline").experiment_id)  # no tags
    with stage_run("tiny", "prepare", "k") as run:
        gone = store.abandoned()
        assert sorted(name for _, name in gone) == ["evaluate@tiny", "reinforce@tiny"]
        for run_id, _ in gone:
            store.end_abandoned(run_id)
        store.end_abandoned(run.id)
        assert store.abandoned() == []
        assert client.get_run(run.id).info.status == "RUNNING"
    assert {client.get_run(run_id).info.status for run_id, _ in gone} == {"KILLED"}
    assert client.get_run(ours.info.run_id).info.status == "RUNNING"


def test_tracking_is_imported_without_mlflow():
    program = "import sys\nimport flows.tracking.run\nprint('mlflow' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("name", ["what?", "a#b %41 'ü"])
def test_store_is_inside_a_checkout_of_any_name(tmp_path, monkeypatch, name):
    checkout = tmp_path / name
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with stage_run("tiny", "prepare", "k") as run:
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [path.name for path in checkout.iterdir()] == [".beamline"]
    assert store.connect(store.store_uri()).get_run(run.id).info.status == "FINISHED"
    worktree = checkout / "worktrees/a"
    worktree.mkdir(parents=True)
    address = store.store_uri(worktree)
    monkeypatch.chdir(worktree)
    assert store.connect(address).get_run(run.id).info.status == "FINISHED"


# what MLflow's UI opens the experiment with


def test_experiment_opens_with_its_runs_unless_somebody_chose_another_kind(client):
    identifier = store.experiment_id(client, store.store_uri())
    made = client.get_experiment(identifier).tags
    assert made[store.EXPERIMENT_KIND] == "custom_model_development"
    view = json.loads(json.loads(made[store.VIEW_TAG])["state"])
    assert view["searchFilter"] == store.WHOLE_RUNS
    assert "metrics.`success/trained`" in view["selectedColumns"]
    assert store.page_of("http://here").endswith(
        "/runs?viewStateShareKey=beamline&workflowType=machine_learning"
    )

    kinds = {
        "genai_development_inferred": store.MODEL_TRAINING,  # as MLflow's UI writes it by itself
        "no_inferred_type": store.MODEL_TRAINING,
        "genai_development": "genai_development",
        "finetuning": "finetuning",
    }
    for kind, expected in kinds.items():
        client.set_experiment_tag(identifier, store.EXPERIMENT_KIND, kind)
        assert store.experiment_id(client, store.store_uri()) == identifier
        assert client.get_experiment(identifier).tags[store.EXPERIMENT_KIND] == expected


def test_experiment_of_an_older_version_gets_kind_and_view(client):
    identifier = client.create_experiment(store.EXPERIMENT)
    assert "searchFilter=tags.%60beamline.kind%60%20%3D%20%27pipeline%27" in store.page_of("")
    assert store.experiment_id(client, store.store_uri()) == identifier
    assert client.get_experiment(identifier).tags.keys() >= store.experiment_tags().keys()


def test_newest_pipeline_of_a_recipe_is_the_run_before(client):
    assert store.last_pipeline("tiny") is None
    for recipe, seed in (("tiny", 1), ("tiny", 2), ("other", 3)):
        with pipeline_run(recipe, {"seed": seed}, name=f"{recipe} seed={seed}") as run:
            run.log_text("kept", "note.txt")
    assert store.last_pipeline("tiny") == ("tiny seed=2", {"seed": "2"})
    assert store.artifact_text(run.id, "note.txt") == "kept"
    assert store.artifact_text(run.id, "nothing.txt") is None
