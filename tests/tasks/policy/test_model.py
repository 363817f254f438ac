"""A tokenizer that can write any text, and a policy that a seed decides."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.policy.machine import PRECISION, in_precision
from tasks.policy.model import fetch_policy, load_policy
from tasks.policy.tiny import ASSISTANT, END, USER, build_policy, build_tokenizer
from tasks.trees.dialogue import TAGS
from tests.conftest import TEXTS

# ---- tokenizer


@given(st.text())
def test_any_text_can_be_written_and_read_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(st.integers(0, 10**30))
def test_a_digit_is_a_token(tokenizer, number):
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(f"x{number}y")]
    assert pieces == ["x", *str(number), "y"]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_a_token_that_decoding_keeps(tokenizer, tag):
    tokens = tokenizer.encode(f"1{tag}2")
    assert len(tokens) == 3
    assert tokenizer.decode(tokens, skip_special_tokens=True) == f"1{tag}2"


def test_the_end_token_is_one_token(tokenizer):
    assert tokenizer.encode(END) == [tokenizer.eos_token_id]


def test_the_vocabulary_has_the_size_that_was_asked_for(tokenizer, tiny):
    assert len(tokenizer) == tiny.vocabulary
    assert sorted(tokenizer.get_vocab().values()) == list(range(tiny.vocabulary))


def test_a_vocabulary_too_small_for_bytes_and_tags_raises(tiny):
    """256 bytes, 3 marks of the dialogue, 10 tags."""
    assert len(build_tokenizer(TEXTS, tiny.model_copy(update={"vocabulary": 269}))) == 269
    with pytest.raises(ValueError, match="vocabulary"):
        build_tokenizer(TEXTS, tiny.model_copy(update={"vocabulary": 268}))


def test_the_same_texts_give_the_same_tokenizer(tokenizer, tiny):
    assert build_tokenizer(iter(TEXTS), tiny).get_vocab() == tokenizer.get_vocab()


def test_the_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == f"{USER}s{USER}u{ASSISTANT}a{END}"
    prompt = tokenizer.apply_chat_template(
        messages[1:2], tokenize=False, add_generation_prompt=True
    )
    assert prompt == f"{USER}u{ASSISTANT}"


# ---- policy


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_seed_decides_the_weights_and_nothing_else_does(tiny, tokenizer):
    torch.manual_seed(11)
    first = weights(build_policy(tiny, tokenizer, seed=3))
    torch.manual_seed(12)
    assert torch.equal(weights(build_policy(tiny, tokenizer, seed=3)), first)
    assert not torch.equal(weights(build_policy(tiny, tokenizer, seed=4)), first)


def test_building_leaves_the_random_numbers_of_the_process_alone(tiny, tokenizer):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    build_policy(tiny, tokenizer, seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_the_policy_has_the_shape_of_its_settings(policy, tiny, tokenizer):
    layers = policy.model.layers
    assert len(layers) == tiny.layers
    assert policy.get_input_embeddings().weight.shape == (len(tokenizer), tiny.hidden)
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    size = tiny.hidden // tiny.heads
    assert layers[0].self_attn.q_proj.weight.shape == (tiny.heads * size, tiny.hidden)
    assert layers[0].self_attn.k_proj.weight.shape == (tiny.key_value_heads * size, tiny.hidden)
    assert layers[0].mlp.up_proj.weight.shape == (tiny.feed_forward, tiny.hidden)
    assert policy.config.max_position_embeddings == tiny.context
    assert policy.config.eos_token_id == tokenizer.eos_token_id


def test_a_policy_in_a_folder_comes_back_as_it_was(policy, tokenizer, tmp_path):
    policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = PretrainedPolicy(kind="pretrained", name=str(tmp_path), revision=None, context=256)
    fetched, its_tokenizer = fetch_policy(settings)
    assert torch.equal(weights(fetched), weights(policy))
    text = "<think>7 times 8</think><answer>\\boxed{56}</answer>"
    assert its_tokenizer.encode(text) == tokenizer.encode(text)
    assert its_tokenizer.eos_token_id == tokenizer.eos_token_id
    assert its_tokenizer.chat_template == tokenizer.chat_template
    tokens = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        logits, again = policy(tokens).logits, fetched.eval()(tokens).logits
    np.testing.assert_allclose(again.float(), logits, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_policy_is_loaded_in_float32_whatever_the_precision(policy, tmp_path, precision, stored):
    copy.deepcopy(policy).to(stored).save_pretrained(tmp_path)
    loaded = load_policy(tmp_path, Machine(threads=1, device="cpu", precision=precision))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(weights(loaded), weights(policy).to(stored).float())


@pytest.mark.parametrize(("precision", "kind"), PRECISION.items())
def test_a_pass_multiplies_in_the_precision_of_the_recipe(policy, precision, kind):
    machine = Machine(threads=1, device="cpu", precision=precision)
    layer = policy.model.layers[0]
    fed = torch.randn(1, 3, policy.config.hidden_size)
    with in_precision(machine):
        assert layer.mlp.up_proj(fed).dtype is kind
        assert layer.input_layernorm(fed).dtype is torch.float32
    assert layer.mlp.up_proj(fed).dtype is torch.float32


def test_a_policy_that_is_nowhere_raises(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        load_policy(tmp_path / "nowhere", Machine(threads=1, device="cpu", precision="float32"))


FAULTS = """
import resource, threading, torch
from params.schema.recipe import load
from tasks.policy.machine import use_machine

use_machine(settings_of("tiny").machine)

def work():  # as an update does: large tensors that come and go
    for _ in range(50):
        torch.zeros(2**21).add(1).mul(2)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = faults()
lane = threading.Thread(target=work)
lane.start(), lane.join()
print(faults() - before)
"""


def test_a_users_own_settings_of_the_allocator_win():
    def faults(**own):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        command = [sys.executable, "-c", FAULTS]
        said = subprocess.run(
            command,
            env=environment | own,
            cwd=Path(__file__).parents[3],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        return int(said)

    pages = 50 * 3 * 2**21 * 4 // 4096
    assert faults(MALLOC_MMAP_THRESHOLD_="1000000") > pages * 0.9
