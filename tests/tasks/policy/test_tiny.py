"""A tokenizer that can write any text, and a policy that a seed decides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.policy.tiny import ASSISTANT, END, USER, build_policy, build_tokenizer
from tasks.trees.dialogue import TAGS
from tests.conftest import TEXTS


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


def test_vocabulary_size(tokenizer, tiny):
    assert len(tokenizer) == tiny.vocabulary
    assert sorted(tokenizer.get_vocab().values()) == list(range(tiny.vocabulary))


def test_too_small_vocabulary_is_refused(tiny):
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


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_seed_decides_the_weights(tiny, tokenizer):
    torch.manual_seed(11)
    first = weights(build_policy(tiny, tokenizer, seed=3))
    torch.manual_seed(12)
    assert torch.equal(weights(build_policy(tiny, tokenizer, seed=3)), first)
    assert not torch.equal(weights(build_policy(tiny, tokenizer, seed=4)), first)


def test_building_keeps_the_random_state(tiny, tokenizer):
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
