import json
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema import Dialogue, Recipe, Reinforce, Rollout
from tasks import track

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """The bytes of a store without runs; the migrations of a new one take most of a second."""
    folder = tmp_path_factory.mktemp("empty")
    client = track.connect(f"sqlite:///{folder / 'mlflow.db'}")
    client.get_experiment_by_name(track.EXPERIMENT)
    return (folder / "mlflow.db").read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch, empty_store):
    """A working directory with a store that has no runs yet."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", track.PIPELINE_RUN, "PREFECT__FLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".beamline").mkdir()
    (tmp_path / ".beamline" / "mlflow.db").write_bytes(empty_store)
    return tmp_path


@pytest.fixture
def client(folder):
    return track.connect(track.store_uri())


@pytest.fixture
def database(folder):
    store = folder / ".beamline" / "mlflow.db"
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        yield connection


@pytest.fixture
def recipe():
    """A few sections of a recipe: what they hold is the schema's business."""
    dialogue = Dialogue.model_construct(system="Use the tool: it's exact.", tools=("python",))
    rollout = Rollout.model_construct(leaves=4, draw=False, temperature=1.0)
    reinforce = Reinforce.model_construct(algorithm="arpo", rollout=rollout)
    return Recipe.model_construct(seed=3, dialogue=dialogue, reinforce=reinforce)


def runs(client):
    experiment = client.get_experiment_by_name(track.EXPERIMENT)
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def history(client, run, name):
    return [(p.step, p.timestamp, p.value) for p in client.get_metric_history(run.id, name)]


# runs and their order


def test_stages_nest_under_their_pipeline(client, recipe):
    tags = {"mlflow.source.git.commit": "abc123", "git.dirty": "true"}
    with track.pipeline("tiny", recipe, tags) as parent:
        assert os.environ[track.PIPELINE_RUN] == parent.id
        with track.stage("tiny", "prepare", "k1") as first, track.stage("tiny", "reinforce", "k2"):
            assert client.get_run(first.id).info.status == "RUNNING"
    assert track.PIPELINE_RUN not in os.environ

    found = runs(client)
    assert set(found) == {parent.name, "prepare@tiny", "reinforce@tiny"}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert found[parent.name].data.tags.items() >= (tags | {"recipe": "tiny"}).items()
    assert parent.name.startswith("tiny 20")
    child = found["reinforce@tiny"].data.tags
    assert child["mlflow.parentRunId"] == parent.id
    assert (child["stage"], child["beamline.key"]) == ("reinforce", "k2")


def test_the_parent_reaches_a_child_process(client, recipe):
    program = "from tasks import track\nwith track.stage('tiny', 'prepare', 'k'): pass"
    with track.pipeline("tiny", recipe) as parent:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert runs(client)["prepare@tiny"].data.tags["mlflow.parentRunId"] == parent.id


def test_a_stage_alone_is_a_top_level_run(client):
    with track.stage("tiny", "prepare", "k"):
        pass
    assert "mlflow.parentRunId" not in runs(client)["prepare@tiny"].data.tags


def test_an_inherited_pipeline_is_put_back(folder, recipe, monkeypatch):
    monkeypatch.setenv(track.PIPELINE_RUN, "outer")
    with track.pipeline("tiny", recipe) as run:
        assert os.environ[track.PIPELINE_RUN] == run.id
    assert os.environ[track.PIPELINE_RUN] == "outer"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_how_a_run_ends(client, recipe, error, status):
    with pytest.raises(error), track.pipeline("tiny", recipe), track.stage("tiny", "prepare", "k"):
        raise error("stop")
    assert [run.info.status for run in runs(client).values()] == [status, status]
    assert track.PIPELINE_RUN not in os.environ


def test_a_killed_stage_is_taken_up_by_its_key(client, recipe):
    program = (
        "import os, signal\n"
        "from tasks import track\n"
        "with track.stage('tiny', 'reinforce', 'same', {'git.dirty': 'true'}) as run:\n"
        "    run.metrics({'reward': 0.5}, 0, 1000.0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment)
    assert killed.returncode == -signal.SIGKILL
    left = runs(client)["reinforce@tiny"]
    assert left.info.status == "RUNNING"

    with (
        track.pipeline("tiny", recipe) as parent,
        track.stage("tiny", "reinforce", "another") as other,
        track.stage("tiny", "reinforce", "same", {"git.dirty": "false"}) as run,
    ):
        run.metrics({"reward": 0.5}, 0, 1000.0)
        run.metrics({"reward": 0.6}, 1, 1001.0)
    assert other.id != left.info.run_id
    assert run.id == left.info.run_id
    again = client.get_run(run.id)
    assert again.info.status == "FINISHED"
    assert again.data.tags["mlflow.parentRunId"] == parent.id
    assert again.data.tags["git.dirty"] == "false"
    assert history(client, run, "reward") == [(0, 1000_000, 0.5), (1, 1001_000, 0.6)]

    with track.stage("tiny", "reinforce", "same") as fresh:  # an ended run is not taken up
        pass
    assert fresh.id != run.id


def test_the_prefect_run_is_a_tag(client, monkeypatch):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "from-the-worker")
    with (
        track.stage("tiny", "prepare", "1"),
        track.stage("tiny", "evaluate", "2", {"prefect.flow_run": "own"}),
    ):
        pass
    found = runs(client)
    assert found["prepare@tiny"].data.tags["prefect.flow_run"] == "from-the-worker"
    assert found["evaluate@tiny"].data.tags["prefect.flow_run"] == "own"


# what a run holds


def test_recipe_is_flattened_once(client, recipe):
    with track.pipeline("tiny", recipe) as run:
        pass
    assert client.get_run(run.id).data.params == {
        "seed": "3",
        "dialogue.system": "Use the tool: it's exact.",
        "dialogue.tools": '["python"]',
        "reinforce.algorithm": "arpo",
        "reinforce.rollout.leaves": "4",
        "reinforce.rollout.draw": "false",
        "reinforce.rollout.temperature": "1.0",
    }


def test_more_parameters_than_one_batch_takes(client):
    with track.stage("tiny", "prepare", "k") as run:
        run.params({"part": {str(n): n for n in range(250)}})
    assert len(client.get_run(run.id).data.params) == 250


KEYS = st.sampled_from(["seed", "rollout", "leaves", "größe"])


@given(
    st.recursive(
        st.dictionaries(KEYS, st.integers(), min_size=1),
        lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        max_leaves=5,
    )
)
def test_flatten_keeps_every_value_under_its_path(values):
    def at(path):
        found = values
        for key in path.split("."):
            found = found[key]
        return found

    def leaves(value):
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    flat = track.flatten(values)
    assert len(flat) == leaves(values)
    assert all(json.loads(text) == at(path) for path, text in flat.items())


def test_a_replay_adds_no_row(client, database):
    records = [({"reward": 0.1 * step, "kl": math.nan}, step, 1e9 + step / 3) for step in range(4)]
    with track.stage("tiny", "reinforce", "k") as run:
        for _ in range(3):
            for values, step, at in records:
                run.metrics(values, step, at)
    rows = database.execute("SELECT key, count(*) FROM metrics GROUP BY key").fetchall()
    assert dict(rows) == {"reward": 4, "kl": 4}
    assert history(client, run, "reward")[1] == (1, 1_000_000_000_333, 0.1)
    assert client.get_run(run.id).data.metrics["reward"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("pass@1", "pass_at_1"),
        ("success/two steps", "success/two steps"),
        ("reward (mean), %", "reward _mean__ _"),
    ],
)
def test_metric_names_are_made_acceptable(client, name, accepted):
    assert track.metric_name(name) == accepted
    with track.stage("tiny", "evaluate", "k") as run:
        run.metrics({name: 0.5}, 0, 1.0)
    assert client.get_run(run.id).data.metrics == {accepted: 0.5}


def test_a_table_is_a_table_to_mlflow_and_replaces_itself(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", track.store_uri())  # load_table looks nowhere else
    rows = [{"kind": "sum", "success": 0.5}, {"kind": "product", "low": math.nan}]
    with track.stage("tiny", "evaluate", "k") as run:
        run.table([{"kind": "old"}], "success.json")
        run.table(rows, "success.json")
        run.table(rows[:1], "other.json")
    experiment = client.get_experiment_by_name(track.EXPERIMENT)
    table = client.load_table(experiment.experiment_id, "success.json", run_ids=[run.id])
    assert table.columns.tolist() == ["kind", "success", "low"]
    assert table["kind"].tolist() == ["sum", "product"]
    assert table["success"][0] == 0.5
    assert table["low"].isna().all()
    shown = json.loads(client.get_run(run.id).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in shown] == ["success.json", "other.json"]


def test_files_and_figures_lie_beside_the_store(client, folder):
    from matplotlib.figure import Figure

    (folder / "verdict.json").write_text("{}")
    with track.stage("tiny", "prepare", "k") as run:
        run.file(folder / "verdict.json")
        run.figure(Figure(), "curve.png")
    kept = folder / ".beamline" / "mlartifacts" / run.id / "artifacts"
    assert (kept / "verdict.json").read_text() == "{}"
    assert (kept / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {found.path for found in client.list_artifacts(run.id)} == {"verdict.json", "curve.png"}
    assert sorted(path.name for path in folder.iterdir()) == [".beamline", "verdict.json"]


def test_processes_that_start_at_once_share_a_new_store(tmp_path):
    program = (
        "import sys\nfrom tasks import track\nwith track.stage('tiny', sys.argv[1], 'k'): pass"
    )
    environment = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, name],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        for name in ("prepare", "evaluate")
    ]
    assert [process.communicate()[1] for process in started] == [b"", b""]
    with closing(sqlite3.connect(tmp_path / ".beamline" / "mlflow.db")) as connection:
        found = connection.execute("SELECT name, status FROM runs").fetchall()
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert sorted(found) == [("evaluate@tiny", "FINISHED"), ("prepare@tiny", "FINISHED")]
    assert [path.name for path in (tmp_path / ".beamline").iterdir()] == ["mlflow.db"]


# a store that is away


def test_a_new_store_is_made_where_the_environment_says(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere/runs.db")
    with track.stage("tiny", "prepare", "k") as run:
        run.table([{"a": 1}], "a.json")
    assert (tmp_path / "elsewhere/mlartifacts" / run.id / "artifacts/a.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert capfd.readouterr() == ("", "")


def test_a_locked_store_is_written_later(client, database, monkeypatch, caplog):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    monkeypatch.setattr(track, "RETRY_AFTER", 0.0)
    with track.stage("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.metrics({"reward": 0.1}, 0, 1.0)
        run.tags({"note": "kept"})
        assert "cannot be written" in caplog.text
        database.execute("ROLLBACK")
        run.metrics({"reward": 0.2}, 1, 2.0)
        assert [value for *_, value in history(client, run, "reward")] == [0.1, 0.2]
    assert client.get_run(run.id).data.tags["note"] == "kept"
    assert client.get_run(run.id).info.status == "FINISHED"


def test_a_failed_attempt_is_followed_by_a_pause_that_the_end_does_not_keep(
    client, database, monkeypatch, caplog
):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    with track.stage("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        for step in range(3):
            run.metrics({"reward": 0.1}, step, 1.0)
        assert caplog.text.count("cannot be written") == 1
        database.execute("ROLLBACK")
    assert [step for step, *_ in history(client, run, "reward")] == [0, 1, 2]


def test_a_store_locked_at_the_start_takes_the_run_at_the_end(
    client, database, recipe, monkeypatch
):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    database.execute("BEGIN IMMEDIATE")
    with track.pipeline("tiny", recipe) as run:
        assert run.id is None
        assert track.PIPELINE_RUN not in os.environ
        database.execute("ROLLBACK")
    assert client.get_run(run.id).info.status == "FINISHED"
    assert client.get_run(run.id).data.params["seed"] == "3"


@pytest.mark.parametrize("store", ["http://127.0.0.1:9", "sqlite:///broken.db"])
def test_training_goes_on_without_a_store(folder, monkeypatch, caplog, store):
    (folder / "broken.db").write_text("this is no database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with caplog.at_level(logging.WARNING), track.stage("tiny", "reinforce", "k") as run:
        run.metrics({"reward": 0.1}, 0, 1.0)
    assert f"2 records of run 'reinforce@tiny' are lost: the tracking store {store}" in caplog.text


def test_a_record_at_fault_does_not_hold_up_the_others(client, folder, caplog):
    with track.stage("tiny", "prepare", "k") as run:
        run.params({"seed": 1})
        run.params({"seed": 2})
        run.file(folder / "missing.json")
        run.metrics({"reward": 0.5}, 0, 1.0)
    assert caplog.text.count("was left out") == 2
    found = client.get_run(run.id)
    assert (found.data.params, found.data.metrics) == ({"seed": "1"}, {"reward": 0.5})


def test_importing_the_module_does_not_import_mlflow():
    program = "import sys\nfrom tasks import track\nprint('mlflow' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout == "False\n"
