"""cold_start: supervised fine-tuning on traces, on the agent's own tokens only."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from tasks.learning import fine_tuning
from tasks.learning.learner_group import HERE, Learners
from tasks.learning.progress import Advance, no_advance
from tasks.ledger import artifacts, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Ledger, SubStep
from tasks.policy import checkpoint, lean_transformers, token_ids
from tasks.policy.lean_transformers import transformers
from tasks.policy.load_model import load_policy, load_tokenizer, save_model
from tasks.policy.machine import PRECISION, use_machine
from tasks.policy.optimizer import AdamW
from tasks.trees.tables import read_rows

IGNORED = -100  # the label of a token that no loss is taken of
POINTS = 50  # of the curve
CHECKPOINTS = 2  # that are kept
LOSSES = "losses.json"  # in a checkpoint of several processes: those of its steps

Point = dict[str, Any]  # of the curve: step, loss, learning_rate


class Traces(Dataset[dict[str, Any]]):
    """Tokenised traces; prompts and tool results are observed, so their labels are ignored."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.array(self.rows[index]["tokens"])
        labels = np.where(self.rows[index]["trained"], tokens, IGNORED)
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


@dataclass(frozen=True)
class ColdStartInputs:
    """What decides the fine-tuned policy."""

    policy: Artifact
    traces: Artifact
    settings: ColdStart
    machine: Machine


@substeps.recorded
def cold_start(
    step: SubStep,
    inputs: ColdStartInputs,
    *,
    advance: Advance = no_advance,
    learners: Learners = HERE,
) -> Record:
    """Fine-tune the policy on the traces; artifact ``policy``.

    A killed training goes on at its newest whole checkpoint. ``advance`` is called with the steps
    done so far and the newest loss. ``learners`` is where the policy learns: several processes
    learn as one does, but for the rounding of sums.
    """
    began = time.perf_counter()
    train = _alone if inputs.machine.processes == 1 else partial(_together, learners=learners)
    curve = train(step, inputs, advance)
    rows = read_rows(Path(inputs.traces.path))
    return {
        "metrics": {"loss": curve[-1]["loss"]},
        "curve": curve,
        "seconds": {"training": time.perf_counter() - began},
        "questions": sorted({row["question_id"] for row in rows}),
        "cursor": inputs.settings.steps * inputs.settings.batch,  # traces that have been passed
    }


# ---------------------------------------------------------------- one process


def _alone(step: SubStep, inputs: ColdStartInputs, advance: Advance) -> list[Point]:
    """Train in this process and write the policy; return the curve."""
    lean_transformers.import_trainer()
    settings, machine = inputs.settings, inputs.machine
    use_machine(machine)
    tokenizer = load_tokenizer(inputs.policy.path)
    checkpoints = step.ledger.scratch(step)
    newest = _newest(checkpoints)
    # Trainer would leave out weights that are saved in other shapes, such as those of experts.
    model = load_policy(newest or inputs.policy.path, machine)
    token_ids.note(model, tokenizer)
    token_ids.imitation_loss(model)
    arguments = _arguments(settings, machine, checkpoints, step.seed)
    _, of_optimizer = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    with lean_transformers.no_tensor_is_sharded():
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            optimizer_cls_and_kwargs=(AdamW, of_optimizer),
            train_dataset=Traces(read_rows(Path(inputs.traces.path))),
            data_collator=_collator(tokenizer),
            callbacks=_callbacks(step.ledger, advance),
        )
        trainer.remove_callback(transformers.PrinterCallback)  # `advance` reports progress
        trainer.train(resume_from_checkpoint=newest)
    save_model(model, step.out / "policy")
    tokenizer.save_pretrained(step.out / "policy")
    return [
        {"step": entry["step"], "loss": entry["loss"], "learning_rate": entry["learning_rate"]}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def _newest(checkpoints: Path) -> str | None:
    newest = substeps.newest_checkpoint(checkpoints)
    return str(newest) if newest else None


def _steps_of_a_point(settings: ColdStart) -> int:
    return max(1, settings.steps // POINTS)


def _arguments(settings: ColdStart, machine: Machine, folder: Path, seed: int) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // settings.micro_batch,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=fine_tuning.ADAM_BETAS[0],
        adam_beta2=fine_tuning.ADAM_BETAS[1],
        max_grad_norm=fine_tuning.GRADIENT_CLIP,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        save_steps=settings.save_every,
        save_total_limit=CHECKPOINTS,
        logging_steps=_steps_of_a_point(settings),
        seed=seed,
        use_cpu=machine.device == "cpu",
        bf16=PRECISION[machine.precision] is torch.bfloat16,
        dataloader_pin_memory=machine.device != "cpu",
        disable_tqdm=True,
        report_to=[],
    )


def _collator(tokenizer: Any) -> Any:
    """Return what makes a batch of traces, padded on the right, whatever the tokenizer's side.

    Padding on the left would move tokens of a policy with learned positions to other positions.
    """
    padding = copy.copy(tokenizer)
    padding.padding_side = "right"
    return transformers.DataCollatorForSeq2Seq(padding, label_pad_token_id=IGNORED)


def _callbacks(ledger: Ledger, advance: Advance) -> list[Any]:
    class CheckpointWatch(transformers.TrainerCallback):
        """Reports progress, and seals every checkpoint once it is whole."""

        def __init__(self) -> None:
            self.shown: dict[str, float] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            advance(state.global_step, self.shown)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                self.shown["loss"] = float(logs["loss"])

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ledger.seal(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    return [CheckpointWatch()]


# ---------------------------------------------------------------- several processes


def _together(
    step: SubStep, inputs: ColdStartInputs, advance: Advance, learners: Learners
) -> list[Point]:
    """Train in processes that learn together, and write the policy; return the curve."""
    settings, scratch = inputs.settings, step.ledger.scratch(step)
    training = fine_tuning.FineTuning(Path(inputs.traces.path), settings, step.seed, inputs.machine)
    policy, losses = _resumed(scratch, Path(inputs.policy.path))
    for end in _stops(settings, len(losses)):
        losses += learners.run(fine_tuning.train, policy, training, end)[len(losses) - end :]
        advance(end, {"loss": losses[-1]})
        if end % settings.save_every == 0 and end < settings.steps:
            folder = scratch / f"checkpoint-{end}"
            artifacts.remove(folder)
            learners.run(fine_tuning.save, policy, training, end, folder)
            (folder / LOSSES).write_text(json.dumps(losses))
            substeps.drop_old_checkpoints(scratch, CHECKPOINTS)
            step.ledger.seal(folder)
            policy = folder / checkpoint.POLICY
    learners.run(fine_tuning.finish, policy, training, step.out / checkpoint.POLICY)
    return _curve(losses, settings)


def _resumed(scratch: Path, first: Path) -> tuple[Path, list[float]]:
    """Return the policy to go on with, and the losses of the steps that it has made."""
    newest = substeps.newest_checkpoint(scratch)
    if newest is None:
        return first, []
    return newest / checkpoint.POLICY, json.loads((newest / LOSSES).read_text())


def _stops(settings: ColdStart, done: int) -> list[int]:
    """Return the numbers of steps at which training reports or writes a checkpoint."""
    every = _steps_of_a_point(settings)
    stops = {*range(0, settings.steps, every), *range(0, settings.steps, settings.save_every)}
    return sorted(stop for stop in {*stops, settings.steps} if stop > done)


def _curve(losses: Sequence[float], settings: ColdStart) -> list[Point]:
    """Return a point of every so many steps: the mean loss since the one before."""
    every = _steps_of_a_point(settings)
    return [
        {
            "step": end,
            "loss": math.fsum(losses[end - every : end]) / every,
            "learning_rate": fine_tuning.learning_rate(settings, end - 1),
        }
        for end in range(every, settings.steps + 1, every)
    ]
