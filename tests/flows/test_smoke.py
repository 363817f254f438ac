"""The whole pipeline on the smoke recipe, with real processes: twice, and once killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.checkout import call, checkout, environment, retrain

RETRAIN = retrain("smoke")
REPRO = (sys.executable, "-m", "dvc", "repro", "verdict@smoke")
STAGES = tuple(
    f"{stage}@smoke"
    for stage in ("champion", "prepare", "cold_start", "reinforce", "evaluate", "verdict")
)
LATER = ("reinforce", "evaluate", "verdict")  # than what takes most of the time


def kill_in_the_middle_of(folder, sub_step):
    """Start a run and SIGKILL its process group while ``sub_step`` is being written."""
    process = subprocess.Popen(
        RETRAIN,
        cwd=folder,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ledger = folder / ".beamline/ledger/smoke/reinforce"
    deadline = time.monotonic() + 240
    while not any(ledger.glob(f".{sub_step}-*.partial")):
        assert process.poll() is None, f"the run ended before {sub_step}"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not any(ledger.glob(f"{sub_step}-*")), "it had ended"


def digests(folder):
    locked = yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in STAGES for out in locked[stage]["outs"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    checkout(folder)
    ran = call(folder, *RETRAIN)
    assert ran.returncode == 0, ran.stdout
    return folder, ran.stdout


def test_a_run_ends_with_the_table_and_dvc_finds_nothing_left_to_do(unbroken):
    folder, said = unbroken
    table = (folder / "reports/smoke/table.md").read_text()
    assert table in said
    assert "success, arithmetic (%)" in table
    verdict = json.loads((folder / "reports/smoke/verdict.json").read_text())
    assert (
        f"verdict: {'promote' if verdict['promote'] else 'reject'}: {verdict['reason']}\n" in said
    )
    assert (verdict["against"], verdict["champion"], verdict["questions"]) == (
        "cold start",
        None,
        30,
    )
    assert {gate["table"] for gate in verdict["gates"]} >= {"questions", "traces", "rewards"}
    again = call(folder, *REPRO)
    assert "Data and pipelines are up to date." in again.stdout
    assert "Running stage" not in again.stdout


@pytest.fixture
def prepared(unbroken, tmp_path):
    """A checkout in which reinforce comes next, and nothing remembers that it has ever ended."""
    folder = tmp_path / "main"
    subprocess.run(["cp", "--archive", unbroken[0], folder], check=True)
    for left in (".dvc/cache/runs", *(f".beamline/ledger/smoke/{stage}" for stage in LATER)):
        shutil.rmtree(folder / left)
    lock = yaml.safe_load((folder / "dvc.lock").read_text())
    for stage in LATER:
        del lock["stages"][f"{stage}@smoke"]
    (folder / "dvc.lock").write_text(yaml.safe_dump(lock))
    return folder


def test_a_run_killed_twice_and_called_again_gives_the_same_digests(unbroken, prepared):
    """The short form of tests/chaos."""
    kill_in_the_middle_of(prepared, "0000-rollout")
    kill_in_the_middle_of(prepared, "0001-update")
    finished = call(prepared, *RETRAIN)
    assert finished.returncode == 0, finished.stdout
    assert "Running stage 'cold_start@smoke'" not in finished.stdout, "it had ended"
    assert digests(prepared) == digests(unbroken[0])
    assert len(digests(prepared)) >= 12
    assert {"data/smoke/corpus", "data/smoke/dropped.parquet"} <= set(digests(prepared))
    assert call(prepared, *RETRAIN).stdout.startswith("nothing to do: smoke is up to date")


def test_a_comparison_of_algorithms_takes_the_stages_before_as_they_are(unbroken):
    folder, _ = unbroken
    compare = (sys.executable, "-m", "flows.compare", "smoke", "--iterations", "1")
    ran = call(folder, *compare, "--algorithms", "grpo", "arpo")
    assert ran.returncode == 0, ran.stdout
    assert "Running stage" not in ran.stdout
    table = (folder / "reports/smoke/algorithms.md").read_text()
    assert table in ran.stdout
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["cold", "grpo", "arpo"]


def test_a_change_that_needs_pruned_weights_replays_the_updates(unbroken):
    folder, _ = unbroken
    before = digests(folder)
    recipe = folder / "params/smoke.yaml"
    recipe.write_text(recipe.read_text().replace("wall_seconds: 20.0", "wall_seconds: 30.0"))
    ran = call(folder, *RETRAIN)
    assert ran.returncode == 0, ran.stdout
    assert "has been pruned, and is needed again" in ran.stdout
    assert "reinforce@smoke has to run: params/smoke.yaml tools: modified" in ran.stdout
    after = digests(folder)
    changed = {path for path in before if after[path] != before[path]}
    said = {f"data/smoke/records/{stage}.jsonl" for stage in ("prepare", "reinforce", "evaluate")}
    assert changed == said, "only what the records say of the limits has changed"
