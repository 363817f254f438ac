"""Load a policy and its tokenizer from a folder or from the Hugging Face hub.

Loading runs no code of a policy's own: weights are read as safetensors, never unpickled, and the
architecture and the tokenizer are those of transformers, even where a policy brings its own.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.policy import adapter, gguf_file, layer_kinds, token_ids
from tasks.policy.device import check_device
from tasks.policy.lean_transformers import no_tensor_is_sharded, transformers

initialization = importlib.import_module("transformers.initialization")
modeling_auto = transformers.models.auto.modeling_auto
tokenization_auto = transformers.models.auto.tokenization_auto

# transformers makes the weights under a setting of the whole process, so that two threads that load
# at once (reinforce.ahead) fail.
LOADING = threading.Lock()
META = torch.device("meta")
ATTENTION = ("attn_implementation", "_attn_implementation")  # keys of a config.json
TOKENIZER = "tokenizer.json"  # in a policy's folder
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAID_BY_GENERATION = {*SPECIAL_IDS, "_from_model_config", "transformers_version"}


def load_tokenizer(folder: str | Path) -> transformers.PreTrainedTokenizerFast:
    """Load the tokenizer of a policy folder exactly as it was saved.

    AutoTokenizer would use the usual class of the architecture, which splits text in its own way.
    """
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)


def fetch_policy(settings: PretrainedPolicy) -> tuple[Any, Any]:
    """Load model and tokenizer from a hub name at its pinned revision, a folder, or a GGUF file.

    Raises as ``load_policy``.
    """
    tokenizer = fetch_tokenizer(settings)
    if settings.gguf:
        with LOADING:
            return gguf_file.load(settings.name, settings.gguf, settings.revision), tokenizer
    model = _model(transformers.AutoModelForCausalLM, settings.name, settings.revision)
    _check_finite(model, settings.name)
    _end_as(model, tokenizer)
    return model, tokenizer


def _end_as(model: Any, tokenizer: Any) -> None:
    """Let the settings for generation know the token that ends a turn here, beside their own."""
    settings, end = getattr(model, "generation_config", None), tokenizer.eos_token_id
    given = getattr(settings, "eos_token_id", None)
    known = [one for one in (given if isinstance(given, list) else [given]) if type(one) is int]
    if settings is not None and end is not None and end not in known:
        settings.eos_token_id = [end, *known] if known else end


def fetch_config(settings: PretrainedPolicy) -> dict[str, Any]:
    """Return the parsed config.json, from where ``fetch_policy`` loads the weights."""
    if settings.gguf:
        return gguf_file.config_of(settings.name, settings.gguf, settings.revision)
    return _config_of(settings.name, settings.revision)


def _config_of(name: str | Path, revision: str | None) -> dict[str, Any]:
    """Return the parsed config.json. Raises ValueError, in one line, where it is not an object."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        remedy = "name a folder that save_pretrained of transformers has written"
        if (folder / adapter.CONFIG).is_file():
            remedy = "it is an adapter: merge it into its base (peft: merge_and_unload)"
        raise ValueError(f"the policy {name} has no config.json: {remedy}")
    with _explained(name):
        config, _ = transformers.PreTrainedConfig.get_config_dict(name, revision=revision)
        return dict(config)


def fetch_tokenizer(settings: PretrainedPolicy) -> Any:
    """Load the tokenizer alone, from where ``fetch_policy`` loads it."""
    if settings.gguf:
        return gguf_file.load_tokenizer(settings.name, settings.gguf, settings.revision)
    _refuse_code(settings.name, settings.revision)
    with _explained(settings.name, "config.json, tokenizer.json or tokenizer_config.json"):
        tokenizer = _tokenizer_class(settings).from_pretrained(
            settings.name, revision=settings.revision, trust_remote_code=False
        )
        tokenizer.init_kwargs.pop("auto_map", None)  # of code that is not saved with it
        return tokenizer


def _tokenizer_class(settings: PretrainedPolicy) -> Any:
    """Return the class that takes a policy's tokenizer.json, where it has one, as it is.

    The usual class of an architecture splits text in its own way, and may drop all spaces.
    """
    whole = transformers.utils.cached_file(
        settings.name,
        TOKENIZER,
        revision=settings.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer


def load_policy(folder: str | Path, machine: Machine, revision: str | None = None) -> Any:
    """Load a causal language model from a folder or a hub name, in float32, on the recipe's device.

    From the folder of an adapter, load its base with the adapter; only the adapter can learn. Where
    the folder has a tokenizer, the model knows which of its rows have a token (``token_ids``).
    Raises OSError where nothing is found, or no safetensors, and ValueError where only code of the
    policy's own can load it, or torch cannot compute on the device.
    """
    base = adapter.base_of(Path(folder))
    model = _load(transformers.AutoModelForCausalLM, base or folder, machine, revision)
    if Path(folder, TOKENIZER).is_file():
        token_ids.note(model, load_tokenizer(folder))
    return adapter.load(model, Path(folder)) if base else model


def load_backbone(folder: Path, machine: Machine) -> Any:
    """Load a model without its head over the vocabulary. Raises as ``load_policy``."""
    return _load(transformers.AutoModel, folder, machine, None)


def save_model(model: Any, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a model as transformers loads it; with ``weights``, those in place of its own.

    Of its settings for generation the ids of tokens stay. Others, such as a repetition penalty or
    top-k, change the distribution: nothing here samples by them, and a server of the folder would.
    """
    given = getattr(model, "generation_config", None)
    if given is not None and given.to_diff_dict().keys() - SAID_BY_GENERATION:
        model.generation_config = _with_ids_alone(given)
    if hasattr(model.config, "auto_map"):
        del model.config.auto_map  # names code that is not beside what is saved
    with no_tensor_is_sharded():
        model.save_pretrained(folder, state_dict=weights)


def _with_ids_alone(given: Any) -> Any:
    """Return settings for generation that say no more than which tokens begin, end and pad."""
    ids = {name: getattr(given, name, None) for name in SPECIAL_IDS}
    return transformers.GenerationConfig(**{k: v for k, v in ids.items() if v is not None})


def _load(kind: Any, folder: str | Path, machine: Machine, revision: str | None) -> Any:
    check_device(machine.device)
    load = partial(_model, kind, folder, revision, dtype=torch.float32)
    try:
        model = load(attn_implementation="sdpa")
    except ValueError as error:  # an architecture without it, such as GPT-OSS
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = load(attn_implementation="eager")
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # which alone bounds scores (Gemma 2)
    return model.to(torch.device(machine.device))


def _model(kind: Any, name: str | Path, revision: str | None, **options: Any) -> Any:
    """Load a model of a class of transformers from safetensors."""
    _refuse_code(name, revision)
    whole = _config_of(name, revision)
    options |= _dequantizing(whole)
    quantized = "quantization_config" in options
    reading = _without_accelerate() if quantized else nullcontext()
    try:
        with LOADING, _unfilled(), _explained(name), reading:
            options |= _without_attention(whole)
            model, loading = kind.from_pretrained(
                name,
                revision=revision,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are refused below, with their names
                **options,
            )
            if adapter.attached(model):
                raise ValueError(
                    f"the policy {name} holds an adapter ({adapter.CONFIG}): merge it into its "
                    "base (peft: merge_and_unload) and name the folder of the whole, or remove it"
                )
            _check_shapes(loading["mismatched_keys"], name)
            _check_weights(model, whole, loading["missing_keys"], name)
            if not quantized:
                _check_used(model, whole, loading["unexpected_keys"], name)
            return _plain(model) if quantized else model
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        if _names_safetensors(name, revision):
            raise OSError(f"the policy {name} is incomplete: {error}: fetch it again") from error
        raise OSError(
            f"the policy {name} has no *.safetensors: other weights are pickles, which can run any "
            "code when they are read. Choose a revision with safetensors, or load the model on a "
            "machine that may run its code and write it with save_pretrained"
        ) from error


def _without_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that leaves out a form of attention that a config.json asks for.

    It was that of the machine which saved the policy, and may need a library that is not here.
    """
    if not any(key in config for key in ATTENTION):
        return {}
    rest = {key: value for key, value in config.items() if key not in ATTENTION}
    return {"config": transformers.AutoConfig.for_model(rest.pop("model_type"), **rest)}


def _dequantizing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option with which transformers makes plain weights of quantized ones."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in layer_kinds.DEQUANTIZED:
        return {}
    kinds = importlib.import_module("transformers.quantizers.auto")
    plain = kinds.AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)
    return {"quantization_config": plain}


def _without_accelerate() -> AbstractContextManager[Any]:
    """Have fp8 weights read without accelerate, which transformers asks for and does not use."""
    reader = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
    return patch.object(reader, "is_accelerate_available", lambda: True)


def _plain(read: Any) -> Any:
    """Return a dequantized model as one that never was quantized: that is saved as it is."""
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    with initialization.no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            type(read.config)(**config), dtype=read.dtype
        )
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


def _check_weights(
    model: Any, config: Mapping[str, Any], missing: Iterable[str], name: str | Path
) -> None:
    """Raise ValueError where files lack a weight, which is random then.

    A head that is the embedding needs none, wherever ``config`` (the parsed config.json) says so:
    of a policy of several kinds of input, transformers reads the text's own config alone.
    """
    lacking = sorted(missing)
    head = model.get_output_embeddings()
    if lacking and head is not None and config.get("tie_word_embeddings"):
        heads = {key for key, weight in model.named_parameters() if weight is head.weight}
        if heads.issuperset(lacking):
            model.config.tie_word_embeddings = True
            model.tie_weights()
            return
    if lacking:
        raise ValueError(
            f"the policy {name} has no weights for {lacking[0]}"
            f"{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, which would be random: "
            "fetch it again, or take a causal language model that was saved with save_pretrained"
        )


def _check_shapes(mismatched: Iterable[Any], name: str | Path) -> None:
    """Raise ValueError where a weight has another shape in its file than by config.json."""
    for key, held, wanted in sorted(mismatched):
        raise ValueError(
            f"the policy {name} has {key} in the shape {tuple(held)}, and by its config.json it is "
            f"{tuple(wanted)}: correct the sizes in config.json, or fetch the policy again"
        )


def _check_used(
    model: Any, config: Mapping[str, Any], unexpected: Iterable[str], name: str | Path
) -> None:
    """Raise ValueError where files have weights of the policy's own layers that nothing uses.

    Those of other parts, such as a part that sees images, are none of a policy's.
    """
    modules = dict(model.named_modules())
    more = int(config.get("num_nextn_predict_layers") or 0)  # layers of other heads, after the last
    unused = [key for key in sorted(unexpected) if _belongs(key, modules, more)]
    if unused:
        raise ValueError(
            f"the policy {name} has weights that its config.json leaves out: {unused[0]}"
            f"{f' and {len(unused) - 1} more' if unused[1:] else ''}: correct config.json (numbers "
            "of layers, biases), or fetch the policy again"
        )


def _belongs(key: str, modules: Mapping[str, Any], more: int) -> bool:
    """Return whether a weight is of a layer that a model has, or of one behind its last layer."""
    place, _, _ = key.rpartition(".")
    owner = modules.get(place)
    if owner is not None and any(True for _ in owner.parameters(recurse=False)):
        return True
    parts = key.split(".")
    for depth, part in enumerate(parts):
        layers = modules.get(".".join(parts[:depth]))
        if part.isdecimal() and isinstance(layers, torch.nn.ModuleList):
            return int(part) >= len(layers) + more
    return False


def _check_finite(model: Any, name: str | Path) -> None:
    """Raise ValueError where a weight is no number: no pass through it is one."""
    for key, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"the policy {name} has numbers in {key} that are not finite: fetch it again, or "
                "convert it without float16, in which large weights become infinite"
            )


@contextmanager
def _explained(name: str | Path, files: str = "config.json") -> Iterator[None]:
    """Turn what the values in ``files`` make transformers raise into a ValueError of one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, MemoryError):
        raise
    except SafetensorError as error:
        damaged = ", ".join(_damaged(Path(name))) or "a *.safetensors"
        raise ValueError(
            f"the policy {name} has a damaged file of weights, {damaged} ({error}): fetch it again "
            "(a file of a few lines stands for one that git lfs pull fetches)"
        ) from error
    except Exception as error:  # of any kind: of divisions, of its checks of types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"transformers cannot load the policy {name} ({reason}): correct its {files}, or "
            "take another policy"
        ) from error


def _damaged(folder: Path) -> list[str]:
    """Return the names of the files of weights in a folder that cannot be opened."""
    names = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            names.append(file.name)
    return names


@contextmanager
def _unfilled() -> Iterator[None]:
    """Have transformers make models with empty memory, to be filled with their weights.

    It would make them on the device "meta", whose operations import torch's compiler, which takes
    longer than torch itself. Empty memory costs nothing until something is written there.
    """
    method: Any = transformers.PreTrainedModel.get_init_context
    contexts = method.__func__

    def without_meta(kind: Any, *arguments: Any, **named: Any) -> list[Any]:
        managers = contexts(kind, *arguments, **named)
        return [initialization.no_init_weights() if one == META else one for one in managers]

    settings: Any = torch.utils.deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        with patch.object(
            transformers.PreTrainedModel, "get_init_context", classmethod(without_meta)
        ):
            yield
    finally:
        settings.fill_uninitialized_memory = filled


def _names_safetensors(name: str | Path, revision: str | None) -> bool:
    """Return whether a folder has safetensors or their index, or the hub's cache the index."""
    if Path(name).is_dir():
        return any(Path(name).glob("*.safetensors*"))
    try:
        transformers.utils.cached_file(
            name,
            transformers.utils.SAFE_WEIGHTS_INDEX_NAME,
            revision=revision,
            local_files_only=True,
        )
    except OSError:
        return False
    return True


def _refuse_code(name: str | Path, revision: str | None) -> None:
    """Raise ValueError if a policy or its tokenizer has only a class of its own (auto_map)."""
    config = _config_of(name, revision)
    kind = str(config.get("model_type"))
    unknown_classes = []
    if config.get("auto_map") and kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        unknown_classes.append(f"model_type '{kind}' of config.json")
    settings = tokenization_auto.get_tokenizer_config(name, revision=revision)
    tokenizer = (
        settings.get("tokenizer_class") or tokenization_auto.TOKENIZER_MAPPING_NAMES.get(kind) or ""
    )
    if _maps_tokenizer(
        settings.get("auto_map")
    ) and not tokenization_auto.tokenizer_class_from_name(tokenizer):
        unknown_classes.append(f"tokenizer_class '{tokenizer}' of tokenizer_config.json")
    if unknown_classes:
        raise ValueError(
            f"the policy {name} needs code of its own (auto_map), which is not run: transformers "
            f"has no class for {' and '.join(unknown_classes)}. Choose another policy, or a copy "
            "that was saved with classes of transformers"
        )


def _maps_tokenizer(auto_map: Any) -> bool:
    """Return whether an auto_map names a tokenizer; in old files it is a list of its classes."""
    return bool(auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map)
