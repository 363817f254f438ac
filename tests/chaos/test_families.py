"""Whole runs with policies of other families, killed in the middle, give the same digests."""

import shutil
from functools import partial

import pytest
import yaml

from tasks.policy.lean_transformers import transformers
from tasks.policy.load_model import load_tokenizer
from tests.chaos import runs
from tests.toy_project import git

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
CONTEXT = 256
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True},
    **{"initializer_range": 0.08, "bos_token_id": None, "pad_token_id": None},
}
STATE = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
FAMILIES = {  # with a state from token to token; convolutions; sinks, a window and experts; experts
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **STATE},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gpt_oss": {
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "qwen3_moe": {"layer_types": ["full_attention"] * 2, "num_experts": 4, **EXPERTS},
}


def make_policy(kind, tokenizer, folder):
    """A tiny policy of a family with random weights, with a tokenizer of the recipe tiny."""
    changes = {**FAMILIES[kind], "num_hidden_layers": len(FAMILIES[kind]["layer_types"])}
    ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[kind](**{**SIZES, **changes, **ends})
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


AHEAD = ("qwen3_5_text", "qwen3_moe")  # whose next batch is sampled while one is learned from


def take_policy(policy, folder, kind):
    """Make smoke, in a clean checkout, a recipe that begins with the policy in a folder."""
    file = folder / "params/smoke.yaml"
    recipe = yaml.safe_load(file.read_text())
    recipe["prepare"]["policy"] = {
        **{"kind": "pretrained", "name": str(policy), "revision": None, "context": CONTEXT}
    }
    recipe["reinforce"]["ahead"] = int(kind in AHEAD)
    file.write_text(yaml.safe_dump(recipe))
    git(folder, "commit", "--quiet", "--all", "--message", "a policy of another family")


@pytest.fixture(params=FAMILIES)
def begun(request, once, bare, prepared):
    """A checkout of smoke with a policy of a family, in which the cold start comes next."""

    def make(folder):
        tokenizer = load_tokenizer(prepared / "models/smoke/initial")
        policy = folder.with_name("policy")
        make_policy(request.param, tokenizer, policy)
        take_policy(policy, runs.copy(bare, folder), request.param)
        runs.prepare(folder, "prepare")

    return once(request.param, make)


def test_a_killed_run_of_a_family_goes_on_with_equal_digests(begun, folder):
    whole = runs.copy(begun, folder.with_name("whole"))
    runs.finish(whole)
    runs.copy(begun, folder)
    for stage, sub_step in (("cold_start", "0000-cold_start"), ("reinforce", "0001-update")):
        run = runs.start(folder, held=f"{stage}/{sub_step}")
        happened = {"cold_start": partial(runs.saved, folder, stage)}.get(
            stage, partial(runs.begun, folder, sub_step)
        )
        runs.wait_for(run, happened)
        runs.kill(runs.below(run.pid))
        run.wait()
    runs.finish(folder)
    assert not any("trained as rows" in runs.said(each).read_text() for each in (whole, folder))
    assert runs.outcome(folder) == runs.outcome(whole)
    runs.check_sound(folder)
    shutil.rmtree(whole)
