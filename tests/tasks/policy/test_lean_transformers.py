"""Tests of the import of transformers, each in a fork of a process that has just imported it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import regex

LEAN = "from tasks.policy.lean_transformers import transformers\n"
LEFT_OUT = (
    "accelerate",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "trio",
)
MODELS = """
import json
found = transformers.models._import_structure
print(json.dumps({name: sorted(found[name]) for name in sorted(found)}))
"""
SIZES = """
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, vocab_size=16)
heads = dict(num_attention_heads=2, num_key_value_heads=1)
"""
# A mask of a function of its own, which transformers makes with a part of torch's compiler.
OTHER_ARCHITECTURE = """
import torch
config = transformers.AutoConfig.for_model("llama", **sizes, **heads)
model = transformers.AutoModelForCausalLM.from_config(config)
made = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
mask = transformers.masking_utils.create_causal_mask(
    config=config,
    inputs_embeds=torch.zeros(1, 3, 8),
    attention_mask=None,
    past_key_values=None,
    and_mask_function=lambda batch, head, query, key: torch.arange(3)[query] == key,
)
print(mask.sum().item())
"""


FORKS = """
import json, os, sys
for name, code in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if not os.fork():
        print(name, flush=True)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
MODULES = "print(json.dumps(list(sys.modules)))"
COMPILED = """
import torch
print(torch.compile(lambda x: x + 1, backend='eager')(torch.tensor(1)).item())
"""
TRAINER = """
import tempfile
model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))
folder = tempfile.gettempdir()  # nothing is written
arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
print(transformers.Trainer(model, arguments).accelerator.num_processes)
"""


def outputs_of(code: str, parts: dict[str, str], folder: Path | None = None) -> dict[str, Any]:
    """Return the last line that each part prints in a fork of a process that has run ``code``.

    Packages in ``folder`` come before those that are installed.
    """
    command = [sys.executable, "-c", code + FORKS, json.dumps(parts)]
    place = {"PYTHONPATH": str(folder)} if folder else {}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    assert done.returncode == 0, done.stderr
    last: dict[str, str] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line in parts:
            name = line
        else:
            last[name] = line
    assert last.keys() == parts.keys(), done.stderr
    return {name: json.loads(line) for name, line in last.items()}


@pytest.fixture(scope="module")
def lean() -> dict[str, Any]:
    """Return what processes print that have imported transformers this way."""
    loaded = "transformers.Qwen2ForCausalLM, transformers.AutoModelForCausalLM\n" + MODULES
    parts = {
        "loaded": loaded,
        "models": MODELS,
        "other": SIZES + OTHER_ARCHITECTURE,
        "compiled": COMPILED,
        "trainer": SIZES + TRAINER,
    }
    return outputs_of(LEAN, parts)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Return what a process prints that had imported transformers as it is."""
    before = "import transformers, transformers.models, transformers.generation.utils\n"
    again = f"{LEAN}print(int('sklearn' in sys.modules))"
    return outputs_of(before, {"models": MODELS, "again": again})


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out(lean: dict[str, Any], name: str) -> None:
    assert name not in lean["loaded"]


def test_lists_the_models_that_transformers_lists(
    lean: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert len(plain["models"]) > 1000
    assert lean["models"] == plain["models"]


def test_other_architecture_generates_and_masks(lean: dict[str, Any]) -> None:
    assert lean["other"] == 3


def test_compiles_afterwards(lean: dict[str, Any]) -> None:
    assert lean["compiled"] == 2


def test_trainer_finds_accelerate(lean: dict[str, Any]) -> None:
    assert lean["trainer"] == 1


def test_earlier_import_stays(plain: dict[str, Any]) -> None:
    assert plain["again"] == 1


@pytest.mark.parametrize("name", ["torchvision", "regex"])
def test_package_of_another_environment_that_needs_the_compiler(
    name: str, plain: dict[str, Any], tmp_path: Path
) -> None:
    """torchvision, which vLLM for a GPU brings, is left out; with others the import is as ever."""
    place = tmp_path / name
    place.mkdir()
    text = f"from torch._dynamo.utils import is_compile_supported\n__path__ = {regex.__path__}\n"
    (place / "__init__.py").write_text(text + Path(regex.__file__).read_text())
    parts = {"models": MODELS, "loaded": MODULES, "other": SIZES + OTHER_ARCHITECTURE}
    found = outputs_of(LEAN, parts, tmp_path)
    assert found["models"] == plain["models"]
    assert found["other"] == 3
    assert ("torch._dynamo" in found["loaded"]) == (name == "regex")


@pytest.mark.parametrize("seed", [1, 3])  # of hashes: the order in which packages are asked for
def test_architecture_of_several_kinds_of_input_beside_torchvision(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "torchvision"
    place.mkdir()
    (place / "__init__.py").write_text("__version__ = '0.26.0'\n")
    monkeypatch.setenv("PYTHONHASHSEED", str(seed))
    asked = "print(json.dumps(transformers.Qwen3_5ForCausalLM.__name__))"
    assert outputs_of(LEAN, {"asked": f"import json\n{asked}"}, tmp_path) == {
        "asked": "Qwen3_5ForCausalLM"
    }
