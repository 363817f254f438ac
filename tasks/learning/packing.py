"""Pack trees into micro-batches in which every token occurs once. Pure.

Trajectories of a question share their prompt, branches share whole prefixes, trajectories that were
sampled apart often begin with the same tokens, and questions share a system message with its
examples. What a causal model computes for a token depends on the tokens before it alone, so equal
prefixes are computed once, whatever node or tree they are in. A forest is the prefix tree of all
contexts of its trees, depth first: a token's slot is its index in that sequence. For each leaf it
has the slots of its path, so that attention and losses see trajectories while everything between
them is computed once a slot.

A model that must not be given a forest computes rows instead: the contexts that no other begins
with, whole and one by one. The slots stay, and each takes its value from one of the rows.

A fresh prompt on a path starts a new context: attention and positions begin anew there, as at the
root of a tree of its own. Losses still see the whole path. Contexts of a tree share prefixes, too:
fresh prompts that begin alike, or the same one of a world that is in the same state again.

Where what sampled has recorded the experts of a mixture, equal tokens of different trees are one
slot only where their experts, and those of all tokens before them, are the same: otherwise the
gradient of a tree would depend on which others are in its forest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.policy.routed_experts import UNKNOWN, Replay
from tasks.trees.tree import PROMPT, TURN, Tree, common_length

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
ByNode = Sequence[Floats]  # node -> a value for each of its tokens; empty for observed nodes

BLOCK = 128  # slots in a block of block-sparse attention
PIECE = 256  # most queries of a row of gathered attention; fewer would copy more keys
PADDING = 1.1  # how much padding may enlarge the attention of a bucket
BUCKET_PAIRS = 50_000  # (query, key) pairs that are cheaper than one more bucket
ROW_TOKENS = 128  # tokens of padding that are cheaper than one more pass over rows


@dataclass(frozen=True)
class Credit:
    """The training signal of one leaf; every array is [S]."""

    advantages: Floats
    segments: Ints  # macro action of each token: 0, 1, ...
    returns: Floats | None = None  # targets of the critic
    values: Floats | None = None  # predictions of the critic before its update
    weight: float = 1.0  # of the leaf in the loss and in its denominator


@dataclass(frozen=True)
class Credited:
    """A tree with the credit of its leaves and log-probabilities of its tokens.

    ``old_logprobs`` are those of the policy that sampled, as the learner computes them;
    ``reference_logprobs`` are those of the reference policy.
    """

    tree: Tree
    credits: Sequence[Credit]  # [L]
    old_logprobs: ByNode | None = None
    reference_logprobs: ByNode | None = None

    @cached_property
    def experts(self) -> list[Ints] | None:
        """Return the experts of each node's tokens, node -> [tokens, routers, chosen].

        Equal tokens that were sampled apart may have been sent to different ones, and are one slot:
        it takes those of the first node. So all passes over a tree have the same, whichever of its
        leaves they are over. ``UNKNOWN`` where no node has any; None where none of the tree has.
        """
        return settled(self.tree)

    @cached_property
    def symbols(self) -> list[Ints]:
        """Return what decides whether tokens of different trees may be one slot: node -> [tokens].

        This is the token, with a digest of its experts where the tree has them.
        """
        tokens = [node.tokens.astype(np.int64) for node in self.tree.nodes]
        if self.experts is None:
            return tokens
        return [_digests(*pair) for pair in zip(tokens, self.experts, strict=True)]


DIGEST, PRIME = np.uint64(1 << 63), np.uint64(0x100000001B3)  # FNV-1a, 64 bits; the first is set


def _digests(tokens: Ints, experts: Ints) -> Ints:
    """Return a number for each token with its experts [tokens, routers, chosen]; never a token."""
    digests = tokens.astype(np.uint64)
    for column in experts.reshape(len(tokens), -1).T:
        digests = (digests ^ column.astype(np.uint64)) * PRIME
    return (digests | DIGEST).view(np.int64)


def settled(tree: Tree) -> list[Ints] | None:
    """Return what ``Credited.experts`` has. Raises ValueError for choices of different shapes."""
    shapes = {node.experts.shape[1:] for node in tree.nodes if node.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(
            f"the tree of question {tree.question.id} has experts of {len(shapes)} shapes "
            f"(routers, chosen), {sorted(shapes)}: policies of different sizes have sampled it"
        )
    # a fresh prompt cuts off what comes before it
    inner = {node.parent for node in tree.nodes if node.kind != PROMPT}
    chains = [tree.contexts(node)[-1] for node in range(len(tree.nodes)) if node not in inner]
    texts = [np.concatenate([tree.nodes[node].tokens for node in chain]) for chain in chains]
    order = _in_order(texts)
    trie = _prefix_tree([texts[index] for index in order])
    slots: dict[int, Ints] = {}
    for index, context in zip(order, trie.contexts, strict=True):
        ends = np.cumsum([len(tree.nodes[node].tokens) for node in chains[index]])
        slots |= zip(chains[index], np.split(context, ends[:-1]), strict=True)
    by_slot = np.full((len(trie.positions), *shapes.pop()), UNKNOWN, np.int64)
    for index in reversed(range(len(tree.nodes))):
        known = tree.nodes[index].experts
        if known is not None:
            by_slot[slots[index][: len(known)]] = known
    return [by_slot[slots[index]] for index in range(len(tree.nodes))]


def _in_order(texts: Sequence[NDArray[Any]], groups: Sequence[Group] = ()) -> list[int]:
    """Return the indices of texts in lexicographic order, in which common prefixes are neighbours.

    Texts of different groups are apart. Big-endian bytes sort as numbers do.
    """
    keys = [text.astype(">u8").tobytes() for text in texts]
    groups = groups or [()] * len(texts)
    return sorted(range(len(texts)), key=lambda index: (groups[index], keys[index]))


def uncredited(tree: Tree) -> Credited:
    """Give a tree zero credit, for forward passes alone."""
    lengths = [
        sum(
            len(tree.nodes[node].tokens)
            for node in tree.path(leaf)
            if tree.nodes[node].kind == TURN
        )
        for leaf in tree.leaves
    ]
    blank = [Credit(np.zeros(n, np.float32), np.zeros(n, np.int64)) for n in lengths]
    return Credited(tree, blank)


Batch = Sequence[tuple[Credited, Sequence[int]]]  # trees, with indices of their leaves
Group = tuple[int, ...]
Grouping = Callable[[int, int], Group]  # place of a tree in a batch and a leaf -> their group
ALL_SHARE: Grouping = lambda tree, leaf: ()  # noqa: E731
TREES_APART: Grouping = lambda tree, leaf: (tree,)  # noqa: E731
LEAVES_APART: Grouping = lambda tree, leaf: (tree, leaf)  # noqa: E731


@dataclass(frozen=True)
class PackedTree:
    """Where L leaves of a tree are among the slots of a layout."""

    source: Credited
    leaves: list[int]  # [L] indices in the tree, in the order of their slots
    nodes: list[int]  # the leaves' turns, indices in the tree, in the order of the leaves
    node_slots: list[Ints]  # turn -> slots of its tokens
    paths: list[Ints]  # leaf -> its slots [T], prompt and all fresh prompts included

    def some(self, leaves: slice) -> PackedTree:
        """Return some of the leaves, without their turns."""
        return PackedTree(self.source, self.leaves[leaves], [], [], self.paths[leaves])

    @property
    def slots(self) -> Ints:
        """Return the slots of all leaves, each once."""
        return np.unique(np.concatenate(self.paths))

    @property
    def first(self) -> int:
        """Return the slot of the prompt's last token: prompts that begin alike are neighbours."""
        return int(self.paths[0][len(self.source.tree.nodes[0].tokens) - 1])


@dataclass(frozen=True)
class Layout:
    """The prefix tree of the contexts of some leaves of some trees, depth first: U slots.

    A slot is a prefix of at least one context: the token that ends it, computed after the tokens
    before it.
    """

    trees: list[PackedTree]
    tokens: Ints  # [U]
    positions: Ints  # [U] index in its context
    parents: Ints  # [U] slot of the token before in its context; -1 for the first
    sampled: Flags  # [U] whether a turn has it
    subtree_ends: Ints  # [U] one past the last slot of a context with this prefix
    contexts: list[Ints]  # context -> its slots, in depth-first order
    owned: list[int]  # context -> its first index that no earlier context contains
    experts: Ints | None = None  # [U, routers, chosen] of a mixture; UNKNOWN where nobody knows

    @property
    def pairs(self) -> int:
        """Count the (query, key) pairs of attention; a token is a query in one context only."""
        return sum(
            (end - start) * end
            for context, prefix_length in zip(self.contexts, self.owned, strict=True)
            for start, end in _pieces(prefix_length, len(context))
        )

    @property
    def block_pairs(self) -> int:
        """Count the pairs in the blocks of slots that block-sparse attention computes.

        A block of keys is visible from its own index to the last subtree that begins in it.
        """
        starts = np.arange(0, len(self.tokens), BLOCK)
        last = (np.maximum.reduceat(self.subtree_ends, starts) - 1) // BLOCK
        return int((last - starts // BLOCK + 1).sum()) * BLOCK**2

    @property
    def rows(self) -> list[Ints]:
        """Return the contexts that no other begins with, each as its slots."""
        common = [*self.owned[1:], 0]  # with the context after, which a whole prefix comes before
        pairs = zip(self.contexts, common, strict=True)
        return [context for context, shared in pairs if shared < len(context)]

    @property
    def row_pairs(self) -> int:
        """Count the (query, key) pairs of attention where each row is computed whole."""
        return sum(len(row) ** 2 for row in self.rows)

    def row_lengths(self, taken: Flags | None = None) -> list[int]:
        """Return the lengths of rows, the shortest first; ``taken`` [U]: of leaves with these."""
        if taken is None:
            return sorted(map(len, self.rows))
        inner = np.zeros(len(taken) + 1, bool)  # the last one is of parents that are none
        inner[self.parents[taken]] = True
        lengths: list[int] = np.sort(self.positions[taken & ~inner[:-1]] + 1).tolist()
        return lengths


def lay_out(batch: Batch, grouping: Grouping = ALL_SHARE) -> Layout:
    """Lay the trajectories of some leaves of each tree out as one prefix tree.

    Leaves of different groups share no slot. Raises ValueError for trees with experts of different
    shapes.
    """
    every = [
        (number, leaf, chain)
        for number, (source, leaves) in enumerate(batch)
        for leaf in leaves
        for chain in source.tree.contexts(source.tree.leaves[leaf])
    ]
    texts = [_joined(batch[number][0].symbols, chain) for number, _, chain in every]
    groups = [grouping(number, leaf) for number, leaf, _ in every]
    order = _in_order(texts, groups)
    trie = _prefix_tree([texts[i] for i in order], [groups[i] for i in order])
    slots: dict[tuple[int, int], list[tuple[int, Ints]]] = {}
    for place, index in sorted(enumerate(order), key=lambda pair: pair[1]):
        slots.setdefault(every[index][:2], []).append((place, trie.contexts[place]))
    trees = [_packed(number, *batch[number], slots) for number in range(len(batch))]
    own = [
        (batch[every[index][0]][0], every[index][2], prefix_length)
        for index, prefix_length in zip(order, trie.owned, strict=True)
    ]
    tokens = [
        _joined([node.tokens for node in source.tree.nodes], chain)[prefix_length:]
        for source, chain, prefix_length in own
    ]
    sampled = np.zeros(len(trie.positions), bool)
    for turn in (turn for tree in trees for turn in tree.node_slots):
        sampled[turn] = True
    return Layout(
        trees,
        np.concatenate(tokens).astype(np.int64),
        sampled=sampled,
        experts=_experts(own),
        **trie._asdict(),
    )


def _joined(of_nodes: Sequence[NDArray[Any]], chain: Sequence[int]) -> NDArray[Any]:
    return np.concatenate([of_nodes[node] for node in chain])


def _packed(
    number: int,
    source: Credited,
    leaves: Sequence[int],
    slots: dict[tuple[int, int], list[tuple[int, Ints]]],
) -> PackedTree:
    """Return a tree of a batch; ``slots``: tree, leaf -> place and slots of each context."""
    in_order = sorted(leaves, key=lambda leaf: slots[number, leaf][-1][0])
    paths = [np.concatenate([some for _, some in slots[number, leaf]]) for leaf in in_order]
    of_turns = _slots_of_turns(source.tree, zip(in_order, paths, strict=True))
    return PackedTree(source, in_order, [*of_turns], [*of_turns.values()], paths)


def _experts(own: Sequence[tuple[Credited, Sequence[int], int]]) -> Ints | None:
    """Return the experts [U, routers, chosen] of slots; None where no tree has any.

    ``own``: what owns slots, in their order: a tree, a context's nodes, the first index of its own.
    """
    shapes = {source.experts[0].shape[1:] for source, _, _ in own if source.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(
            f"the trees have experts of {len(shapes)} shapes (routers, chosen), {sorted(shapes)}: "
            "policies of different sizes have sampled them"
        )
    (shape,) = shapes
    parts = []
    for source, chain, prefix_length in own:
        if source.experts is None:
            length = sum(len(source.tree.nodes[node].tokens) for node in chain)
            parts.append(np.full((length - prefix_length, *shape), UNKNOWN, np.int64))
        else:
            parts.append(_joined(source.experts, chain)[prefix_length:])
    return np.concatenate(parts)


class _Trie(NamedTuple):
    """The fields of a ``Layout`` that the symbols of its contexts decide."""

    positions: Ints
    parents: Ints
    subtree_ends: Ints
    contexts: list[Ints]
    owned: list[int]


def _prefix_tree(texts: Sequence[NDArray[Any]], groups: Sequence[Group] = ()) -> _Trie:
    """Return the prefix tree of contexts (their symbols), which are in the order of ``_in_order``.

    In that order a context shares its longest prefix with the one before it, and what it adds comes
    right after that one's slots: depth first.
    """
    groups = groups or [()] * len(texts)
    owned = [
        0,
        *(
            common_length(one, other) if group == same else 0
            for (one, other), (group, same) in zip(pairwise(texts), pairwise(groups), strict=True)
        ),
    ]
    count = sum(map(len, texts)) - sum(owned)
    positions, parents = np.zeros(count, np.int64), np.zeros(count, np.int64)
    ends = np.full(count, count)
    contexts: list[Ints] = []
    slots: Ints = np.zeros(0, np.int64)
    used = 0
    for text, prefix_length in zip(texts, owned, strict=True):
        ends[slots[prefix_length:]] = used  # what the context before has alone ends here
        slots = np.concatenate(
            [slots[:prefix_length], np.arange(used, used + len(text) - prefix_length)]
        )
        new = slots[prefix_length:]
        positions[new] = np.arange(prefix_length, len(text))
        parents[new] = np.concatenate([[-1], slots[:-1]])[prefix_length:]
        contexts.append(slots)
        used += len(new)
    return _Trie(positions, parents, ends, contexts, owned)


def _slots_of_turns(tree: Tree, paths: Iterable[tuple[int, Ints]]) -> dict[int, Ints]:
    """Return the slots of the tokens of each turn on the paths of some leaves: node -> slots."""
    slots_of_turns: dict[int, Ints] = {}
    for leaf, slots in paths:
        start = 0
        for node in tree.path(tree.leaves[leaf]):
            end = start + len(tree.nodes[node].tokens)
            if tree.nodes[node].kind == TURN:
                slots_of_turns.setdefault(node, slots[start:end])
            start = end
    return slots_of_turns


def slots_of(layout: Layout, taken: Flags | None = None) -> int:
    """Count the slots of a layout; ``taken`` [U]: those of a part of it."""
    return len(layout.tokens) if taken is None else int(np.count_nonzero(taken))


def row_batches(layout: Layout, together: bool = False) -> list[list[Ints]]:
    """Return the rows of a layout, as their slots, in batches of a similar length.

    Padding adds at most a tenth to a batch, or ``ROW_TOKENS``. ``together``: one batch of all.
    """
    rows = sorted(layout.rows, key=len)
    ends = np.cumsum([0, *_batch_sizes([len(row) for row in rows], together)])
    return [rows[first:end] for first, end in pairwise(ends)]


def _batch_sizes(lengths: Sequence[int], together: bool) -> list[int]:
    """Return how many rows each batch has; ``lengths``: of all rows, the shortest first."""
    sizes: list[int] = []
    real = 0
    for length in lengths:
        padded = (sizes[-1] + 1) * length if sizes else 0
        most = max(PADDING * (real + length), real + length + ROW_TOKENS)
        if not sizes or (padded > most and not together):
            sizes.append(0)
            real = 0
        sizes[-1] += 1
        real += length
    return sizes


def row_tokens(layout: Layout, taken: Flags | None = None, together: bool = False) -> int:
    """Count the tokens that are computed as rows, with padding; ``taken`` as in ``slots_of``."""
    lengths = layout.row_lengths(taken)
    sizes = _batch_sizes(lengths, together)
    return sum(size * lengths[end - 1] for size, end in zip(sizes, np.cumsum(sizes), strict=True))


@dataclass(frozen=True)
class Cost:
    """Multiplications of training: of a token in the layers, and of a (query, key) pair.

    ``apart``: groupings in which fewer pairs may be computed than where all leaves share slots.
    """

    token: float
    pair: float
    pairs: Callable[[Layout], int]  # as the form of attention counts them
    tokens: Callable[..., int] = slots_of  # that are computed for a layout, or a part of it
    apart: Sequence[Grouping] = ()

    def with_more(self, layout: Layout, taken: Flags, slots: Ints) -> tuple[Flags, int]:
        """Add slots to those of a part of a layout; return them and the tokens of the part."""
        more = taken.copy()
        more[slots] = True
        return more, self.tokens(layout, more)


def cheapest(batch: Batch, cost: Cost, tokens: int) -> Layout:
    """Lay some trees out in the grouping that takes the fewest multiplications.

    All leaves share slots in one of more than ``tokens`` tokens.
    """
    best = lay_out(batch)
    for grouping in cost.apart:
        other = lay_out(batch, grouping)
        if cost.tokens(other) <= tokens and _price(other, cost) < _price(best, cost):
            best = other
    return best


def _price(layout: Layout, cost: Cost) -> float:
    return cost.token * cost.tokens(layout) + cost.pair * cost.pairs(layout)


@dataclass(frozen=True)
class Bucket:
    """R pieces of contexts as padded rows of attention, with up to A queries and B keys each.

    A context's queries are the tokens that no earlier one contains: a shared token is a key of
    several contexts, and a query of the first. A long context is cut into pieces of its queries,
    whose keys end with the last query, so that few pairs are computed that no query sees.
    """

    queries: Tensor  # [R, A] slots
    keys: Tensor  # [R, B] slots
    visible: Tensor  # bool [R, 1, A, B]


@dataclass(frozen=True, eq=False)
class Forest:
    """A micro-batch: U slots of some trees, of which P are sampled, in L leaves of at most S.

    N entries are the tokens of the leaves' turns, laid end to end. Several may be one slot: turns
    that were sampled apart have log-probabilities of their own, even for equal tokens.
    """

    layout: Layout
    tokens: Tensor  # [1, U]
    positions: Tensor  # [1, U]
    buckets: list[Bucket]
    places: Tensor  # [U] index of each slot among the queries of all buckets, laid end to end
    subtree_ends: Tensor  # [U]
    longest: int  # tokens of the longest context
    predicting: Tensor  # [P] the slot whose hidden state predicts the sampled token
    targets: Tensor  # [P] the sampled token
    entries: Tensor  # [N] index among the P of each token of a turn
    views: Tensor  # [L, S] index among the N of each sampled token of a leaf
    mask: Tensor  # bool [L, S]; padding is at the end of a row
    advantages: Tensor  # [L, S]
    segments: Tensor  # [L, S]
    weights: Tensor  # [L] of the leaves in the loss
    returns: Tensor | None  # [L, S]
    values: Tensor | None  # [L, S] of the critic before its update
    experts: Replay | None = None  # of the slots, where what sampled a tree has recorded them
    known: dict[str, Tensor] = field(default_factory=dict)  # name -> [N]; see KNOWN
    spare: bool = False  # counts for nothing: it keeps a process in step with others


def forests(batch: Batch, tokens: int, cost: Cost, device: str) -> Iterator[Forest]:
    """Yield micro-batches of at most ``tokens`` tokens with the given leaves of each tree.

    ``cost`` counts them: slots, or the tokens of rows.
    """
    for part in micro_batches(batch, tokens, cost):
        yield forest(cheapest(part, cost, tokens), device)


def micro_batches(batch: Batch, tokens: int, cost: Cost) -> Sequence[Batch]:
    """Divide a batch into parts of at most ``tokens`` tokens; trees that begin alike go together.

    A larger tree is split between its leaves; a single leaf that is larger is a micro-batch, with
    all of its contexts, because the loss of a trajectory needs them together.
    """
    batch = [(source, leaves) for source, leaves in batch if len(leaves)]
    if not batch:
        return []
    whole = lay_out(batch)
    none = np.zeros(len(whole.tokens), bool)
    parts: list[list[tuple[Credited, Sequence[int]]]] = []
    taken = none
    for tree in sorted(whole.trees, key=lambda tree: tree.first):
        for piece in _fitting(tree, lambda some: cost.with_more(whole, none, some)[1] <= tokens):
            more, count = cost.with_more(whole, taken, piece.slots)
            if not parts or count > tokens:
                parts.append([])
                more, _ = cost.with_more(whole, none, piece.slots)
            parts[-1].append((piece.source, piece.leaves))
            taken = more
    return parts


def _fitting(tree: PackedTree, fits: Callable[[Ints], bool]) -> list[PackedTree]:
    """Split a tree in halves of its leaves until each fits or has one leaf."""
    if len(tree.leaves) == 1 or fits(tree.slots):
        return [tree]
    half = len(tree.leaves) // 2
    halves = (tree.some(slice(half)), tree.some(slice(half, None)))
    return [piece for some in halves for piece in _fitting(some, fits)]


def forest(layout: Layout, device: str) -> Forest:
    """Put a layout into tensors on ``device``."""
    buckets, places = _buckets(layout.contexts, layout.owned, len(layout.tokens))
    credits = [tree.source.credits[leaf] for tree in layout.trees for leaf in tree.leaves]
    number = np.cumsum(layout.sampled) - 1  # slot -> index among the P
    turns = [slots for tree in layout.trees for slots in tree.node_slots]
    views, mask = padded(_views(layout))

    def move(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def of_leaves(name: str) -> Tensor:
        return move(padded([getattr(credit, name) for credit in credits])[0])

    valued = credits[0].returns is not None

    return Forest(
        layout=layout,
        tokens=move(layout.tokens[None]),
        positions=move(layout.positions[None]),
        buckets=[Bucket(*(move(array) for array in bucket)) for bucket in buckets],
        places=move(places),
        subtree_ends=move(layout.subtree_ends),
        longest=max(len(context) for context in layout.contexts),
        predicting=move(layout.parents[layout.sampled]),
        targets=move(layout.tokens[layout.sampled]),
        entries=move(number[np.concatenate(turns)]),
        views=move(views),
        mask=move(mask),
        advantages=of_leaves("advantages"),
        segments=of_leaves("segments"),
        weights=move(np.array([credit.weight for credit in credits], np.float32)),
        returns=of_leaves("returns") if valued else None,
        values=of_leaves("values") if valued else None,
        experts=None if layout.experts is None else Replay(move(layout.experts.astype(np.int16))),
        known={name: move(values) for name, values in _known(layout).items()},
    )


def _views(layout: Layout) -> list[Ints]:
    """Return the indices among the entries of each leaf's sampled tokens: leaf -> [S]."""
    views, used = [], 0
    for packed in layout.trees:
        tree, entries = packed.source.tree, {}
        for node, slots in zip(packed.nodes, packed.node_slots, strict=True):
            entries[node] = np.arange(used, used + len(slots))
            used += len(slots)
        for leaf in packed.leaves:
            path = tree.path(tree.leaves[leaf])
            views.append(np.concatenate([entries[node] for node in path if node in entries]))
    return views


def padded(rows: Sequence[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Stack rows of up to S entries, padded with zeros: values [L, S] and mask [L, S]."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(max(1, lengths.max()))[None] < lengths[:, None]
    padded = np.zeros(mask.shape, rows[0].dtype)
    padded[mask] = np.concatenate(rows)
    return padded, mask


KNOWN: dict[str, Callable[[Credited], ByNode | None]] = {  # values of a forest's entries
    "sampler_logprobs": lambda credited: [node.logprobs for node in credited.tree.nodes],
    "entropies": lambda credited: [node.entropies for node in credited.tree.nodes],
    "old_logprobs": lambda credited: credited.old_logprobs,
    "reference_logprobs": lambda credited: credited.reference_logprobs,
}


def _known(layout: Layout) -> dict[str, Floats]:
    """Return the values of ``KNOWN`` that all trees have: name -> [N]."""
    arrays: dict[str, Floats] = {}
    for name, of in KNOWN.items():
        parts = [(of(tree.source), tree.nodes) for tree in layout.trees]
        if all(values is not None for values, _ in parts):
            arrays[name] = np.concatenate(
                [values[node] for values, nodes in parts if values is not None for node in nodes]
            ).astype(np.float32)
    return arrays


class _Rows(NamedTuple):
    """The arrays of a ``Bucket``."""

    queries: Ints  # [R, A]
    keys: Ints  # [R, B]
    visible: NDArray[np.bool_]  # [R, 1, A, B]


class _Piece(NamedTuple):
    """The first ``keys`` tokens of a context, of which the last ``queries`` attend to them."""

    queries: int
    keys: int
    context: Ints  # its slots

    @property
    def own(self) -> Ints:
        """Return the slots of the queries."""
        return self.context[self.keys - self.queries : self.keys]


def _pieces(prefix_length: int, length: int) -> Iterator[tuple[int, int]]:
    """Cut a context of ``length`` tokens from its own first one on: yield (start, end) of each.

    The first piece has what is left over: the others have equal sizes, and end where those of any
    other share of the context do, so that a tree never computes more pairs than its leaves apart.
    """
    first = prefix_length + (length - prefix_length - 1) % PIECE + 1
    return pairwise([prefix_length, *range(first, length, PIECE), length])


def _buckets(
    contexts: Sequence[Ints], owned: Sequence[int], slots: int
) -> tuple[list[_Rows], Ints]:
    """Group pieces of the contexts by size into rows of attention; also return ``Forest.places``.

    ``contexts``: the slots of each; ``owned``: its first index that no earlier one contains. One
    that earlier ones contain whole has no row.
    """
    pieces = [
        _Piece(end - start, end, context)
        for context, prefix_length in zip(contexts, owned, strict=True)
        for start, end in _pieces(prefix_length, len(context))
        if start < end
    ]
    places: Ints = np.zeros(slots, np.int64)
    buckets, before = [], 0
    for group in _groups(sorted(pieces, key=lambda piece: piece[:2])):
        own_slots, mask = padded([piece.own for piece in group])
        all_slots, _ = padded([piece.context[: piece.keys] for piece in group])
        first = np.array([piece.keys - piece.queries for piece in group])[:, None]
        reach = np.where(mask, first + np.arange(mask.shape[1]), 0)  # padding sees the first key
        places[own_slots[mask]] = before + np.flatnonzero(mask.ravel())
        before += mask.size
        visible = np.arange(all_slots.shape[1]) <= reach[:, :, None]
        buckets.append(_Rows(own_slots, all_slots, visible[:, None]))
    return buckets, places


def _groups(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Group pieces, sorted by size, so that padding each to the largest of its group is cheap."""
    groups: list[list[_Piece]] = []
    real = longest = 0
    for piece in pieces:
        pairs = piece.queries * piece.keys
        longest = max(longest, piece.keys)
        padded = (len(groups[-1]) + 1) * piece.queries * longest if groups else 0
        if not groups or padded > PADDING * (real + pairs) + BUCKET_PAIRS:
            groups.append([])
            real, longest = 0, piece.keys
        groups[-1].append(piece)
        real += pairs
    return groups


def last_slots(forest: Forest) -> Tensor:
    """Return the slot of the last token of each leaf [L], in the order of the layout."""
    slots = [path[-1] for tree in forest.layout.trees for path in tree.paths]
    return torch.tensor(np.array(slots), device=forest.tokens.device)


def to_nodes(forest: Forest, values: Tensor) -> Iterator[tuple[Credited, int, Floats]]:
    """Split values of a forest's entries [N, ...]: yield tree, node and the node's values."""
    rest = values.detach().float().cpu().numpy()
    for tree in forest.layout.trees:
        for node, slots in zip(tree.nodes, tree.node_slots, strict=True):
            yield tree.source, node, rest[: len(slots)]
            rest = rest[len(slots) :]
