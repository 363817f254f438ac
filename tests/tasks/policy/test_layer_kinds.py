"""Which policies are refused for their layers: every family of this transformers, from its config.

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
    "llama4": {},
    "gpt_oss": {},
    "gpt_neo": {},
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
    "dots1": {},  # a window that no layer has
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_layer_is_refused_whatever_the_context(kind):
    fault = layer_kinds.fault(config_of(kind, **RECURRENT[kind]), 8)
    assert kind in fault and "take a policy" in fault
    assert "with a state from token to token" in fault or "with recurrent layers" in fault


@pytest.mark.parametrize("kind", CONVOLVED)
def test_a_convolution_is_refused(kind):
    fault = layer_kinds.fault(config_of(kind, **CONVOLVED[kind]), 8)
    assert f"architecture {kind}, 1 of its 2 layers conv, with a convolution" in fault


def told(kind):
    """Whether an architecture's attention is told of its windows."""
    return layer_kinds._of_text(config_of(kind))["model_type"] in layer_kinds.WINDOWED


@pytest.mark.parametrize("kind", filter(told, WINDOWED))
def test_a_window_that_attention_is_told_of_is_sound(kind):
    assert layer_kinds.fault(config_of(kind, **WINDOWED[kind]), LONG) == ""


@pytest.mark.parametrize("kind", [kind for kind in WINDOWED if not told(kind)])
def test_another_window_that_the_context_outgrows_is_refused_with_its_figures(kind):
    config = config_of(kind, **WINDOWED[kind])
    fault = layer_kinds.fault(config, LONG)
    size = int(re.search(r"window of (\d+) tokens", fault)[1])
    assert f"lower prepare.policy.context to {size}" in fault and str(LONG) in fault
    assert layer_kinds.fault(config, size) == ""
    assert f"window of {size} tokens" in layer_kinds.fault(config, size + 1)


@pytest.mark.parametrize("kind", FULL)
def test_full_attention_is_sound_at_any_length(kind):
    assert layer_kinds.fault(config_of(kind, **FULL[kind]), LONG) == ""


@pytest.mark.parametrize("kind", sorted({*MODELS} - {*PARTS}))
def test_no_family_of_this_transformers_is_overlooked(kind):
    """What carries a state, in the source, is refused; so are windows that are not tried."""
    config = CONFIGS[kind]()
    described = layer_kinds.described(config)
    kinds = {*(described.get("layer_types") or described.get("layers_block_type") or ["?"])}
    if STATEFUL.search(source_of(kind)) and kinds != {"full_attention"}:
        assert layer_kinds.fault(config.to_dict(), 8)
    elif kinds & {"sliding_attention", "chunked_attention"} or described.get("sliding_window"):
        uses = kinds != {"full_attention"} and not told(kind)
        assert bool(layer_kinds.fault(config.to_dict(), LONG)) == uses
    known = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", "?"}
    if not kinds <= known:
        assert layer_kinds.fault(config.to_dict(), 8)


def test_a_kind_that_is_not_known_is_refused():
    config = config_of("qwen3", num_hidden_layers=2) | {"layer_types": ["full_attention", "eddy"]}
    assert "1 of its 2 layers eddy, of a kind that is not known" in layer_kinds.fault(config, 8)
    unknown = {"model_type": "of_tomorrow", "num_hidden_layers": 2}
    assert "mamba" not in layer_kinds.fault(unknown, LONG)
    for key, value, words in (
        ("mamba_d_state", 16, "a state from token to token"),
        ("conv_kernel", 4, "a convolution"),
        ("hybrid_override_pattern", "M*-", "mamba"),
        ("attn_type_list", [0, 1], "not known here"),
        ("sliding_window", 64, "window of 64 tokens"),
    ):
        assert words in layer_kinds.fault(unknown | {key: value}, 128)
        nested = {"model_type": "of_pictures", "text_config": unknown | {key: value}}
        assert words in layer_kinds.fault(nested, 128)


def test_an_old_config_has_the_defaults_of_its_architecture():
    """Files on the hub often leave out what was the default when they were written."""
    assert "window of 256 tokens" in layer_kinds.fault({"model_type": "gpt_neo"}, 257)
    off = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64}
    assert layer_kinds.fault(off, LONG) == ""
    none = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 32}
    assert layer_kinds.fault(none | {"num_hidden_layers": 32, "sliding_window": 64}, LONG) == ""


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
    with pytest.raises(ValueError, match="take a policy whose layers are all full") as refused:
        recipes.load("mine", folder("qwen3_next"))
    assert str(refused.value).startswith(
        "params/mine.yaml: 'prepare.policy.name' = 'policy' is of "
    )
    assert "qwen3_next, 36 of its 48 layers linear_attention, with a state" in str(refused.value)


def test_a_window_counts_where_the_context_is_longer(folder):
    with pytest.raises(ValueError, match=r"window of 1023 .*context has 1024.*context to 1023"):
        recipes.load("mine", folder("phimoe", sliding_window=1023))
    recipes.load("mine", folder("phimoe", sliding_window=1024))


def test_a_policy_in_the_hubs_cache_is_judged_by_its_pinned_commit(folder):
    with pytest.raises(ValueError, match="'some/policy' is of the architecture mamba2"):
        recipes.load("mine", folder("mamba2", "some/policy", "a" * 40))
    files = folder("mamba2", "some/policy", "b" * 40)
    file = files / "mine.yaml"
    file.write_text(file.read_text().replace("b" * 40, "c" * 40))
    recipes.load("mine", files)  # not here yet: prepare looks at it once it has been fetched


def test_a_known_policy_is_judged_by_its_row(folder):
    files = folder("qwen2", "some/policy")
    row = {"revision": "d" * 40, "config": {"model_type": "phimoe", "sliding_window": 64}}
    (files / "architectures.yaml").write_text(yaml.safe_dump({"some/policy": row}))
    with pytest.raises(ValueError, match="window of 64 tokens"):
        recipes.load("mine", files)


def test_a_teacher_is_sampled_in_the_same_way(folder):
    with pytest.raises(
        ValueError, match=r"'prepare\.expert\.policy\.name' = 'teacher' is of .* lfm2"
    ):
        recipes.load("mine", folder("lfm2", teacher="teacher", **CONVOLVED["lfm2"]))
    recipes.load("mine", folder("lfm2", teacher="teacher", engine="vllm", **CONVOLVED["lfm2"]))
