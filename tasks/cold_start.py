"""cold_start: supervised fine-tuning on traces, on the agent's own tokens only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefect import task
from torch.utils.data import Dataset

from params.schema.base import Machine
from params.schema.cold_start import ColdStart
from tasks.ledger import prefect_cache, substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Ledger, Step
from tasks.policy.machine import PRECISION, use_machine
from tasks.policy.model import load_policy, load_tokenizer
from tasks.trees.tables import read_rows

IGNORED = -100  # the label of a token that no loss is taken of


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


@task(**prefect_cache.TASK_OPTIONS)
@substeps.recorded
def cold_start(
    step: Step,
    inputs: ColdStartInputs,
    *,
    advance: Callable[[int, Mapping[str, float]], object] = lambda finished, shown: None,
) -> Record:
    """Fine-tune the policy on the traces; artifact ``policy``.

    A killed training goes on at its newest whole checkpoint. ``advance`` is called after every step
    with the steps done so far and the newest loss.
    """
    from transformers import PrinterCallback, Trainer

    settings, machine = inputs.settings, inputs.machine
    use_machine(machine)
    tokenizer = load_tokenizer(inputs.policy.path)
    checkpoints = step.ledger.scratch(step)
    began = time.perf_counter()
    model = load_policy(inputs.policy.path, machine)
    rows = read_rows(Path(inputs.traces.path))
    trainer = Trainer(
        model=model,
        args=_arguments(settings, machine, checkpoints, step.seed),
        train_dataset=Traces(rows),
        data_collator=_collator(tokenizer),
        callbacks=_callbacks(step.ledger, advance),
    )
    trainer.remove_callback(PrinterCallback)  # `advance` reports progress
    trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))
    model.save_pretrained(step.out / "policy")
    tokenizer.save_pretrained(step.out / "policy")
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "metrics": {"loss": losses[-1]["loss"]},
        "curve": [
            {"step": entry["step"], "loss": entry["loss"], "learning_rate": entry["learning_rate"]}
            for entry in losses
        ],
        "seconds": {"training": time.perf_counter() - began},
        "questions": sorted({row["question_id"] for row in rows}),
        "cursor": settings.steps * settings.batch,  # traces that have been passed
    }


def newest_checkpoint(folder: Path) -> str | None:
    """Return the newest whole checkpoint in ``folder``, or None."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1]))
    return next((str(path) for path in found if substeps.read(path)), None)


def _arguments(settings: ColdStart, machine: Machine, folder: Path, seed: int) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // settings.micro_batch,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        save_steps=settings.save_every,
        save_total_limit=2,
        logging_steps=max(1, settings.steps // 50),
        seed=seed,
        use_cpu=machine.device == "cpu",
        bf16=PRECISION[machine.precision] is torch.bfloat16,
        dataloader_pin_memory=machine.device != "cpu",
        disable_tqdm=True,
        report_to=[],
    )


def _collator(tokenizer: Any) -> Any:
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)


def _callbacks(ledger: Ledger, advance: Callable[[int, Mapping[str, float]], object]) -> list[Any]:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
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

    return [Watch()]
