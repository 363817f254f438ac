"""The stages of the recipe gsm8k-smoke on GSM8K's files below data/sources/, in this process."""

import contextlib
import io
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from prefect.context import refresh_global_settings_context

from flows.stages.champion import champion_flow
from flows.stages.cold_start import cold_start_flow
from flows.stages.evaluate import evaluate_flow
from flows.stages.prepare import prepare_flow
from flows.stages.reinforce import reinforce_flow
from flows.stages.reward_model import reward_model_flow
from flows.stages.verdict import verdict_flow
from flows.workers import stage
from params import overrides, recipe_files
from tests.checkout import checkout

STAGES = (
    champion_flow,
    prepare_flow,
    cold_start_flow,
    reward_model_flow,
    reinforce_flow,
    evaluate_flow,
    verdict_flow,
)

SET_ASIDE = 5  # for validation; the recipe sets aside 200, more than the fixtures have


@pytest.fixture(scope="module")
def run(tmp_path_factory, data, api):
    folder = tmp_path_factory.mktemp("gsm8k")
    checkout(folder)
    (folder / "data/sources/gsm8k").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        shutil.copy(data / f"gsm8k/{split}.jsonl", folder / "data/sources/gsm8k")
    fewer = [f"prepare.questions.validation={SET_ASIDE}", "evaluate.questions=12"]
    overrides.apply_to("gsm8k-smoke", fewer, folder / "params")
    recipe_files.refresh("gsm8k-smoke", folder / "params")
    threads, said = torch.get_num_threads(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
    ):
        patch.setenv("PREFECT_API_URL", api)
        refresh_global_settings_context()
        assert [stage.run(flow, "gsm8k-smoke") for flow in STAGES] == [0] * len(STAGES)
    refresh_global_settings_context()
    torch.set_num_threads(threads)
    return folder, said.getvalue()


def test_it_ends_with_a_table_of_the_test_questions(run):
    table = (run[0] / "reports/gsm8k-smoke/table.md").read_text()
    assert "success, gsm8k (%) | 12 |" in table


def test_every_training_row_is_a_verified_trace_or_dropped_for_a_reason(run, data):
    folder, said = run
    made = folder / "data/gsm8k-smoke"
    traces = pq.read_table(made / "traces.parquet")["question_id"].to_pylist()
    dropped = pq.read_table(made / "dropped.parquet").to_pylist()
    aside = pq.read_table(made / "questions/validation.parquet")["id"].to_pylist()
    rows = len((data / "gsm8k/train.jsonl").read_text().splitlines())
    unanswered = [each["question_id"] for each in dropped]
    assert sorted([*traces, *unanswered, *aside]) == sorted(
        f"gsm8k-train-{number:05d}" for number in range(1, rows + 1)
    )
    assert all(each["reason"] and each["reason"] in said for each in dropped)
    assert len(traces) >= 0.85 * (rows - SET_ASIDE)


def test_every_trace_computes_its_answer_with_a_tool(run):
    traces = pq.read_table(run[0] / "data/gsm8k-smoke/traces.parquet")["text"].to_pylist()
    assert all("<python>" in text and "<result>" in text for text in traces)
