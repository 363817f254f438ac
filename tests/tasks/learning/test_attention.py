"""Attention over a forest gives each leaf what attention over its own row would give."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from params.schema.base import Machine
from tasks.learning import attention
from tasks.learning.attention import (
    FLEX,
    GATHERED,
    attending,
    block_mask,
    forest_flex_attention,
    form_for,
    gathered_attention,
)
from tasks.learning.packing import BLOCK, forest, lay_out
from tasks.learning.passes import states
from tasks.policy.machine import in_precision
from tests.examples import examples
from tests.trees import VOCABULARY, begun, credited, random_tree, small_policy

FORMS = {GATHERED: gathered_attention, FLEX: forest_flex_attention}


def forest_of(seeds, leaves=5, fresh=0.0):
    trees = [begun(random_tree(seed, leaves, fresh=fresh), range(5)) for seed in seeds]
    sources = [credited(tree) for tree in trees]
    return forest(lay_out([(source, range(leaves)) for source in sources]), "cpu")


def logits_by_row(model, made):
    """The same from the model's own causal attention, a context of a leaf at a time.

    [L] of [T, vocabulary]
    """
    found = []
    for packed in made.layout.trees:
        tree = packed.source.tree
        for leaf in packed.leaves:
            rows = [
                np.concatenate([tree.nodes[node].tokens for node in context])
                for context in tree.contexts(tree.leaves[leaf])
            ]
            logits = [model(input_ids=torch.from_numpy(row).long()[None]).logits[0] for row in rows]
            found.append(torch.cat(logits))
    return found


def logits_of_forest(model, made, form):
    with attending(model, form):
        output = model(
            input_ids=made.tokens, position_ids=made.positions, use_cache=False, forest=made
        )
    paths = [path for packed in made.layout.trees for path in packed.paths]
    return [output.logits[0, torch.from_numpy(path)] for path in paths]


@examples(20)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_each_leaf_gets_the_logits_of_its_own_rows(form, seeds, key_value_heads, fresh):
    model = small_policy(key_value_heads=key_value_heads).eval()
    made = forest_of(seeds, fresh=fresh)
    with torch.no_grad():
        expected = logits_by_row(model, made)
        for row, own in zip(logits_of_forest(model, made, form), expected, strict=True):
            torch.testing.assert_close(row, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_mask_of_another_forest_is_not_reused(form):
    model = small_policy().eval()
    with torch.no_grad():
        for seed in (1, 2, 1):
            made = forest_of([seed])
            rows = logits_of_forest(model, made, form)
            for row, own in zip(rows, logits_by_row(model, made), strict=True):
                torch.testing.assert_close(row, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_passes_in_bf16_attend_in_either_form(form, monkeypatch):
    """Turned queries and keys come in float32 then, values in bf16; a GPU wants one kind."""
    kinds = set()

    def flex(*tensors, **rest):
        kinds.update(tensor.dtype for tensor in tensors)
        return compute(*tensors, **rest)

    compute = attention.flex_attention
    monkeypatch.setattr(attention, "flex_attention", flex)
    model, made = small_policy().eval(), forest_of([4, 5])
    machine = Machine(threads=1, device="cpu", precision="bfloat16")
    with torch.no_grad():
        with in_precision(machine):
            found = logits_of_forest(model, made, form)
        expected = logits_by_row(model, made)
    for row, own in zip(found, expected, strict=True):
        assert 0 < float((row - own).abs().max()) < 0.1 * float(own.abs().max())
    assert kinds == ({torch.bfloat16} if form == FLEX else set())


def test_attention_is_restored_after_an_error():
    model = small_policy()
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attending(model, GATHERED):
        assert model.config._attn_implementation == GATHERED
        raise ZeroDivisionError
    assert model.config._attn_implementation == before


def test_a_gpu_takes_flex_attention_and_a_cpu_gathers():
    assert (form_for("cuda"), form_for("cpu")) == (FLEX, GATHERED)


def test_hidden_states_precede_sampled_tokens():
    model = small_policy().eval()
    made = forest_of([4])
    with torch.no_grad():
        with attending(model, GATHERED):
            picked = states(model.base_model, made)
        layout = made.layout
        for path in layout.trees[0].paths:
            row = model.base_model(input_ids=torch.from_numpy(layout.tokens[path])[None])
            for place, slot in enumerate(path):
                if layout.sampled[slot]:
                    number = int(layout.sampled[:slot].sum())
                    torch.testing.assert_close(
                        picked[number], row.last_hidden_state[0, place - 1], rtol=0, atol=1e-4
                    )


# ---------------------------------------------------------------- other architectures


def small_model(architecture):
    """A model of another architecture, as small as ``small_policy``."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**sizes)).eval()


def gradient_of(model, logits):
    """Of a sum that weighs every logit differently, over all weights in one row."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, VOCABULARY)
    sum((torch.log_softmax(leaf, -1) * weights).mean() for leaf in logits).backward()
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat(found)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "granite", "glm4"]
)
def test_other_architectures_attend_over_forests_too(architecture):
    model, made = small_model(architecture), forest_of((1, 2))
    rows = logits_by_row(model, made)
    leaves = logits_of_forest(model, made, GATHERED)
    for leaf, row in zip(leaves, rows, strict=True):
        torch.testing.assert_close(leaf, row, rtol=0, atol=1e-4)
    expected, found = gradient_of(model, rows), gradient_of(model, leaves)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- sinks, and latent sizes


def seen_in(made, window):
    """Which slots each slot sees [U, U], from the parents of slots alone."""
    parents = made.layout.parents
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for slot in range(len(parents)):
        at, left = slot, window
        while left and at >= 0:
            seen[slot, at] = True
            at, left = parents[at], left - 1
    return seen


def naive(query, key, value, sinks, seen, scale):
    """Softmax with one more logit a head, which has no value."""
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], -1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    return (shares @ value).transpose(1, 2)


@examples(25)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=2),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1, 2, 4]),  # heads of keys, of 4
    st.sampled_from([(8, 8), (24, 16), (16, 24)]),  # sizes of keys, and of values
    st.booleans(),
    st.sampled_from([None, 7]),
    st.sampled_from([None, 0.7]),
    st.integers(0, 100),
)
def test_sinks_and_other_sizes_give_a_naive_softmax(
    seeds, fresh, heads, sizes, sinks, window, scale, seed
):
    """In both forms, and the gradient of the sinks, too."""
    made, random = forest_of(seeds, 3, fresh), torch.Generator().manual_seed(seed)
    slots = made.tokens.shape[1]
    shapes = [(4, sizes[0]), (heads, sizes[0]), (heads, sizes[1])]
    tensors = [torch.randn(1, n, slots, size, generator=random) for n, size in shapes]
    tensors += [3 * torch.randn(4, generator=random)] if sinks else []
    tensors = [each.requires_grad_() for each in tensors]
    own = tensors[3] if sinks else None
    settings = {"forest": made, "scaling": scale, "sliding_window": window, "s_aux": own}
    found, _ = gathered_attention(None, *tensors[:3], None, **settings)
    with torch.no_grad():  # which a CPU has no gradient of
        without = [each.detach() for each in tensors[:3]]
        flex, _ = forest_flex_attention(None, *without, None, **settings)
    seen = seen_in(made, window or slots)
    expected = naive(*tensors[:3], own, seen, sizes[0] ** -0.5 if scale is None else scale)
    for one in (found, flex):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)
    weights = torch.randn(expected.shape, generator=random)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_a_sink_takes_its_share(form):
    """Equal scores of n keys and a sink of ln n leave each value half of its weight."""
    made = forest_of([3], 2)
    slots = made.tokens.shape[1]
    zeros, ones = torch.zeros(1, 2, slots, 8), torch.ones(1, 2, slots, 5)
    sinks = torch.tensor([4.0, 1e-9]).log()
    found, _ = FORMS[form](None, zeros, zeros, ones, None, forest=made, s_aux=sinks)
    seen = made.positions[0] + 1.0
    torch.testing.assert_close(found[0, :, 0, 0], seen / (seen + 4))
    torch.testing.assert_close(found[0, :, 1], torch.ones(slots, 5))


@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_sinks_of_bounded_scores_are_refused(form):
    with pytest.raises(ValueError, match="takes s_aux together with softcap"):
        FORMS[form](None, *[None] * 4, forest=forest_of([1]), softcap=2.0, s_aux=torch.zeros(1))


@pytest.mark.parametrize(
    "config, told, window",
    [
        ({}, None, None),
        ({"sliding_window": 5}, None, 5),
        ({"sliding_window": 5}, 3, 3),
        ({"sliding_window": 5, "use_sliding_window": False}, None, None),
        ({"sliding_window": 5, "layer_types": ["full_attention", "x"]}, None, None),
        ({"sliding_window": 5, "layer_types": ["sliding_attention", "x"]}, None, 5),
    ],
)
def test_a_window_of_masks_alone_is_found(config, told, window):
    module = SimpleNamespace(config=SimpleNamespace(**config), layer_idx=0)
    assert attention.window_of(module, told) == window
    assert attention.window_of(None, told) == told


def test_attention_that_cannot_be_set_is_an_error():
    """It would compute rows as trees: transformers leaves it as it is, with a warning."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bloom"](n_layer=1, hidden_size=32))
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be set"), attending(model, FLEX):
        pass


@examples(15)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=4),
    st.integers(5, 120),
    st.sampled_from([0.0, 0.5]),
)
def test_blocks_equal_those_of_a_full_mask(seeds, leaves, fresh):
    made = forest_of(seeds, leaves, fresh)
    ends, slots = made.subtree_ends, made.tokens.shape[1]

    def visible(batch, head, i, j):
        return (j <= i) & (i < ends[j])

    whole = create_block_mask(visible, None, None, slots, slots, device="cpu", BLOCK_SIZE=BLOCK)
    own = block_mask(made)
    assert torch.equal(own.to_dense(), whole.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(own, name), getattr(whole, name)), name


@pytest.mark.parametrize("form", [GATHERED, FLEX])
def test_what_trees_cannot_have_is_refused(form):
    made = forest_of([1])
    model = small_policy()
    model.config.attention_dropout = 0.1
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        logits_of_forest(model.train(), made, form)
    with pytest.raises(ValueError, match="attention takes sinks, which is not computed"):
        FORMS[form](None, *[None] * 4, forest=made, sinks=torch.zeros(1), is_causal=True)
    with pytest.raises(ValueError, match="do not pass on what they are given"):
        FORMS[form](None, *[None] * 4)
