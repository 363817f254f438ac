"""Questions that begin alike are computed once, and are learned from as they are apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tasks.learning import passes, shares
from tasks.learning.attention import GATHERED, ROWS, attending
from tasks.learning.packing import (
    LEAVES_APART,
    TREES_APART,
    Cost,
    forest,
    lay_out,
    micro_batches,
)
from tasks.policy.lean_transformers import transformers
from tests.examples import examples
from tests.sections import MACHINE
from tests.trees import begun, credited, random_tree

VOCABULARY = 61
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0},
}
EXPERTS, CHOSEN = 8, 2
FAMILIES = {
    "plain": ("llama", {}),
    "windowed": ("mistral", {"sliding_window": 7}),
    "recurrent": (
        "qwen3_5_text",
        {
            **{"layer_types": ["linear_attention", "full_attention"]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        },
    ),
    "mixture": (
        "qwen3_moe",
        {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    kind, more = FAMILIES[request.param]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | more))
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    ).eval()


class Doubled(TorchFunctionMode):
    """Computes in float64 what a model computes in float32, whatever its weights have."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if one is torch.float32 else one for one in args]
        named = {
            name: torch.float64 if one is torch.float32 else one
            for name, one in (kwargs or {}).items()
        }
        return function(*args, **named)


def gradient(model, made, form):
    """The gradient of a loss in which every view of a token counts differently."""
    model.zero_grad()
    with attending(model, form), Doubled():
        logprobs = passes.forest_logprobs(model, made, 0.7, MACHINE, made.experts)
        views = logprobs[made.entries][made.views]
        (views * made.advantages * made.weights[:, None])[made.mask].sum().backward()
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}


def routed(tree, routers, alike):
    """The tree with experts of its tokens, which follow from the token alone where ``alike``."""
    nodes = []
    for index, node in enumerate(tree.nodes):
        random = np.random.default_rng(index)
        scores = random.random((len(node.tokens), routers, EXPERTS))
        if alike:
            scores = np.stack(
                [np.random.default_rng(t).random(scores.shape[1:]) for t in node.tokens]
            )
        nodes.append(replace(node, experts=scores.argsort(-1)[..., :CHOSEN].astype(np.uint8)))
    return replace(tree, nodes=nodes)


SYSTEMS = ([], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 1, 2, 3, 4, 4, 4], [6, 6])
trees = st.builds(
    lambda seed, leaves, fresh, vocabulary, system: begun(
        random_tree(seed, leaves, vocabulary, f"q{seed}", fresh), system
    ),
    st.integers(0, 1000),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([VOCABULARY, 2]),  # with two tokens, much is alike by chance
    st.sampled_from(SYSTEMS),
)


@examples(6)
@given(st.lists(trees, min_size=2, max_size=4), st.booleans())
def test_gradients_are_those_of_trees_apart(model, some, alike):
    """Of float64, for each form, and whatever the experts of equal tokens are."""
    model.double()
    if model.config.model_type == "qwen3_moe":
        some = [routed(tree, SIZES["num_hidden_layers"], alike) for tree in some]
    batch = [(credited(tree, seed), range(len(tree.leaves))) for seed, tree in enumerate(some)]
    whole, alone = lay_out(batch), lay_out(batch, TREES_APART)
    assert len(whole.tokens) <= len(alone.tokens)
    apart = [gradient(model, forest(lay_out([one]), "cpu"), GATHERED) for one in batch]
    expected = {name: sum(one[name] for one in apart) for name in apart[0]}
    largest = max(float(value.abs().max()) for value in expected.values())
    for form in (GATHERED, ROWS):
        found = gradient(model, forest(whole, "cpu"), form)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10 * largest, msg=name)


def test_equal_tokens_with_other_experts_are_slots_of_their_own():
    """What a router was made to do for one question must not be done for another."""
    tree = begun(random_tree(1, 2), range(6))
    one, same = (
        routed(replace(tree, question=replace(tree.question, id=n)), 2, True) for n in "ab"
    )
    experts = same.nodes[0].experts.copy()
    experts[3] = experts[3][:, ::-1]  # of the fourth token of the prompt
    other = replace(same, nodes=[replace(same.nodes[0], experts=experts), *same.nodes[1:]])
    unknown = replace(same, nodes=[replace(node, experts=None) for node in same.nodes])
    sizes = [
        len(lay_out([(credited(each), range(2)) for each in pair]).tokens)
        for pair in ([one], [one, same], [one, other], [one, unknown])
    ]
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0] - 3, 2 * sizes[0]]


# ---------------------------------------------------------------- micro-batches and lanes

FREE = Cost(1.0, 0.0, lambda layout: 0)


def unique(parts):
    """The slots of each part of a batch, each part in a forest of its own."""
    return [len(lay_out(part).tokens) if part else 0 for part in parts]


def two_kinds(count=8, length=60):
    """Short questions in turn with one long beginning and another."""
    made = [
        begun(random_tree(seed, 1), np.arange(length) + 7 * (seed % 2)) for seed in range(2 * count)
    ]
    return [(credited(tree), range(1)) for tree in made]


def test_a_micro_batch_has_questions_that_begin_alike():
    batch = two_kinds()
    limit = max(unique([batch[0::2], batch[1::2]]))
    parts = micro_batches(batch, limit, FREE)
    assert len(parts) == 2, "each beginning is computed once"
    assert sum(unique(parts)) == len(lay_out(batch).tokens)


def test_lanes_have_questions_that_begin_alike_and_as_much_to_compute():
    batch = two_kinds()
    parts = shares.divided(batch, 2, FREE)
    assert sum(unique(parts)) == len(lay_out(batch).tokens)
    assert max(unique(parts)) < 0.55 * sum(unique(parts))


@examples(30)
@given(st.lists(trees, max_size=7), st.integers(1, 4))
def test_each_tree_is_in_one_lane(some, count):
    batch = [(credited(tree), range(len(tree.leaves))) for tree in some]
    parts = shares.divided(batch, count, FREE)
    assert len(parts) == count
    assert sorted(id(pair) for part in parts for pair in part) == sorted(map(id, batch))
    if batch:
        largest = max(unique([[pair] for pair in batch]))
        sizes = unique(parts)
        assert max(sizes) <= sum(unique([[pair] for pair in batch])) / count + largest


@examples(30)
@given(st.lists(trees, min_size=1, max_size=5), st.integers(1, 120), st.booleans())
def test_micro_batches_have_each_leaf_once_and_no_more_tokens(some, limit, rows):
    batch = [(credited(tree), range(len(tree.leaves))) for tree in some]
    cost = replace(FREE, tokens=passes.TOKENS[ROWS]) if rows else FREE
    parts = micro_batches(batch, limit, cost)
    leaves = [(id(source), leaf) for part in parts for source, of in part for leaf in of]
    assert sorted(leaves) == sorted((id(source), leaf) for source, of in batch for leaf in of)
    for part in parts:
        single = sum(len(of) for _, of in part) == 1
        assert cost.tokens(lay_out(part)) <= limit or single
    apart = lay_out(batch, LEAVES_APART)
    assert sum(FREE.tokens(lay_out(part)) for part in parts) <= len(apart.tokens)
