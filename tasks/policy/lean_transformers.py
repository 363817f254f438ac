"""transformers, imported without what it offers beyond policies of text: half of its start.

Whoever needs transformers takes it from here: ``from tasks.policy.lean_transformers import
transformers``. For features that no run uses, a plain import loads scikit-learn, SciPy, pandas,
accelerate with a client of AWS, torch's compiler and its sharding, which takes longer than torch
itself. Here these seem absent meanwhile; afterwards everything can be imported, so that any
architecture, ``Trainer`` and peft work as ever. A process that has imported transformers already
(vLLM's, TRL's) keeps it as it is. Where a package of another environment cannot be imported like
this, transformers is imported as ever, which takes longer.
tests/tasks/policy/test_lean_transformers.py fails where a new version of transformers needs other
measures.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from tasks.stand_ins import Later, instead

LOG = logging.getLogger(__name__)

FLAGGED = (  # transformers imports them if they are there
    "accelerate",  # models spread over devices
    "hqq",  # quantized caches
    "librosa",  # sound
    "scipy",  # losses of object detection
    "sklearn",  # generation with an assistant
    "soundfile",
    "torchao",  # quantized weights
    "torchaudio",
    "torchvision",  # images; vLLM for a GPU brings it
)
ABSENT = (*FLAGGED, "trio")  # which httpcore2 can use in place of asyncio
COMPILER = "torch._dynamo"
SHARDED_TENSORS = "torch.distributed.tensor"
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"
SHARED = (  # what all architectures import
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)


def _import() -> None:
    """Import transformers without what no run uses, or as ever where that fails."""
    try:
        _import_lean()
    except Exception as error:  # whatever a package makes of modules that seem absent
        LOG.warning("transformers is imported whole, which takes longer: %s", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        importlib.import_module("transformers")


def _import_lean() -> None:
    with ExitStack() as stack:
        stack.enter_context(instead(dict.fromkeys(ABSENT)))  # None: a module that is absent
        if COMPILER not in sys.modules:
            stack.enter_context(instead(_compiler()))
        # Beamline shards its models itself (tasks/policy/sharding.py).
        stack.enter_context(patch.object(torch.distributed, "is_available", lambda: False))
        # transformers would read the metadata of every package to learn the names of distributions.
        stack.enter_context(patch.object(importlib.metadata, "packages_distributions", dict))
        utils = importlib.import_module("transformers.utils.import_utils")
        with patch.object(utils, "define_import_structure", _models_of(utils)):
            importlib.import_module("transformers.models")
        for name in SHARED:
            importlib.import_module(name)
    _ask_anew(FLAGGED)


@contextmanager
def no_tensor_is_sharded() -> Iterator[None]:
    """Let libraries that look for sharded tensors find none, where none can be.

    They look for objects of a class whose import takes as long as torch's. Where it is loaded
    already, it stays: only then can there be such tensors.
    """
    tensors = ModuleType(SHARDED_TENSORS)
    tensors.DTensor = type("DTensor", (), {})  # type: ignore[attr-defined]
    with instead({SHARDED_TENSORS: tensors}):
        yield


def _ask_anew(names: Iterable[str]) -> None:
    """Let modules that are imported from now on ask anew what is there.

    Those that did without a package keep the old answer, as they would call what they left out.
    """
    utils: Any = sys.modules["transformers.utils.import_utils"]
    for name in names:
        flag = f"is_{name}_available"
        anew = functools.lru_cache(getattr(utils, flag).__wrapped__)
        setattr(utils, flag, anew)
        setattr(sys.modules["transformers.utils"], flag, anew)
        if name in utils.BACKENDS_MAPPING:
            utils.BACKENDS_MAPPING[name] = (anew, utils.BACKENDS_MAPPING[name][1])
    for module in [*sys.modules.values()]:
        if isinstance(module, utils._LazyModule):
            _find_anew(module, utils)


def _find_anew(module: Any, utils: Any) -> None:
    """Let a module of transformers have what it took for unavailable.

    Its stand-ins for that are made for packages that are absent, and are None in place of an error
    where these are there: Qwen3.5 could not be imported beside torchvision.
    """
    missing = module._object_missing_backend
    is_there = {  # by the name of a package, or a package with its least version
        package: utils.BACKENDS_MAPPING[package][0]
        if isinstance(package, str)
        else package.is_satisfied
        for packages in missing.values()
        for package in packages
    }
    present = {package for package, ask in is_there.items() if ask()}
    module._object_missing_backend = {
        name: packages for name, packages in missing.items() if not present.issuperset(packages)
    }


def _compiler() -> dict[str, ModuleType]:
    """Return stand-ins for what transformers takes of torch's compiler while it is imported.

    What is compiled later imports the compiler then; only functions that it should take as
    constants, or as one operation each, are no longer known to it.
    """
    compiler: Any = Later(COMPILER)  # who keeps it and asks for more gets it of the real one
    compiler.__path__ = []
    compiler.disable = lambda fn=None, recursive=True, **_: torch._disable_dynamo(fn, recursive)
    compiler.allow_in_graph = compiler.assume_constant_result = lambda function: function
    masks: Any = ModuleType(MASKS)
    masks.TransformGetItemToIndex = _mask_mode
    return {COMPILER: compiler, MASKS: masks}


def _mask_mode() -> Any:
    """Return the mode in which transformers makes unusual masks."""
    return importlib.import_module(MASKS).TransformGetItemToIndex()


def _models_of(utils: Any) -> Any:
    """Return a function that lists the modules of ``transformers.models`` from an older answer.

    To list them, transformers reads them all, at its import and once more for this package.
    """
    folder = Path(utils.__file__).parents[1] / "models"
    structure = utils.define_import_structure(folder, prefix="models")
    start = "models."

    def listed(_: str) -> dict[Any, dict[str, set[str]]]:
        return {
            backends: {
                name.removeprefix(start): values
                for name, values in modules.items()
                if name.startswith(start)
            }
            for backends, modules in structure.items()
        }

    return listed


if "transformers" not in sys.modules:
    _import()
import transformers as transformers  # noqa: E402
