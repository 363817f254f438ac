"""Tests of the import of transformers, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def output_of(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Return the modules of a process that has an architecture and the automatic classes."""
    names = "transformers.Qwen2ForCausalLM, transformers.AutoModelForCausalLM\n"
    return output_of(f"{LEAN}{names}import json, sys\nprint(json.dumps(list(sys.modules)))")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out(loaded: list[str], name: str) -> None:
    assert name not in loaded


def test_lists_the_models_that_transformers_lists() -> None:
    plain = output_of(f"import transformers, transformers.models\n{MODELS}")
    assert len(plain) > 1000
    assert output_of(LEAN + MODELS) == plain


def test_other_architecture_generates_and_masks() -> None:
    assert output_of(LEAN + SIZES + OTHER_ARCHITECTURE) == 3


def test_compiles_afterwards() -> None:
    compiled = "torch.compile(lambda x: x + 1, backend='eager')(torch.tensor(1))"
    assert output_of(f"{LEAN}import torch\nprint({compiled}.item())") == 2


def test_trainer_finds_accelerate(tmp_path: Path) -> None:
    arguments = f"transformers.TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[])"
    model = "transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads))"
    code = f"{SIZES}trainer = transformers.Trainer({model}, {arguments})\n"
    assert output_of(f"{LEAN}{code}print(trainer.accelerator.num_processes)") == 1


def test_trainer_comes_with_accelerate_alone() -> None:
    code = (
        "from tasks.policy import lean_transformers\nimport json, sys\n"
        "transformers.utils.is_peft_available()\n"
        "lean_transformers.import_trainer()\ntransformers.Trainer, transformers.TrainingArguments\n"
        "assert transformers.utils.is_peft_available()\n"
        "print(json.dumps(list(sys.modules)))"
    )
    loaded = output_of(LEAN + code)
    assert "accelerate" in loaded
    assert not {"botocore", "datasets", "pandas", "peft", "sklearn", "torch._dynamo"} & {*loaded}


def test_earlier_import_stays() -> None:
    code = "import transformers.generation.utils as before, sys\n"
    assert output_of(f"{code}{LEAN}print(int('sklearn' in sys.modules))") == 1
