"""In which form policies learn: every family of this transformers, from its config.

No weights are made. Whether a family has recurrent or convolution layers is read in its model's
source, too, so that a family that comes with a new version is found.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from params.schema.base import PARAMS
from tasks import recipes
from tasks.policy import layer_kinds
from tasks.policy.lean_transformers import transformers
from tests.params.edits import edited

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
MODELS = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
PARTS = ("musicgen", "musicgen_melody")  # no config without those of their parts
LONG = 10**7
# In a model's source: what carries a state. Sound and pictures are convolved elsewhere.
STATEFUL = re.compile(
    r"causal_conv1d_(fn|update)|selective_scan|gated_delta_rule|has_previous_state|rwkv_linear"
    r"|class \w*(SSM|Mamba|Lightning|xLSTM|RecurrentBlock)\w*\("
)


def config_of(kind, **changes):
    """The config.json of a family's default, with changes, as transformers writes it whole."""
    return CONFIGS[kind](**changes).to_dict()


def source_of(kind):
    module = type(CONFIGS[kind]()).__module__.replace("configuration_", "modeling_")
    found = find_spec(module)
    return Path(found.origin).read_text() if found else ""


RECURRENT = {
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "olmo_hybrid": {},
    "minimax": {},
    "falcon_h1": {},
    "falcon_mamba": {},
    "nemotron_h": {},
    "jamba": {},
    "bamba": {"attn_layer_indices": [1]},
    "zamba": {},
    "zamba2": {},
    "mamba": {},
    "mamba2": {},
    "rwkv": {},
    "xlstm": {},
    "recurrent_gemma": {},
    "kimi_linear": {},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
}
# Their models do not pass on what they are given, or they mix tokens in code of their own.
NOT_TRIED = {
    *("falcon_mamba", "mamba", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
}
CONVOLVED = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
WINDOWED = {
    "gemma2": {},
    "gemma3": {},
    "gemma3_text": {},
    "gemma4": {},
    "olmo3": {},
    "mistral": {},
    "ministral": {},
    "exaone4": {},
    "cohere2": {},
    "phi3": {"sliding_window": 64},
    "mixtral": {"sliding_window": 64},
    "starcoder2": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    "qwen3": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 64},
}
PLAIN = """
llama qwen2 qwen3 qwen3_moe gemma smollm3 phi phi3 glm glm4 granite olmo2 olmoe ernie4_5 seed_oss
apertus arcee starcoder2 gpt2 opt minimax_m2
"""
FULL = {
    **{kind: {} for kind in PLAIN.split()},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["attention", "attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]},
}


def form_of(kind, context=None, **changes):
    return layer_kinds.learner_form(layer_kinds.described(CONFIGS[kind](**changes)), context)


@pytest.mark.parametrize("kind", RECURRENT | CONVOLVED)
def test_a_state_that_is_not_tried_is_carried_along_rows_whatever_the_context(kind):
    changes = (RECURRENT | CONVOLVED)[kind]
    form, reason = form_of(kind, 8, **changes)
    assert form == (layer_kinds.ROWS if kind in NOT_TRIED else layer_kinds.TREES)
    assert bool(reason) == (kind in NOT_TRIED)
    assert layer_kinds.refusal(config_of(kind, **changes), LONG) == ""


def test_the_reason_counts_the_layers():
    assert form_of("mamba").reason == "32 of 32 layers linear_attention"
    assert form_of("deepseek_v32").reason == "61 of 61 layers indexed_attention"
    assert form_of("bloom").reason == "the architecture bloom, whose attention cannot be set"
    assert form_of("got_ocr2") == ("rows", "the architecture got_ocr2")  # around Qwen2


def told(kind):
    """Whether an architecture's attention is told of its windows."""
    return layer_kinds._of_text(config_of(kind))["model_type"] in layer_kinds.WINDOWED


@pytest.mark.parametrize("kind", [*filter(told, WINDOWED), "llama4_text"])
def test_a_window_that_attention_is_told_of_goes_as_trees(kind):
    assert form_of(kind, LONG, **WINDOWED.get(kind, {})) == (layer_kinds.TREES, "")


@pytest.mark.parametrize("kind", FULL)
def test_full_attention_that_is_tried_goes_as_trees_at_any_length(kind):
    changes = FULL[kind]
    assert form_of(kind, LONG, **changes).kind == "trees"
    assert layer_kinds.refusal(config_of(kind, **changes), LONG) == ""


def test_a_window_counts_where_a_context_outgrows_it():
    config = config_of("llama", num_hidden_layers=2) | {"layer_types": ["local", "full_attention"]}
    config |= {"window_size": 64}
    assert layer_kinds.learner_form(config, 64).kind == "trees"
    assert layer_kinds.learner_form(config, 65) == ("rows", "1 of 2 layers local")
    assert layer_kinds.learner_form(config | {"max_position_embeddings": 64}).kind == "trees"


@pytest.mark.parametrize("kind", sorted({*MODELS} - {*PARTS}))
def test_no_family_of_this_transformers_is_overlooked(kind):
    """What carries a state, in the source, is no tree; nor are windows that are not tried."""
    config = CONFIGS[kind]()
    described = layer_kinds.described(config)
    kinds = {*(described.get("layer_types") or described.get("layers_block_type") or ["?"])}
    form = layer_kinds.learner_form(described, LONG).kind
    stateful = layer_kinds._of_text(config_of(kind))["model_type"] in layer_kinds.STATEFUL
    if STATEFUL.search(source_of(kind)) and kinds != {"full_attention"}:
        assert form == ("trees" if stateful else "rows")
    known = {"full_attention", "sliding_attention", "mlp", "moe", "?"}
    known |= {*layer_kinds.STATES} if stateful else set()
    if not kinds <= known | ({"chunked_attention"} if "llama4" in kind else set()):
        assert form == "rows"
    if "sliding_attention" in kinds and not told(kind):
        assert form == "rows"


def test_a_kind_that_is_not_known_is_no_tree():
    config = config_of("qwen3", num_hidden_layers=2) | {"layer_types": ["full_attention", "eddy"]}
    assert layer_kinds.learner_form(config) == ("rows", "1 of 2 layers eddy")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("bart", "an encoder and a decoder"),
        ("whisper", "an encoder and a decoder"),
        ("t5", "an encoder and a decoder"),
        ("vit", "no causal language model"),
        ("of_tomorrow", "no causal language model"),
        ("bert", "layers see the tokens that come after"),
        ("xlnet", "layers see the tokens that come after"),
        ("blt", "patches of bytes"),
        ("moshi", "sound"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(kind, words):
    refused = layer_kinds.refusal({"model_type": kind}, 8)
    assert kind in refused and words in refused and "take a causal language model" in refused


def test_encoders_that_are_made_causal_are_not_refused():
    assert layer_kinds.refusal({"model_type": "bert", "is_decoder": True}, 8) == ""
    assert layer_kinds.refusal({"model_type": "gpt_neox"}, 8) == ""
    gemma = {"model_type": "gemma3_text"}
    assert layer_kinds.refusal(gemma, 8) == ""
    assert "come after" in layer_kinds.refusal(gemma | {"use_bidirectional_attention": True}, 8)


def test_values_by_the_length_of_the_context_end_it():
    scaled = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = {"model_type": "phi3", "rope_scaling": scaled, "max_position_embeddings": 131072}
    config |= {"original_max_position_embeddings": 4096}
    assert layer_kinds.refusal(config, 4096) == ""
    assert "lower prepare.policy.context to 4096" in layer_kinds.refusal(config, 4097)
    llama = {"model_type": "llama", "max_position_embeddings": 2048}
    llama |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert "from 2048 tokens on" in layer_kinds.refusal(llama, 4096)
    assert "from 2048 tokens on" in layer_kinds.refusal({"model_type": "doge"}, 4096)
    assert layer_kinds.refusal({"model_type": "doge"}, 2048) == ""


def test_usual_families_are_judged_without_transformers():
    code = (
        "import sys; from tasks import recipes; recipes.load('qwen2.5-7b'); "
        "recipes.load('llama3.1-8b'); assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- a recipe's policy


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of recipes, in which ``mine`` has a policy with a config.json."""
    monkeypatch.chdir(tmp_path)
    files = Path("params")
    files.mkdir()
    for name in ("algorithms.yaml", "architectures.yaml", "benchmarks.yaml"):
        (files / name).write_text((PARAMS / name).read_text())
    (files / "prompts").symlink_to(PARAMS.resolve() / "prompts")

    def write(kind, name="policy", revision=None, teacher=None, engine="transformers", **changes):
        tiny = yaml.safe_load((PARAMS / "tiny.yaml").read_text())
        policy = {"kind": "pretrained", "name": name, "revision": revision, "context": 1024}
        edits = {"prepare__policy": policy, "engine__kind": engine}
        if teacher:
            sampling = {"questions": 9, "attempts": 4, "most": 1, "temperature": 1.0}
            sampling |= {"top_p": 1.0, "rows": 4, "policy": {"name": teacher, "revision": None}}
            edits["prepare__expert"] = {"kind": "sampled", **sampling}
        (files / "mine.yaml").write_text(yaml.safe_dump(edited(tiny, edits)))
        place = Path(teacher or name)
        if revision:
            hub = Path("hub").resolve()
            monkeypatch.setenv("HF_HUB_CACHE", str(hub))
            place = hub / f"models--{name.replace('/', '--')}" / "snapshots" / revision
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config_of(kind, **changes)))
        return files

    return write


def test_a_recipe_names_file_key_value_kind_and_remedy(folder):
    with pytest.raises(ValueError, match="take a causal language model of text") as refused:
        recipes.load("mine", folder("bart"))
    assert str(refused.value).startswith(
        "params/mine.yaml: 'prepare.policy.name' = 'policy' is of the architecture bart, which has"
    )
    recipes.load("mine", folder("qwen3_next"))


def test_a_policy_in_the_hubs_cache_is_judged_by_its_pinned_commit(folder):
    with pytest.raises(ValueError, match="'some/policy' is of the architecture bart"):
        recipes.load("mine", folder("bart", "some/policy", "a" * 40))
    files = folder("bart", "some/policy", "b" * 40)
    file = files / "mine.yaml"
    file.write_text(file.read_text().replace("b" * 40, "c" * 40))
    recipes.load("mine", files)  # not here yet: prepare looks at it once it has been fetched


def test_a_known_policy_is_judged_by_its_row(folder):
    files = folder("qwen2", "some/policy")
    row = {"revision": "d" * 40, "config": {"model_type": "bart"}}
    (files / "architectures.yaml").write_text(yaml.safe_dump({"some/policy": row}))
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        recipes.load("mine", files)


def test_a_teacher_is_sampled_in_the_same_way(folder):
    with pytest.raises(
        ValueError, match=r"'prepare\.expert\.policy\.name' = 'teacher' is of .* bart"
    ):
        recipes.load("mine", folder("bart", teacher="teacher"))
    recipes.load("mine", folder("bart", teacher="teacher", engine="vllm"))


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma3_text"])
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_are_refused_by_name(kind, method):
    config = config_of(kind) | {"quantization_config": {"quant_method": method, "bits": 4}}
    assert f"quantized (quantization_config of its config.json: {method})" in layer_kinds.refusal(
        config, 64
    )


def test_quantized_weights_that_can_be_made_plain_are_none_of_a_part():
    """transformers loads a text within a whole without the settings of the whole."""
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    assert layer_kinds.refusal(config_of("deepseek_v3") | fp8, 64) == ""
    whole = {"model_type": "qwen3_5", "text_config": config_of("qwen3_5_text")}
    assert layer_kinds.refusal(whole, 64) == ""
    assert "quantized" in layer_kinds.refusal(whole | fp8, 64)
