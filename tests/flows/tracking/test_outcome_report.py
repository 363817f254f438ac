"""What MLflow's list of runs and Prefect show of a whole run."""

import json
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.context import refresh_global_settings_context
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run, task_run

from flows.tracking import outcome_report, store
from flows.tracking.outcome_report import Findings
from flows.tracking.run import start_run
from flows.workers import connection
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question
from tests.waiting import wait_until

PANEL = {"digest": "d" * 64, "of": {"digest": "e" * 64, "tasks": 900}}
MEASURED = {
    "success": {
        "cold start": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "trained": {"mean": 0.75, "low": 0.7, "high": 0.8},
    },
    "tool calls a question": {"trained": {"mean": 1.5, "low": 1.0, "high": 2.0}},
}
VERDICT = {"promote": True, "reason": "every gate passed", "questions": 30}
CURVE = """iteration,reward,success,kl,loss,validation_success
0,0.5,0.25,0,1,0.4
1,0.75,0.5,,1,
2,,,,,0.6
"""


@pytest.fixture
def finished(folder):
    """What the stages of the recipe "toy" leave behind."""
    reports = Path("reports/toy")
    reports.mkdir(parents=True)
    (reports / "metrics.json").write_text(json.dumps({"panel": PANEL, **MEASURED}))
    (reports / "verdict.json").write_text(json.dumps(VERDICT))
    Path("data/toy").mkdir(parents=True)
    Path("data/toy/curve.csv").write_text(CURVE)
    (reports / "table.md").write_text("| | questions |\n|---|---:|\n| success (%) | 900 |\n")
    for split in ("train", "test"):
        save_questions(
            [Question("1", "sum", split, ("1",))], Path(f"data/toy/questions/{split}.parquet")
        )
    return folder


def test_run_has_figures_datasets_and_verdict(finished, client):
    run = start_run("toy", {"recipe": "toy"})
    for _ in range(2):  # a message may be sent twice
        outcome_report.log_outcome(run, "toy", {"prepare": 1.5, "reinforce": 2.0}, ["**Code**: c"])
    run.end("FINISHED")
    found = client.get_run(run.id)
    assert found.data.metrics == {
        **{
            "success/cold_start": 0.5,
            "success/cold_start_low": 0.4,
            "success/cold_start_high": 0.6,
        },
        **{"success/trained": 0.75, "success/trained_low": 0.7, "success/trained_high": 0.8},
        **{"tool_calls_a_question/trained": 1.5, "tool_calls_a_question/trained_low": 1.0},
        **{"tool_calls_a_question/trained_high": 2.0, "promote": 1.0},
        **{"seconds/prepare": 1.5, "seconds/reinforce": 2.0, "seconds/all": 3.5},
        **{"Progress/reward": 0.75, "Progress/success": 0.5, "Training/kl": 0.0},
    }
    reward = client.get_metric_history(run.id, "Progress/reward")
    assert {(point.step, point.value) for point in reward} == {(0, 0.5), (1, 0.75)}
    assert found.data.tags["verdict"] == "promote: every gate passed"
    named = {name: found.data.tags[name] for name in ("panel", "panel.of")}
    assert named == {"panel": "d" * 64, "panel.of": "e" * 64}
    assert found.data.tags["mlflow.note.content"].splitlines() == [
        "**Success** **75.0 %** [70.0, 80.0], before **50.0 %** [40.0, 60.0], 30 questions  ",
        "**Promote**: every gate passed  ",
        "**Code**: c",
    ]
    assert "| success (%) | 900 |" in store.artifact_text(run.id, "table.md")
    inputs = [
        (given.dataset.name, given.dataset.digest, given.tags[0].value)
        for given in found.inputs.dataset_inputs
    ]
    listed = outcome_report.datasets(Path("data/toy"))
    assert inputs == [(given["name"], given["digest"], given["context"]) for given in listed]
    assert [given["context"] for given in listed] == ["training", "evaluation"]
    assert listed[0]["digest"] != listed[1]["digest"]


def test_run_of_a_recipe_without_reports_has_its_seconds_alone(folder, client):
    run = start_run("toy", {"recipe": "toy"})
    outcome_report.log_outcome(run, "toy", {"first": 1.0})
    run.end("FINISHED")
    assert client.get_run(run.id).data.metrics == {"seconds/first": 1.0, "seconds/all": 1.0}


def test_pages_of_runs(folder, client):
    run = start_run("toy", {store.KIND_TAG: store.PIPELINE})
    page = store.page_of("http://here", run.id)
    assert page.startswith("http://here/#/experiments/")
    assert page.endswith(f"/runs/{run.id}?workflowType=machine_learning")
    assert store.page_of("http://here", "nobody") is None


def is_recorded(prefect, task_run):
    try:
        return bool(prefect.read_task_run(task_run))
    except ObjectNotFound:  # the server makes it of events
        return False


def test_flow_run_has_what_came_out_and_where_to_look(finished, client, api, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", api)
    refresh_global_settings_context()
    run = start_run("toy", {"recipe": "toy", store.KIND_TAG: store.PIPELINE})
    changed = {"reinforce.rate": ("0.1", "http://me:pw@a|b")}
    places = {"server": "http://prefect", "page": "/page/1", "question": "/page/1#q"}

    above = []

    @task
    def starting():
        above.append(task_run.id)

    @flow(name="schedule")
    def schedule():
        starting()
        return flow_run.id

    @flow(name="outcome")
    def ending():
        said = outcome_report.words("toy", run, {"prepare": 2.0})
        found = Findings(
            words=said,
            lost=[("test-3", "sum")],
            mlflow="http://here/#/page",
            which="train-7 (sum)",
            before="toy 0",
            changed=changed,
            **places,
        )
        outcome_report.show_in_prefect("toy", found, *above)
        outcome_report.show_in_prefect("qwen2.5_toy", Findings())

    with connection.prefect_server(), SyncPrefectClient(api) as prefect:
        scheduled = schedule()
        wait_until(lambda: is_recorded(prefect, *above))
        state = ending(return_state=True)
        its_own = ArtifactFilterFlowRunId(any_=[scheduled])
        [shown] = prefect.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=its_own))
        of_run = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id])
        )
        found = {made.key: made for made in prefect.read_artifacts(artifact_filter=of_run)}
    assert set(found) == {"mlflow-toy", "outcome-toy"}, "the other recipe has nothing to show"
    assert (shown.key, shown.data) == ("outcome-toy", found["outcome-toy"].data)
    assert "http://here/#/page" in found["mlflow-toy"].data
    assert found["outcome-toy"].description == "verdict: promote: every gate passed"
    assert found["outcome-toy"].data.split("\n\n") == [
        "- success 50.0 % (cold start) → 75.0 % [70.0, 80.0] (trained)\n"
        "- verdict: promote: every gate passed\n- took 2 s: prepare 2 s",
        "Begin with [train-7 (sum)](/page/1#q) · [the page of the run](/page/1) · "
        "[the run in MLflow](http://here/#/page)",
        "| differs from the run before | toy 0 | now |\n|---|---|---|\n"
        "| `reinforce.rate` | `0.1` | `http://a\\|b` |",
        "Held-out questions that are answered worse than before: test-3 (sum).",
        Path("reports/toy/table.md").read_text(),
    ]
