import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from params.schema.algorithms import Critic
from tasks.engines import Request
from tasks.engines.transformers.engine import TransformersEngine
from tasks.learning import learner
from tasks.learning.packing import uncredited
from tasks.ledger import artifacts
from tasks.policy import checkpoint, resident
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.tasks.learning.test_learner import (
    HALF,
    MACHINE,
    OWN,
    SETTINGS,
    SHARED,
    fresh,
    made_trees,
    run,
    same,
    weights,
)


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    folder = tmp_path_factory.mktemp("initial") / "policy"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_equal_updates_give_equal_bytes_and_other_orders_do_not(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"epochs": 2, "mini_batches": 2})
    digests = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        learning = fresh(initial, settings)
        run(learning, made_trees(), settings, seed=seed)
        checkpoint.save(learning, tmp_path / name)
        digests.append(artifacts.digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_going_on_from_disk_is_going_on_in_memory(initial, tmp_path):
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


def test_without_its_optimizer_the_next_update_would_differ(initial, tmp_path):
    # proves that the test above looks at the optimizer's state, too
    learning = fresh(initial)
    run(learning, made_trees(seed=1))
    checkpoint.save(learning, tmp_path)
    run(learning, made_trees(seed=2))
    (tmp_path / checkpoint.OPTIMIZER).rename(tmp_path / "elsewhere")
    restarted = fresh(tmp_path / checkpoint.POLICY)
    run(restarted, made_trees(seed=2))
    assert not same(weights(restarted.model), weights(learning.model))


def test_a_policy_that_has_not_learned_is_saved_without_an_optimizer(initial, tmp_path):
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
def test_the_loaded_tokenizer_writes_as_the_one_that_was_built(initial, tokenizer, tmp_path, text):
    loaded = fresh(initial)
    checkpoint.save(loaded, tmp_path)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for learning in (loaded, fresh(tmp_path / checkpoint.POLICY)):
        assert learning.tokenizer.encode(text, add_special_tokens=False) == tokens
        assert learning.tokenizer.decode(tokens) == text
        assert max(tokens) < learning.model.config.vocab_size


def test_the_resident_learner_is_used_again_and_another_folder_is_loaded(initial, tmp_path):
    first = fresh(initial)
    assert resident.POLICIES.load_learner(initial, MACHINE) is first
    checkpoint.save(first, tmp_path)
    other = resident.POLICIES.load_learner(tmp_path / checkpoint.POLICY, MACHINE)
    assert other is not first
    assert same(weights(other.model), weights(first.model))
    assert resident.POLICIES.load_learner(initial, MACHINE) is not first, "only one stays in memory"


def test_a_learner_is_known_by_the_folder_that_it_will_have(initial, tmp_path):
    learning = fresh(initial)
    resident.POLICIES.keep(learning, tmp_path / "later" / "policy")
    assert resident.POLICIES.load_learner(tmp_path / "later" / "policy", MACHINE) is learning
    assert resident.POLICIES.load_learner(initial, MACHINE) is not learning


def test_after_an_update_that_failed_the_folder_gives_what_lies_in_it(initial):
    # the first mini-batch has changed the weights in memory when the second one fails
    learning = fresh(initial)
    before = weights(learning.model)
    trees = made_trees(2)
    trees[1].credits[0].advantages[:] = np.inf
    order = np.random.default_rng(1).permutation(2)
    with pytest.raises(RuntimeError, match="update 2"):
        run(
            learning,
            [trees[i] for i in np.argsort(order)],
            SETTINGS.model_copy(update={"mini_batches": 2}),
        )
    assert same(weights(resident.POLICIES.load_learner(initial, MACHINE).model), before)


@pytest.mark.parametrize("left", [[], ["tokenizer.json"]])
def test_a_folder_that_was_pruned_is_an_error_with_its_remedy(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("{}")
    resident.POLICIES.clear()
    with pytest.raises(RuntimeError, match=rf"{tmp_path} holds no policy .* run `make clean`"):
        resident.POLICIES.load_learner(tmp_path, MACHINE)


# ---------------------------------------------------------------- what samples


def test_in_float32_a_policy_samples_as_it_learns(initial):
    learning = fresh(initial)
    assert resident.to_sample(learning.model, MACHINE) is learning.model


def test_in_bf16_a_copy_samples_and_what_learns_stays_as_it_was(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    sampling = resident.to_sample(learning.model, HALF)
    cast = weights(sampling)
    assert same(cast, {name: weight.to(torch.bfloat16) for name, weight in before.items()})
    assert sampling.lm_head.weight is sampling.model.embed_tokens.weight, "still tied"
    assert sampling.model.rotary_emb.inv_freq.dtype is torch.float32
    run(learning, made_trees())
    assert same(weights(sampling), cast), "not a view of what learns"
    assert not same(weights(learning.model), before)


def test_what_is_sampled_in_bf16_is_near_what_the_learner_says_of_it(initial):
    learning = fresh(initial)
    engine = TransformersEngine(resident.to_sample(learning.model, HALF), learning.tokenizer)
    prompt = np.arange(3, 12, dtype=np.int32)
    with engine.session(1, 80, 1.0, 1.0, ("</answer>",)) as session:
        (sample,) = session.sample([Request(session.open(), prompt, 17, 60)])
    nothing = np.zeros(0, np.float32)
    turn = Node(0, TURN, "", "", sample.tokens, sample.logprobs, sample.entropies)
    tree = Tree(
        Question("q", "k", "t", ("1",)), [Node(-1, PROMPT, "", "", prompt, nothing, nothing), turn]
    )
    tree.leaves = [1]
    for machine in (MACHINE, HALF):
        found = learner.node_logprobs(learning.model, [uncredited(tree)], 1.0, SETTINGS, machine)
        np.testing.assert_allclose(found[0][1], sample.logprobs, atol=0.05)


# ---------------------------------------------------------------- critics


def values(learning):
    found = learner.node_values(learning, made_trees(2), SETTINGS, MACHINE)
    return [node.tolist() for tree in found for node in tree]


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_a_critic_goes_on_from_disk_as_it_would_in_memory(initial, tmp_path, critic):
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
def test_without_a_part_of_its_critic_the_next_update_would_differ(initial, tmp_path, lost):
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


def test_a_new_critic_of_its_own_begins_as_the_policy_and_values_everything_at_0(initial):
    learning = fresh(initial, critic=OWN)
    assert learning.critic and learning.critic.backbone
    assert same(weights(learning.critic.backbone), weights(learning.model.base_model))
    assert all(value == 0 for node in values(learning) for value in node)


def test_a_saved_critic_is_what_transformers_loads_and_a_head(initial, tmp_path):
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
def test_whose_optimizer_a_critics_weights_are_in(initial, critic):
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


def test_an_algorithm_without_a_critic_has_none_from_another_one_that_stood_here(initial):
    """A comparison starts every row from one cold start, which may still be in memory."""
    learning = fresh(initial, critic=OWN)
    checkpoint.prepare_critic(learning, None, MACHINE)
    assert learning.critic is None


def test_a_critics_settings_are_those_of_the_row_and_not_of_the_checkpoint(initial, tmp_path):
    learning = fresh(initial, critic=OWN)
    checkpoint.save(learning, tmp_path)
    other = Critic(backbone="own", value_clip=None, coefficient=2.0)
    restarted = fresh(tmp_path / checkpoint.POLICY, critic=other)
    assert restarted.critic
    assert (restarted.critic.value_clip, restarted.critic.coefficient) == (None, 2.0)


# ---------------------------------------------------------------- reference


def test_the_reference_is_kept_until_another_one_is_asked_for(initial, tmp_path):
    learning = fresh(initial)
    checkpoint.save(learning, tmp_path)
    first = resident.POLICIES.load_reference(initial, MACHINE)
    assert resident.POLICIES.load_reference(initial, MACHINE) is first
    assert first is not learning.model, "what learns is not looked at"
    run(learning, made_trees())
    assert same(weights(first), weights(checkpoint.load_policy(initial, MACHINE)))
    assert resident.POLICIES.load_reference(tmp_path / checkpoint.POLICY, MACHINE) is not first
