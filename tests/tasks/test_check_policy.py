"""A policy that would be trained or sampled wrongly is stopped, whatever is wrong with it."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from params.schema.agent import EngineSettings
from params.schema.algorithms import Critic
from params.schema.base import Machine
from tasks import check_policy as checks
from tasks.check_policy import STAGE, PolicyCheckError, check_policy, inputs_of
from tasks.engines.servers.servers_engine import fleet_at
from tasks.engines.servers.token_guard import FOLDER, NAMES, TOKEN, Guard
from tasks.engines.transformers.cache import RaggedCache
from tasks.engines.transformers.serve import Served, app_of
from tasks.learning import attention, learner
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, outcome_model, resident, small_copy
from tasks.policy.lean_transformers import transformers
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question
from tests.sampling_server import listening
from tests.sections import HALF, MACHINE

ENGINE = EngineSettings(kind="transformers", memory=1.0)
Layer = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer
CONTEXT = 256
ROUTES = ("learner", "gradient", "sampler")


@pytest.fixture(scope="module")
def folder(policy, tokenizer, tmp_path_factory):
    """A folder with a policy and a question, to be left as it is."""
    place = tmp_path_factory.mktemp("checked")
    policy.save_pretrained(place / "policy")
    tokenizer.save_pretrained(place / "policy")
    save_questions([Question("q", "sum", "What is 12 times 34?", ("408",))], place / "q.parquet")
    return place


@pytest.fixture
def made(folder, tmp_path, monkeypatch):
    """What the check of that policy is made from; nothing of it is in memory."""
    monkeypatch.chdir(tmp_path)
    resident.POLICIES.clear()
    yield lambda **changes: inputs_for(folder, **changes)
    resident.POLICIES.clear()


def inputs_for(folder, policy="policy", engine=ENGINE, machine=MACHINE, context=CONTEXT):
    made = Artifact.at(folder / policy), Artifact.at(folder / "q.parquet")
    return made[0], inputs_of(*made, engine, machine, context)


def run(made, step=None, **changes):
    policy, inputs = made(**changes)
    return check_policy(step or SubStep("toy", STAGE, 0, 0), inputs, policy=policy)


def stopped(made, **changes):
    """The error of a check that must fail, and the comparisons beyond their tolerance."""
    with pytest.raises(PolicyCheckError) as caught:
        run(made, **changes)
    found = {
        name.removeprefix("policy_check/"): value
        for name, value in caught.value.metrics.items()
        if not name.endswith("_tolerance")
        and not value <= caught.value.metrics[f"{name}_tolerance"]
    }
    return str(caught.value), found


def test_sound_policy_passes_once(made):
    record = run(made)
    metrics = record["metrics"]
    for check, tolerance in (("structure", checks.STRUCTURE), ("precision", checks.PRECISION)):
        for route in ("learner", "sampler"):
            assert metrics[f"policy_check/{check}/{route}"] < tolerance / 5
            assert metrics[f"policy_check/{check}/{route}_tolerance"] == tolerance
    assert metrics["policy_check/structure/gradient"] < checks.STRUCTURE_GRADIENT
    assert record["line"].startswith(
        "policy check: 2 layers full_attention, learned as trees; structure (float32) "
    )
    assert "\n" not in record["line"]
    again = run(made)
    assert again["finished"] == record["finished"]
    resident.POLICIES.clear()
    assert not record["artifacts"]


def test_policy_that_reads_pictures_too_is_one_of_text(made, folder, tokenizer):
    """Gemma 3 as it is published: the sizes of its text are in a config within its config."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    ends = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    picture = {**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING["gemma3"](
        text_config={**sizes, **attention, **ends, "sliding_window": 32},
        vision_config={**picture, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "gemma3")
    tokenizer.save_pretrained(folder / "gemma3")
    assert "1 layer sliding_attention" in run(made, policy="gemma3")["line"]
    learner = resident.POLICIES.load_learner(folder / "gemma3", MACHINE)
    for backbone in ("shared", "own"):
        critic = Critic(backbone=backbone, value_clip=0.2, coefficient=0.5)
        checkpoint.prepare_critic(learner, critic, MACHINE)
        assert learner.critic.head.in_features == sizes["hidden_size"]
    assert outcome_model.begin(folder / "gemma3", MACHINE).head.in_features == sizes["hidden_size"]


def test_rounding_of_a_low_precision_is_no_fault_and_a_fault_is_more(made, monkeypatch):
    record = run(made, machine=HALF)
    metrics = record["metrics"]
    for route in ROUTES:
        apart = metrics[f"policy_check/precision/{route}"]
        assert 1e-3 < apart < metrics[f"policy_check/precision/{route}_tolerance"]
    assert "precision (bfloat16)" in record["line"]
    real = attention.gathered_attention

    def shifted(module, query, key, value, *others, **named):
        return real(module, query, key.roll(1, 2), value, *others, **named)

    with attending_with(shifted):
        _, found = stopped(made, machine=HALF, context=CONTEXT - 1)
    assert {"structure/learner", "precision/learner", "precision/gradient"} <= found.keys()


@contextmanager
def attending_with(function):
    register = transformers.AttentionInterface.register
    register(attention.GATHERED, function)
    try:
        yield
    finally:
        register(attention.GATHERED, attention.gathered_attention)


def test_layer_that_mixes_in_the_slot_before_is_stopped(made, monkeypatch):
    """In a row that is the token before; in a tree it may be another leaf's, in a cache nothing."""
    forward = Layer.forward

    def leaking(self, hidden_states, *arguments, **named):
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return forward(self, hidden_states + 0.01 * before, *arguments, **named)

    monkeypatch.setattr(Layer, "forward", leaking)
    message, found = stopped(made)
    assert {"structure/learner", "structure/gradient", "structure/sampler"} <= found.keys()
    assert "the policy (2 layers full_attention) does not compute a tree" in message
    assert "in structure, the learner's log-probabilities differ by " in message
    assert "at most 0.0001 is a matter of rounding" in message
    assert "another policy" in message and "engine.kind" in message and "\n" not in message
    assert substeps.read(next(Path(".beamline").rglob("*check_policy*"), Path("none"))) is None


def test_layer_of_an_undeclared_architecture_is_stopped(made, folder, tokenizer):
    """What it makes of a token depends on the one before, which no key of its config tells."""

    class ForgetfulConfig(transformers.Qwen2Config):
        model_type = "forgetful"

    class ForgetfulForCausalLM(transformers.Qwen2ForCausalLM):
        config_class = ForgetfulConfig

        def forward(self, input_ids=None, **named):
            output = super().forward(input_ids=input_ids, **named)
            mixed = torch.nn.functional.pad(output.logits, (0, 0, 1, 0))[:, :-1]
            output.logits = output.logits + 0.1 * mixed
            return output

    transformers.AutoConfig.register("forgetful", ForgetfulConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ForgetfulConfig, ForgetfulForCausalLM, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    config = ForgetfulConfig(**{**model.config.to_dict(), "model_type": "forgetful"})
    forgetful = ForgetfulForCausalLM(config)
    forgetful.load_state_dict(model.state_dict())
    forgetful.save_pretrained(folder / "forgetful")
    tokenizer.save_pretrained(folder / "forgetful")
    _, found = stopped(made, policy="forgetful")
    assert {"structure/learner", "structure/sampler"} <= found.keys()


def test_cache_that_forgets_a_token_is_stopped(made, monkeypatch):
    write = RaggedCache.write

    def forgetting(self, new, layer, rows, positions):
        if layer == 0 and self.positions.shape[1] == 1:  # one token of those that were sampled
            new = torch.where((positions == 45)[:, None, None, None], 0.0, new)
        return write(self, new, layer, rows, positions)

    monkeypatch.setattr(RaggedCache, "write", forgetting)
    message, found = stopped(made)
    assert found.keys() == {"structure/sampler", "precision/sampler"}
    assert "the sampler's log-probabilities differ" in message
    assert "learner" not in message


def test_window_of_thousands_of_tokens_that_the_learner_forgets_is_stopped(
    made, folder, tokenizer, monkeypatch
):
    """The policy's own weights show nothing of it on a short tree."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    model.config.update({"use_sliding_window": True, "sliding_window": 4096})
    model.config.update({"max_window_layers": 1, "max_position_embeddings": 8192})
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.save_pretrained(folder / "windowed")
    tokenizer.save_pretrained(folder / "windowed")
    line = run(made, policy="windowed", context=8192)["line"]
    assert "1 layer full_attention, 1 layer sliding_attention" in line
    whole = attention.visible_in
    monkeypatch.setattr(
        attention, "visible_in", lambda forest, window, *others: whole(forest, None, *others)
    )
    _, found = stopped(made, policy="windowed", context=8191)
    assert found.keys() == {"structure/learner", "structure/gradient"}
    run(made, policy="windowed", context=4096)  # no context of this recipe exceeds the window


def test_gradient_that_the_values_do_not_show_is_stopped(made, monkeypatch):
    real = learner.token_logprobs

    def scaled(*arguments, **named):
        values, entropies = real(*arguments, **named)
        return values.detach() + 0.99 * (values - values.detach()), entropies

    monkeypatch.setattr(learner, "token_logprobs", scaled)
    message, found = stopped(made)
    assert found.keys() == {"structure/gradient", "precision/gradient"}
    assert found["structure/gradient"] == pytest.approx(0.01, rel=1e-3)
    assert "in structure, the gradient differs by 0.01" in message


def test_without_a_small_copy_the_weights_are_checked_in_float32(made, monkeypatch):
    def refuse(*_):
        raise ValueError("sizes that no copy may have")

    monkeypatch.setattr(small_copy, "small_copy", refuse)
    record = run(made, machine=HALF)
    assert "no small copy (sizes that no copy may have)" in record["line"]
    assert "precision (float32)" in record["line"] and "structure" not in record["line"]
    assert record["metrics"]["policy_check/precision/learner_tolerance"] == checks.PRECISION


def test_server_is_asked(made, folder, tmp_path, monkeypatch):
    for name, value in {
        TOKEN: "t" * 16,
        NAMES: "localhost",
        FOLDER: str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    app = Guard(app_of(Served(MACHINE, folder / "policy")))
    with listening(app) as port:
        served = ENGINE.model_copy(update={"servers": (f"http://localhost:{port}",)})
        record = run(made, engine=served)
        assert 0 < record["metrics"]["policy_check/precision/sampler"] < 1e-4
        fleet_at.cache_clear()


def test_pass_is_found_for_the_same_machine_and_versions_alone(made, monkeypatch):
    step = SubStep("toy", STAGE, 0, 0)
    _, inputs = made()
    place = step.place(check_policy, inputs)
    vllm = EngineSettings(kind="vllm", memory=1.0)
    others = {
        "device": replace(inputs, device="NVIDIA H100 80GB HBM3"),
        "device of the recipe": replace(
            inputs, machine=Machine(**{**vars(MACHINE), "device": "cuda"})
        ),
        "precision": replace(inputs, machine=HALF),
        "engine": replace(inputs, engine=vllm),
        "servers": replace(inputs, served=True),
        "form": replace(inputs, form=attention.FLEX),
        "versions": replace(inputs, versions={**inputs.versions, "torch": "0"}),
        "context": replace(inputs, context=CONTEXT + 1),
        "config": replace(inputs, config=inputs.config.replace("qwen2", "qwen3")),
    }
    places = {name: step.place(check_policy, other) for name, other in others.items()}
    assert place not in places.values() and len({*places.values()}) == len(places)
    memory = replace(inputs, engine=EngineSettings(kind="transformers", memory=0.5))
    assert step.place(check_policy, memory) == place
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "one card")
    assert checks.device_kind("cuda") != checks.device_kind("cpu") == inputs.device


def test_trained_policy_of_the_same_architecture_is_not_checked_again(made, folder, tokenizer):
    _, first = made()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.config.use_cache = False
    model.save_pretrained(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    _, second = made(policy="trained")
    assert first == second


def test_tree_has_what_a_rollout_can_have():
    vocabulary = np.arange(3, 99, dtype=np.int32)
    for room in (128, 40, 16):
        tree = checks.grown(checks.Inventing(vocabulary), vocabulary, vocabulary, room)
        contexts = [tree.contexts(leaf) for leaf in tree.leaves]
        assert [len(of) for of in contexts] == [1, 1, 2]
        first, inside, other = (tree.steps(leaf) for leaf in tree.leaves)
        assert [len(parts) for parts in first] == [1, 2, 1, 1]  # prompt, turn, result, turn
        assert [len(parts) for parts in inside] == [1, 2] and inside[1][0] == first[1][0]
        assert [len(parts) for parts in other] == [1, 1, 1, 1]  # a fresh prompt after a turn
        longest = max(
            sum(len(tree.nodes[node].tokens) for node in chain) for of in contexts for chain in of
        )
        assert longest <= room
    sizes = checks.LENGTHS
    assert sizes["prompt"] > small_copy.WINDOW
    assert sizes["fresh"] + sizes["short"] < small_copy.ORIGINAL < sizes["prompt"]


# ---------------------------------------------------------------- mixtures of experts


@pytest.fixture(scope="module")
def mixture(folder, tokenizer):
    """The folder of a Qwen3-MoE whose weights are large enough for experts to matter."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 6}
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        **{**sizes, **heads, **experts, "vocab_size": len(tokenizer), "num_hidden_layers": 4},
        **{"initializer_range": 0.3, "norm_topk_prob": True, "eos_token_id": 1},
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    return "mixture"


def test_share_of_other_experts_is_measured_and_replayed(made, mixture):
    exact = run(made, policy=mixture)["metrics"]
    for check in ("structure", "precision"):
        assert exact[f"policy_check/{check}/experts"] < 0.005
    assert exact["policy_check/structure/replay"] < checks.STRUCTURE / 5
    resident.POLICIES.clear()
    low = run(made, policy=mixture, machine=HALF)["metrics"]
    assert low["policy_check/precision/experts"] > 0.02  # and passes: the learner replays them
    assert low["policy_check/precision/experts_tolerance"] == checks.REPLAYED_EXPERTS


def test_mixture_whose_sampler_does_not_say_is_stopped(
    made, mixture, folder, tmp_path, monkeypatch
):
    for name, value in {TOKEN: "t" * 16, NAMES: "localhost", FOLDER: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with listening(Guard(app_of(Served(MACHINE, folder / mixture)))) as port:
        served = ENGINE.model_copy(update={"servers": (f"http://localhost:{port}",)})
        message, found = stopped(made, policy=mixture, engine=served, machine=HALF)
        fleet_at.cache_clear()
    assert found["precision/experts"] > checks.UNKNOWN_EXPERTS
    for word in ("other experts", "4 layers", "engine.kind", "float32"):
        assert word in message
    print(message)


def test_record_in_another_order_is_stopped(made, mixture, monkeypatch):
    right = RaggedCache.note
    monkeypatch.setattr(RaggedCache, "note", lambda cache, chosen: right(cache, chosen.flip(0)))
    _, found = stopped(made, policy=mixture)
    assert {"structure/replay", "structure/experts"} <= found.keys()


def test_router_that_is_not_known_is_named():
    config = transformers.AutoConfig.for_model("phimoe")
    model = small_copy.small_copy(config, CONTEXT)
    assert "PhimoeTopKRouter" in checks._unseen(model)


def test_kernels_that_transformers_takes_by_itself_are_in_the_key(made, monkeypatch):
    """They come and go with what is installed."""
    found = {"causal-conv1d": "2.0"}
    monkeypatch.setattr(checks, "_version", lambda name: found.get(name, ""))
    assert made()[1].versions == found


def test_kernels_of_a_gpu_that_differ_are_named(made):
    inputs = replace(made()[1], versions={"torch": "2.13", "fla-core": "0.6.0"})
    on_gpu = replace(inputs, machine=inputs.machine.model_copy(update={"device": "cuda"}))
    config = transformers.AutoConfig.for_model("qwen3")
    found = {"structure": {"learner": checks.Found(0.014, 1e-4)}}
    remedy = "set TRITON_F32_DEFAULT=ieee in the environment, or uninstall fla-core 0.6.0"
    assert remedy in checks.fault_of(found, config, on_gpu)
    assert remedy not in checks.fault_of(found, config, inputs)
