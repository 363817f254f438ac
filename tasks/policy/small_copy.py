"""Small copies of an architecture: one layer of each kind, few numbers a token, random weights.

What a layer does to a token (its windows, states, experts, positions) is in the config; how wide it
is decides nothing of that. So a copy whose sizes are cut shows in a second what the policy's own
layers would show in minutes. Windows and the original context of scaled positions are cut, too,
where contexts of the recipe exceed them: a short tree cannot show what happens behind 4,096 tokens.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.policy import layer_kinds
from tasks.policy.lean_transformers import transformers

initialization = importlib.import_module("transformers.initialization")

HIDDEN, HEADS, HEAD, FEED_FORWARD, VOCABULARY = 64, 4, 16, 96, 128
WINDOW, ORIGINAL, POSITIONS = 16, 32, 512  # tokens
MOST_LAYERS, MOST_WEIGHTS = 8, 100_000_000  # of a copy
# Of products of weights with normed states: the first whose rounding is small enough. Large ones
# make tokens matter, and in some architectures (products of states, unscaled attention) amplify
# rounding until it looks like a fault.
GAINS, MOST_ROUNDING = (1.7, 1.2, 0.8), 3e-5
MOVED = 0.3  # of vectors
Values = dict[str, Any]

FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # layers of a kind
LAST = ("num_kv_shared_layers",)
WINDOWS = (*layer_kinds.SIZES, "index_topk", "keep_window_size", "floor_scale")
# Groups of keys whose sizes belong together, each with the size in a copy. A group whose cut makes
# an invalid config keeps its sizes.
CUTS: dict[str, dict[str, int]] = {
    "vocabulary": {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY},
    "positions": dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
        POSITIONS,
    ),
    "experts": {
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
        ),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    },
    "widths": {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim"), HIDDEN),
        **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "embedding_dim"), HIDDEN),
        **dict.fromkeys(("input_embedding_size", "output_embedding_size"), HIDDEN),
        **dict.fromkeys(("attention_hidden_size", "lru_width"), HIDDEN),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
        **dict.fromkeys(("attention_heads", "decoder_attention_heads"), HEADS),
        "swa_num_attention_heads": HEADS,
        "index_n_heads": 32,  # few would leave many keys without a score, in no order
        **dict.fromkeys(("head_dim", "swa_head_dim", "attention_head_size", "kv_channels"), HEAD),
        **dict.fromkeys(("global_head_dim", "attention_head_dim"), HEAD),
        **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), HEAD),
        "rotary_dim": HEAD // 2,
        "query_pre_attn_scalar": HEAD,
    },
    "latents": {
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), HEAD),
        **{"q_lora_rank": 24, "qk_rope_head_dim": HEAD // 2, "qk_head_dim": HEAD + HEAD // 2},
        **{"index_head_dim": HEAD, "o_lora_rank": 24},
    },
    "linear": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD),
    },
    "states": {
        **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), HEAD),
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * HEADS),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), HEAD),
        **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
        **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
        "mamba_d_ssm": 2 * HIDDEN,
    },
    "chunks": dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), WINDOW),
}
FED = re.compile(
    "intermediate_size|^ffn_dim$|^decoder_ffn_dim$|^ffn_hidden_size$|_ffn_hidden_size$"
)
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
PATTERNED = {  # keys that say by a period which layers are of a kind
    **{"attn_layer_period": 2, "attn_layer_offset": 1},
    **{"expert_layer_period": 2, "expert_layer_offset": 0},
}


def small_copy(config: Any, context: int, seed: int = 0, device: str = "cpu") -> Any:
    """Return a model like those of ``config``, but small, in float32 on a device, in ``eval``.

    Passes that find the size of its weights are made there: kernels that transformers has found for
    a GPU compute nothing elsewhere.
    ``context``: the most tokens of a context in the recipe. Raises ValueError where no small config
    of the architecture makes a model that computes.
    """
    reason = "no candidate"
    for small in small_configs(config, context):
        try:
            return _made(small, seed, torch.device(device))
        except Exception as error:  # of any kind: what the architecture makes of sizes
            reason = reason if reason != "no candidate" else f"{type(error).__name__}: {error}"
    raise ValueError(" ".join(reason.split())[:300])


def small_configs(config: Any, context: int) -> Iterator[Any]:
    """Yield configs with fewer layers and smaller sizes, the smallest first.

    Later ones keep the sizes of one group of keys, then of two, and the last of all.
    """
    groups = list(CUTS)
    for kept in [*_some(groups), frozenset(groups)]:
        for whole in (True, False):  # with values that are worked out from others, and without
            try:
                yield _small(config, context, kept, whole)
            except Exception:  # the config's own check refuses the sizes
                continue


def _some(groups: list[str]) -> list[frozenset[str]]:
    return [frozenset(some) for count in range(3) for some in combinations(groups, count)]


def _small(config: Any, context: int, kept: frozenset[str], whole: bool) -> Any:
    """Return a config with all sizes cut but those of the groups ``kept``."""
    values = config.to_dict() if whole else {**config.to_diff_dict()}
    every = config.to_dict()
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None:
            values[name] = _small(part, context, kept, whole)
    for name in [name for name in values if name.startswith("_") or name == "architectures"]:
        del values[name]
    changes = {**_sizes(every, kept), **_windows(every, context), **_layers(every)}
    given = {name: value for name, value in changes.items() if name in every}
    return type(config)(**{**values, **given, **_tokens(every, kept)})


def _sizes(values: Mapping[str, Any], kept: frozenset[str]) -> Values:
    """Return what the sizes of a config are cut to."""
    cut: Values = {
        key: min(size, values[key])
        for group, sizes in CUTS.items()
        if group not in kept
        for key, size in sizes.items()
        if _number(values.get(key))
    }
    if "widths" in kept:
        return cut
    heads = next((values[key] for key in HEAD_COUNTS if _number(values.get(key))), HEADS)
    if "head_dim" in values and values["head_dim"] is None:
        cut["head_dim"] = HEAD
    if "expand" in values and "num_heads" in cut:  # heads of a state
        cut["num_heads"] = 2 * HEADS
    if "qk_rope_head_dim" in cut and "head_dim" in cut:  # what is rotated
        cut["head_dim"] = cut["qk_rope_head_dim"]
    for key in KEY_VALUE:
        if _number(values.get(key)):
            cut[key] = HEADS if values[key] == heads else min(2, values[key])
    for key, value in values.items():
        if FED.search(key) and _number(value):
            cut[key] = min(value, 2 * HIDDEN if "expand" in values else FEED_FORWARD)
        elif FED.search(key) and isinstance(value, list | tuple):
            cut[key] = [FEED_FORWARD] * len(value)
    return cut


def _windows(values: Mapping[str, Any], context: int) -> Values:
    """Return windows and original contexts that contexts of the recipe exceed, cut."""

    def cut(key: str, size: int) -> Values:
        value: Any = values.get(key)
        return {key: size} if _number(value) and size < value < context else {}

    changes: Values = {}
    for key in WINDOWS:
        changes |= cut(key, WINDOW)
    changes |= cut("original_max_position_embeddings", ORIGINAL)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), Mapping):
            changes[key] = _positions(values[key], context)
    return changes


def _positions(values: Mapping[str, Any], context: int) -> Values:
    """Return the settings of scaled positions with their original context cut."""
    changed: Values = {}
    rotated = int(HEAD * (values.get("partial_rotary_factor") or 1))
    for key, value in values.items():
        if isinstance(value, Mapping):  # one for each kind of layers
            changed[key] = _positions(value, context)
        elif key == "original_max_position_embeddings" and _number(value) and value < context:
            changed[key] = min(value, ORIGINAL)
        elif key in ("long_factor", "short_factor"):
            changed[key] = list(value)[: rotated // 2]
        else:
            changed[key] = value
    return changed


class LayerKeys(NamedTuple):
    """The keys of a config that say something about each layer, by their form."""

    flags: dict[str, Any]  # a list with an entry a layer
    places: dict[str, Any]  # a list of numbers of layers
    tables: dict[str, dict[int, Any]]  # number of a layer -> its own settings
    firsts: dict[str, int]  # so many layers from the first on
    lasts: dict[str, int]  # so many layers up to the last


def _layers(values: Mapping[str, Any]) -> Values:
    """Return the keys that name layers, for one layer of each kind and at least two layers."""
    key = next((name for name in layer_kinds.COUNTS if _number(values.get(name))), None)
    if key is None:
        return {}
    if "attention_types" in values:  # GPT-Neo: a pattern, and how often it comes
        kinds = sorted({*values["attention_layers"]})
        return {key: len(kinds), "attention_types": [[kinds, 1]], "attention_layers": kinds}
    count = values[key]
    keys = _layer_keys(values, count)
    chosen = _chosen(keys, count)
    return {
        key: len(chosen),
        **_for_layers(keys, chosen, count),
        **{name: period for name, period in PATTERNED.items() if name in values},
        **({"max_window_layers": len(chosen)} if "max_window_layers" in values else {}),
    }


def _layer_keys(values: Mapping[str, Any], count: int) -> LayerKeys:
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    places = {
        name: value
        for name, value in lists.items()
        if name == "full_attn_idxs" or ("layer" in name and _are_places(value, count))
    }
    return LayerKeys(
        flags={n: v for n, v in lists.items() if len(v) == count and not _are_places(v, count)},
        places=places,
        tables={
            name: {int(layer): own for layer, own in value.items()}
            for name, value in values.items()
            if name.startswith("per_layer") and isinstance(value, Mapping)
        },
        firsts={name: values[name] for name in FIRST if _number(values.get(name))},
        lasts={name: values[name] for name in LAST if _number(values.get(name))},
    )


def _chosen(keys: LayerKeys, count: int) -> list[int]:
    """Return the first layer of each kind, at least two layers, in their order."""
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(_kind(keys, layer, count), layer)
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    return [0, 1] if len(chosen) == 1 and count > 1 else chosen


def _kind(keys: LayerKeys, layer: int, count: int) -> str:
    """Return everything that a config says of a layer, as text."""
    said = [value[layer] for value in keys.flags.values()]
    said += [layer in value for value in keys.places.values()]
    said += [value.get(layer) for value in keys.tables.values()]
    said += [layer < first for first in keys.firsts.values()]
    said += [layer >= count - last for last in keys.lasts.values()]
    return repr(said)


def _for_layers(keys: LayerKeys, chosen: Sequence[int], count: int) -> Values:
    """Return the keys as they are for the chosen layers alone."""
    new: Values = {}
    for name, value in keys.flags.items():
        new[name] = [value[layer] for layer in chosen]
    for name, value in keys.places.items():
        new[name] = [at for at, layer in enumerate(chosen) if layer in value]
    for name, value in keys.tables.items():
        new[name] = {at: value[layer] for at, layer in enumerate(chosen) if layer in value}
    for name, first in keys.firsts.items():
        new[name] = sum(layer < first for layer in chosen)
    for name, last in keys.lasts.items():
        new[name] = sum(layer >= count - last for layer in chosen)
    return new


def _are_places(value: Any, count: int) -> bool:
    """Return whether a list names layers by their numbers."""
    numbers = [one for one in value if isinstance(one, int) and not isinstance(one, bool)]
    return len(numbers) == len(value) == len({*numbers}) and all(0 <= n < count for n in numbers)


def _tokens(values: Mapping[str, Any], kept: frozenset[str]) -> Values:
    """Return special tokens that are in the small vocabulary."""
    if "vocabulary" in kept:
        return {}
    given = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {key: token for key, token in given.items() if values.get(key) is not None}


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---------------------------------------------------------------- weights


def _made(config: Any, seed: int, device: torch.device) -> Any:
    """Return a model of a config on a device with weights that make tokens matter.

    Raises ValueError for one that is too large, or whose logits are not finite.
    """
    with initialization.no_init_weights():  # memory that nothing is written to costs nothing
        if (count := _built(config).num_parameters()) > MOST_WEIGHTS:
            raise ValueError(f"a copy would have {count:,} weights")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _built(config).eval()
        first = copy.deepcopy(model.state_dict())
        for gain in GAINS:
            model.cpu().load_state_dict(first)
            torch.manual_seed(seed)
            for weight in model.parameters():
                _randomize(weight, gain)
            _spread(model.to(device))
            if _rounding(model) <= MOST_ROUNDING:
                break
    return model


def _built(config: Any) -> Any:
    """Return a model of a config, with the attention that a policy is loaded with where it can."""
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    make = transformers.AutoModelForCausalLM.from_config
    try:
        return make(
            copy.deepcopy(config),
            attn_implementation="eager" if capped else "sdpa",
            dtype=torch.float32,
        )
    except ValueError:  # an architecture without it
        return make(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)


def _randomize(weight: Tensor, gain: float) -> None:
    """Draw a matrix anew, and move a vector (a norm's, a bias) away from equal values."""
    if weight.ndim > 1 and weight.numel():
        weight.normal_(0.0, gain / math.sqrt(weight.shape[-1]))
    else:
        weight.add_(MOVED * torch.randn_like(weight))


def _spread(model: Any) -> None:
    """Scale the last product so that the logits of a token spread by more than 1."""
    tokens = torch.arange(3, 3 + WINDOW, device=model.device)[None]
    head = model.get_output_embeddings()
    for _ in range(3):
        logits = model(input_ids=tokens, use_cache=False).logits
        deviation = float(logits.std(-1).mean())
        if not math.isfinite(deviation):
            raise ValueError("the logits of a copy are not finite")
        if deviation > 1.2:
            return
        if head is not None:
            head.weight.mul_(1.5 / max(deviation, 1e-3))


def _rounding(model: Any) -> float:
    """Return how far log-probabilities move when each weight moves by about its last bit.

    Rounding within a pass is as large, and no less amplified.
    """
    tokens = torch.arange(3, 3 + 4 * WINDOW, device=model.device)[None]
    moved = copy.deepcopy(model)
    for weight in moved.parameters():
        drawn = torch.randn(weight.shape).to(weight.device)
        weight.mul_(1 + torch.finfo(torch.float32).eps * drawn)
    one, other = (
        each(input_ids=tokens, use_cache=False).logits.log_softmax(-1) for each in (model, moved)
    )
    return float((one - other).abs().max())
