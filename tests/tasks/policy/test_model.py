"""A tokenizer that can write any text, and a policy that a seed decides."""

import copy

import numpy as np
import pytest
import torch

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.policy.model import fetch_policy, load_policy

# ---- tokenizer


# ---- policy


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


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
def test_policy_is_loaded_in_float32(policy, tmp_path, precision, stored):
    copy.deepcopy(policy).to(stored).save_pretrained(tmp_path)
    loaded = load_policy(tmp_path, Machine(threads=1, device="cpu", precision=precision))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(weights(loaded), weights(policy).to(stored).float())


def test_missing_policy_raises(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        load_policy(tmp_path / "nowhere", Machine(threads=1, device="cpu", precision="float32"))
