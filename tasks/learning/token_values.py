"""What an update saw of each sampled token: log-probability gap, importance ratio, clipping."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.learning.losses import Loss
from tasks.learning.packing import Forest, to_nodes
from tasks.learning.views import Views, sampled_only

# (question, node) -> sums over the leaf views of each token: gap, ratio, clipped, views. [S, 4]
Seen = dict[tuple[str, int], NDArray[np.float32]]

TABLE = pa.schema(
    {
        "question": pa.string(),
        "node": pa.int32(),
        "logprob_gap": pa.list_(pa.float32()),
        "ratio": pa.list_(pa.float32()),
        "clipped": pa.list_(pa.float32()),
    }
)


@torch.no_grad()
def add(seen: Seen, forest: Forest, views: Views, loss: Loss) -> None:
    """Add what the loss saw of the tokens of a micro-batch to ``seen``, in place."""
    sampled_views = sampled_only(views)
    ratio = loss.ratio.of(sampled_views)
    clipped = torch.stack([*loss.objective.bounded(ratio, sampled_views, loss.clip).values()])
    gap = sampled_views.old_logprobs - sampled_views.sampler_logprobs
    values = torch.stack([gap, ratio, clipped.any(0).float(), torch.ones_like(ratio)], -1)
    for tree, node, sums in to_nodes(forest, _over_views(values, forest)):
        key = (tree.tree.question.id, node)
        seen[key] = seen[key] + sums if key in seen else sums  # of a tree in several forests


def _over_views(values: Tensor, forest: Forest) -> Tensor:
    """Add the values [L, S, 4] of all views of each entry. [N, 4]"""
    sums = torch.zeros(len(forest.entries), values.shape[-1], device=values.device)
    return sums.index_add(0, forest.views[forest.mask], values[forest.mask])


def table(seen: Mapping[tuple[str, int], NDArray[np.float32]]) -> pa.Table:
    """Return a row a node that the last pass over the batch trained, each with lists over tokens.

    ``logprob_gap`` (nats): the log-probability that the trainer gives the token with the weights
    that sampled it, less the engine's. ``ratio``: the importance ratio of the token's unit in the
    last pass over it; ``clipped``: the share of leaf views in which the clip range decided the loss
    there. Where leaves share a token, ``ratio`` is the mean over them: units and advantages may
    differ. A node without a row is on no leaf with an advantage, or in a mini-batch that was left
    out because ``stop_at_kl`` had ended the batch.
    """
    rows = []
    for (question, node), sums in sorted(seen.items()):
        gap, ratio, clipped, views = sums.T
        lists = (gap / views, ratio / views, clipped / views)
        rows.append(dict(zip(TABLE.names, (question, node, *lists), strict=True)))
    return pa.Table.from_pylist(rows, schema=TABLE)
