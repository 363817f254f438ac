import pytest

from flows.host import disk, requirements
from flows.host.requirements import Devices
from tasks import recipes
from tasks.engines.vllm import kind as vllm
from tasks.learning.learner_group import LAUNCH
from tests import toy_project as toy

SERVERS = 'engine.servers=["http://gpu:8000"]'
CUDA = "machine.device=cuda"


def changed(name, *changes):
    return recipes.load_changed(name, changes, toy.ROOT / "params")


def test_a_device_that_torch_cannot_use_is_named_with_a_remedy(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that a machine with GPUs has none, too
    [fault] = requirements.faults(changed("smoke", CUDA), {})
    assert fault.startswith("'machine.device' = 'cuda': torch ")
    assert "built without CUDA" in fault or "CUDA_VISIBLE_DEVICES, which is ''" in fault
    for remedy in ("set machine.device: cpu", "a worker with a GPU", "beamline plan"):
        assert remedy in fault


@pytest.mark.parametrize(
    ("changes", "environment", "stages", "lacking"),
    [
        ([CUDA], {}, ["evaluate"], True),
        ([CUDA], {}, ["cold_start"], True),
        ([CUDA], {}, ["prepare", "champion", "verdict"], False),
        ([CUDA, SERVERS], {}, ["evaluate"], False),
        ([CUDA, SERVERS], {}, ["reinforce"], True),
        ([CUDA, SERVERS, "machine.processes=2"], {LAUNCH: "srun"}, ["reinforce"], False),
        ([CUDA, "machine.processes=2"], {LAUNCH: "srun"}, ["reinforce"], True),
        ([], {}, disk.STAGES, False),
    ],
)
def test_only_stages_that_compute_here_need_the_device(
    monkeypatch, changes, environment, stages, lacking
):
    monkeypatch.setattr(requirements, "_devices", lambda device: Devices("has no GPU", 0))
    recipe = changed("smoke", *changes)
    assert bool(requirements.faults(recipe, environment, stages)) is lacking


@pytest.mark.parametrize(("gpus", "processes", "lacking"), [(1, 1, 0), (1, 2, 1), (2, 2, 0)])
def test_a_gpu_is_needed_for_each_learner_process(monkeypatch, gpus, processes, lacking):
    monkeypatch.setattr(requirements, "_devices", lambda device: Devices(None, gpus))
    monkeypatch.setattr(requirements.gpu, "visible", lambda: [])  # a GPU without nvidia-smi
    recipe = changed("smoke", CUDA, f"machine.processes={processes}")
    faults = requirements.faults(recipe, {}, ["cold_start"])
    assert len(faults) == lacking
    assert all(f"'machine.processes' = {processes}, and this" in fault for fault in faults)


@pytest.mark.parametrize("installed", [False, True])
def test_missing_engine_is_found_where_a_stage_samples(monkeypatch, installed):
    monkeypatch.setattr(vllm, "find_spec", lambda name: (installed and name == "vllm") or None)
    faults = {
        stage: requirements.faults(changed("tiny-vllm"), {}, [stage]) for stage in disk.STAGES
    }
    sampling = {"reinforce", "evaluate"}
    assert {stage for stage in faults if faults[stage]} == (set() if installed else sampling)
    assert requirements.faults(changed("tiny-vllm", SERVERS), {}) == []


def test_stages_that_sample_need_the_engine():
    sampling = {
        name: [stage for stage in disk.STAGES if requirements.samples(stage, changed(name))]
        for name in ("tiny", "tiny-reward-model")
    }
    assert sampling == {
        "tiny": ["reinforce", "evaluate"],
        "tiny-reward-model": ["reward_model", "reinforce", "evaluate"],
    }
