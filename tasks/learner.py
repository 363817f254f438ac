"""The policy that learns: load it, take its log-probabilities, update it, save it. Torch only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from params.schema import Machine, Update
from tasks.losses import Loss, Views, policy_loss
from tasks.packing import MicroBatch, Row, micro_batches

PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POLICY, OPTIMIZER = "policy", "optimizer"  # folders of one checkpoint
LOGIT_CHUNK = 4096  # positions whose logits exist at one time


@dataclass
class Learner:
    """A policy, its tokenizer, its optimizer (once it learns), and how many updates it has had."""

    folder: Path  # where it was loaded from, or will lie once the ledger has named it
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer | None = None
    updates: int = 0


_resident: list[Learner] = []  # at most one: the state that the next sub-step most likely wants


def resident(folder: Path, machine: Machine) -> Learner:
    """The learner whose state lies in ``folder``: the one in memory, or loaded from there.

    Raises RuntimeError where the folder has been pruned or is no policy.
    """
    if not (_resident and _resident[0].folder == folder):
        if not (folder / "config.json").is_file():
            raise RuntimeError(
                f"{folder} holds no policy (an old one that was pruned?): run `make clean` to "
                "start anew"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        _resident[:] = [Learner(folder, load_policy(folder, machine), tokenizer)]
    return _resident[0]


def keep_resident(learner: Learner, folder: Path) -> None:
    """Note that the learner in memory is what ``folder`` will hold."""
    learner.folder = folder
    _resident[:] = [learner]


def use_machine(machine: Machine) -> None:
    """Set threads, and choose deterministic kernels, so that equal runs give equal weights.

    Keeps transformers quiet: a run shows its own progress.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(machine.threads)
    torch.use_deterministic_algorithms(True, warn_only=machine.device != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 12 %


def load_policy(folder: str | Path, machine: Machine, revision: str | None = None) -> Any:
    """A causal language model from a folder or a hub name, on the recipe's device.

    Raises OSError (from transformers) where neither is found.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, revision=revision, dtype=PRECISION[machine.precision], attn_implementation="sdpa"
    )
    model.to(torch.device(machine.device))  # type: ignore[arg-type]
    return model


def prepare_optimizer(learner: Learner, settings: Update) -> None:
    """Make the optimizer of a learner that has none, with the state that lies beside its policy."""
    if learner.optimizer is None:
        learner.optimizer = make_optimizer(learner.model, settings)
        beside = learner.folder.parent / OPTIMIZER
        if learner.folder.name == POLICY and beside.is_dir():
            _restore_optimizer(learner, beside)


def make_optimizer(model: Any, settings: Update) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        fused=True,
    )


def save(learner: Learner, folder: Path) -> None:
    """Write ``folder``/policy (weights and tokenizer, as transformers loads them) and, beside it,
    ``folder``/optimizer. Equal learners give equal bytes."""
    learner.model.save_pretrained(folder / POLICY)
    learner.tokenizer.save_pretrained(folder / POLICY)
    if learner.optimizer is None:
        return
    state = {
        f"{index}.{name}": value.contiguous()
        for index, entry in learner.optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    (folder / OPTIMIZER).mkdir()
    save_file(state, folder / OPTIMIZER / "state.safetensors")
    (folder / OPTIMIZER / "updates.json").write_text(json.dumps({"updates": learner.updates}))


def _restore_optimizer(learner: Learner, folder: Path) -> None:
    assert learner.optimizer
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "state.safetensors").items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})
    learner.updates = json.loads((folder / "updates.json").read_text())["updates"]


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
    seed: int,
) -> dict[str, float]:
    """One batch's optimizer steps: epochs x mini-batches. Returns metrics, averaged over tokens.

    A mini-batch holds whole leaves, in an order drawn from ``seed``. Rows whose advantage is zero
    have no gradient and skip the model, but count in the denominator.
    """
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
    metrics["entropy"] = entropies.sum()
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
        name: total.get(name, 0.0) / tokens for name in ("clip_low", "clip_high", "kl", "entropy")
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
