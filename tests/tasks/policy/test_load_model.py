"""A tokenizer that can write any text, and a policy that a seed decides."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.policy.load_model import (
    fetch_policy,
    fetch_tokenizer,
    load_backbone,
    load_policy,
    save_model,
)
from tasks.prepare import _check_rows, check_layers
from tasks.trees.tables import write_table

ROOT = Path(__file__).parents[3]

MACHINE = Machine(threads=1, device="cpu", precision="float32")

# ---- tokenizer


# ---- policy


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_policy_in_a_folder_comes_back_as_it_was(policy, tokenizer, tmp_path):
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = PretrainedPolicy(kind="pretrained", name=str(tmp_path), revision=None, context=256)
    fetched, its_tokenizer = fetch_policy(settings)
    assert torch.equal(weights(fetched), weights(policy))
    text = "<think>7 times 8</think><answer>\\boxed{56}</answer>"
    assert its_tokenizer.encode(text) == tokenizer.encode(text)
    assert its_tokenizer.eos_token_id == tokenizer.eos_token_id
    assert its_tokenizer.chat_template == tokenizer.chat_template
    tokens = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        logits, again = policy(tokens).logits, fetched.eval()(tokens).logits
    np.testing.assert_allclose(again.float(), logits, atol=1e-5)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_as_transformers_loads_it(family, tmp_path):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = []
    for load in (
        lambda: load_policy(tmp_path, MACHINE),
        lambda: AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="sdpa"
        ),
    ):
        torch.manual_seed(2)
        model = load()
        found.append({**model.state_dict(), **dict(model.named_buffers())})
    ours, theirs = found
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)


def changed(folder, change):
    """Change the weights of a folder, a mapping by name."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def configured(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_missing_are_not_made_at_random(family, tmp_path):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names = []
    changed(tmp_path, lambda kept: (names.append(sorted(kept)[-2]), kept.pop(names[0])))
    with pytest.raises(ValueError, match=f"no weights for .*{names[0][-10:]}.* random: fetch it"):
        load_policy(tmp_path, MACHINE)


@pytest.mark.parametrize("tied", [True, False])
def test_head_that_the_whole_ties_is_the_embedding(tied, tokenizer, tmp_path):
    """Qwen3.5 as it is published: its text is a part, and the whole alone says that it is tied."""
    part = {key: SIZES[key] for key in SIZES if key != "pad_token_id"}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    config = AutoConfig.for_model("qwen3_5_text", **part, **linear, **kinds)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["tie_word_embeddings"]
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    settings = PretrainedPolicy(kind="pretrained", name=str(tmp_path), revision=None, context=64)
    if not tied:
        with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
            fetch_policy(settings)
        return
    fetch_policy(settings)[0].save_pretrained(tmp_path / "again")
    loaded = load_policy(tmp_path / "again", MACHINE)
    tokens = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_of_the_machine_that_saved_a_policy_is_not_asked_for(
    key, policy, tokenizer, tmp_path
):
    for part in (policy, tokenizer):
        part.save_pretrained(tmp_path)
    configured(tmp_path, **{key: "flash_attention_2"})
    settings = PretrainedPolicy(kind="pretrained", name=str(tmp_path), revision=None, context=64)
    for loaded in (fetch_policy(settings)[0], load_policy(tmp_path, MACHINE)):
        assert loaded.config._attn_implementation == "sdpa"
        assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight)


def test_quantized_weights_become_plain_ones(tokenizer, tmp_path):
    """Weights in fp8, with a scale for each block of 128 numbers, as Qwen and DeepSeek write."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    sizes["num_key_value_heads"] = 4
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def quantized(weights):
        for name in [name for name in weights if name.endswith("proj.weight")]:
            scale = weights[name].abs().max()[None, None] / 448
            weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale

    changed(tmp_path, quantized)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    configured(tmp_path, quantization_config=blocks | {"modules_to_not_convert": ["lm_head"]})
    settings = PretrainedPolicy(kind="pretrained", name=str(tmp_path), revision=None, context=64)
    fetch_policy(settings)[0].save_pretrained(tmp_path / "again")
    loaded = load_policy(tmp_path / "again", MACHINE)
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()
    for (name, ours), theirs in zip(
        loaded.named_parameters(), model.state_dict().values(), strict=True
    ):
        assert ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=0.07, atol=1e-3, msg=name)


def given(folder):
    """Return the settings of a recipe that names the folder as its policy."""
    return PretrainedPolicy(kind="pretrained", name=str(folder), revision=None, context=128)


@pytest.fixture
def brought(policy, tokenizer, tmp_path):
    """A policy's folder, as a user brings it."""
    policy.save_pretrained(tmp_path / "brought")
    tokenizer.save_pretrained(tmp_path / "brought")
    return tmp_path / "brought"


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_a_tokenizer_splits_as_its_file_says_whatever_its_class(
    kind, model_type, brought, tokenizer
):
    own = json.loads((brought / "tokenizer_config.json").read_text())
    (brought / "tokenizer_config.json").write_text(json.dumps(own | {"tokenizer_class": kind}))
    configured(brought, model_type=model_type)
    text = "Hello  world 1234\n    don't , x"
    fetched = fetch_tokenizer(given(brought))
    assert fetched.encode(text) == tokenizer.encode(text)
    assert fetched.decode(fetched.encode(text)) == text


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_p": 0.6},  # without do_sample, which transformers would not write
        {"do_sample": True, "top_k": 20, "repetition_penalty": 1.3, "min_new_tokens": 7},
        {"suppress_tokens": [5], "no_repeat_ngram_size": 2, "max_new_tokens": 3},
    ],
)
def test_settings_that_change_the_distribution_are_not_written(settings, brought, tmp_path):
    ids = {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1}
    (brought / "generation_config.json").write_text(json.dumps(settings | ids))
    model, tokenizer = fetch_policy(given(brought))
    save_model(model, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    ids["eos_token_id"] = [tokenizer.eos_token_id, 2, 3]  # the end of a turn here, too
    assert {name: written.get(name) for name in ids} == ids
    assert not written.keys() & settings.keys()


@pytest.mark.parametrize(
    ("saved", "config", "said"),
    [
        ({"attention_bias": True}, {"attention_bias": False}, r"leaves out: .*_proj\.bias and \d"),
        ({}, {"num_hidden_layers": 1}, r"leaves out: model\.layers\.1\..* and \d+ more: correct"),
        ({}, {"intermediate_size": 64}, r"in the shape .*, and by its config.json it is .*64"),
        ({}, {"vocab_size": 99}, r"in the shape .*, and by its config.json it is \(99, "),
    ],
)
def test_weights_that_disagree_with_the_config_are_named(saved, config, said, brought):
    kept = {"model_type": "llama", **SIZES, **saved}
    whole = AutoConfig.for_model(kept.pop("model_type"), **kept)
    AutoModelForCausalLM.from_config(whole).save_pretrained(brought)
    configured(brought, **config)
    with pytest.raises(ValueError, match=said):
        fetch_policy(given(brought))


def test_weights_of_other_parts_are_left_alone(brought):
    changed(brought, lambda weights: weights.update({"vision.layers.0.weight": torch.ones(2)}))
    fetch_policy(given(brought))


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\0" * 99])
def test_a_damaged_file_of_weights_is_named(content, brought):
    (brought / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged file of weights, model\.safetensors .*git lfs"):
        fetch_policy(given(brought))


def test_a_folder_without_a_config_is_named(brought):
    (brought / "config.json").rename(brought / "adapter_config.json")
    with pytest.raises(ValueError, match=r"has no config\.json: it is an adapter: merge it"):
        fetch_policy(given(brought))


def test_what_is_saved_names_no_code_that_is_not_there(brought, tmp_path):
    configured(brought, auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    model, _ = fetch_policy(given(brought))
    save_model(model, tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again/config.json").read_text())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number, brought):
    weights = load_file(brought / "model.safetensors")
    weights["model.embed_tokens.weight"][2] = number
    save_file(weights, brought / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"numbers in model\.embed_tokens\.weight .* not finite"):
        fetch_policy(given(brought))


def test_an_adapter_beside_its_base_is_refused(brought):
    base = AutoModelForCausalLM.from_pretrained(brought)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(brought)
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config.json\): merge it"):
        fetch_policy(given(brought))


@pytest.mark.parametrize(
    "changes",
    [
        *({"hidden_size": "32"}, {"eos_token_id": "1"}, {"rope_scaling": "linear"}),
        *({"layer_types": ["foo", "bar"]}, {"dtype": "foo"}, {"quantization_config": ["a"]}),
        *({"quantization_config": "fp8"}, None),
    ],
    ids=lambda changes: "-".join(changes or ["list"]),
)
def test_a_brought_config_of_other_types_is_one_line(changes, brought):
    if changes is None:
        (brought / "config.json").write_text("[1]")
    else:
        configured(brought, **changes)
    with pytest.raises(ValueError, match=r"^transformers cannot load the policy [^\n]*$"):
        fetch_policy(given(brought))


@pytest.mark.parametrize(
    "changes", [{"sliding_window_pattern": 0}, {"layer_types": None, "num_hidden_layers": "two"}]
)
def test_config_that_transformers_cannot_read_is_one_line(changes, tmp_path):
    config = AutoConfig.for_model("exaone4", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    configured(tmp_path, **({"layer_types": None} | changes))
    with pytest.raises(ValueError, match=r"^transformers cannot load the policy .*config.json, or"):
        load_policy(tmp_path, MACHINE)


WITHOUT = """
import sys
from pathlib import Path
from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from tasks.cold_start import ColdStartInputs, cold_start
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep

settings = ColdStart(
    steps=1,
    batch=2,
    micro_batch=2,
    learning_rate=1e-2,
    warmup_steps=0,
    weight_decay=0.01,
    save_every=1,
)
machine = Machine(threads=1, device="cpu", precision="float32")
traces = Artifact.at(Path("traces.parquet"))
inputs = ColdStartInputs(Artifact.at(Path("initial")), traces, settings, machine)
cold_start(SubStep("toy", "cold_start", 0, 5), inputs)
print(*sys.modules)
"""


def test_trains_without_the_compiler(policy, tokenizer, tmp_path):
    """torch's compiler, its sharding and sympy take longer to import than torch itself."""
    policy.save_pretrained(tmp_path / "initial")
    tokenizer.save_pretrained(tmp_path / "initial")
    rows = [{"question_id": str(n), "tokens": [5, 6, 7], "trained": [0, 1, 1]} for n in range(4)]
    write_table(pa.Table.from_pylist(rows), tmp_path / "traces.parquet")
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    loaded = set(ran.stdout.split())
    assert "tasks.learning.fine_tuning" in loaded, ran.stderr
    heavy = {
        "transformers.trainer",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "sympy",
        "scipy",
    }
    assert loaded & heavy == set()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_policy_is_loaded_in_float32(policy, tmp_path, precision, stored):
    copy.deepcopy(policy).to(stored).save_pretrained(tmp_path)
    loaded = load_policy(tmp_path, Machine(threads=1, device="cpu", precision=precision))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(weights(loaded), weights(policy).to(stored).float())


class Pickled:
    """Makes a folder where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def refused(folder, kind, match):
    """Check that nothing loads a model from ``folder``."""
    settings = PretrainedPolicy(kind="pretrained", name=str(folder), revision=None, context=256)
    for load in (
        lambda: load_policy(folder, MACHINE),
        lambda: load_backbone(folder, MACHINE),
        lambda: fetch_policy(settings),
    ):
        with pytest.raises(kind, match=match):
            load()


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_refused_unread(policy, tokenizer, tmp_path, zipped):
    for part in (policy, tokenizer):
        part.save_pretrained(tmp_path / "policy")
    (tmp_path / "policy" / "model.safetensors").unlink()
    pickled = {"x": Pickled(tmp_path / "unpickled")}
    file = tmp_path / "policy" / "pytorch_model.bin"
    torch.save(pickled, file, _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "policy", OSError, r"has no \*\.safetensors.*save_pretrained")
    assert not (tmp_path / "unpickled").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "unpickled").exists(), "it would have"


def test_incomplete_policy_names_the_missing_file(policy, tokenizer, tmp_path):
    policy.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    _, missing, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    missing.unlink()
    refused(tmp_path, OSError, f"incomplete.*{missing.name}.*fetch it again")


@pytest.fixture
def with_code(policy, tokenizer, tmp_path, monkeypatch):
    """A function that writes a policy with code of its own; whoever is asked agrees to run it."""
    folder, run = tmp_path / "policy", tmp_path / "run"

    def write(file, **changes):
        for part in (policy, tokenizer):
            part.save_pretrained(folder)
        (folder / "own.py").write_text(f"import os\nos.mkdir({str(run)!r})\n")
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))
        return folder

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    yield write
    assert not run.exists()


OWN = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "own.Own")
OWN["AutoTokenizer"] = ["own.Own", "own.Own"]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "unknown", "auto_map": OWN}),
        ("config.json", {"model_type": "t5", "auto_map": OWN}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": OWN}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": OWN["AutoTokenizer"]}),
    ],
)
def test_policy_that_needs_code_of_its_own_is_refused(with_code, file, changes):
    """Also where transformers would ask, and is told to run it."""
    refused(with_code(file, **changes), ValueError, f"needs code of its own.*{file}")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": OWN}),
        ("config.json", {"auto_map": {}}),
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "auto_map": OWN}),
        ("tokenizer_config.json", {"auto_map": OWN["AutoTokenizer"]}),
        ("tokenizer_config.json", {"auto_map": {"AutoProcessor": "own.Own"}}),
    ],
)
def test_policy_that_transformers_knows_is_loaded_without_its_code(
    with_code, policy, file, changes
):
    folder = with_code(file, **changes)
    settings = PretrainedPolicy(kind="pretrained", name=str(folder), revision=None, context=256)
    fetched, tokenizer = fetch_policy(settings)
    for loaded in (fetched, load_policy(folder, MACHINE)):
        assert type(loaded) is type(policy) and torch.equal(weights(loaded), weights(policy))
    assert type(load_backbone(folder, MACHINE)) is type(policy.base_model)
    assert type(tokenizer).__module__.startswith("transformers.")


def test_missing_policy_raises(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        load_policy(tmp_path / "nowhere", MACHINE)


def test_a_context_beyond_the_last_position_is_refused_before_any_work(brought):
    configured(brought, max_position_embeddings=48)
    with pytest.raises(ValueError, match=r"'prepare.policy.context' is 128, .* has 48 positions"):
        check_layers("mine", given(brought))
    configured(brought, max_position_embeddings=128)
    check_layers("mine", given(brought))


def test_a_token_without_a_row_is_refused_where_a_text_can_have_it(policy, tokenizer):
    larger, fitting = copy.deepcopy(tokenizer), copy.deepcopy(policy)
    fitting.resize_token_embeddings(len(tokenizer))
    larger.add_tokens(["<picture>"], special_tokens=True)
    dialect = SimpleNamespace(prompt=lambda question: np.array([1, 2]))
    _check_rows(fitting, larger, dialect, ["<python>"])
    with pytest.raises(ValueError, match=r"the token '<picture>' with .* rows of embeddings"):
        _check_rows(fitting, larger, dialect, ["<python>", "<picture>"])
    added = larger.added_tokens_decoder
    fitting.resize_token_embeddings(max(n for n in larger.get_vocab().values() if n not in added))
    with pytest.raises(ValueError, match="rows of embeddings"):
        _check_rows(fitting, larger, dialect, [])
