import signal
from dataclasses import replace

import pytest

from flows.tracking import store, trace_writing, traces
from flows.tracking.run import stage_run
from tests.mlflow_store import branched, found_traces, history, sample, save_iteration

SEVEN, EIGHT = "train-00007", "train-00008"


@pytest.fixture(scope="module")
def traced(tmp_path_factory, empty_store):
    """A client, and a run that has written the traces of two questions with three leaves each."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "mlflow.db").write_bytes(empty_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        saved = save_iteration(folder / "iteration", branched(SEVEN), branched(EIGHT))
        with stage_run("tiny", "reinforce", "k") as run:
            run.log_traces(lambda: sample(saved))
        return store.connect(store.store_uri()), run


def leaves(client, filter_string):
    """Question and leaf of the traces that a search finds."""
    tags = [trace.info.tags for trace in found_traces(client, filter_string)]
    return sorted((each["question"], int(each["leaf"])) for each in tags)


def test_trajectory_has_a_span_for_each_turn_and_call(traced):
    client, _ = traced
    [trace] = found_traces(client, "tags.question = 'train-00007' AND tags.leaf = '0'")
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


def test_times_of_spans_are_token_positions(traced):
    client, _ = traced
    [trace] = found_traces(client, "tags.question = 'train-00007' AND tags.leaf = '0'")
    began = 1_700_000_000_000
    assert (trace.info.request_time, trace.info.execution_duration) == (began, 28)
    spans_ms = [
        (span.start_time_ns // 10**6 - began, span.end_time_ns // 10**6 - began)
        for span in trace.data.spans
    ]
    assert sorted(spans_ms) == [(0, 28), (10, 18), (18, 22), (22, 28)]
    assert trace.info.token_usage["total_tokens"] == 28


def test_branches_share_nodes(traced):
    client, _ = traced

    def nodes(leaf):
        [trace] = found_traces(client, f"tags.question = 'train-00007' AND tags.leaf = '{leaf}'")
        parts = [span.attributes for span in trace.data.spans if span.parent_id]
        return {part["node"]: (part["shared"], part["leaves"]) for part in parts}

    assert nodes(0) == {1: (True, [0, 1]), 2: (True, [0, 1]), 3: (False, [0])}
    assert nodes(1) == {1: (True, [0, 1]), 2: (True, [0, 1]), 4: (False, [1])}
    assert nodes(2) == {5: (False, [2])}


def test_list_shows_question_answer_and_reward(traced):
    client, _ = traced
    [trace] = found_traces(client, "tags.question = 'train-00008' AND tags.leaf = '2'")
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
def test_traces_are_found(traced, search, expected):
    client, _ = traced
    assert leaves(client, search) == expected


def test_traces_are_found_by_their_run(traced):
    client, run = traced
    assert len(found_traces(client, run_id=run.id)) == 6
    assert {t.info.trace_metadata["mlflow.sourceRun"] for t in found_traces(client)} == {run.id}


def test_replay_adds_no_trace_and_no_feedback(client, saved, database):
    counts = "SELECT (SELECT count(*) FROM trace_info), count(*) FROM assessments"
    with stage_run("tiny", "reinforce", "k") as first:
        first.log_traces(lambda: sample(saved))
    before = database.execute(counts).fetchone()
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(lambda: sample(saved, at=1_800_000_000.0))
        run.log_traces(lambda: sample(saved))
    assert database.execute(counts).fetchone() == before == (6, 24)
    assert run.id != first.id
    assert len(found_traces(client, run_id=run.id)) == 6, "they are linked to the later run too"
    assert len(found_traces(client, run_id=first.id)) == 6


def test_missing_traces_are_added(client, saved):
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(lambda: sample(saved)[:2])
        assert len(found_traces(client)) == 2
        run.log_traces(lambda: sample(saved))
    assert leaves(client, None) == [(q, leaf) for q in (SEVEN, EIGHT) for leaf in range(3)]


def test_traces_of_several_batches(client, folder, monkeypatch):
    monkeypatch.setattr(trace_writing, "ENTITIES_PER_BATCH", 2)
    saved = save_iteration(folder / "many", *(branched(f"train-{n}") for n in range(3)))
    for _ in range(2):
        with stage_run("tiny", "reinforce", "k") as run:
            run.log_traces(lambda: sample(saved))
        assert len(found_traces(client, run_id=run.id)) == len(found_traces(client)) == 9


def test_traces_without_spans_are_completed(client, saved, database, child):
    killed = child(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from mlflow.tracing.client import TracingClient\n"
        "from flows.tracking import traces\n"
        "from flows.tracking.run import stage_run\n"
        "from tasks.ledger.artifacts import Artifact\nfrom tasks.ledger.substeps import SubStep\n"
        "TracingClient.log_spans = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "saved = [Artifact.at(Path('iteration', n)) for n in ('trees', 'rewards.parquet')]\n"
        "step = SubStep('tiny', 'reinforce', 20, 0)\n"
        "with stage_run('tiny', 'reinforce', 'k') as run:\n"
        "    run.log_traces(lambda: traces.sample(step, *saved, 1_700_000_000.0, 1))\n"
    )
    assert killed.wait()[0] == -signal.SIGKILL
    assert database.execute("SELECT count(*) FROM trace_info").fetchone() == (3,)
    assert database.execute("SELECT count(*) FROM spans").fetchone() == (0,)

    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(lambda: sample(saved))
    found = found_traces(client, run_id=run.id)
    assert sorted(len(trace.data.spans) for trace in found) == [2, 2, 4, 4, 4, 4]
    assert {len(trace.info.assessments) for trace in found} == {4}


def test_traces_are_queued(client, saved, database, monkeypatch, caplog):
    monkeypatch.setattr(store, "LOCK_WAIT", 0.1)
    with stage_run("tiny", "reinforce", "k") as run:
        database.execute("BEGIN IMMEDIATE")
        run.log_traces(lambda: sample(saved))
        assert "queued in .beamline/unsent" in caplog.text
        database.execute("ROLLBACK")
    assert len(found_traces(client, run_id=run.id)) == 6
    assert {len(trace.info.assessments) for trace in found_traces(client)} == {4}


def test_missing_trees_do_not_hold_up_metrics(client, saved, folder, caplog):
    (folder / "iteration" / "rewards.parquet").unlink()
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(lambda: sample(saved))
        run.log_metrics({"reward": 0.5}, 0, 1.0)
    assert "was dropped" in caplog.text
    assert history(client, run, "reward") == [(0, 1000, 0.5)]


def test_store_without_traces_takes_metrics(client, caplog):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import NOT_IMPLEMENTED

    def refused():
        raise MlflowException("no traces here", NOT_IMPLEMENTED)

    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(refused)
        run.log_metrics({"reward": 0.5}, 0, 1.0)
    assert "no traces here" in caplog.text
    assert history(client, run, "reward") == [(0, 1000, 0.5)]


def test_hostile_texts_stay_readable(client, folder):
    call = "<python>" + "x\x00" * 50_000 + "</python>"
    odd = branched("it's \x00", call, '<result>"}]}\x1b[2J \ufdd0</result>', "error")
    made = sample(save_iteration(folder / "hostile", odd))
    unwritable = replace(made[0].spans[1], outputs=traces.printable("\ud800 half a pair"))
    made[0] = replace(made[0], spans=(made[0].spans[0], unwritable, *made[0].spans[2:]))
    with stage_run("tiny", "reinforce", "k") as run:
        run.log_traces(lambda: made)
    assert len(found_traces(client, run_id=run.id)) == 3
    [trace] = found_traces(client, "tags.leaf = '1'")
    [tool] = [span for span in trace.data.spans if span.span_type == "TOOL"]
    assert tool.inputs["call"].endswith("[cut: 100,000 characters in all]")
    assert tool.outputs["result"] == '<result>"}]}\ufffd[2J \ufffd</result>'
    assert tool.status.status_code == "ERROR"
    assert tool.status.description == "error"
    assert trace.info.tags["question"] == "it's \ufffd"
