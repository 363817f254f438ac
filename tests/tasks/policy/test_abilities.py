"""What a recipe asks of an architecture that it cannot do is refused, with what it can."""

import json

import pytest
import yaml

from benchmarks import families
from params.schema.base import PARAMS
from params.schema.reinforce import Lora
from tasks import recipes
from tasks.policy import abilities


def faults(kind, *modules, recompute=False):
    lora = Lora(rank=1, alpha=1.0, modules=modules) if modules else None
    return abilities.faults(families.config_of(kind).to_dict(), lora, recompute)


@pytest.mark.parametrize(
    "kind, modules",
    [
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_a", "out_proj", "down_proj")),
        ("lfm2", ("in_proj", "out_proj", "w1")),
        ("nemotron_h", ("in_proj",)),
        ("minimax", ("qkv_proj", "output_gate", "out_proj")),
        ("jamba", ("x_proj", "in_proj", "out_proj")),
        ("gpt_oss", ("q_proj", "o_proj")),
        ("deepseek_v3", ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    ],
)
def test_adapters_of_mixers_take_effect(kind, modules):
    assert faults(kind, *modules, recompute=True) == []


@pytest.mark.parametrize(
    "kind, module, other",
    [
        ("jamba", "dt_proj", "x_proj"),  # its code reads the weight alone
        ("qwen3_5_text", "conv1d", "in_proj_qkv"),  # no linear layer
        ("nemotron_h", "out_proj", "in_proj"),  # peft refuses it
        ("deepseek_v3", "down_proj", "o_proj"),  # experts whose weights are one tensor
        ("deepseek_v3", "gate_proj", "o_proj"),
        ("qwen3_moe", "down_proj", "o_proj"),
        ("llama", "out_proj", "o_proj"),
    ],
)
def test_adapters_without_effect_are_named_with_those_that_have_one(kind, module, other):
    (fault,) = faults(kind, other, module)
    assert f"names {module}, and in the architecture {kind}" in fault
    names = fault.rpartition("name some of ")[2].split(", ")
    assert other in names and module not in names


def test_an_architecture_that_recomputes_nothing_is_refused():
    (fault,) = faults("jetmoe", recompute=True)
    assert "'reinforce.update.recompute'" in fault and "set it to false" in fault


def test_a_recipe_is_refused_with_all_of_it_when_it_is_read(tmp_path):
    policy = tmp_path / "policy"
    policy.mkdir()
    config = families.config_of("jetmoe").to_dict()
    (policy / "config.json").write_text(json.dumps(config))
    for file in PARAMS.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    recipe = yaml.safe_load((PARAMS / "smoke.yaml").read_text())
    recipe["prepare"]["policy"] = {
        **{"kind": "pretrained", "name": str(policy), "revision": None, "context": 256}
    }
    recipe["reinforce"]["update"]["recompute"] = True
    recipe["lora"] = {"rank": 2, "alpha": 2.0, "modules": ["q_proj"]}
    (tmp_path / "smoke.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError) as caught:
        recipes.load("smoke", tmp_path)
    assert all(key in str(caught.value) for key in ("lora.modules", "update.recompute"))
