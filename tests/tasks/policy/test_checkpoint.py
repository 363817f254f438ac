import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from params.schema.algorithms import Critic
from tasks.learning import passes
from tasks.ledger import artifacts
from tasks.policy import checkpoint, resident
from tests.learners import OWN, SETTINGS, SHARED, fresh, made_trees, run, same, weights
from tests.sections import MACHINE


def test_equal_updates_give_equal_bytes(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"epochs": 2, "mini_batches": 2})
    digests = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        learning = fresh(initial, settings)
        run(learning, made_trees(), settings, seed=seed)
        checkpoint.save(learning, tmp_path / name)
        digests.append(artifacts.digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_learner_resumes_from_disk(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"warmup_updates": 3, "mini_batches": 2})
    learning = fresh(initial, settings)
    run(learning, made_trees(seed=1), settings)
    checkpoint.save(learning, tmp_path / "between")
    in_memory = run(learning, made_trees(seed=2), settings)
    checkpoint.save(learning, tmp_path / "in_memory")

    restarted = fresh(tmp_path / "between" / checkpoint.POLICY, settings)
    assert restarted.updates == 2
    from_disk = run(restarted, made_trees(seed=2), settings)
    checkpoint.save(restarted, tmp_path / "from_disk")
    assert from_disk == in_memory
    assert artifacts.digest(tmp_path / "from_disk") == artifacts.digest(tmp_path / "in_memory")


def test_saved_optimizer_matters(initial, tmp_path):
    # proves that the test above looks at the optimizer's state, too
    learning = fresh(initial)
    run(learning, made_trees(seed=1))
    checkpoint.save(learning, tmp_path)
    run(learning, made_trees(seed=2))
    (tmp_path / checkpoint.OPTIMIZER).rename(tmp_path / "elsewhere")
    restarted = fresh(tmp_path / checkpoint.POLICY)
    run(restarted, made_trees(seed=2))
    assert not same(weights(restarted.model), weights(learning.model))


def test_unlearned_policy_has_no_optimizer(initial, tmp_path):
    resident.POLICIES.clear()
    checkpoint.save(resident.POLICIES.load_learner(initial, MACHINE), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.POLICY]


TEXTS = [
    "<think>I compute it.</think><python>12 * 345</python>",
    "<answer>\\boxed{-7}</answer>",
    "ZeroDivisionError: division by zero\r\n\tline 2,  'x' isn't 12",
    "Gr\u00fc\u00dfe, cafe\u0301",  # the accent is a character of its own
    "<|endoftext|><|im_end|>",  # what a tool prints may look like another model's special tokens
]


@pytest.mark.parametrize("text", TEXTS)
def test_loaded_tokenizer_equals_the_built_one(initial, tokenizer, tmp_path, text):
    loaded = fresh(initial)
    checkpoint.save(loaded, tmp_path)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for learning in (loaded, fresh(tmp_path / checkpoint.POLICY)):
        assert learning.tokenizer.encode(text, add_special_tokens=False) == tokens
        assert learning.tokenizer.decode(tokens) == text
        assert max(tokens) < learning.model.config.vocab_size


# ---------------------------------------------------------------- what samples


# ---------------------------------------------------------------- critics


def values(learning):
    found = passes.node_values(learning, made_trees(2), SETTINGS, MACHINE)
    return [node.tolist() for tree in found for node in tree]


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_critic_resumes_from_disk(initial, tmp_path, critic):
    settings = SETTINGS.model_copy(update={"warmup_updates": 3, "mini_batches": 2})
    learning = fresh(initial, settings, critic)
    run(learning, made_trees(seed=1, values=True), settings)
    checkpoint.save(learning, tmp_path / "between")
    in_memory = run(learning, made_trees(seed=2, values=True), settings)
    checkpoint.save(learning, tmp_path / "in_memory")

    restarted = fresh(tmp_path / "between" / checkpoint.POLICY, settings, critic)
    from_disk = run(restarted, made_trees(seed=2, values=True), settings)
    checkpoint.save(restarted, tmp_path / "from_disk")
    assert from_disk == in_memory
    assert artifacts.digest(tmp_path / "from_disk") == artifacts.digest(tmp_path / "in_memory")
    assert values(restarted) == values(learning) != values(fresh(initial, settings, critic))


@pytest.mark.parametrize(
    "lost", ["head.safetensors", "model.safetensors", "state.safetensors"], ids=lambda name: name
)
def test_each_part_of_a_saved_critic_matters(initial, tmp_path, lost):
    # proves that the test above looks at head, backbone and optimizer
    learning = fresh(initial, critic=OWN)
    run(learning, made_trees(seed=1, values=True))
    checkpoint.save(learning, tmp_path)
    run(learning, made_trees(seed=2, values=True))
    untrained = fresh(initial, critic=OWN)
    checkpoint.save(untrained, tmp_path / "other")
    if lost != "state.safetensors":
        (tmp_path / "other" / checkpoint.CRITIC / lost).rename(tmp_path / checkpoint.CRITIC / lost)
    else:
        file = tmp_path / checkpoint.OPTIMIZER / checkpoint.CRITIC / lost
        state = {name: torch.zeros_like(value) for name, value in load_file(file).items()}
        checkpoint.save_file(state, file)
    restarted = fresh(tmp_path / checkpoint.POLICY, critic=OWN)
    run(restarted, made_trees(seed=2, values=True))
    assert values(restarted) != values(learning)


def test_new_own_critic_copies_the_policy_and_values_0(initial):
    learning = fresh(initial, critic=OWN)
    assert learning.critic and learning.critic.backbone
    assert same(weights(learning.critic.backbone), weights(learning.model.base_model))
    assert all(value == 0 for node in values(learning) for value in node)


def test_saved_critic_loads_in_transformers(initial, tmp_path):
    own, shared = (fresh(initial, critic=critic) for critic in (OWN, SHARED))
    checkpoint.save(own, tmp_path / "own")
    checkpoint.save(shared, tmp_path / "shared")
    AutoModel.from_pretrained(tmp_path / "own" / checkpoint.CRITIC)
    assert "vocab_size" in json.loads(
        (tmp_path / "own" / checkpoint.CRITIC / "config.json").read_text()
    )
    (head,) = (tmp_path / "shared" / checkpoint.CRITIC).iterdir()
    assert {name: tuple(w.shape) for name, w in load_file(head).items()} == {
        "weight": (1, 32),
        "bias": (1,),
    }


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_critic_weights_are_in_one_optimizer(initial, critic):
    learning = fresh(initial, critic=critic)
    assert learning.critic and learning.optimizer

    def held(optimizer):
        return {id(w) for group in optimizer.param_groups for w in group["params"]}

    head = {id(weight) for weight in learning.critic.head.parameters()}
    if critic is OWN:
        assert learning.critic.optimizer
        assert head < held(learning.critic.optimizer)
        assert not held(learning.critic.optimizer) & held(learning.optimizer)
    else:
        assert learning.critic.optimizer is None
        assert head < held(learning.optimizer)


def test_critic_of_another_algorithm_is_dropped(initial):
    """A comparison starts every row from one cold start, which may still be in memory."""
    learning = fresh(initial, critic=OWN)
    checkpoint.prepare_critic(learning, None, MACHINE)
    assert learning.critic is None


def test_critic_settings_come_from_the_row(initial, tmp_path):
    learning = fresh(initial, critic=OWN)
    checkpoint.save(learning, tmp_path)
    other = Critic(backbone="own", value_clip=None, coefficient=2.0)
    restarted = fresh(tmp_path / checkpoint.POLICY, critic=other)
    assert restarted.critic
    assert (restarted.critic.value_clip, restarted.critic.coefficient) == (None, 2.0)


# ---------------------------------------------------------------- reference
