"""Which layers a policy has, by its config.json, and the form in which it learns.

Where every layer has a form on trees, the learner computes a token that several trajectories share
once. A layer attends to all tokens of its context, or to a window or a chunk of them that it names
to its attention, or it carries a state from token to token in a way that is known to
tasks/learning/recurrent.py. An unknown layer would be trained wrongly without an error, so only
architectures that have been tried learn as trees. Any other policy learns from rows: each context
by itself, in the model's own forward pass. What is no causal language model is refused before any
work.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FULL = {"full_attention", "attention", "global", "mlp", "moe"}  # see all tokens, or one alone
WINDOWS = ("sliding_attention", "chunked_attention", "local", "local_attention")
SIZES = {  # keys with the tokens that a layer sees -> the kind that it is then
    "sliding_window": "sliding_attention",
    "sliding_window_size": "sliding_attention",
    "attention_window": "sliding_attention",
    "attention_window_size": "sliding_attention",
    "window_size": "local",
    "local_attention": "local",
    "attention_chunk_size": "chunked_attention",
}
COUNTS = (  # keys with the number of layers
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers"),
)
NAMED = (  # keys that list the kind of each layer
    *("layer_types", "layers_block_type", "block_types"),
    *("attention_layers", "attn_layers", "attn_type_list"),
)
OF_A_STATE = re.compile(  # keys of a config that lists no kinds of layers
    "mamba|ssm|rwkv|lru_|lstm|^state_size|^linear_(attn|conv|num|key|value)|lightning|retention"
)
OF_A_CONVOLUTION = re.compile("^conv_(kernel|l_cache|dim)|^conv1d")
RECURRENT = ("rwkv", "xlstm")  # architectures whose config has no such key
# Architectures that learn as trees. ``python -m benchmarks.families`` tries each.
WINDOWED = {  # attention is told of their windows, or finds them in their config
    *("afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss"),
    *("granite_swa", "granitemoe_swa", "laguna", "mimo_v2_flash", "ministral", "ministral3"),
    *("mistral", "mixtral", "modernbert-decoder", "olmo3", "phi3", "phi4_multimodal", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2", "vaultgemma"),
}
PLAIN_ATTENTION = {  # they pass to their attention what they get; latent keys are keys, too
    *("apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "ctrl", "dbrx"),
    *("deepseek_v2", "deepseek_v3", "diffllama", "emu3_text_model", "ernie4_5"),
    *("ernie4_5_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "llama"),
    *("longcat_flash", "mellum", "minicpm3", "minimax_m2", "minimax_m3_vl_text"),
    *("mllama_text_model", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon"),
    *("phi", "seed_oss", "solar_open", "stablelm", "youtu"),
}
CHUNKED = {"llama4_text"}  # attention finds their chunks in their config
# Their layers that carry a state, or convolve, have a form in tasks/learning/recurrent.py, and
# their attention sees all tokens.
STATEFUL = {
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next",
}
STATES = ("linear_attention", "conv", "hybrid", "mamba", "recurrent")
WRAPPING = {  # they pass on what they get to one of the above
    *("emu3", "fuyu", "gemma3", "gemma4", "gemma4_unified", "llama4", "mllama", "qwen3_5"),
    "qwen3_5_moe",
}
# Attention that transformers cannot set: with scores that depend on distance, or of another age.
OWN_ATTENTION = {
    *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt"),
    "xglm",
}
INSTEAD = "take a causal language model of text, such as one of Llama, Qwen or Mistral"
NO_POLICIES = {  # architectures that transformers lists as causal language models all the same
    "blt": "which reads patches of bytes in place of tokens",
    "cpmant": "whose layers see the tokens that come after",
    "gemma4_assistant": "which drafts tokens for another policy",
    "gemma4_unified_assistant": "which drafts tokens for another policy",
    "git": "which reads pictures",
    "moshi": "which reads and writes sound",
    "musicgen": "which writes sound",
    "musicgen_melody": "which writes sound",
    "trocr": "which reads pictures",
    "xlnet": "whose layers see the tokens that come after",
}
DECODES = ("is_decoder", "causal")  # keys of encoders that may also be made causal
CAUSAL = ("gpt_neox", "gpt_neox_japanese")  # which they have no effect on
DEQUANTIZED = ("fp8", "mxfp4")  # quantized weights that load_model makes plain ones of
BY_LENGTH = ("dynamic", "longrope")  # positions that are scaled by the length of the context
TREES, ROWS = "trees", "rows"  # the forms in which a policy learns
WRAPPED_BY = "wrapped_by"  # key of what ``described`` returns: the architecture of the whole
TEXT = ("text_config", "llm_config", "language_config")  # of a policy of several kinds of input
PLAIN = ("llama", "qwen2", "qwen3", "qwen3_moe")  # whose config.json says all by itself


def refusal(config: Mapping[str, Any], context: int) -> str:
    """Return why a policy cannot be trained in any form with contexts of so many tokens, or "".

    ``config``: the parsed config.json. Where it does not say all by itself, the architecture's
    defaults are asked for, which imports transformers.
    """
    if what := _quantized(config):
        return what
    if _of_text(config).get("is_causal") is False:
        return f"with is_causal: false in its config.json, so that tokens see later ones: {INSTEAD}"
    if _is_plain(config):
        return ""
    whole, kind = _whole(config), str(config.get("model_type"))
    if what := NO_POLICIES.get(kind) or _no_causal_model(whole, kind):
        return f"of the architecture {kind}, {what}: {INSTEAD}"
    if (end := _end_of_values(_of_text(whole))) and end < context:
        return (
            f"of the architecture {kind}, in which a token's value depends on how long the whole "
            f"context is from {end} tokens on, and a context has {context}: lower "
            f"prepare.policy.context to {end}, or take another policy"
        )
    return ""


def _quantized(config: Mapping[str, Any]) -> str:
    """Return why the weights of a policy can neither learn nor be made ones that can, or ""."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return ""
    method = str(settings.get("quant_method"))
    # the text of a policy of several kinds of input is loaded without the settings of the whole
    if method in DEQUANTIZED and _of_text(config) is config:
        return ""
    return (
        f"of the architecture {config.get('model_type')}, whose weights are quantized "
        f"(quantization_config of its config.json: {method}), which cannot learn: take the weights "
        "that they were made from, or a GGUF file (prepare.policy.gguf)"
    )


def _no_causal_model(whole: Mapping[str, Any], kind: str) -> str:
    """Return what makes an architecture no causal language model, or ""."""
    from tasks.policy.lean_transformers import transformers

    text = _of_text(whole)
    if whole.get("is_encoder_decoder"):
        return "which has an encoder and a decoder"
    if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "for which transformers has no causal language model"
    sees = text.get("use_bidirectional_attention") in (True, "all")
    if sees or (kind not in CAUSAL and any(text.get(key) is False for key in DECODES)):
        return "whose layers see the tokens that come after"
    return ""


def positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a policy has, by its config.json; None where that does not say."""
    text = _of_text(config)
    names = ("max_position_embeddings", "n_positions")
    return next(filter(None, (_number(text.get(name)) for name in names)), None)


def _end_of_values(text: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which a token's value is the same in contexts of any length.

    None: it always is. Beyond, positions are scaled anew as soon as the context has grown, or
    (Doge) equal tokens compete for the places of a window, so that no two of sampler, trees and
    rows would agree.
    """
    if chosen := _number(text.get("keep_window_size")):
        return chosen
    settings = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(settings, Mapping):
        return None
    kinds = [one for one in (settings, *settings.values()) if isinstance(one, Mapping)]
    ends = [
        _number(one.get("original_max_position_embeddings"))
        or _number(text.get("original_max_position_embeddings"))
        or _number(text.get("max_position_embeddings"))
        for one in kinds
        if one.get("rope_type", one.get("type")) in BY_LENGTH
    ]
    return min(filter(None, ends), default=None)


class LearnerForm(NamedTuple):
    """In which form a policy learns: trees, or rows with the layers that have no form on trees."""

    kind: str
    reason: str = ""


def learner_form(config: Mapping[str, Any], context: int | None = None) -> LearnerForm:
    """Return the form in which a policy learns, by its config with its architecture's defaults.

    Trees are for architectures that have been tried with all kinds of their layers; rows are the
    model's own pass, which any other causal model has. ``context``: the longest in tokens; None:
    the most that the policy has positions for.
    """
    text = _of_text(config)
    kind = str(text.get("model_type"))
    wrapping = text.get(WRAPPED_BY, kind)
    if wrapping != kind and wrapping not in WRAPPING:
        return LearnerForm(ROWS, f"the architecture {wrapping}")
    if kind not in PLAIN_ATTENTION | WINDOWED | CHUNKED | STATEFUL:
        return LearnerForm(ROWS, _layers_without(text, kind))
    longest = context or _number(text.get("max_position_embeddings"))
    kinds = kinds_of(text)
    sound = {*FULL, *(WINDOWS[:1] if kind in WINDOWED else ()), *_chunks(kind)}
    sound |= {*STATES} if kind in STATEFUL else set()
    for layers in filter(lambda each: each not in sound, kinds):
        size = _size(text, layers) if layers in WINDOWS else None
        if size is None or longest is None or size < longest:
            return LearnerForm(ROWS, f"{kinds[layers]} of {sum(kinds.values())} layers {layers}")
    return LearnerForm(TREES)


def _chunks(kind: str) -> tuple[str, ...]:
    return ("chunked_attention",) if kind in CHUNKED else ()


def _layers_without(text: Mapping[str, Any], kind: str) -> str:
    """Return which layers of an architecture that is not known as trees have no form there."""
    kinds = kinds_of(text)
    others = [
        f"{count} of {sum(kinds.values())} layers {layers}"
        for layers, count in kinds.items()
        if layers not in FULL
    ]
    if kind in OWN_ATTENTION:
        return f"the architecture {kind}, whose attention cannot be set"
    return ", ".join(others) or f"the architecture {kind}"


def read(name: str, revision: str | None) -> dict[str, Any] | None:
    """Return the config.json of a folder, or of a commit in the hub's cache; None without one."""
    if file := file_of(name, revision, "config.json"):
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # loading the policy says what is wrong with it
            return None
        return config if isinstance(config, dict) else None
    return None


def file_of(name: str, revision: str | None, file: str) -> Path | None:
    """Return a file of a folder, or of a commit in the hub's cache; None where it is not here."""
    places = (Path(name, file), _cached(name, revision, file))
    return next((place for place in places if place and place.is_file()), None)


def described(config: Any) -> dict[str, Any]:
    """Return a config of transformers as a mapping, with the kinds of layers that it works out."""
    text = config.get_text_config(decoder=True)
    lists = {name: getattr(text, name, None) for name in NAMED}
    known = {name: kinds for name, kinds in lists.items() if kinds}
    return {**text.to_dict(), **known, WRAPPED_BY: config.model_type}


# ---------------------------------------------------------------- reading a config


def _is_plain(config: Mapping[str, Any]) -> bool:
    if config.get("model_type") not in PLAIN or config.get("use_sliding_window"):
        return False
    return FULL.issuperset(kinds_of(config)) and _end_of_values(config) is None


def _whole(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the defaults of its architecture, where transformers knows it."""
    from tasks.policy.lean_transformers import transformers

    rest = {**config}
    try:
        return described(transformers.AutoConfig.for_model(rest.pop("model_type"), **rest))
    except Exception:  # values of any kind; loading the policy says what is wrong with them
        return config


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the part that reads and writes text."""
    nested = next((config[name] for name in TEXT if isinstance(config.get(name), dict)), None)
    return _of_text(nested) if nested else config


def kinds_of(config: Mapping[str, Any]) -> Counter[str]:
    """Return the kinds of a config's layers, each with the number of its layers."""
    for name in NAMED:
        kinds = config.get(name)
        if isinstance(kinds, list | tuple) and kinds:
            return Counter(map(str, kinds))
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        signs = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        return Counter(signs.get(sign, sign) for sign in pattern)
    count = next(filter(None, (_number(config.get(key)) for key in COUNTS)), 1)
    return Counter({_only_kind(config): count})


def _only_kind(config: Mapping[str, Any]) -> str:
    """Return the kind of the layers of a config that lists none."""
    kind = str(config.get("model_type"))
    if kind in RECURRENT:
        return "recurrent"
    keys = [key for key, value in config.items() if value]
    if any(OF_A_STATE.search(key.lower()) for key in keys):
        return "recurrent"
    if any(OF_A_CONVOLUTION.search(key.lower()) for key in keys):
        return "conv"
    if config.get("use_sliding_window") is not False:
        windows = [kind for key, kind in SIZES.items() if _number(config.get(key))]
        return windows[0] if windows else "full_attention"
    return "full_attention"


def _size(config: Mapping[str, Any], kind: str) -> int | None:
    """Return how many tokens a layer of a kind sees."""
    names = [key for key, of in SIZES.items() if of == kind] + [*SIZES]
    return next(filter(None, (_number(config.get(key)) for key in names)), None)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _cached(name: str, revision: str | None, file: str) -> Path | None:
    """Return where the hub's cache has a file of a commit."""
    if not revision:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    root = Path(os.environ.get("HF_HOME", home), "hub")
    root = Path(os.environ.get("HF_HUB_CACHE", root)).expanduser()
    return root / f"models--{name.replace('/', '--')}" / "snapshots" / revision / file
