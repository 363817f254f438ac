import json
import logging
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.tracking import outbox, trace_writing
from flows.tracking import run as run_module
from flows.tracking import store as track
from flows.tracking import traces as spans
from params.schema.agent import Dialogue
from params.schema.recipe import Recipe
from params.schema.reinforce import Reinforce, Rollout
from tasks.ledger import artifacts as ledger
from tasks.ledger.artifacts import Artifact
from tasks.reward import TABLE
from tasks.trees.tables import save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

ROOT = Path(__file__).parents[3]


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
    for name in ("MLFLOW_TRACKING_URI", run_module.PIPELINE_RUN, "PREFECT__FLOW_RUN_ID"):
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
    with run_module.pipeline("tiny", recipe, tags) as parent:
        assert os.environ[run_module.PIPELINE_RUN] == parent.id
        with (
            run_module.stage("tiny", "prepare", "k1") as first,
            run_module.stage("tiny", "reinforce", "k2"),
        ):
            assert client.get_run(first.id).info.status == "RUNNING"
    assert run_module.PIPELINE_RUN not in os.environ

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
    with run_module.pipeline("tiny", recipe) as parent:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert runs(client)["prepare@tiny"].data.tags["mlflow.parentRunId"] == parent.id


def test_a_stage_alone_is_a_top_level_run(client):
    with run_module.stage("tiny", "prepare", "k"):
        pass
    assert "mlflow.parentRunId" not in runs(client)["prepare@tiny"].data.tags


def test_an_inherited_pipeline_is_put_back(folder, recipe, monkeypatch):
    monkeypatch.setenv(run_module.PIPELINE_RUN, "outer")
    with run_module.pipeline("tiny", recipe) as run:
        assert os.environ[run_module.PIPELINE_RUN] == run.id
    assert os.environ[run_module.PIPELINE_RUN] == "outer"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_how_a_run_ends(client, recipe, error, status):
    with (
        pytest.raises(error),
        run_module.pipeline("tiny", recipe),
        run_module.stage("tiny", "prepare", "k"),
    ):
        raise error("stop")
    assert [run.info.status for run in runs(client).values()] == [status, status]
    assert run_module.PIPELINE_RUN not in os.environ


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
        run_module.pipeline("tiny", recipe) as parent,
        run_module.stage("tiny", "reinforce", "another") as other,
        run_module.stage("tiny", "reinforce", "same", {"git.dirty": "false"}) as run,
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

    with run_module.stage("tiny", "reinforce", "same") as fresh:  # an ended run is not taken up
        pass
    assert fresh.id != run.id


def test_the_prefect_run_is_a_tag(client, monkeypatch):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "from-the-worker")
    with (
        run_module.stage("tiny", "prepare", "1"),
        run_module.stage("tiny", "evaluate", "2", {"prefect.flow_run": "own"}),
    ):
        pass
    found = runs(client)
    assert found["prepare@tiny"].data.tags["prefect.flow_run"] == "from-the-worker"
    assert found["evaluate@tiny"].data.tags["prefect.flow_run"] == "own"


# what a run holds


def test_recipe_is_flattened_once(client, recipe):
    with run_module.pipeline("tiny", recipe) as run:
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
    with run_module.stage("tiny", "prepare", "k") as run:
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

    flat = run_module.flatten(values)
    assert len(flat) == leaves(values)
    assert all(json.loads(text) == at(path) for path, text in flat.items())


def test_a_replay_adds_no_row(client, database):
    records = [({"reward": 0.1 * step, "kl": math.nan}, step, 1e9 + step / 3) for step in range(4)]
    with run_module.stage("tiny", "reinforce", "k") as run:
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
    assert run_module.metric_name(name) == accepted
    with run_module.stage("tiny", "evaluate", "k") as run:
        run.metrics({name: 0.5}, 0, 1.0)
    assert client.get_run(run.id).data.metrics == {accepted: 0.5}


def test_a_table_is_a_table_to_mlflow_and_replaces_itself(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", track.store_uri())  # load_table looks nowhere else
    rows = [{"kind": "sum", "success": 0.5}, {"kind": "product", "low": math.nan}]
    with run_module.stage("tiny", "evaluate", "k") as run:
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
    with run_module.stage("tiny", "prepare", "k") as run:
        run.file(folder / "verdict.json")
        run.figure(Figure(), "curve.png")
    kept = folder / ".beamline" / "mlartifacts" / run.id / "artifacts"
    assert (kept / "verdict.json").read_text() == "{}"
    assert (kept / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {found.path for found in client.list_artifacts(run.id)} == {"verdict.json", "curve.png"}
    assert sorted(path.name for path in folder.iterdir()) == [".beamline", "verdict.json"]


def test_processes_that_start_at_once_share_a_new_store(tmp_path):
    program = """import sys
from tasks import track
name = sys.argv[1]
with track.stage("tiny", name, key=name): pass  # of one key, the second would take up the first"""
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
    with run_module.stage("tiny", "prepare", "k") as run:
        run.table([{"a": 1}], "a.json")
    assert (tmp_path / "elsewhere/mlartifacts" / run.id / "artifacts/a.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert capfd.readouterr() == ("", "")


def test_a_locked_store_is_written_later(client, database, monkeypatch, caplog):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    monkeypatch.setattr(run_module, "RETRY_AFTER", 0.0)
    with run_module.stage("tiny", "reinforce", "k") as run:
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
    with run_module.stage("tiny", "reinforce", "k") as run:
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
    with run_module.pipeline("tiny", recipe) as run:
        assert run.id is None
        assert os.environ[run_module.PIPELINE_RUN].startswith(run_module.UNTRACKED)
        database.execute("ROLLBACK")
    assert client.get_run(run.id).info.status == "FINISHED"
    assert client.get_run(run.id).data.params["seed"] == "3"


@pytest.mark.parametrize("store", ["http://127.0.0.1:9", "sqlite:///broken.db"])
def test_training_goes_on_without_a_store(folder, monkeypatch, caplog, store):
    (folder / "broken.db").write_text("this is no database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with caplog.at_level(logging.WARNING), run_module.stage("tiny", "reinforce", "k") as run:
        run.metrics({"reward": 0.1}, 0, 1.0)
    said = "2 records of run 'reinforce@tiny' wait in .beamline/untracked for the tracking store "
    assert caplog.text.count(f"{said}{store}") == 1
    assert caplog.text.count("cannot be written") == 1
    [folder] = outbox.waiting()
    kept = [outbox.read(entry).kind for entry in outbox.entries(folder)]
    assert kept == ["metrics", "end"]


def test_a_record_at_fault_does_not_hold_up_the_others(client, folder, caplog):
    with run_module.stage("tiny", "prepare", "k") as run:
        run.params({"seed": 1})
        run.params({"seed": 2})
        run.file(folder / "missing.json")
        run.metrics({"reward": 0.5}, 0, 1.0)
    assert caplog.text.count("was left out") == 2
    found = client.get_run(run.id)
    assert (found.data.params, found.data.metrics) == ({"seed": "1"}, {"reward": 0.5})


UNTOLD = """
import os, signal
from tasks import track
from params.schema import Recipe
with track.pipeline('tiny', Recipe.model_construct(seed=3)), \\
     track.stage('tiny', 'reinforce', 'same') as run:
    run.metrics({'reward': 0.5, 'kl': float('nan')}, 0, 1000.0)
    run.table([{'a': 1}], 'a.json')
    %s
"""


def told(folder, last="pass", **environment):
    """Run UNTOLD in a process of its own; its exit status, and what it says on standard error."""
    ran = subprocess.run(
        [sys.executable, "-c", UNTOLD % last],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    return ran.returncode, ran.stderr


@pytest.fixture
def away(folder):
    """The store's file lies elsewhere; calling this brings it back."""
    store = folder / ".beamline" / "mlflow.db"
    for file in store.parent.glob("mlflow.db*"):
        file.rename(folder / file.name)
    store.symlink_to(folder)  # a folder: it cannot be opened

    def bring_back():
        store.unlink()
        for file in folder.glob("mlflow.db*"):
            file.rename(store.parent / file.name)
        return track.connect(track.store_uri())

    return bring_back


def test_what_was_never_told_is_delivered_by_the_next_run_in_its_order(away, folder):
    status, said = told(folder)
    assert status == 0
    assert said.count("cannot be written") == 2, "once a run"
    assert [len(outbox.entries(each)) for each in outbox.waiting()] == [2, 3]
    client = away()
    assert run_module.deliver() == 5
    assert run_module.deliver() == 0
    parent, child = sorted(runs(client).values(), key=lambda run: "stage" in run.data.tags)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {parent.info.status, child.info.status} == {"FINISHED"}
    assert parent.data.params == {"seed": "3"}
    assert child.data.metrics["reward"] == 0.5
    assert list(outbox.root().iterdir()) == []


def test_a_run_killed_without_a_store_is_taken_up_when_it_is_back(away, folder):
    assert told(folder, "os.kill(os.getpid(), signal.SIGKILL)")[0] == -signal.SIGKILL
    client = away()
    with run_module.stage("tiny", "reinforce", "same") as run:
        run.metrics({"reward": 0.5}, 0, 1000.0)
        run.metrics({"reward": 0.6}, 1, 1001.0)
    assert set(runs(client)) >= {"reinforce@tiny"}
    assert len(runs(client)) == 2
    assert history(client, run, "reward") == [(0, 1000_000, 0.5), (1, 1001_000, 0.6)]


def test_a_delivery_that_is_cut_and_repeated_adds_nothing(away, folder):
    told(folder)
    kept = {file: file.read_bytes() for file in outbox.root().rglob("*") if file.is_file()}
    client = away()
    for _ in range(2):
        run_module.deliver()
        for file, content in kept.items():  # as if it had been killed before it removed them
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
    run_module.deliver()
    assert len(client.search_runs([client.get_experiment_by_name("beamline").experiment_id])) == 2
    with closing(sqlite3.connect(folder / ".beamline" / "mlflow.db")) as store:
        assert store.execute("SELECT key, count(*) FROM metrics GROUP BY key").fetchall() == [
            ("kl", 1),
            ("reward", 1),
        ]


def test_what_a_living_run_holds_is_left_to_it(client, database, monkeypatch):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    with run_module.stage("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.metrics({"reward": 0.1}, 0, 1.0)
        database.execute("ROLLBACK")
        program = "from tasks import track\nprint(track.deliver())"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        other = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert other.stdout == "0\n"
    assert history(client, run, "reward") == [(0, 1000, 0.1)]


def test_a_store_that_goes_away_and_comes_back_as_a_copy_or_empty_is_written(
    client, folder, empty_store, monkeypatch
):
    monkeypatch.setattr(run_module, "RETRY_AFTER", 0.0)
    store = folder / ".beamline" / "mlflow.db"
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.metrics({"reward": 0.1}, 0, 1.0)
        first = run.id
        store.rename(folder / "moved.db")
        run.metrics({"reward": 0.2}, 1, 2.0)
        assert not store.exists(), "another store is not made in its place"
        store.write_bytes((folder / "moved.db").read_bytes())
        run.metrics({"reward": 0.3}, 2, 3.0)
        assert run.id == first
        again = track.connect(track.store_uri())
        assert [value for *_, value in history(again, run, "reward")] == [0.1, 0.2, 0.3]
        store.unlink()
        run.metrics({"reward": 0.4}, 3, 4.0)
        store.write_bytes(empty_store)
    assert run.id != first
    again = track.connect(track.store_uri())
    assert [value for *_, value in history(again, run, "reward")] == [0.4]
    assert again.get_run(run.id).info.status == "FINISHED"


def test_a_stage_in_a_worktree_leaves_what_waits_with_its_checkout(folder, monkeypatch):
    worktree = folder / ".beamline/runs/tiny-1"
    worktree.mkdir(parents=True)
    monkeypatch.chdir(worktree)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with run_module.stage("tiny", "reinforce", "k"):
        pass
    assert len(list((folder / ".beamline/untracked").iterdir())) == 1
    assert list(worktree.iterdir()) == []


def test_a_disk_that_takes_nothing_does_not_end_the_run(folder, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (folder / ".beamline" / "untracked").write_text("no folder")
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.metrics({"reward": 0.1}, 0, 1.0)
    assert caplog.text.count("was left out") == 2


# a server that is stopped and started


def serve(folder, port):
    """An MLflow server on loopback, once it answers."""
    options = {
        "--port": str(port),
        "--workers": "1",
        "--backend-store-uri": f"sqlite:///{folder}/server.db",
        "--artifacts-destination": str(folder / "artifacts"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *(w for pair in options.items() for w in pair)],
        cwd=folder,
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return process
    raise AssertionError("MLflow's server did not start")


def stop(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_server_stopped_and_started_in_the_middle_of_a_run_has_all_of_it_once(
    folder, kept, port, empty_store, monkeypatch, caplog
):
    (folder / "server.db").write_bytes(empty_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(run_module, "RETRY_AFTER", 0.0)
    server = serve(folder, port)
    try:
        with run_module.stage("tiny", "reinforce", "k") as run:
            run.metrics({"reward": 0.1}, 0, 1.0)
            stop(server)
            run.metrics({"reward": 0.2}, 1, 2.0)
            run.traces(lambda: sample(kept))
            run.table([{"a": 1}], "a.json")
            assert caplog.text.count("cannot be written") == 1
            server = serve(folder, port)
            run.metrics({"reward": 0.3}, 2, 3.0)
            client = track.connect(track.store_uri())
            assert [step for step, *_ in history(client, run, "reward")] == [0, 1, 2]
            stop(server)
        [waits] = outbox.waiting()
        assert [outbox.read(entry).kind for entry in outbox.entries(waits)] == ["end"]
        server = serve(folder, port)
        assert run_module.deliver() == 1
        client = track.connect(track.store_uri())
        again = client.get_run(run.id)
        assert again.info.status == "FINISHED"
        assert len(found(client, run_id=run.id)) == 6
        assert [entry.path for entry in client.list_artifacts(run.id)] == ["a.json"]
    finally:
        stop(server)


# runs that nobody ends


def test_a_run_whose_process_is_gone_is_known_and_ended_and_others_are_let_be(client, folder):
    assert told(folder, "os.kill(os.getpid(), signal.SIGKILL)")[0] == -signal.SIGKILL
    ours = client.create_run(client.get_experiment_by_name("beamline").experiment_id)  # no tags
    with run_module.stage("tiny", "prepare", "k") as run:
        gone = track.abandoned()
        assert sorted(name.split()[0] for _, name in gone) == ["reinforce@tiny", "tiny"]
        for run_id, _ in gone:
            track.end_abandoned(run_id)
        track.end_abandoned(run.id)
        assert track.abandoned() == []
        assert client.get_run(run.id).info.status == "RUNNING"
    assert {client.get_run(run_id).info.status for run_id, _ in gone} == {"KILLED"}
    assert client.get_run(ours.info.run_id).info.status == "RUNNING"


def test_a_stage_that_lives_is_not_taken_up_by_another_of_its_key(client):
    with run_module.stage("tiny", "reinforce", "same") as first:
        program = "from tasks import track\nwith track.stage('tiny', 'reinforce', 'same'): pass"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        assert client.get_run(first.id).info.status == "RUNNING"


# trajectories as traces

CALL = "<think>first</think><python>print(6*7)</python>"


def node(parent, kind, outcome, text, length):
    measures = np.full(length if kind == TURN else 0, 0.25, np.float32)
    return Node(parent, kind, outcome, text, np.zeros(length, np.int32), -measures, measures)


def branched(name="train-00007", call=CALL, result="<result>42</result>", outcome="ok"):
    """A tree of which two leaves share a tool call and its result; the third stands alone."""
    question = Question(name, "chain", f"What is 6 times 7? ({name})", ("42",))
    nodes = [
        node(-1, PROMPT, "", question.text, 10),
        node(0, TURN, "call", call, 8),
        node(1, RESULT, outcome, result, 4),
        node(2, TURN, "answer", "<think>so</think><answer>\\boxed{42}</answer>", 6),
        node(2, TURN, "answer", "<think>so</think><answer>\\boxed{41}</answer>", 6),
        node(0, TURN, "cut", "<think>hm, hm, hm", 7),
    ]
    return Tree(question, nodes, leaves=[3, 4, 5])


def scores(tree):
    """Rows of the table of rewards: the leaves are right, wrong, and without an answer."""
    return [
        {
            "question": tree.question.id,
            "leaf": leaf,
            "reward": reward,
            "score": max(0.0, reward),
            "breakdown": [("score", max(0.0, reward))],  # as a table gives a map back
            "success": reward > 0,
            "answer": answer,
            "faults": faults,
            "outcome": tree.nodes[tree.leaves[leaf]].outcome,
            "response_tokens": 18,
            "sampled_tokens": 14,
        }
        for leaf, (answer, reward, faults) in enumerate(
            [("42", 1.0, []), ("41", 0.0, []), (None, -1.0, ["think", "answer"])]
        )
    ]


def keep(folder, *trees):
    """What the ledger has of an iteration with these trees: the artifacts "trees" and "rewards"."""
    rows = [row for tree in trees for row in scores(tree)]
    save_trees(trees, folder / "trees")
    write_table(pa.Table.from_pylist(rows, schema=TABLE), folder / "rewards.parquet")
    return Artifact.at(folder / "trees"), Artifact.at(folder / "rewards.parquet")


def sample(artifacts, iteration=20, at=1_700_000_000.0):
    return spans.sample(ledger.Step("tiny", "reinforce", iteration, 0), *artifacts, at, size=9)


@pytest.fixture
def kept(folder):
    return keep(folder / "iteration", branched("train-00007"), branched("train-00008"))


@pytest.fixture
def traced(client, kept):
    """A run that has written the traces of two questions with three leaves each."""
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: sample(kept))
    return run


def found(client, filter_string=None, **options):
    experiment = client.get_experiment_by_name(track.EXPERIMENT).experiment_id
    return client.search_traces(locations=[experiment], filter_string=filter_string, **options)


def leaves(client, filter_string):
    """Question and leaf of the traces that a search finds."""
    tags = [trace.info.tags for trace in found(client, filter_string)]
    return sorted((each["question"], int(each["leaf"])) for each in tags)


def test_a_trajectory_is_a_trace_with_a_span_a_turn_and_a_span_a_call(client, traced):
    [trace] = found(client, "tags.question = 'train-00007' AND tags.leaf = '0'")
    root, *parts = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    assert (root.span_type, root.parent_id) == ("AGENT", None)
    assert [part.span_type for part in parts] == ["CHAT_MODEL", "TOOL", "CHAT_MODEL"]
    assert {part.parent_id for part in parts} == {root.span_id}
    assert root.inputs["messages"][0]["content"] == "What is 6 times 7? (train-00007)"
    assert root.outputs == {"answer": "42"}
    assert parts[1].inputs == {"call": "print(6*7)"}
    assert parts[1].outputs == {"result": "<result>42</result>"}
    assert parts[0].attributes["mean_logprob"] == -0.25
    assert parts[0].attributes["outcome"] == "call"


def test_a_span_lies_where_its_tokens_lie(client, traced):
    [trace] = found(client, "tags.question = 'train-00007' AND tags.leaf = '0'")
    began = 1_700_000_000_000
    assert (trace.info.request_time, trace.info.execution_duration) == (began, 28)
    spans_ms = [
        (span.start_time_ns // 10**6 - began, span.end_time_ns // 10**6 - began)
        for span in trace.data.spans
    ]
    assert sorted(spans_ms) == [(0, 28), (10, 18), (18, 22), (22, 28)]
    assert trace.info.token_usage["total_tokens"] == 28


def test_branches_share_nodes_and_say_so(client, traced):
    def nodes(leaf):
        [trace] = found(client, f"tags.question = 'train-00007' AND tags.leaf = '{leaf}'")
        parts = [span.attributes for span in trace.data.spans if span.parent_id]
        return {part["node"]: (part["shared"], part["leaves"]) for part in parts}

    assert nodes(0) == {1: (True, [0, 1]), 2: (True, [0, 1]), 3: (False, [0])}
    assert nodes(1) == {1: (True, [0, 1]), 2: (True, [0, 1]), 4: (False, [1])}
    assert nodes(2) == {5: (False, [2])}


def test_a_list_of_traces_shows_question_answer_outcome_and_reward(client, traced):
    [trace] = found(client, "tags.question = 'train-00008' AND tags.leaf = '2'")
    info = trace.info
    assert info.request_preview == "What is 6 times 7? (train-00008)"
    assert info.response_preview == "no answer (cut)"
    assert info.tags["mlflow.traceName"] == "train-00008 leaf 2, iteration 20"
    assert info.state == "ERROR"
    feedback = {entry.name: entry.value for entry in info.assessments}
    assert feedback == {"reward": -1.0, "success": False, "outcome": "cut", "answer": "42"}
    reward = next(entry for entry in info.assessments if entry.name == "reward")
    assert reward.rationale == "format faults: think, answer"
    assert (reward.source.source_type, reward.source.source_id) == ("CODE", "tasks/reward.py")


SEVEN, EIGHT = "train-00007", "train-00008"


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("tags.question = 'train-00007'", [(SEVEN, 0), (SEVEN, 1), (SEVEN, 2)]),
        ("trace.text LIKE '%(train-00008)%'", [(EIGHT, 0), (EIGHT, 1), (EIGHT, 2)]),
        ("tags.outcome = 'cut'", [(SEVEN, 2), (EIGHT, 2)]),
        ("feedback.outcome = 'cut'", [(SEVEN, 2), (EIGHT, 2)]),
        ("attributes.status = 'ERROR'", [(SEVEN, 2), (EIGHT, 2)]),
        ("feedback.reward < 0", [(SEVEN, 2), (EIGHT, 2)]),
        ("feedback.reward >= 0.5", [(SEVEN, 0), (EIGHT, 0)]),
        ("feedback.reward <= 0 AND tags.question = 'train-00007'", [(SEVEN, 1), (SEVEN, 2)]),
        ("tags.reward = '1'", [(SEVEN, 0), (EIGHT, 0)]),
        ("feedback.success = 'true'", [(SEVEN, 0), (EIGHT, 0)]),
        ("tags.success = 'false' AND tags.faults = 'none'", [(SEVEN, 1), (EIGHT, 1)]),
        ("tags.iteration = '40'", []),
        (
            "span.name = 'python' AND tags.question = 'train-00008'",
            [(EIGHT, 0), (EIGHT, 1)],
        ),
    ],
)
def test_traces_are_found(client, traced, search, expected):
    assert leaves(client, search) == expected


def test_traces_are_found_by_their_run(client, traced):
    assert len(found(client, run_id=traced.id)) == 6
    assert {t.info.trace_metadata["mlflow.sourceRun"] for t in found(client)} == {traced.id}


def test_a_replay_adds_no_trace_and_no_feedback(client, kept, traced, database):
    counts = "SELECT (SELECT count(*) FROM trace_info), count(*) FROM assessments"
    before = database.execute(counts).fetchone()
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: sample(kept, at=1_800_000_000.0))
        run.traces(lambda: sample(kept))
    assert database.execute(counts).fetchone() == before == (6, 24)
    assert run.id != traced.id
    assert len(found(client, run_id=run.id)) == 6, "they are linked to the later run too"
    assert len(found(client, run_id=traced.id)) == 6


def test_what_is_missing_is_added(client, kept):
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: sample(kept)[:2])
        assert len(found(client)) == 2
        run.traces(lambda: sample(kept))
    assert leaves(client, None) == [(q, leaf) for q in (SEVEN, EIGHT) for leaf in range(3)]


def test_more_traces_than_one_search_takes(client, folder, monkeypatch):
    monkeypatch.setattr(trace_writing, "ENTITIES_PER_BATCH", 2)
    kept = keep(folder / "many", *(branched(f"train-{n}") for n in range(3)))
    for _ in range(2):
        with run_module.stage("tiny", "reinforce", "k") as run:
            run.traces(lambda: sample(kept))
        assert len(found(client, run_id=run.id)) == len(found(client)) == 9


def test_a_run_killed_between_traces_and_their_spans_is_completed(client, kept, database):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from mlflow.tracing.client import TracingClient\n"
        "from tasks import ledger, spans, track\n"
        "TracingClient.log_spans = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "kept = [Artifact.at(Path('iteration', n)) for n in ('trees', 'rewards.parquet')]\n"
        "step = ledger.Step('tiny', 'reinforce', 20, 0)\n"
        "with track.stage('tiny', 'reinforce', 'k') as run:\n"
        "    run.traces(lambda: spans.sample(step, *kept, 1_700_000_000.0, 1))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert database.execute("SELECT count(*) FROM trace_info").fetchone() == (3,)
    assert database.execute("SELECT count(*) FROM spans").fetchone() == (0,)

    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: sample(kept))
    traces = found(client, run_id=run.id)
    assert sorted(len(trace.data.spans) for trace in traces) == [2, 2, 4, 4, 4, 4]
    assert {len(trace.info.assessments) for trace in traces} == {4}


def test_traces_wait_for_a_store_that_is_away(client, kept, database, monkeypatch, caplog):
    monkeypatch.setattr(track, "LOCK_WAIT", 0.1)
    with run_module.stage("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.traces(lambda: sample(kept))
        assert "waits in .beamline/untracked" in caplog.text
        database.execute("ROLLBACK")
    assert len(found(client, run_id=run.id)) == 6
    assert {len(trace.info.assessments) for trace in found(client)} == {4}


def test_trees_that_are_gone_do_not_hold_up_the_other_records(client, kept, folder, caplog):
    (folder / "iteration" / "rewards.parquet").unlink()
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: sample(kept))
        run.metrics({"reward": 0.5}, 0, 1.0)
    assert "a record was left out" in caplog.text
    assert history(client, run, "reward") == [(0, 1000, 0.5)]


def test_a_store_that_knows_no_traces_still_takes_metrics(client, caplog):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import NOT_IMPLEMENTED

    def refused():
        raise MlflowException("no traces here", NOT_IMPLEMENTED)

    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(refused)
        run.metrics({"reward": 0.5}, 0, 1.0)
    assert "no traces here" in caplog.text
    assert history(client, run, "reward") == [(0, 1000, 0.5)]


def test_hostile_texts_are_kept_readable(client, folder):
    call = "<python>" + "x\x00" * 50_000 + "</python>"
    odd = branched("it's \x00", call, '<result>"}]}\x1b[2J \ufdd0</result>', "error")
    kept = keep(folder / "hostile", odd)
    traces = sample(kept)
    unwritable = replace(traces[0].spans[1], outputs=spans.printable("\ud800 half a pair"))
    traces[0] = replace(traces[0], spans=(traces[0].spans[0], unwritable, *traces[0].spans[2:]))
    with run_module.stage("tiny", "reinforce", "k") as run:
        run.traces(lambda: traces)
    assert len(found(client, run_id=run.id)) == 3
    [trace] = found(client, "tags.leaf = '1'")
    [tool] = [span for span in trace.data.spans if span.span_type == "TOOL"]
    assert tool.inputs["call"].endswith("[cut: 100,000 characters in all]")
    assert tool.outputs["result"] == '<result>"}]}\ufffd[2J \ufdd0</result>'
    assert tool.status.status_code == "ERROR"
    assert tool.status.description == "error"
    assert trace.info.tags["question"] == "it's \ufffd"


def test_importing_the_module_does_not_import_mlflow():
    program = "import sys\nfrom tasks import track\nprint('mlflow' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout == "False\n"
