import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from params.schema.reinforce import Lora
from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import learner
from tasks.learning.packing import Credited, uncredited
from tasks.learning.passes import node_logprobs
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, checkpoint, resident
from tasks.policy.load_model import load_policy
from tasks.policy.machine import PRECISION
from tests.learners import GRPO, OWN, SETTINGS, SHARED, TEMPERATURE, made_trees, run, same, weights
from tests.sections import HALF, MACHINE
from tests.trees import credited, random_tree

LORA = Lora(rank=4, alpha=8, modules=("q_proj", "v_proj", "down_proj"))


def adapted(folder, settings=SETTINGS, critic=None, lora=LORA, seed=3):
    """A learner that learns by an adapter, as a new process would have it."""
    resident.POLICIES.clear()
    learning = resident.POLICIES.load_learner(folder, MACHINE)
    checkpoint.prepare_critic(learning, critic, MACHINE)
    checkpoint.prepare_adapter(learning, lora, Artifact.at(folder), seed)
    checkpoint.prepare_optimizer(learning, settings)
    return learning


def learned(folder, **given):
    """The same after an update."""
    learning = adapted(folder, **given)
    run(learning, made_trees())
    return learning


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 45)[None]).logits


def logprobs(model, machine=MACHINE):
    found = node_logprobs(model, made_trees(), TEMPERATURE, SETTINGS, machine)
    return np.concatenate([node for tree in found for node in tree])


def of_adapter(model):
    return {name: weight for name, weight in weights(model).items() if "lora" in name}


# ---------------------------------------------------------------- what learns


def test_new_adapter_changes_no_output(initial):
    plain = load_policy(initial, MACHINE)
    assert torch.equal(logits(adapted(initial).model), logits(plain))


def test_update_changes_the_adapter_alone(initial):
    learning = adapted(initial)
    before = weights(learning.model)
    run(learning, made_trees())
    after = weights(learning.model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == set(of_adapter(learning.model))
    held = sum(entry["exp_avg"].numel() for entry in learning.optimizer.state.values())
    assert held == sum(weight.numel() for weight in of_adapter(learning.model).values())
    names = {name.split(".")[-4] for name in changed}
    assert names == set(LORA.modules)


@pytest.mark.parametrize("machine", [MACHINE, HALF], ids=["float32", "bfloat16"])
def test_adapter_follows_the_advantages(initial, machine):
    """Also with passes in bf16: the small steps of weights are taken in float32."""
    tree = random_tree(5, leaves=2)
    good, bad = (
        replace(credit, advantages=np.full_like(credit.advantages, sign))
        for credit, sign in zip(credited(tree).credits, (1, -1), strict=True)
    )
    settings = SETTINGS.model_copy(update={"learning_rate": 1e-3, "weight_decay": 0.0})
    learning = adapted(initial, settings)
    own = [set(tree.path(leaf)) for leaf in tree.leaves]

    def totals():
        (by_node,) = node_logprobs(learning.model, [uncredited(tree)], 1.0, settings, MACHINE)
        return [sum(by_node[node].sum() for node in own[i] - own[1 - i]) for i in (0, 1)]

    before = totals()
    for _ in range(3):
        batch = [Credited(tree, [good, bad])]
        learner.optimize(learning, batch, GRPO, settings, 1.0, machine, seed=1)
    after = totals()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_seed_decides_the_adapter(initial):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    one, other, third = (of_adapter(adapted(initial, seed=seed).model) for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert same(one, other)
    assert not same(one, third)


@pytest.mark.parametrize("name", ["kproj", "lm_head", "embed_tokens", "input_layernorm"])
def test_unknown_module_is_refused(initial, name):
    wrong = LORA.model_copy(update={"modules": ("q_proj", name)})
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ValueError, match=rf"lora.modules names {name}, .* some of {names}$"):
        adapted(initial, lora=wrong)


@pytest.mark.parametrize("threads", [1, 2])
def test_adapter_learns_alike_with_recomputation(initial, threads):
    torch.set_num_threads(threads)
    found = []
    for recompute in (False, True):
        settings = SETTINGS.model_copy(update={"recompute": recompute, "mini_batches": 2})
        learning = adapted(initial, settings)
        run(learning, made_trees(5), settings)
        own = [weight for weight in learning.model.parameters() if weight.requires_grad]
        found.append((of_adapter(learning.model), [weight.grad for weight in own]))
    torch.set_num_threads(MACHINE.threads)
    assert same(found[0][0], found[1][0])
    assert all(torch.equal(*both) for both in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_critic_beside_an_adapter_learns_all_weights(initial, critic, tmp_path):
    learning = adapted(initial, critic=critic)
    assert learning.critic
    run(learning, made_trees(values=True))
    assert all(weight.grad is not None for weight in learning.critic.weights())
    checkpoint.save(learning, tmp_path)
    run(learning, made_trees(seed=9, values=True))
    restarted = adapted(tmp_path / checkpoint.POLICY, critic=critic)
    run(restarted, made_trees(seed=9, values=True))
    assert same(weights(restarted.model), weights(learning.model))
    assert same(weights(restarted.critic.head), weights(learning.critic.head))


def test_new_critic_of_an_adapter_has_merged_weights(initial):
    learning = learned(initial)
    checkpoint.prepare_critic(learning, OWN, MACHINE)
    backbone = learning.critic.backbone
    assert same(weights(backbone), weights(adapter.merged(learning.model).base_model))
    assert all(weight.requires_grad for weight in backbone.parameters())


# ---------------------------------------------------------------- on disk


def test_checkpoint_has_the_adapter_and_names_its_base(initial, tmp_path):
    learning = learned(initial)
    checkpoint.save(learning, tmp_path)
    policy = tmp_path / checkpoint.POLICY
    tokens = {path.name for path in initial.iterdir() if "token" in path.name}
    templates = {path.name for path in initial.glob("chat_template*")}
    assert {path.name for path in policy.iterdir()} - tokens - templates == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    said = json.loads((policy / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(initial)
    assert said["revision"] == artifacts.digest(initial)
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (4, 8, "LORA")
    assert said["target_modules"] == ["down_proj", "q_proj", "v_proj"], "in an order of their own"
    stored = load_file(tmp_path / checkpoint.OPTIMIZER / "state.safetensors")
    assert len(stored) == 3 * len(of_adapter(learning.model))


def test_adapter_resumes_from_disk(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"warmup_updates": 3, "mini_batches": 2})
    learning = adapted(initial, settings)
    run(learning, made_trees(seed=1), settings)
    checkpoint.save(learning, tmp_path / "between")
    in_memory = run(learning, made_trees(seed=2), settings)
    checkpoint.save(learning, tmp_path / "in_memory")
    restarted = adapted(tmp_path / "between" / checkpoint.POLICY, settings)
    assert restarted.updates == 2
    assert run(restarted, made_trees(seed=2), settings) == in_memory
    checkpoint.save(restarted, tmp_path / "from_disk")
    assert artifacts.digest(tmp_path / "from_disk") == artifacts.digest(tmp_path / "in_memory")


def test_peft_loads_the_adapter(initial, tmp_path):
    learning = learned(initial)
    checkpoint.save(learning, tmp_path)
    folder = tmp_path / checkpoint.POLICY
    base = AutoModelForCausalLM.from_pretrained(initial)
    expected = logits(learning.model)
    for model in (
        PeftModel.from_pretrained(base, folder),
        AutoModelForCausalLM.from_pretrained(folder),
    ):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_adapter_without_its_base_is_refused(initial, policy, tokenizer, tmp_path):
    base = tmp_path / "base"
    policy.save_pretrained(base)
    tokenizer.save_pretrained(base)
    checkpoint.save(learned(base), tmp_path)
    folder = tmp_path / checkpoint.POLICY
    resident.POLICIES.clear()
    resident.POLICIES.load_learner(folder, MACHINE)
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[::-1])
    resident.POLICIES.clear()
    with pytest.raises(RuntimeError, match=rf"{folder}/adapter_config.json .* policy {base} with"):
        resident.POLICIES.load_learner(folder, MACHINE)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="dvc checkout"):
        resident.POLICIES.load_reference(folder, MACHINE)


@pytest.mark.parametrize("fault", ["lacks", "has"])
def test_an_adapter_with_other_weights_than_its_config_says_is_refused(initial, tmp_path, fault):
    checkpoint.save(learned(initial), tmp_path)
    file = tmp_path / checkpoint.POLICY / adapter.WEIGHTS
    kept = load_file(file)
    name = sorted(kept)[0]
    if fault == "lacks":
        kept.pop(name)
    else:
        kept[name.replace("layers.0", "layers.9")] = kept[name].clone()
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"adapter_model.safetensors {fault} .*layers"):
        load_policy(tmp_path / checkpoint.POLICY, MACHINE)


# ---------------------------------------------------------------- merged


def test_merged_weights_follow_the_formula(initial):
    learning = learned(initial)
    before = weights(load_policy(initial, MACHINE))
    own, whole = of_adapter(learning.model), weights(adapter.merged(learning.model))
    assert set(whole) == set(before)
    for name, weight in whole.items():
        layer = name.removesuffix(".weight")
        expected = before[name]
        if f"{layer}.lora_A.default.weight" in own:
            a, b = (own[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            expected = expected + 2.0 * b @ a
            assert not torch.equal(weight, before[name])
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


def test_merging_leaves_the_learner_unchanged(initial):
    learning = learned(initial)
    before = weights(learning.model)
    whole = adapter.merged(learning.model)
    assert adapter.attached(learning.model)
    assert not adapter.attached(whole)
    after = weights(whole)
    run(learning, made_trees(seed=5))
    assert same(weights(whole), after)
    assert not same(weights(learning.model), before)


def test_merging_without_an_adapter_changes_nothing(initial):
    model = load_policy(initial, MACHINE)
    assert adapter.merged(model) is model


def test_merged_folder_is_an_ordinary_policy(initial, tmp_path):
    learning = learned(initial)
    checkpoint.save(learning, tmp_path)
    for name in ("once", "twice"):
        checkpoint.merged(tmp_path / checkpoint.POLICY, tmp_path / name)
    assert artifacts.digest(tmp_path / "once") == artifacts.digest(tmp_path / "twice")
    plain = {path.name for path in initial.iterdir()}
    assert {path.name for path in (tmp_path / "once").iterdir()} == plain
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not adapter.attached(model)
    assert model.dtype is torch.float32
    expected = logprobs(learning.model)
    np.testing.assert_allclose(logprobs(model), expected, atol=1e-5)
    assert np.abs(logprobs(load_policy(initial, MACHINE)) - expected).max() > 1e-3
    text = "<think>7 times 8</think>"
    tokenizer = checkpoint.load_tokenizer(tmp_path / "once")
    assert tokenizer.encode(text) == learning.tokenizer.encode(text)


def test_a_whole_policy_is_copied_as_it_is(initial, tmp_path):
    checkpoint.merged(initial, tmp_path / "copy")
    assert artifacts.digest(tmp_path / "copy") == artifacts.digest(initial)


def test_newest_adapter_is_merged_for_engines(initial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learning = adapted(initial)
    assert checkpoint.whole(Artifact.at(initial)) == initial
    for name in ("first", "second"):
        run(learning, made_trees())
        checkpoint.save(learning, tmp_path / name)
        policy = Artifact.at(tmp_path / name / checkpoint.POLICY)
        whole = checkpoint.whole(policy)
        assert [path.name for path in checkpoint.MERGED.iterdir()] == [policy.digest]
        model = AutoModelForCausalLM.from_pretrained(whole)
        np.testing.assert_allclose(logprobs(model), logprobs(learning.model), atol=1e-5)
        before = whole.stat().st_ino
        assert checkpoint.whole(policy) == whole
        assert whole.stat().st_ino == before, "it is not made again"


@pytest.mark.parametrize(("machine", "tolerance"), [(MACHINE, 1e-4), (HALF, 0.05)])
def test_sampling_copy_is_merged(initial, machine, tolerance):
    learning = learned(initial)
    sampling = resident.to_sample(learning.model, machine)
    assert not adapter.attached(sampling)
    assert {weight.dtype for weight in sampling.parameters()} == {PRECISION[machine.precision]}
    exact = logprobs(adapter.merged(learning.model))
    np.testing.assert_allclose(logprobs(learning.model, machine), exact, atol=tolerance)
    engine = TransformersEngine(sampling, learning.tokenizer)
    prompt = np.arange(3, 12, dtype=np.int32)
    with engine.session(1, 40, 1.0, 1.0, ("</answer>",)) as session:
        (sample,) = session.sample([SamplingRequest(session.open(), prompt, 17, 20)])
    tokens = torch.from_numpy(np.concatenate([prompt, sample.tokens]).astype(np.int64))
    with torch.no_grad():
        every = torch.log_softmax(learning.model.eval()(tokens[None]).logits[0], -1)
    said = every[len(prompt) - 1 : -1].gather(-1, tokens[len(prompt) :, None])[:, 0]
    np.testing.assert_allclose(sample.logprobs, said, atol=tolerance)


# ---------------------------------------------------------------- as a reference


def test_base_as_reference_needs_no_copy(initial):
    learning = learned(initial)
    expected = logits(load_policy(initial, MACHINE))
    resident.POLICIES.clear()
    with resident.POLICIES.reference_of(initial, learning, MACHINE) as model:
        assert model is learning.model
        assert torch.equal(logits(model), expected)
    assert resident.POLICIES.reference is None
    assert not torch.equal(logits(learning.model), expected)
    before = of_adapter(learning.model)
    run(learning, made_trees(seed=5))
    assert not same(of_adapter(learning.model), before), "it learns again"
    assert all(name in gradients_of(learning.model) for name in before)


def gradients_of(model):
    return [name for name, weight in model.named_parameters() if weight.grad is not None]


def test_earlier_adapter_is_a_separate_reference(initial, tmp_path):
    learning = learned(initial)
    checkpoint.save(learning, tmp_path)
    expected = logits(learning.model)
    run(learning, made_trees(seed=5))
    with resident.POLICIES.reference_of(tmp_path / checkpoint.POLICY, learning, MACHINE) as model:
        assert model is not learning.model
        assert torch.equal(logits(model), expected)


def test_unchanged_learner_is_its_own_reference(initial):
    resident.POLICIES.clear()
    learning = resident.POLICIES.load_learner(initial, MACHINE)
    with resident.POLICIES.reference_of(initial, learning, MACHINE) as model:
        assert model is learning.model
    assert resident.POLICIES.reference is None
