import copy
import json
from pathlib import Path

import pytest

from flows.host import disk
from flows.host.disk import GIB, needs
from params.schema import prepare
from params.schema import reinforce as reinforce_module
from params.schema.algorithms import load_algorithms
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact
from tasks.policy import checkpoint, resident
from tasks.policy.tiny import build_policy
from tasks.recipes import load as settings_of

SMOKE = settings_of("smoke")
ROWS = load_algorithms()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recipe(**reinforce):
    return SMOKE.model_copy(update={"reinforce": SMOKE.reinforce.model_copy(update=reinforce)})


def granted(gib, chosen=SMOKE):
    machine = chosen.machine.model_copy(update={"disk_gib": gib})
    return chosen.model_copy(update={"machine": machine})


def keep(every, last):
    return reinforce_module.Keep(weights_every=every, optimizer_last=last)


def test_parameters_are_those_of_the_real_policy(tiny, tokenizer, policy):
    model = build_policy(tiny, tokenizer, seed=0)
    counted = disk.parameters(tiny.model_copy(update={"vocabulary": len(tokenizer)}))
    assert counted == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("every", "last", "weights", "optimizers"),
    [(1, 1, 20, 2), (5, 1, 5, 2), (5, 3, 7, 6), (100, 30, 20, 40), (20, 20, 20, 40)],
)
def test_weights_are_kept_by_tier(every, last, weights, optimizers):
    need = needs(recipe(iterations=20, keep=keep(every, last)), ROWS["arpo"], 1000)["reinforce"]
    assert need.weights == 1000 * (weights + 2)  # the trained policy is published, too
    assert need.optimizers == 1000 * optimizers


def test_policies_of_batches_that_wait_are_kept_without_their_optimizers():
    chosen = recipe(iterations=20, keep=keep(5, 2), ahead=3)
    need = needs(chosen, ROWS["arpo"], 1000)["reinforce"]
    assert need.weights == 1000 * (20 // 5 + 4 + 2)
    assert need.optimizers == 1000 * 2 * 2


def test_critic_with_its_own_backbone_doubles_the_need():
    chosen = recipe(iterations=20, keep=keep(5, 1))
    alone, critic = (needs(chosen, ROWS[name], 1000)["reinforce"] for name in ("grpo", "ppo"))
    assert critic.optimizers == 2 * alone.optimizers
    assert critic.passing == 2 * alone.passing
    assert critic.weights - alone.weights == 5 * 1000


def test_iterations_keep_adapters_alone(policy, tmp_path):
    lora = reinforce_module.Lora(rank=4, alpha=8, modules=("q_proj", "down_proj"))
    assert disk.adapter_of("mine", lora) is None
    policy.save_pretrained("models/mine/initial")
    learning = resident.Learner(tmp_path, copy.deepcopy(policy), None)
    checkpoint.prepare_adapter(learning, lora, Artifact.at(Path("models/mine/initial")), seed=0)
    own = [weight for weight in learning.model.parameters() if weight.requires_grad]
    size = disk.adapter_of("mine", lora)
    assert size == sum(4 * weight.numel() for weight in own)
    chosen = recipe(iterations=20, keep=keep(5, 1))
    need, critic = (needs(chosen, ROWS[name], 1000, 10)["reinforce"] for name in ("grpo", "ppo"))
    assert (need.weights, need.optimizers, need.passing) == (5 * 10 + 2 * 1000, 2 * 10, 3 * 10)
    assert critic.passing == 3 * (1000 + 10), "all weights of a critic of its own learn"


LEARNED = settings_of("tiny-reward-model")


@pytest.mark.parametrize(
    ("steps", "again", "checkpoints"),
    [
        (150, 20, (2, 0)),
        (151, 51, (3, 1)),
        (999, 999, (3, 3)),
        (50, 50, (0, 0)),
        (50, None, (0, 0)),
    ],
)
def test_checkpoints_of_a_reward_model_pass_and_its_trees_stay(steps, again, checkpoints):
    settings = LEARNED.reward_model.model_copy(update={"steps": steps, "save_every": 50})
    changed = settings.again.model_copy(update={"steps": again}) if again else None
    settings = settings.model_copy(update={"again": changed})
    need = needs(LEARNED.model_copy(update={"reward_model": settings}), ROWS["grpo"], 1000, 10)
    first, training = need["reward_model"], need["reinforce"]
    assert (first.weights, first.passing) == (2000, checkpoints[0] * 3000)
    leaves = settings.questions * LEARNED.reinforce.rollout.leaves
    assert first.trees == 2 * leaves * LEARNED.dialogue.path_tokens * disk.TOKEN
    assert training.passing == max(3 * 10, checkpoints[1] * 3000), "whole weights, not adapters"


def test_trees_count_at_full_length_in_all_batches():
    tokens = 2 * 4 * 6 * 144  # iterations, questions, leaves, tokens
    alone = needs(SMOKE, ROWS["arpo"], 1)["reinforce"].trees
    assert alone == 2 * tokens * disk.TOKEN
    assert needs(SMOKE, ROWS["dapo"], 1)["reinforce"].trees == 10 * alone


def test_run_with_enough_space_is_accepted():
    disk.check("smoke", SMOKE, ROWS["arpo"])
    disk.check("smoke", granted(1), ROWS["arpo"])


def test_run_without_space_is_refused_with_a_remedy(monkeypatch):
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError) as refused:
        disk.check("smoke", SMOKE, ROWS["arpo"])
    said = str(refused.value)
    assert said.startswith("params/smoke.yaml: the run may need 0.0")
    assert "GiB more on disk (weights 0.0" in said
    assert "and 0.00093 GiB are free: make room, or raise reinforce.keep.weights_every" in said


def test_run_that_is_granted_too_little_is_refused():
    with pytest.raises(ValueError, match=r"machine\.disk_gib grants 0\.001: raise it, or raise"):
        disk.check("smoke", granted(0.001), ROWS["arpo"])


def test_present_files_count_as_granted(monkeypatch):
    disk.check("smoke", granted(0.02), ROWS["arpo"])
    file = artifacts.ROOT / "smoke/prepare/0000-prepare-1/trees"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"0" * (GIB // 50))
    with pytest.raises(ValueError, match=r"beside 0\.020 GiB that are there"):
        disk.check("smoke", granted(0.02), ROWS["arpo"])


def test_only_stages_that_will_run_need_space(monkeypatch):
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    learned = settings_of("tiny-reward-model")
    for stage in disk.STAGES[:-1]:
        with pytest.raises(ValueError, match="are free"):
            disk.check("tiny-reward-model", learned, ROWS["arpo"], [stage])
    disk.check("smoke", SMOKE, ROWS["arpo"], ["reward_model", "verdict"])
    disk.check("smoke", SMOKE, ROWS["arpo"], [])


def test_size_of_a_downloaded_policy_is_measured(monkeypatch):
    pretrained = prepare.PretrainedPolicy(kind="pretrained", name="a/b", revision=None, context=9)
    assert disk.weights_of("mine", pretrained) is None
    Path("models/mine/initial").mkdir(parents=True)
    for number in range(2):
        Path(f"models/mine/initial/model-{number}.safetensors").write_bytes(b"0" * 50)
    Path("models/mine/initial/tokenizer.json").write_text("{}")
    for dtype, size in (("float32", 100), ("bfloat16", 200)):
        Path("models/mine/initial/config.json").write_text(json.dumps({"dtype": dtype}))
        assert disk.weights_of("mine", pretrained) == size, "training is in float32"


def test_granted_space_is_in_no_key():
    assert granted(1).machine.model_dump() == SMOKE.machine.model_dump()
    assert keys.stage_key(granted(1)) == keys.stage_key(SMOKE)
