from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning import packing
from tasks.learning.attention import FLEX, GATHERED, PAIRS
from tasks.learning.packing import (
    BLOCK,
    LEAVES_APART,
    TREES_APART,
    Cost,
    cheapest,
    forest,
    forests,
    lay_out,
    to_nodes,
    uncredited,
)
from tasks.trees.tree import TURN
from tests.examples import examples
from tests.trees import VOCABULARY, begun, credited, lengths, random_tree

FREE_ATTENTION = Cost(1.0, 0.0, PAIRS[GATHERED])
trees = st.builds(
    lambda seed, leaves, fresh, prompts, vocabulary: credited(
        random_tree(seed, leaves, vocabulary, fresh=fresh, prompts=prompts), seed
    ),
    st.integers(0, 10_000),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    st.sampled_from([0, 0, 2]),
    st.sampled_from([VOCABULARY, 2]),  # with two tokens, turns that were sampled apart are alike
)


def of_all(sources):
    """All leaves of some trees in one layout."""
    return lay_out([(source, range(len(source.tree.leaves))) for source in sources])


def path_tokens(tree, leaf):
    return np.concatenate([tree.nodes[node].tokens for node in tree.path(tree.leaves[leaf])])


def sampled_tokens(tree, leaf):
    turns = [n for n in tree.path(tree.leaves[leaf]) if tree.nodes[n].kind == TURN]
    return np.concatenate([tree.nodes[node].tokens for node in turns])


def prefixes(tree, leaf):
    """Every prefix of every context of a leaf: its tokens, and whether a turn has the last one."""
    for context in tree.contexts(leaf):
        tokens = [token for node in context for token in tree.nodes[node].tokens.tolist()]
        own = [tree.nodes[node].kind == TURN for node in context for _ in tree.nodes[node].tokens]
        yield from ((tuple(tokens[: end + 1]), own[end]) for end in range(len(tokens)))


def every_prefix(sources):
    trees = [source.tree for source in sources]
    return [prefix for tree in trees for leaf in tree.leaves for prefix in prefixes(tree, leaf)]


@given(st.lists(trees, min_size=1, max_size=3))
def test_each_prefix_has_one_slot(sources):
    layout, every = of_all(sources), every_prefix(sources)
    assert len(layout.tokens) == len({tokens for tokens, _ in every})
    assert layout.sampled.sum() == len({tokens for tokens, own in every if own})


@given(trees)
def test_the_slots_of_a_leaf_are_its_trajectory(source):
    tree = source.tree
    layout = of_all([source])
    contexts = {tuple(layout.tokens[slots]): slots for slots in layout.contexts}
    for leaf, path in zip(layout.trees[0].leaves, layout.trees[0].paths, strict=True):
        assert layout.tokens[path].tolist() == path_tokens(tree, leaf).tolist()
        own = [
            contexts[tuple(np.concatenate([tree.nodes[node].tokens for node in context]))]
            for context in tree.contexts(tree.leaves[leaf])
        ]
        assert path.tolist() == np.concatenate(own).tolist()
    for slots in layout.contexts:
        assert layout.positions[slots].tolist() == list(range(len(slots)))
        assert layout.parents[slots].tolist() == [-1, *slots[:-1].tolist()]


@given(trees)
def test_a_turn_has_the_slots_of_its_leaves(source):
    tree = source.tree
    layout = of_all([source])
    of_turns = dict(zip(layout.trees[0].nodes, layout.trees[0].node_slots, strict=True))
    for leaf, path in zip(layout.trees[0].leaves, layout.trees[0].paths, strict=True):
        ends = np.cumsum([len(tree.nodes[node].tokens) for node in tree.path(tree.leaves[leaf])])
        for node, end in zip(tree.path(tree.leaves[leaf]), ends, strict=True):
            if tree.nodes[node].kind == TURN:
                slots = path[end - len(tree.nodes[node].tokens) : end]
                assert of_turns.pop(node, slots).tolist() == slots.tolist()
    assert not of_turns


@given(trees, st.data())
def test_slot_is_owned_by_its_first_context(source, data):
    leaves = data.draw(st.permutations(range(len(source.tree.leaves))))
    layout = lay_out([(source, leaves)])
    assert sorted(layout.trees[0].leaves) == sorted(leaves)
    owned = [slots[own:] for slots, own in zip(layout.contexts, layout.owned, strict=True)]
    assert sorted(np.concatenate(owned).tolist()) == list(range(len(layout.tokens)))


@given(st.lists(trees, min_size=1, max_size=3))
def test_subtree_is_what_may_attend_to_a_slot(sources):
    layout = of_all(sources)
    slots = np.arange(len(layout.tokens))
    by_subtree = (slots[None] <= slots[:, None]) & (slots[:, None] < layout.subtree_ends[None])
    by_context = np.zeros_like(by_subtree)
    for context in layout.contexts:
        for place, slot in enumerate(context):
            by_context[slot, context[: place + 1]] = True
    assert (by_subtree == by_context).all()


@examples(40)
@given(st.lists(trees, min_size=1, max_size=4))
def test_attention_sees_only_the_own_context(sources):
    made = forest(of_all(sources), "cpu")
    slots = made.tokens.shape[1]
    queries = torch.cat([bucket.queries.flatten() for bucket in made.buckets])
    assert queries[made.places].tolist() == list(range(slots)), "each slot is a query once"
    seen = torch.zeros(len(queries), slots, dtype=torch.bool)
    start = 0
    for bucket in made.buckets:
        for keys, visible in zip(bucket.keys, bucket.visible[:, 0], strict=True):
            for row in visible:
                seen[start, keys[row]] = True
                start += 1
    mask = torch.arange(slots)
    expected = (mask[None] <= mask[:, None]) & (mask[:, None] < made.subtree_ends[None])
    assert (seen[made.places] == expected).all()
    assert all(bucket.visible.any(-1).all() for bucket in made.buckets), "no row without a key"


@examples(40)
@given(st.lists(trees, min_size=1, max_size=4))
def test_views_gather_each_leafs_sampled_tokens(sources):
    made = forest(of_all(sources), "cpu")
    order = [(packed.source, leaf) for packed in made.layout.trees for leaf in packed.leaves]
    assert len(order) == len(made.views)
    for row, ((source, leaf), view) in enumerate(zip(order, made.views, strict=True)):
        mask = made.mask[row]
        tokens = sampled_tokens(source.tree, leaf)
        assert made.targets[made.entries[view[mask]]].tolist() == tokens.tolist()
        assert mask.tolist() == [i < len(tokens) for i in range(len(mask))]
        credit = source.credits[leaf]
        assert made.advantages[row][mask].tolist() == credit.advantages.tolist()
        assert made.segments[row][mask].tolist() == credit.segments.tolist()


@given(trees)
def test_token_is_predicted_from_the_one_before(source):
    made = forest(of_all([source]), "cpu")
    layout = made.layout
    sampled = np.flatnonzero(layout.sampled)
    before = made.predicting.numpy()
    assert (layout.positions[before] == layout.positions[sampled] - 1).all()
    assert (layout.tokens[sampled] == made.targets.numpy()).all()
    assert (made.subtree_ends.numpy()[before] > sampled).all()


@examples(40)
@given(st.lists(trees, min_size=1, max_size=3))
def test_token_values_go_in_and_out_by_node(sources):
    sources = [replace(s, old_logprobs=[n.logprobs * 2 for n in s.tree.nodes]) for s in sources]
    made = forest(of_all(sources), "cpu")
    assert "reference_logprobs" not in made.known
    back = list(to_nodes(made, made.known["old_logprobs"]))
    assert len(back) == sum(
        node.kind == TURN
        for packed in made.layout.trees
        for node in (packed.source.tree.nodes[n] for n in packed.nodes)
    )
    for source, node, values in back:
        assert values.tolist() == (source.tree.nodes[node].logprobs * 2).tolist()


@examples(40)
@given(st.lists(trees, min_size=1, max_size=5), st.integers(1, 200), st.data())
def test_each_leaf_is_in_one_forest_of_limited_size(sources, limit, data):
    batch = [
        (source, data.draw(st.sets(st.sampled_from(range(len(source.credits)))).map(sorted)))
        for source in sources
    ]
    seen = []
    for made in forests(batch, limit, FREE_ATTENTION, "cpu"):
        leaves = [
            (id(packed.source), leaf) for packed in made.layout.trees for leaf in packed.leaves
        ]
        assert made.tokens.shape[1] <= limit or len(leaves) == 1
        seen += leaves
    wanted = [(id(source), leaf) for source, leaves in batch for leaf in leaves]
    assert sorted(seen) == sorted(wanted)


@examples(40)
@given(st.lists(trees, min_size=1, max_size=4))
def test_predicted_tokens_are_unique_where_all_fits(sources):
    batch = [(source, range(len(source.credits))) for source in sources]
    (made,) = forests(batch, 10**9, FREE_ATTENTION, "cpu")
    trees = [source.tree for source in sources]
    turns = [node for tree in trees for node in tree.nodes if node.kind == TURN]
    assert len(made.targets) == len({tokens for tokens, own in every_prefix(sources) if own})
    assert len(made.entries) == sum(len(node.tokens) for node in turns)
    assert int(made.mask.sum()) == sum(sum(lengths(tree)) for tree in trees)


def test_an_empty_batch_gives_no_forest():
    assert list(forests([(credited(random_tree(0)), [])], 100, FREE_ATTENTION, "cpu")) == []


# ---------------------------------------------------------------- cost


ALONE = {
    TREES_APART: lambda packed: len(packed.trees),
    LEAVES_APART: lambda packed: sum(len(tree.leaves) for tree in packed.trees),
}


@pytest.mark.parametrize("grouping", ALONE)
def test_prefixes_are_shared_only_where_that_pays(grouping):
    """And only where what is then computed still fits."""
    sources = [credited(begun(random_tree(seed, 4), range(9)), seed) for seed in range(3)]
    batch = [(source, range(4)) for source in sources]
    whole, apart = lay_out(batch), lay_out(batch, grouping)
    assert len(whole.tokens) < len(apart.tokens)
    assert apart.owned.count(0) == ALONE[grouping](apart)
    grudging = Cost(1.0, 1.0, lambda made: 10_000 * (made.owned.count(0) == 1), apart=[grouping])
    assert cheapest(batch, grudging, 10_000).owned == apart.owned
    assert cheapest(batch, grudging, len(apart.tokens) - 1).owned == whole.owned
    assert cheapest(batch, replace(grudging, pair=0.0), 10_000).owned == whole.owned
    assert cheapest(batch, FREE_ATTENTION, 10_000).owned == whole.owned


@given(st.lists(trees, min_size=1, max_size=3))
def test_gathered_trees_never_cost_more_than_rows(sources):
    batch = [(source, range(len(source.credits))) for source in sources]
    whole = lay_out(batch)
    for grouping in (TREES_APART, LEAVES_APART):
        assert whole.pairs <= lay_out(batch, grouping).pairs


@examples(30)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5]))
def test_block_pairs_count_visible_blocks(seed, fresh):
    source = credited(random_tree(seed, leaves=40, fresh=fresh))
    layout = of_all([source])
    slots = np.arange(len(layout.tokens))
    visible = (slots[None] <= slots[:, None]) & (slots[:, None] < layout.subtree_ends[None])
    size = -(-len(slots) // BLOCK) * BLOCK
    padded = np.zeros((size, size), bool)
    padded[: len(slots), : len(slots)] = visible
    blocks = padded.reshape(size // BLOCK, BLOCK, size // BLOCK, BLOCK).any((1, 3)).sum()
    assert PAIRS[FLEX](layout) == blocks * BLOCK**2


@pytest.mark.parametrize("padding", [1.0, 1.5])
def test_buckets_pad_no_further_than_allowed(monkeypatch, padding):
    monkeypatch.setattr(packing, "PADDING", padding)
    monkeypatch.setattr(packing, "BUCKET_PAIRS", 0)
    made = forest(of_all([credited(random_tree(s, leaves=9)) for s in range(4)]), "cpu")
    for bucket in made.buckets:
        rows, queries, keys = bucket.visible[:, 0].shape
        visible_keys = bucket.visible[:, 0].any(1).sum(-1)
        own = (bucket.visible[:, 0].sum(-1) > 1).sum(-1) + 1
        assert rows * queries * keys <= padding * int((visible_keys * own).sum()) + rows * keys


def test_few_pairs_are_computed_that_no_query_sees(monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 64)
    monkeypatch.setattr(packing, "BUCKET_PAIRS", 0)
    source = credited(random_tree(0, leaves=1))
    first = source.tree.nodes[0]
    source.tree.nodes[0] = replace(first, tokens=np.arange(2000, dtype=np.int32))
    layout = of_all([source])
    size = len(layout.tokens)
    assert layout.pairs <= 1.05 * size * (size + 1) // 2
    made = forest(layout, "cpu")
    assert sum(bucket.visible.numel() for bucket in made.buckets) <= packing.PADDING * layout.pairs
    assert sum(int(bucket.visible.sum()) for bucket in made.buckets) == size * (size + 1) // 2


def test_uncredited_tree_has_zero_credit():
    tree = random_tree(1)
    made = uncredited(tree)
    assert [len(credit.advantages) for credit in made.credits] == lengths(tree)
    assert not any(credit.advantages.any() for credit in made.credits)


# ---------------------------------------------------------------- rows


@given(trees)
def test_rows_are_the_contexts_that_no_other_begins_with(source):
    layout = of_all([source])
    rows = [tuple(layout.tokens[row]) for row in layout.rows]
    contexts = {tuple(layout.tokens[context]) for context in layout.contexts}
    longest = {c for c in contexts if not any(o != c and o[: len(c)] == c for o in contexts)}
    assert sorted(rows) == sorted(longest)
    assert {*np.concatenate(layout.rows).tolist()} == {*range(len(layout.tokens))}


@given(st.lists(trees, min_size=1, max_size=3))
def test_rows_are_padded_to_rows_of_a_similar_length(sources):
    layout = of_all(sources)
    rows = len(layout.rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROW_TOKENS", 4)
        batches = packing.row_batches(layout)
        assert sum(map(len, batches)) == rows
        for batch in batches:
            padded, real = len(batch) * max(map(len, batch)), sum(map(len, batch))
            assert padded <= max(packing.PADDING * real, real + 4)
        (together,) = packing.row_batches(layout, together=True)
        assert len(together) == rows
        assert packing.row_tokens(layout, together=True) == rows * max(map(len, together))
