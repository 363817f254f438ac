"""A run that samples through vLLM, killed in the middle, gives an unbroken one's digests."""

from functools import partial

from tests.chaos import runs


def sample_through_vllm(folder):
    """Make smoke, in a clean checkout, a recipe that samples through vLLM."""
    place = folder / "params/smoke.yaml"
    text = place.read_text()
    for old, new in (("kind: transformers #", "kind: vllm #"), ("memory: 1.0 #", "memory: 0.25 #")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    place.write_text(text)
    runs.git(folder, "commit", "--quiet", "--all", "--message", "vLLM")


def test_killed_run_gives_an_unbroken_ones_digests(tmp_path):
    folder = runs.create(tmp_path / "killed/main")
    sample_through_vllm(folder)
    runs.prepare(folder, "cold_start")
    unbroken = runs.copy(folder, tmp_path / "unbroken/main")
    runs.finish(unbroken)
    run = runs.start(folder)
    runs.wait_for(run, partial(runs.begun, folder, "0001-rollout"))
    runs.kill(runs.below(run.pid))
    run.wait()
    runs.finish(folder)
    assert runs.outcome(folder) == runs.outcome(unbroken)
    runs.check_sound(folder)
