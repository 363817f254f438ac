"""Layers that carry a state, or convolve, over trees: what rows give, for chains of any length."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import families
from tasks.learning import chains, passes, recurrent
from tasks.learning.attention import GATHERED, attending
from tasks.learning.packing import forest, lay_out
from tasks.policy.logits import backbone_of, head_of
from tasks.policy.small_copy import small_copy
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.trees import credited, random_tree

VOCABULARY = 64
# a kind of layer -> a family that has it, of moderate size
LAYERS = {
    "gated delta rule": "qwen3_5_text",
    "delta rule with a decay a channel": "kimi_linear",
    "lightning attention": "minimax",
    "selective state space": "jamba",
    "short convolution": "lfm2",
    "state space": "nemotron_h",
}
# lengths of a prompt and of what branches off, nested; chunks of the scans have 64 tokens
SHAPES = {
    "one token": (1, [(1, []), (1, [(1, []), (1, [])]), (2, [])]),
    "around a chunk": (63, [(64, [(1, []), (65, [])]), (65, [(63, []), (2, [])])]),
    "nothing shared": (2, [(3, [])]),
}


def tree_of(shape, seed=0):
    """A tree of given lengths, in which no two branches begin with the same token."""
    random = np.random.default_rng(seed)
    tree = Tree(Question("q", "kind", "text", ("1",)))

    def add(parent, shape, first):
        length, rest = shape
        tokens = random.integers(3, VOCABULARY, length).astype(np.int32)
        tokens[0] = 3 + first
        none = np.zeros(length if parent >= 0 else 0, np.float32)
        kind = TURN if parent >= 0 else PROMPT
        tree.nodes.append(Node(parent, kind, "", "", tokens, none, none))
        at = len(tree.nodes) - 1
        for number, branch in enumerate(rest):
            add(at, branch, number)
        if not rest:
            tree.leaves.append(at)

    add(-1, shape, seed)
    return tree


def layout_of(trees):
    return lay_out([(credited(tree), range(len(tree.leaves))) for tree in trees])


def forest_of(trees):
    return forest(layout_of(trees), "cpu")


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    return small_copy(families.config_of(LAYERS[request.param]), 2**20)


def computed(model, packed):
    """The hidden states of all slots."""
    backbone, slots = backbone_of(model), torch.arange(packed.tokens.shape[1])
    with attending(model, GATHERED):
        return passes.states(backbone, packed, slots)


def by_rows(model, packed):
    """The hidden states of all slots, and the context that each comes from."""
    states = [None] * packed.tokens.shape[1]
    for context in packed.layout.contexts:
        row = backbone_of(model)(packed.tokens[0, context][None])
        for slot, state in zip(context, row.last_hidden_state[0], strict=True):
            states[slot] = state
    return torch.stack(states)


def gradient(model, states):
    model.zero_grad()
    logits = head_of(model)(states).float()
    (logits * torch.cos(torch.arange(logits.numel())).view_as(logits)).sum().backward()
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_chains_of_any_length_give_what_rows_give(shape, model):
    packed = forest_of([tree_of(SHAPES[shape], seed) for seed in range(2)])
    states, rows = computed(model, packed), by_rows(model, packed)
    scale = float(rows.detach().abs().max())
    torch.testing.assert_close(states, rows, rtol=0, atol=1e-5 * max(1, scale))
    own, expected = gradient(model, states), gradient(model, rows)
    assert own.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=1e-5 * largest, msg=name)


def test_layers_that_are_computed_again_have_the_same_gradient(model):
    """In the backward pass each layer still goes along the forest that it was given."""
    made = [forest_of([tree_of(SHAPES[shape])]) for shape in ("around a chunk", "one token")]

    def of_both(recompute):
        model.zero_grad()
        with attending(model, GATHERED), passes.recomputing(model, recompute):
            states = [passes.states(backbone_of(model), packed) for packed in made]
            sum(each.square().sum() for each in states).backward()
        return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}

    kept, again = of_both(recompute=False), of_both(recompute=True)
    largest = max(float(value.abs().max()) for value in kept.values())
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-6 * largest, msg=name)


def test_threads_go_along_forests_of_their_own():
    model = small_copy(families.config_of("lfm2"), 2**20)
    made = [forest_of([tree_of((7, [(5, [(9, []), (number, [])])]))]) for number in range(1, 5)]
    results, backbone = {}, backbone_of(model)
    meet = threading.Barrier(len(made))

    @torch.no_grad()
    def compute(index, packed):
        slots = torch.arange(packed.tokens.shape[1])
        for _ in range(3):
            meet.wait(30)
            results[index] = passes.states(backbone, packed, slots)

    with attending(model, GATHERED):
        threads = [threading.Thread(target=compute, args=pair) for pair in enumerate(made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with torch.no_grad():
        for index, packed in enumerate(made):
            rows = by_rows(model, packed)
            torch.testing.assert_close(results[index], rows, rtol=0, atol=1e-4)


def test_a_model_has_its_own_layers_back_after_an_error():
    model = small_copy(families.config_of("lfm2"), 2**20)
    with pytest.raises(ZeroDivisionError), attending(model, GATHERED):
        _ = 1 / 0
    assert not any("forward" in vars(module) for module in model.modules())
    tokens = torch.arange(3, 9)[None]
    assert model(tokens).logits.isfinite().all()


def test_layers_that_are_given_no_forest_say_so():
    """Instead of mixing the tokens of different trees."""
    model = small_copy(families.config_of("falcon_mamba"), 2**20)
    packed = forest_of([tree_of(SHAPES["one token"])])
    with pytest.raises(ValueError, match="take another policy"), recurrent.going_along(model):
        backbone_of(model)(input_ids=packed.tokens, forest=packed)


# ---------------------------------------------------------------- chains

TREES = st.builds(
    random_tree,
    st.integers(0, 10**6),
    leaves=st.integers(1, 8),
    vocabulary=st.sampled_from([2, 97]),
    fresh=st.sampled_from([0.0, 0.5]),
    prompts=st.sampled_from([0, 2]),
)


@given(st.lists(TREES, min_size=1, max_size=3))
def test_chains_with_those_before_them_are_contexts(trees):
    parents = layout_of(trees).parents
    before, slots = [np.zeros(0, int)], []
    for depth, wave in enumerate(chains.cut_into_waves(parents)):
        ends = []
        for batch in wave:
            for row, mask, parent in zip(batch.slots, batch.mask, batch.parents, strict=True):
                own = row[mask]
                slots += [*own]
                ends.append(np.concatenate([before[parent] if depth else before[0], own]))
                assert list(ends[-1]) == context_of(parents, own[-1])
                assert (row[~mask] == own[-1]).all()
        before = ends
    assert sorted(slots) == list(range(len(parents)))


def context_of(parents, slot):
    """The slots up to one, by going back from it."""
    found = []
    while slot >= 0:
        found.append(slot)
        slot = parents[slot]
    return found[::-1]


@given(st.lists(TREES, min_size=1, max_size=3), st.integers(1, 5))
def test_a_slot_of_a_convolution_follows_those_before_it(trees, width):
    parents = layout_of(trees).parents
    slots, missing, places = chains.windows(parents, width)
    for slot, place in enumerate(places):
        seen = range(place - width + 1, place + 1)
        own = [int(slots[at]) for at in seen if at >= 0 and not missing[at]]
        assert own == context_of(parents, slot)[-width:]
        assert all(at >= 0 for at in seen)


def test_the_waves_are_the_branchings_and_similar_chains_go_together():
    """A question with eight answers has two waves; padding stays below a tenth."""
    shape = (512, [(length, []) for length in (100, 101, 104, 108, 400, 401, 410, 440)])
    first, second = chains.cut_into_waves(layout_of([tree_of(shape)]).parents)
    assert [batch.slots.shape for batch in first] == [(1, 512)]
    assert [batch.slots.shape for batch in second] == [(4, 108), (4, 440)]
