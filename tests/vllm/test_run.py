"""A run that samples through vLLM, killed in the middle, gives an unbroken one's digests."""

import pytest

from tests.chaos import runs

WITH_VLLM = (*runs.AS_COMMIT, "--set", "engine.kind=vllm", "--set", "engine.memory=0.25")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return runs.create(tmp_path_factory.mktemp("bare") / "main")


def test_killed_run_gives_an_unbroken_ones_digests(bare, tmp_path):
    unbroken = runs.copy(bare, tmp_path / "unbroken" / "main")
    runs.finish(unbroken, WITH_VLLM)
    folder = runs.copy(bare, tmp_path / "killed" / "main")
    run = runs.start(folder, WITH_VLLM)
    runs.wait_for(run, lambda: begun(folder, "0001-rollout"))
    runs.kill(runs.below(run.pid))
    run.wait()
    runs.finish(folder, WITH_VLLM)
    assert runs.outcome(folder, WITH_VLLM) == runs.outcome(unbroken, WITH_VLLM)
    runs.check_sound(folder)


def begun(folder, sub_step):
    """Whether a sub-step of reinforce is being written in the worktree of the run."""
    places = (folder / ".beamline/runs").glob(f"*/{runs.LEDGER}/reinforce/.{sub_step}-*.partial")
    return any(places)
