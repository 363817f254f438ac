"""Hold what a server has loaded against what the learner has written.

A server says by name which weights it has. Here are the digests of some of them, from the policy's
folder, and the log-probabilities of the token after a short prompt, by the policy in memory.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from tasks.engines.turns import Drawn, TurnRequest
from tasks.policy import sharding, token_ids
from tasks.policy.token_ids import TokenIds

COMPARED = 8  # weights that are compared, evenly over the names: a call each, of some milliseconds
LARGEST = 2**24  # bytes in float32 of a weight that is compared: 20 ms to digest
# vLLM lays most weights together and packs some; this one it has as it is, and never cut in parts.
VLLM_WEIGHT = "model.norm.weight"
PROMPT_TOKENS, STRIDE = 8, 7919  # of the prompt: a prime apart, so that they are not neighbours
DRAWS = 8  # tokens that a server samples after the prompt
# Nats between the log-probabilities of server and learner, in the middle of the draws: those of a
# server in bfloat16 differ by some hundredths, those in float32 by 1e-5 (on a GPU by up to 1e-2).
TOLERANCES = {torch.float32: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Reference:
    """What a server with the right weights answers."""

    # Name -> digest -> the precision that gives it; bfloat16 where both give the same.
    digests: Mapping[str, Mapping[str, torch.dtype]]
    # [V] after ``prompt_of(V)``, V the ids up to the last that has a token; None: not known here
    logprobs: NDArray[np.float32] | None


@dataclass(frozen=True)
class ServedPolicy:
    """A policy for servers: where its weights are, and what they are held against."""

    folder: Path
    version: str
    ids: TokenIds  # those that have a token
    pieces: Sequence[str]  # the text of each token, at least
    reference: Reference


def digest_of(weight: Tensor) -> str:
    """Return the digest of a weight, whatever its precision."""
    numbers = weight.detach().float().cpu().contiguous().numpy()
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def reference_of(folder: Path, model: Any, kind: str) -> Reference:
    """Return what a server of a kind of engine answers that has the weights of ``folder``.

    ``model``: the same policy in memory, with or without an adapter.
    """
    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    digests: dict[str, dict[str, torch.dtype]] = {}
    for name, weight in _compared(folder, names if kind != "vllm" else names & {VLLM_WEIGHT}):
        digests[name] = {digest_of(weight): torch.float32}
        digests[name] |= {digest_of(weight.to(torch.bfloat16)): torch.bfloat16}
    return Reference(digests, _logprobs(model))


def _compared(folder: Path, names: set[str]) -> list[tuple[str, Tensor]]:
    """Return some of the weights in a folder by name."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in names & set(weights.keys()):
                if 4 * np.prod(weights.get_slice(name).get_shape()) <= LARGEST:
                    found[name] = file
    ordered = sorted(found)
    count = min(COMPARED, len(ordered))
    picked = [ordered[number * len(ordered) // count] for number in range(count)]
    return [(name, _weight(found[name], name)) for name in picked]


def _weight(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as weights:
        weight: Tensor = weights.get_tensor(name)
        return weight


def prompt_of(vocabulary: int) -> NDArray[np.int32]:
    """Return the tokens of the prompt for a policy with so many."""
    return (np.arange(1, PROMPT_TOKENS + 1) * STRIDE % vocabulary).astype(np.int32)


def _logprobs(model: Any) -> NDArray[np.float32] | None:
    """Return log-probabilities [V] of the token after the prompt, None for a part of a model."""
    if sharding.is_sharded(model):
        return None
    ids = token_ids.of(model)
    tokens = torch.from_numpy(prompt_of(ids.end)).long()[None]
    with torch.no_grad():
        logits = model(tokens.to(model.device), use_cache=False).logits[0, -1]
    scores: NDArray[np.float32] = ids.only(logits).float().log_softmax(-1).cpu().numpy()
    return scores


def turns_after_prompt(vocabulary: int) -> list[TurnRequest]:
    """Return requests for one token each after the prompt."""
    tokens = prompt_of(vocabulary)
    return [TurnRequest(tokens, seed, 1, 1.0, 1.0, (), (), ()) for seed in range(DRAWS)]


def difference(
    reference: Reference,
    digest: Callable[[str], str],
    sample: Callable[[], Sequence[Drawn]],
) -> str | None:
    """Return how a server differs from the reference, or None.

    ``digest`` asks it for that of a weight, ``sample`` for the turns of ``turns_after_prompt``.
    """
    given = {name: digest(name) for name in reference.digests}
    for name, known in reference.digests.items():
        if given[name] not in known:
            return f"{name} is not the learner's, by its digest"
    if reference.logprobs is None:
        return None
    precisions = {known[given[name]] for name, known in reference.digests.items()}
    exact = torch.float32 in precisions
    tolerance = TOLERANCES[torch.float32 if exact else torch.bfloat16]
    learned = reference.logprobs
    apart = statistics.median(
        abs(float(logprobs[0] - learned[tokens[0]])) for tokens, logprobs, _ in sample()
    )
    if apart <= tolerance:
        return None
    return (
        f"its log-probabilities after a prompt are {apart:.3g} nats from the learner's, and at "
        f"most {tolerance} is a matter of rounding"
    )
