import json
import logging
import math
import os
import signal
import socket
import sqlite3
import time
import urllib.request
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.tracking import outbox, store
from flows.tracking import run as tracking
from flows.tracking.run import PIPELINE_RUN, pipeline_run, send_unsent, stage_run
from params.schema.agent import Dialogue
from params.schema.defaults import defaults
from params.schema.recipe import Recipe
from params.schema.reinforce import Reinforce, Rollout
from tests.mlflow_store import found_traces, history, runs, sample


@pytest.fixture
def recipe():
    """A few sections of a recipe: what they hold is the schema's business."""
    dialogue = Dialogue.model_construct(system="Use the tool: it's exact.")
    rollout = Rollout.model_construct(leaves=4, draw=False, temperature=1.0)
    reinforce = Reinforce.model_construct(algorithm="arpo", rollout=rollout)
    made = Recipe.model_construct(seed=3, dialogue=dialogue, reinforce=reinforce)
    return made.model_dump(mode="json")


# runs and their order


def test_stages_nest_under_their_pipeline(client, recipe, child):
    tags = {"mlflow.source.git.commit": "abc123", "git.dirty": "true"}
    with pipeline_run("tiny", recipe, tags) as parent:
        assert os.environ[PIPELINE_RUN] == parent.id
        with stage_run("tiny", "prepare", "k1") as first, stage_run("tiny", "reinforce", "k2"):
            assert client.get_run(first.id).info.status == "RUNNING"
        code = (
            "from flows.tracking.run import stage_run\nwith stage_run('tiny', 'evaluate', 'k'): 0"
        )
        assert child(code).wait() == (0, "")
    assert PIPELINE_RUN not in os.environ

    found = runs(client)
    assert set(found) == {parent.name, "prepare@tiny", "reinforce@tiny", "evaluate@tiny"}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert found[parent.name].data.tags.items() >= (tags | {"recipe": "tiny"}).items()
    assert parent.name.startswith("tiny 20")
    stages = [run.data.tags for name, run in found.items() if name != parent.name]
    assert {tags["mlflow.parentRunId"] for tags in stages} == {parent.id}
    child_tags = found["reinforce@tiny"].data.tags
    assert (child_tags["stage"], child_tags["beamline.key"]) == ("reinforce", "k2")


def test_stage_alone_is_a_top_level_run(client):
    with stage_run("tiny", "prepare", "k"):
        pass
    assert "mlflow.parentRunId" not in runs(client)["prepare@tiny"].data.tags


def test_inherited_pipeline_is_restored(folder, recipe, monkeypatch):
    monkeypatch.setenv(PIPELINE_RUN, "outer")
    with pipeline_run("tiny", recipe) as run:
        assert os.environ[PIPELINE_RUN] == run.id
    assert os.environ[PIPELINE_RUN] == "outer"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_status_after_an_exception(client, recipe, error, status):
    with pytest.raises(error), pipeline_run("tiny", recipe), stage_run("tiny", "prepare", "k"):
        raise error("stop")
    assert [run.info.status for run in runs(client).values()] == [status, status]
    assert PIPELINE_RUN not in os.environ


def test_killed_stage_is_resumed_by_its_key(client, recipe, child):
    killed = child(
        "import os, signal\n"
        "from flows.tracking.run import stage_run\n"
        "with stage_run('tiny', 'reinforce', 'same', {'git.dirty': 'true'}) as run:\n"
        "    run.log_metrics({'reward': 0.5}, 0, 1000.0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert killed.wait()[0] == -signal.SIGKILL
    left = runs(client)["reinforce@tiny"]
    assert left.info.status == "RUNNING"

    with (
        pipeline_run("tiny", recipe) as parent,
        stage_run("tiny", "reinforce", "another") as other,
        stage_run("tiny", "reinforce", "same", {"git.dirty": "false"}) as run,
    ):
        run.log_metrics({"reward": 0.5}, 0, 1000.0)
        run.log_metrics({"reward": 0.6}, 1, 1001.0)
    assert other.id != left.info.run_id
    assert run.id == left.info.run_id
    again = client.get_run(run.id)
    assert again.info.status == "FINISHED"
    assert again.data.tags["mlflow.parentRunId"] == parent.id
    assert again.data.tags["git.dirty"] == "false"
    assert history(client, run, "reward") == [(0, 1000_000, 0.5), (1, 1001_000, 0.6)]

    with stage_run("tiny", "reinforce", "same") as fresh:  # an ended run is not resumed
        pass
    assert fresh.id != run.id


def test_living_stage_is_not_resumed(client, child):
    with stage_run("tiny", "reinforce", "same") as first:
        code = "from flows.tracking.run import stage_run\nwith stage_run('tiny', 'x', 'same'): 0"
        assert child(code).wait() == (0, "")
        assert client.get_run(first.id).info.status == "RUNNING"


def test_prefect_flow_run_is_a_tag(client, monkeypatch):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "from-the-worker")
    with (
        stage_run("tiny", "prepare", "1"),
        stage_run("tiny", "evaluate", "2", {"prefect.flow_run": "own"}),
    ):
        pass
    found = runs(client)
    assert found["prepare@tiny"].data.tags["prefect.flow_run"] == "from-the-worker"
    assert found["evaluate@tiny"].data.tags["prefect.flow_run"] == "own"


# what a run holds


def test_recipe_is_flattened_once(client, recipe):
    with pipeline_run("tiny", recipe) as run:
        pass
    params = client.get_run(run.id).data.params
    written = {
        "seed": "3",
        "dialogue.system": "Use the tool: it's exact.",
        "dialogue.prompt": "growing",
        "dialogue.history": "2",
        "dialogue.prompt_tokens": "null",
        "reinforce.algorithm": "arpo",
        "reinforce.rollout.leaves": "4",
        "reinforce.rollout.draw": "false",
        "reinforce.rollout.temperature": "1.0",
        "reinforce.turns_per_policy": "null",
    }
    assert written.items() <= params.items()
    assert set(params) - set(written) <= set(defaults())


def test_parameters_of_several_batches(client):
    with stage_run("tiny", "prepare", "k") as run:
        run.log_params({"part": {str(n): n for n in range(250)}})
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

    flat = tracking.flatten(values)
    assert len(flat) == leaves(values)
    assert all(json.loads(text) == at(path) for path, text in flat.items())


def test_replay_adds_no_row(client, database):
    records = [({"reward": 0.1 * step, "kl": math.nan}, step, 1e9 + step / 3) for step in range(4)]
    with stage_run("tiny", "reinforce", "k") as run:
        for _ in range(3):
            for values, step, at in records:
                run.log_metrics(values, step, at)
    rows = database.execute("SELECT key, count(*) FROM metrics GROUP BY key").fetchall()
    assert dict(rows) == {"reward": 4, "kl": 4}
    assert history(client, run, "reward")[1] == (1, 1_000_000_000_333, 0.1)
    assert client.get_run(run.id).data.metrics["reward"] == pytest.approx(0.3)


def test_metric_names_are_made_acceptable(client):
    names = {
        "pass@1": "pass_at_1",
        "success/two steps": "success/two steps",
        "reward (mean), %": "reward _mean__ _",
    }
    with stage_run("tiny", "evaluate", "k") as run:
        run.log_metrics(dict.fromkeys(names, 0.5), 0, 1.0)
    assert client.get_run(run.id).data.metrics == dict.fromkeys(names.values(), 0.5)


def test_table_is_shown_and_replaces_itself(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.store_uri())  # load_table reads nothing else
    rows = [{"kind": "sum", "success": 0.5}, {"kind": "product", "low": math.nan}]
    with stage_run("tiny", "evaluate", "k") as run:
        run.log_table([{"kind": "old"}], "success.json")
        run.log_table(rows, "success.json")
        run.log_table(rows[:1], "other.json")
    experiment = client.get_experiment_by_name(store.EXPERIMENT)
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
    with stage_run("tiny", "prepare", "k") as run:
        run.log_file(folder / "verdict.json")
        run.log_figure(Figure(), "curve.png")
    kept = folder / ".beamline" / "mlartifacts" / run.id / "artifacts"
    assert (kept / "verdict.json").read_text() == "{}"
    assert (kept / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {found.path for found in client.list_artifacts(run.id)} == {"verdict.json", "curve.png"}
    assert sorted(path.name for path in folder.iterdir()) == [".beamline", "verdict.json"]


# an unreachable store


def test_locked_store_is_written_later(client, database, monkeypatch, caplog):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.1)
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.0)
    with stage_run("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.log_metrics({"reward": 0.1}, 0, 1.0)
        run.set_tags({"note": "kept"})
        assert "cannot be written" in caplog.text
        database.execute("ROLLBACK")
        run.log_metrics({"reward": 0.2}, 1, 2.0)
        assert [value for *_, value in history(client, run, "reward")] == [0.1, 0.2]
    assert client.get_run(run.id).data.tags["note"] == "kept"
    assert client.get_run(run.id).info.status == "FINISHED"


def test_pause_after_a_failure_ends_with_the_run(client, database, monkeypatch, caplog):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.1)
    with stage_run("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        for step in range(3):
            run.log_metrics({"reward": 0.1}, step, 1.0)
        assert caplog.text.count("cannot be written") == 1
        database.execute("ROLLBACK")
        run.log_metrics({"reward": 0.1}, 3, 1.0)
        assert history(client, run, "reward") == [], "no attempt within the pause"
    assert [step for step, *_ in history(client, run, "reward")] == [0, 1, 2, 3]


def test_store_locked_at_the_start(client, database, recipe, monkeypatch):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.1)
    database.execute("BEGIN IMMEDIATE")
    with pipeline_run("tiny", recipe) as run:
        assert run.id is None
        assert os.environ[PIPELINE_RUN].startswith(tracking.UNSENT)
        database.execute("ROLLBACK")
    assert client.get_run(run.id).info.status == "FINISHED"
    assert client.get_run(run.id).data.params["seed"] == "3"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "sqlite:///broken.db"])
def test_training_goes_on_without_a_store(folder, monkeypatch, caplog, address):
    (folder / "broken.db").write_text("this is no database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with caplog.at_level(logging.WARNING), stage_run("tiny", "reinforce", "k") as run:
        run.log_metrics({"reward": 0.1}, 0, 1.0)
    assert caplog.text.count("2 messages are unsent, queued in .beamline/unsent") == 1
    assert caplog.text.count("cannot be written") == 1
    assert address in caplog.text
    [folder] = outbox.unsent_runs()
    kept = [outbox.read(file).kind for file in outbox.Outbox(folder).files()]
    assert kept == ["metrics", "end"]


def test_faulty_message_does_not_hold_up_others(client, folder, caplog):
    with stage_run("tiny", "prepare", "k") as run:
        run.log_params({"seed": 1})
        run.log_params({"seed": 2})
        run.log_file(folder / "missing.json")
        run.log_metrics({"reward": 0.5}, 0, 1.0)
    assert caplog.text.count("was dropped") == 2
    found = client.get_run(run.id)
    assert (found.data.params, found.data.metrics) == ({"seed": "1"}, {"reward": 0.5})


QUEUEING = """
import os, signal
from flows.tracking.run import pipeline_run, stage_run
with pipeline_run('tiny', {'seed': 3}), \\
     stage_run('tiny', 'reinforce', 'same') as run:
    run.log_metrics({'reward': 0.5, 'kl': float('nan')}, 0, 1000.0)
    run.log_table([{'a': 1}], 'a.json')
    %s
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def unreachable(folder):
    """The store's file lies elsewhere; calling this brings it back and connects to it."""
    file = folder / ".beamline" / "mlflow.db"
    for part in file.parent.glob("mlflow.db*"):
        part.rename(folder / part.name)
    file.symlink_to(folder)  # a folder: it cannot be opened

    def bring_back():
        file.unlink()
        for part in folder.glob("mlflow.db*"):
            part.rename(file.parent / part.name)
        return store.connect(store.store_uri())

    return bring_back


def test_unsent_messages_are_sent_in_order(unreachable, child):
    status, printed = child(QUEUEING % "pass").wait()
    assert status == 0
    assert printed.count("cannot be written") == 2, "once a run"
    unsent = [outbox.Outbox(folder).files() for folder in outbox.unsent_runs()]
    assert [len(files) for files in unsent] == [2, 3]
    client = unreachable()
    assert send_unsent() == 5
    assert send_unsent() == 0
    parent, stage = sorted(runs(client).values(), key=lambda run: "stage" in run.data.tags)
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {parent.info.status, stage.info.status} == {"FINISHED"}
    assert parent.data.params["seed"] == "3"
    assert stage.data.metrics["reward"] == 0.5
    assert list(outbox.root().iterdir()) == []


def test_run_killed_without_a_store_is_resumed(unreachable, child):
    assert child(QUEUEING % KILL).wait()[0] == -signal.SIGKILL
    client = unreachable()
    with stage_run("tiny", "reinforce", "same") as run:
        run.log_metrics({"reward": 0.5}, 0, 1000.0)
        run.log_metrics({"reward": 0.6}, 1, 1001.0)
    assert set(runs(client)) >= {"reinforce@tiny"}
    assert len(runs(client)) == 2
    assert history(client, run, "reward") == [(0, 1000_000, 0.5), (1, 1001_000, 0.6)]


def test_repeated_sending_adds_nothing(unreachable, folder, child):
    assert child(QUEUEING % "pass").wait()[0] == 0
    kept = {file: file.read_bytes() for file in outbox.root().rglob("*") if file.is_file()}
    client = unreachable()
    for _ in range(2):
        send_unsent()
        for file, content in kept.items():  # as if it had been killed before it removed them
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
    send_unsent()
    assert len(runs(client)) == 2
    with closing(sqlite3.connect(folder / ".beamline" / "mlflow.db")) as database:
        rows = database.execute("SELECT key, count(*) FROM metrics GROUP BY key").fetchall()
    assert rows == [("kl", 1), ("reward", 1)]


def test_queue_of_a_living_run_is_left_to_it(client, database, monkeypatch, child):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.1)
    with stage_run("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.log_metrics({"reward": 0.1}, 0, 1.0)
        database.execute("ROLLBACK")
        code = "from flows.tracking.run import send_unsent\nprint(send_unsent())"
        assert child(code).wait() == (0, "0\n")
    assert history(client, run, "reward") == [(0, 1000, 0.1)]


def test_store_comes_back_as_a_copy_or_empty(client, folder, empty_store, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.0)
    file = folder / ".beamline" / "mlflow.db"
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_metrics({"reward": 0.1}, 0, 1.0)
        first = run.id
        file.rename(folder / "moved.db")
        run.log_metrics({"reward": 0.2}, 1, 2.0)
        assert not file.exists(), "another store is not made in its place"
        file.write_bytes((folder / "moved.db").read_bytes())
        run.log_metrics({"reward": 0.3}, 2, 3.0)
        assert run.id == first
        again = store.connect(store.store_uri())
        assert [value for *_, value in history(again, run, "reward")] == [0.1, 0.2, 0.3]
        file.unlink()
        run.log_metrics({"reward": 0.4}, 3, 4.0)
        file.write_bytes(empty_store)
    assert run.id != first
    again = store.connect(store.store_uri())
    assert [value for *_, value in history(again, run, "reward")] == [0.4]
    assert again.get_run(run.id).info.status == "FINISHED"


def test_worktree_leaves_its_queue_with_the_checkout(folder, monkeypatch):
    worktree = folder / ".beamline/runs/tiny-1"
    worktree.mkdir(parents=True)
    monkeypatch.chdir(worktree)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with stage_run("tiny", "reinforce", "k"):
        pass
    assert len(list((folder / ".beamline/unsent").iterdir())) == 1
    assert list(worktree.iterdir()) == []


def test_full_disk_does_not_end_the_run(folder, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (folder / ".beamline" / "unsent").write_text("no folder")
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_metrics({"reward": 0.1}, 0, 1.0)
    assert caplog.text.count("was dropped") == 2


# a server that is stopped and started


SERVE = """
import os, uvicorn
from mlflow import server
os.environ[server.BACKEND_STORE_URI_ENV_VAR] = "sqlite:///{0}/server.db"
os.environ[server.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
os.environ[server.ARTIFACTS_DESTINATION_ENV_VAR] = "{0}/artifacts"
os.environ[server.SERVE_ARTIFACTS_ENV_VAR] = "true"
os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
uvicorn.run("mlflow.server.fastapi_app:app", port={1})
"""


class Server:
    """An MLflow server on loopback that can be stopped and started at the same address.

    It is what MLflow's command runs, in a process that need not import MLflow first.
    """

    def __init__(self, folder, child):
        self.folder, self.child = folder, child
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        self.process = self.child(SERVE.format(self.folder, self.port))
        while self.process.lives():
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"MLflow's server did not start: {self.process.wait()}")

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def server(folder, empty_store, child):
    (folder / "server.db").write_bytes(empty_store)
    server = Server(folder, child)
    yield server
    server.stop()


def test_restarted_server_has_everything_once(server, saved, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.0)
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_metrics({"reward": 0.1}, 0, 1.0)
        assert caplog.text.count("cannot be written") == 1
        server.start()
        run.log_metrics({"reward": 0.2}, 1, 2.0)
        client = store.connect(server.address)
        assert [step for step, *_ in history(client, run, "reward")] == [0, 1]
        server.stop()
        run.log_metrics({"reward": 0.3}, 2, 3.0)
        run.log_traces(lambda: sample(saved))
        run.log_table([{"a": 1}], "a.json")
        assert caplog.text.count("cannot be written") == 2
    server.start()
    assert send_unsent() == 4
    client = store.connect(server.address)
    assert [step for step, *_ in history(client, run, "reward")] == [0, 1, 2]
    assert client.get_run(run.id).info.status == "FINISHED"
    assert len(found_traces(client, run_id=run.id)) == 6
    assert [entry.path for entry in client.list_artifacts(run.id)] == ["a.json"]


def test_server_that_hangs_is_not_waited_for_in_each_process(folder, monkeypatch):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections wait in its queue
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        began = time.monotonic()
        with stage_run("toy", "reinforce", "key", {}) as run:
            run.log_metrics({"loss": 1.0}, step=0, at=1.0)
        assert time.monotonic() - began < 5  # MLflow's own client takes 20 s
    assert run.is_queued
