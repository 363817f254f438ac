"""The policy that learns: its log-probabilities, and its updates. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from params.schema import Machine, Update
from tasks.checkpoint import Learner, forget
from tasks.losses import Loss, Views, policy_loss
from tasks.packing import MicroBatch, Row, micro_batches

LOGIT_CHUNK = 4096  # positions whose logits exist at one time


def token_logprobs(
    model: Any, tokens: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and normalised entropies of the tokens under ``mask``; both [leaves, T].

    tokens and mask are [leaves, T]; values elsewhere are 0. Logits are taken only where a sampled
    token is predicted, ``LOGIT_CHUNK`` positions at a time, and recomputed in the backward pass.
    """
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    predicting = mask[:, 1:]
    states, targets = hidden[:, :-1][predicting], tokens[:, 1:][predicting]
    head = model.get_output_embeddings()
    parts = [
        checkpoint(_chunk_logprobs, head, part, target, temperature, use_reentrant=False)
        for part, target in zip(states.split(LOGIT_CHUNK), targets.split(LOGIT_CHUNK), strict=True)
    ]
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    places = torch.nn.functional.pad(predicting, (1, 0))
    zero = torch.zeros(tokens.shape, device=tokens.device)
    return zero.masked_scatter(places, logprobs), zero.masked_scatter(places, entropies)


def _chunk_logprobs(
    head: Any, states: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = head(states).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1) / math.log(logits.shape[-1])
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def update(
    learner: Learner,
    rows: Sequence[Row],
    loss: Loss,
    settings: Update,
    temperature: float,
    machine: Machine,
    seed: int | Sequence[int],
) -> dict[str, float]:
    """One batch's optimizer steps: epochs x mini-batches. Returns metrics, averaged over tokens.

    A mini-batch holds whole leaves, in an order drawn from ``seed``. Rows whose advantage is zero
    have no gradient and skip the model, but count in the denominator.
    """
    forget(learner)
    learner.model.train()
    order = np.random.default_rng(seed)
    sums: list[dict[str, float]] = []
    for _ in range(settings.epochs):
        for part in np.array_split(order.permutation(len(rows)), settings.mini_batches):
            batch = [rows[i] for i in part]
            sums.append(_step(learner, batch, loss, settings, temperature, machine))
    return _averages(sums)


def _step(
    learner: Learner,
    rows: Sequence[Row],
    loss: Loss,
    settings: Update,
    temperature: float,
    machine: Machine,
) -> dict[str, float]:
    """One optimizer step; gradients of its micro-batches add up."""
    assert learner.optimizer, "prepare_optimizer comes first"
    lengths = torch.tensor([row.sampled for row in rows])
    denominator = loss.averaging.denominator(lengths)
    useful = [row for row in rows if row.advantage != 0]
    sums: dict[str, float] = {"loss": 0.0, "trained_tokens": 0.0}
    learner.optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches(useful, settings.micro_batch_tokens, machine.device):
        value, metrics = _micro_batch_loss(learner, batch, loss, temperature, denominator)
        value.backward()
        _add_up(sums, {"loss": float(value.detach()), **metrics})
        sums["trained_tokens"] += float(batch.mask.sum())
    if useful:
        sums["gradient_norm"] = _apply(learner, settings)
    return sums


def _micro_batch_loss(
    learner: Learner, batch: MicroBatch, loss: Loss, temperature: float, denominator: float
) -> tuple[Tensor, dict[str, float]]:
    logprobs, entropies = token_logprobs(learner.model, batch.tokens, batch.mask, temperature)
    views = Views(logprobs, batch.old_logprobs, batch.advantages, batch.mask)
    value, metrics = policy_loss(views, loss, denominator)
    metrics["trained_entropy"] = entropies.sum()
    mismatch = (logprobs.detach() - batch.old_logprobs).abs()
    metrics["mismatch_highest"] = torch.where(batch.mask, mismatch, 0.0).max()
    return value, {name: float(entry) for name, entry in metrics.items()}


def _apply(learner: Learner, settings: Update) -> float:
    """Clip, warm up, step; the gradient norm before clipping."""
    assert learner.optimizer
    weights = learner.model.parameters()
    norm = float(torch.nn.utils.clip_grad_norm_(weights, settings.gradient_clip))
    if not math.isfinite(norm):
        raise RuntimeError(
            f"the gradient of update {learner.updates + 1} is {norm}: lower "
            "reinforce.update.learning_rate, or look at the newest trees in the ledger"
        )
    learner.updates += 1
    share = min(1.0, learner.updates / max(1, settings.warmup_updates))
    for group in learner.optimizer.param_groups:
        group["lr"] = settings.learning_rate * share
    learner.optimizer.step()
    return norm


COMBINE: dict[str, Callable[[float, float], float]] = {
    "ratio_highest": max,
    "mismatch_highest": max,
    "ratio_lowest": min,
}


def _add_up(sums: dict[str, float], new: dict[str, float]) -> None:
    for name, value in new.items():
        combine = COMBINE.get(name, lambda old, value: old + value)
        sums[name] = combine(sums[name], value) if name in sums else value


def _averages(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of all steps of one batch: token sums become means over tokens."""
    total: dict[str, float] = {}
    for step in steps:
        _add_up(total, step)
    tokens = max(1.0, total.get("tokens", 0.0))
    means = {
        name: total.get(name, 0.0) / tokens
        for name in ("clip_low", "clip_high", "kl", "trained_entropy")
    }
    extremes = {name: total[name] for name in COMBINE if name in total}
    return {
        **means,
        **extremes,
        "loss": total["loss"] / len(steps),
        "gradient_norm": total.get("gradient_norm", 0.0) / len(steps),
        "trained_tokens": total["trained_tokens"],
        "clip_fraction": means["clip_low"] + means["clip_high"],
    }
