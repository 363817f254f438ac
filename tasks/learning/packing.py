"""Pack trees into micro-batches in which every token of a tree occurs once. Pure.

Trajectories of a question share their prompt, branches share whole prefixes, and trajectories that
were sampled apart often begin with the same tokens. What a causal model computes for a token
depends on the tokens before it alone, so equal prefixes are computed once, whatever node they are
in. A forest lays the prefix trees of its trees end to end, depth first: a token's slot is its index
in that sequence. For each leaf it has the slots of its path, so that attention and losses see
trajectories while everything between them is computed once a slot.

A model that must not be given a forest computes rows instead: the contexts that no other begins
with, whole and one by one. The slots stay, and each takes its value from one of the rows.

A fresh prompt on a path starts a new context: attention and positions begin anew there, as at the
root of a tree of its own. Losses still see the whole path. Contexts of a tree share prefixes, too:
fresh prompts that begin alike, or the same one of a world that is in the same state again.
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
    by_slot = np.full((len(trie.tokens), *shapes.pop()), UNKNOWN, np.int64)
    for index in reversed(range(len(tree.nodes))):
        known = tree.nodes[index].experts
        if known is not None:
            by_slot[slots[index][: len(known)]] = known
    return [by_slot[slots[index]] for index in range(len(tree.nodes))]


def _in_order(texts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the indices of texts in lexicographic order, in which common prefixes are neighbours.

    Big-endian bytes sort as tokens do.
    """
    keys = [text.astype(">u4").tobytes() for text in texts]
    return sorted(range(len(texts)), key=lambda index: keys[index])


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


@dataclass(frozen=True)
class Layout:
    """The prefix tree of the contexts of L leaves of a tree, depth first: U slots.

    A slot is a prefix of at least one context: the token that ends it, computed after the tokens
    before it.
    """

    source: Credited
    leaves: list[int]  # [L] indices in the tree, in depth-first order
    nodes: list[int]  # the leaves' turns, indices in the tree, in the order of the leaves
    node_slots: list[Ints]  # turn -> slots of its tokens
    tokens: Ints  # [U]
    positions: Ints  # [U] index in its context
    parents: Ints  # [U] slot of the token before in its context; -1 for the first
    sampled: NDArray[np.bool_]  # [U] whether a turn has it
    subtree_ends: Ints  # [U] one past the last slot of a context with this prefix
    paths: list[Ints]  # leaf -> its slots [T], prompt and all fresh prompts included
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


def lay_out(source: Credited, leaves: Sequence[int]) -> Layout:
    """Lay the trajectories of ``leaves`` (indices of leaves) end to end, equal prefixes once."""
    tree = source.tree
    chains = {leaf: tree.contexts(tree.leaves[leaf]) for leaf in leaves}
    flat = [(leaf, chain) for leaf, of_leaf in chains.items() for chain in of_leaf]
    texts = [np.concatenate([tree.nodes[node].tokens for node in chain]) for _, chain in flat]
    order = _in_order(texts)
    trie = _prefix_tree([texts[context] for context in order])
    indices = {id(flat[context][1]): index for index, context in enumerate(order)}
    slots = {leaf: [trie.contexts[indices[id(c)]] for c in of] for leaf, of in chains.items()}
    in_order = sorted(leaves, key=lambda leaf: indices[id(chains[leaf][-1])])
    paths = [np.concatenate(slots[leaf]) for leaf in in_order]
    of_turns = _slots_of_turns(tree, zip(in_order, paths, strict=True))
    sampled = np.zeros(len(trie.tokens), bool)
    for some in of_turns.values():
        sampled[some] = True
    return Layout(
        source,
        in_order,
        list(of_turns),
        list(of_turns.values()),
        sampled=sampled,
        paths=paths,
        experts=_experts(source, [flat[context][1] for context in order], trie),
        **trie._asdict(),
    )


def _experts(source: Credited, chains: Sequence[Sequence[int]], trie: _Trie) -> Ints | None:
    """Return the experts [U, routers, chosen] of the slots of contexts, given as their nodes."""
    if source.experts is None:
        return None
    experts = np.empty((len(trie.tokens), *source.experts[0].shape[1:]), np.int64)
    for chain, slots in zip(chains, trie.contexts, strict=True):
        experts[slots] = np.concatenate([source.experts[node] for node in chain])
    return experts


class _Trie(NamedTuple):
    """The fields of a ``Layout`` that the tokens of its contexts decide."""

    tokens: Ints
    positions: Ints
    parents: Ints
    subtree_ends: Ints
    contexts: list[Ints]
    owned: list[int]


def _prefix_tree(texts: Sequence[NDArray[np.int32]]) -> _Trie:
    """Return the prefix tree of contexts (their tokens), which are in lexicographic order.

    In that order a context shares its longest prefix with the one before it, and what it adds comes
    right after that one's slots: depth first.
    """
    owned = [0, *(common_length(one, other) for one, other in pairwise(texts))]
    tokens = np.concatenate(
        [text[prefix_length:] for text, prefix_length in zip(texts, owned, strict=True)]
    )
    positions, parents = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
    ends = np.full(len(tokens), len(tokens))
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
    return _Trie(tokens.astype(np.int64), positions, parents, ends, contexts, owned)


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


def slots_of(layouts: Sequence[Layout]) -> int:
    """Count the tokens of layouts, equal prefixes of a tree once."""
    return sum(len(part.tokens) for part in layouts)


def row_batches(layouts: Sequence[Layout], together: bool = False) -> list[list[Ints]]:
    """Return the rows of layouts, as slots of their forest, in batches of a similar length.

    Padding adds at most a tenth to a batch, or ``ROW_TOKENS``. ``together``: one batch of all.
    """
    offsets = np.cumsum([0, *(len(part.tokens) for part in layouts)])
    pairs = zip(layouts, offsets, strict=False)
    rows = sorted((row + offset for part, offset in pairs for row in part.rows), key=len)
    batches: list[list[Ints]] = []
    real = 0
    for row in rows:
        padded = (len(batches[-1]) + 1) * len(row) if batches else 0
        most = max(PADDING * (real + len(row)), real + len(row) + ROW_TOKENS)
        if not batches or (padded > most and not together):
            batches.append([])
            real = 0
        batches[-1].append(row)
        real += len(row)
    return batches


def row_tokens(layouts: Sequence[Layout], together: bool = False) -> int:
    """Count the tokens of layouts that are computed as rows, with the padding of their batches."""
    batches = row_batches(layouts, together)
    return sum(len(batch) * max(map(len, batch)) for batch in batches)


@dataclass(frozen=True)
class Cost:
    """Multiplications of training: of a token in the layers, and of a (query, key) pair."""

    token: float
    pair: float
    pairs: Callable[[Layout], int]  # as the form of attention counts them
    tokens: Callable[[Sequence[Layout]], int] = slots_of  # that are computed for some layouts


def cheapest(whole: Layout, cost: Cost) -> list[Layout]:
    """Return the layout as it is, or one layout a leaf where that takes fewer multiplications."""
    together = _multiplications([whole], cost)
    # Leaves apart have the tokens of all paths, and each layout of them at least one pair a token.
    if len(whole.leaves) == 1 or together <= (cost.token + cost.pair) * sum(map(len, whole.paths)):
        return [whole]
    rows = [lay_out(whole.source, [leaf]) for leaf in whole.leaves]
    return [whole] if together <= _multiplications(rows, cost) else rows


def _multiplications(layouts: Sequence[Layout], cost: Cost) -> float:
    pairs = sum(map(cost.pairs, layouts))
    return cost.token * cost.tokens(layouts) + cost.pair * pairs


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
    layouts: Sequence[Layout] = ()
    spare: bool = False  # counts for nothing: it keeps a process in step with others


def forests(
    batch: Sequence[tuple[Credited, Sequence[int]]], tokens: int, cost: Cost, device: str
) -> Iterator[Forest]:
    """Yield micro-batches of at most ``tokens`` tokens with the given leaves of each tree.

    ``cost`` counts them: slots, or the tokens of rows.

    A larger tree is split between its leaves; a single leaf that is larger is a micro-batch, with
    all of its contexts, because the loss of a trajectory needs them together.
    """
    waiting: list[Layout] = []
    for credited, leaves in batch:
        if not len(leaves):
            continue
        for layout in _fitting(lay_out(credited, leaves), tokens, cost):
            if waiting and cost.tokens([*waiting, layout]) > tokens:
                yield forest(waiting, device)
                waiting = []
            waiting.append(layout)
    if waiting:
        yield forest(waiting, device)


def _fitting(layout: Layout, tokens: int, cost: Cost) -> list[Layout]:
    """Split a layout in halves of its leaves until each has at most ``tokens`` tokens."""
    parts = cheapest(layout, cost)
    if len(parts) > 1 or cost.tokens([layout]) <= tokens or len(layout.leaves) == 1:
        return parts
    half = len(layout.leaves) // 2
    halves = (layout.leaves[:half], layout.leaves[half:])
    return [
        part for leaves in halves for part in _fitting(lay_out(layout.source, leaves), tokens, cost)
    ]


def forest(layouts: Sequence[Layout], device: str) -> Forest:
    """Join layouts to one sequence of slots, in tensors on ``device``."""
    offsets = np.concatenate([[0], np.cumsum([len(part.tokens) for part in layouts])])
    pairs = list(zip(layouts, offsets, strict=False))
    sampled = np.concatenate([part.sampled for part in layouts])
    parents = np.concatenate([part.parents + offset for part, offset in pairs])
    tokens = np.concatenate([part.tokens for part in layouts])
    contexts = [context + offset for part, offset in pairs for context in part.contexts]
    owned = [prefix_length for part in layouts for prefix_length in part.owned]
    buckets, places = _buckets(contexts, owned, len(tokens))
    credits = [part.source.credits[leaf] for part in layouts for leaf in part.leaves]
    number = np.cumsum(sampled) - 1  # slot -> index among the P
    turns = [slots + offset for part, offset in pairs for slots in part.node_slots]
    views, mask = padded(_views(layouts))

    def move(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def of_leaves(name: str) -> Tensor:
        return move(padded([getattr(credit, name) for credit in credits])[0])

    valued = credits[0].returns is not None

    return Forest(
        tokens=move(tokens[None]),
        positions=move(np.concatenate([part.positions for part in layouts])[None]),
        buckets=[Bucket(*(move(array) for array in bucket)) for bucket in buckets],
        places=move(places),
        subtree_ends=move(np.concatenate([part.subtree_ends + offset for part, offset in pairs])),
        longest=max(len(context) for context in contexts),
        predicting=move(parents[sampled]),
        targets=move(tokens[sampled]),
        entries=move(number[np.concatenate(turns)]),
        views=move(views),
        mask=move(mask),
        advantages=of_leaves("advantages"),
        segments=of_leaves("segments"),
        weights=move(np.array([credit.weight for credit in credits], np.float32)),
        returns=of_leaves("returns") if valued else None,
        values=of_leaves("values") if valued else None,
        experts=_replay(layouts, move),
        known={name: move(values) for name, values in _known(layouts).items()},
        layouts=layouts,
    )


def _replay(layouts: Sequence[Layout], move: Callable[[NDArray[Any]], Tensor]) -> Replay | None:
    """Return the experts of all slots of layouts; None where no tree has any.

    Raises ValueError for trees with choices of different shapes.
    """
    shapes = {part.experts.shape[1:] for part in layouts if part.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(
            f"the trees have experts of {len(shapes)} shapes (routers, chosen), {sorted(shapes)}: "
            "policies of different sizes have sampled them"
        )
    (shape,) = shapes
    every = [
        np.full((len(part.tokens), *shape), UNKNOWN) if part.experts is None else part.experts
        for part in layouts
    ]
    return Replay(move(np.concatenate(every).astype(np.int16)))


def _views(layouts: Sequence[Layout]) -> list[Ints]:
    """Return the indices among the entries of each leaf's sampled tokens: leaf -> [S]."""
    views, used = [], 0
    for layout in layouts:
        tree, entries = layout.source.tree, {}
        for node, slots in zip(layout.nodes, layout.node_slots, strict=True):
            entries[node] = np.arange(used, used + len(slots))
            used += len(slots)
        for leaf in layout.leaves:
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


def _known(layouts: Sequence[Layout]) -> dict[str, Floats]:
    """Return the values of ``KNOWN`` that all layouts have: name -> [N]."""
    arrays: dict[str, Floats] = {}
    for name, of in KNOWN.items():
        parts = [(of(part.source), part.nodes) for part in layouts]
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
    """Return the slot of the last token of each leaf [L], in the order of the layouts."""
    slots, used = [], 0
    for layout in forest.layouts:
        slots += [used + path[-1] for path in layout.paths]
        used += len(layout.tokens)
    return torch.tensor(slots, device=forest.tokens.device)


def to_nodes(forest: Forest, values: Tensor) -> Iterator[tuple[Credited, int, Floats]]:
    """Split values of a forest's entries [N, ...]: yield tree, node and the node's values."""
    rest = values.detach().float().cpu().numpy()
    for layout in forest.layouts:
        for node, slots in zip(layout.nodes, layout.node_slots, strict=True):
            yield layout.source, node, rest[: len(slots)]
            rest = rest[len(slots) :]
