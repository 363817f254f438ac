"""Attention of few queries a row, over keys of which the first are the same in all rows.

Reading keys and values is most of what a decoding step's attention does. Those of a prompt's
beginning that all rows share are read once, in one product with the queries of all rows; the
softmax goes over these and a row's own ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 16  # queries of a row up to which bfloat16 products are faster with the keys in front


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shared: int) -> Tensor:
    """Return what queries see, [rows, heads, queries, size].

    query [rows, heads, queries, size], already scaled; key and value [rows, heads, visible, size],
    of which the first ``shared`` positions of the first row stand for those of all, and are seen by
    all queries; mask [rows, 1, 1 or queries, visible - shared]: 0, or -inf where not seen.
    """
    own_keys, own_values = (part[:, :, shared:].flatten(0, 1) for part in (key, value))
    own_scores = _scores(query.flatten(0, 1), own_keys).unflatten(0, query.shape[:2])
    if not shared:
        weights = _softmax(own_scores.contiguous(), mask, 0)
        return torch.bmm(weights.flatten(0, 1), own_values).view_as(query)
    heads_first = query.transpose(0, 1)
    first_key, first_value = key[0, :, :shared], value[0, :, :shared]
    of_first = torch.bmm(heads_first.flatten(1, 2), first_key.transpose(1, 2))
    of_first = of_first.view(*heads_first.shape[:3], shared).transpose(0, 1)
    weights = _softmax(torch.cat((of_first, own_scores), -1), mask, shared)
    own = torch.bmm(weights[..., shared:].flatten(0, 1), own_values)
    by_heads = weights[..., :shared].transpose(0, 1).flatten(1, 2)
    first = torch.bmm(by_heads, first_value).view_as(heads_first)
    return first.transpose(0, 1) + own.view_as(query)


def _softmax(scores: Tensor, mask: Tensor, shared: int) -> Tensor:
    """Return the weights of scores, which are changed; in float32, where bfloat16 is slower."""
    exact = scores.float()
    exact[..., shared:] += mask
    return exact.softmax(-1).to(scores.dtype)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return products [batch, queries, keys]."""
    if query.dtype is torch.bfloat16 and query.shape[1] <= FEW:
        return torch.bmm(key, query.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(query, key.transpose(1, 2))
