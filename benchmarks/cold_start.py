"""Measure the cold start beside TRL's SFTTrainer: equal weights, traces, batches and threads.

``python -m benchmarks.cold_start`` prints a line a case and writes cold_start.json; ``make bench``
runs it after the cases of RL. Both sides do whole optimizer steps on the same traces in the same
batches. TRL is measured in each of its shapes: padded rows, rows without padding
(``padding_free``), packed rows (``packing``), and parts of a batch. A shape whose loss is not that
of padded rows counts only as a speed: without FlashAttention, traces of one row may see each other.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.against_trl import deterministic, machine, spread
from benchmarks.cases import SMOLLM, cold_start_inputs, load_settings, require_package
from benchmarks.floors import matrix_rate
from params.schema.cold_start import ColdStart
from params.schema.prepare import TinyPolicy
from params.schema.recipe import Recipe
from tasks.environments import open_environment
from tasks.learning import fine_tuning
from tasks.learning.fine_tuning import FineTuning, places
from tasks.ledger import artifacts
from tasks.ledger.substeps import SubStep
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import use_machine
from tasks.policy.tiny import build_policy, build_tokenizer
from tasks.prepare import prepare
from tasks.questions.trace_tables import TRACES
from tasks.trees.tables import write_table

FILE = Path(__file__).with_name("cold_start.json")
HOUSEHOLD = "household"
CASES = (HOUSEHOLD, SMOLLM)
STEPS, REPETITIONS = 6, 5  # of a repetition; each side
NEAR = 1e-3  # nats: how far the loss of a shape may be from that of padded rows
# Tokens of household's traces: a prompt, then acts and observations, from and to.
PROMPT, ACTS, ACT, SEEN = (50, 80), (5, 14), (5, 9), (10, 26)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """How TRL lays a batch out."""

    parts: int  # passes a batch
    padding_free: bool = False
    packing: bool = False

    def __str__(self) -> str:
        layout = "packing" if self.packing else "padding-free" if self.padding_free else "padded"
        return f"{layout}, {self.parts} parts"


SHAPES = (
    *(Shape(parts) for parts in (1, 2, 4)),
    *(Shape(parts, padding_free=True) for parts in (1, 2)),
    Shape(1, packing=True),
)


# ---------------------------------------------------------------- what both sides learn


@contextmanager
def material(name: str) -> Iterator[tuple[Recipe, Path, Path]]:
    """Yield the recipe of a case, the folder of its first policy, and the file of its traces."""
    recipe = load_settings(name)
    if name == SMOLLM:
        require_package(recipe)
        opening = partial(open_environment, recipe.tools, {}, recipe.machine.threads)
        step = SubStep(f"bench-{name}", "prepare", 0, recipe.seed)
        record = prepare(step, cold_start_inputs(recipe), open_environment=opening)
        initial, traces = (artifacts.output(record, one) for one in ("initial", "traces"))
        yield recipe, Path(initial.path), Path(traces.path)
        return
    with tempfile.TemporaryDirectory() as made:
        settings = recipe.prepare.policy
        assert isinstance(settings, TinyPolicy)
        tokenizer = build_tokenizer(["Go to a cabinet."], settings)
        policy = build_policy(settings, tokenizer, recipe.seed)
        folder, traces_file = Path(made, "policy"), Path(made, "traces.parquet")
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        rows = [*episodes(400, len(tokenizer), recipe.seed)]
        write_table(pa.Table.from_pylist(rows, schema=TRACES), traces_file)
        yield recipe, folder, traces_file


def episodes(count: int, vocabulary: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield traces of random tokens, as long as household's."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        lengths, flags = [draw.integers(*PROMPT)], [False]
        for _ in range(draw.integers(*ACTS)):
            lengths += [draw.integers(*ACT), draw.integers(*SEEN)]
            flags += [True, False]
        trained = np.repeat(flags, lengths)
        yield {
            **dict.fromkeys(("split", "kind", "flaw", "text"), ""),
            "question_id": f"trace-{number}",
            "tokens": draw.integers(5, vocabulary, len(trained)),
            "trained": trained,
        }


# ---------------------------------------------------------------- Beamline


def beamline(recipe: Recipe, folder: Path, traces: Path) -> Callable[[int], list[float]]:
    """Return what trains up to a number of steps, and returns all of its losses so far."""
    assert recipe.cold_start
    training = FineTuning(traces, settings_of(recipe.cold_start), recipe.seed, recipe.machine)
    fine_tuning.begin()
    losses: list[float] = []

    def train(end: int) -> list[float]:
        with deterministic(True):
            losses.extend(fine_tuning.train(folder, training, end))
        return losses

    return train


def settings_of(cold_start: ColdStart) -> ColdStart:
    """Return a cold start that neither warms up nor decays, as long as any measurement takes."""
    return cold_start.model_copy(update={"steps": 10**9, "warmup_steps": 0})


def batches(recipe: Recipe, traces: Path, steps: range) -> list[list[Row]]:
    """Return the traces of the steps."""
    assert recipe.cold_start
    training = FineTuning(traces, recipe.cold_start, recipe.seed, recipe.machine)
    rows = training.rows
    return [[rows[index] for index in places(step, len(rows), training)] for step in steps]


# ---------------------------------------------------------------- TRL


def trl(recipe: Recipe, folder: Path, shape: Shape) -> Callable[[Sequence[Row]], float]:
    """Return what trains on one batch, and returns its loss before the step."""
    from trl import SFTConfig, SFTTrainer

    assert recipe.cold_start
    settings, output = recipe.cold_start, tempfile.mkdtemp()
    config = SFTConfig(
        output_dir=output,
        use_cpu=True,
        bf16=recipe.machine.precision == "bfloat16",
        fp16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        learning_rate=settings.learning_rate,
        adam_beta1=fine_tuning.ADAM_BETAS[0],
        adam_beta2=fine_tuning.ADAM_BETAS[1],
        weight_decay=settings.weight_decay,
        max_grad_norm=fine_tuning.GRADIENT_CLIP,
        lr_scheduler_type="constant",
        per_device_train_batch_size=settings.batch // shape.parts,
        gradient_accumulation_steps=shape.parts,
        max_length=None,
        padding_free=shape.padding_free or shape.packing,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=recipe.seed,
    )
    model = load_policy(folder, recipe.machine)
    model.set_attn_implementation("sdpa")
    tokenizer = load_tokenizer(folder)
    trainer: Any = SFTTrainer(model, config, train_dataset=_dataset([]), processing_class=tokenizer)
    shutil.rmtree(output, ignore_errors=True)
    trainer.create_optimizer_and_scheduler(num_training_steps=10**9)
    trainer.model.train()
    context = recipe.prepare.policy.context

    def step(rows: Sequence[Row]) -> float:
        examples = [_example(row) for row in rows]
        laid_out = _packed(examples, context) if shape.packing else examples
        size = math.ceil(len(laid_out) / shape.parts)
        parts = [laid_out[start:][:size] for start in range(0, len(laid_out), size)]
        inputs = [trainer.data_collator(part) for part in parts]
        learned = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
        trainer.current_gradient_accumulation_steps = len(parts)
        loss = 0.0
        for one in inputs:
            count = torch.tensor(learned)
            loss += float(trainer.training_step(trainer.model, one, count))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), config.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return loss

    return step


def _example(row: Row) -> dict[str, Any]:
    tokens, trained = np.array(row["tokens"]), np.array(row["trained"], bool)
    return {
        "input_ids": tokens.tolist(),
        "labels": np.where(trained, tokens, -100).tolist(),
    }


def _packed(examples: Sequence[Mapping[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return the examples in rows of at most ``length`` tokens, by TRL's own packing."""
    from trl import pack_dataset

    return [*pack_dataset(_dataset(examples), length, "bfd")]


def _dataset(examples: Sequence[Mapping[str, Any]]) -> Any:
    from datasets import Dataset

    rows = examples or [{"input_ids": [1, 2], "labels": [1, 2]}]
    return Dataset.from_list([dict(row) for row in rows])


# ---------------------------------------------------------------- the measurement


def measure(name: str, repetitions: int) -> dict[str, Any]:
    """Measure a case; each repetition has as many steps of each side, in turns."""
    with material(name) as (recipe, folder, traces):
        use_machine(recipe.machine)
        train = beamline(recipe, folder, traces)
        losses, tried = _tried(recipe, folder, traces)
        fastest = _fastest(losses, tried)
        losses["beamline"] = train(1)[0]
        peer = trl(recipe, folder, fastest)
        speeds: dict[str, list[float]] = {"beamline": [], "trl": []}
        for number in range(repetitions):
            steps = range(3 + number * STEPS, 3 + (number + 1) * STEPS)
            some = batches(recipe, traces, steps)
            tokens = sum(len(row["tokens"]) for rows in some for row in rows)
            train(steps.start)
            speeds["beamline"].append(tokens / _seconds(partial(train, steps.stop)))
            speeds["trl"].append(tokens / _seconds(partial(_each, peer, some)))
        rate = matrix_rate(recipe.machine.precision)
        return _summary(recipe, folder, traces, speeds, fastest, tried, losses, rate)


def _tried(recipe: Recipe, folder: Path, traces: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the first loss of each shape of TRL, and its speed; one is in memory at a time."""
    first, *some = batches(recipe, traces, range(3))
    tokens = sum(len(row["tokens"]) for rows in some for row in rows)
    losses, speeds = {}, {}
    for shape in SHAPES:
        step = trl(recipe, folder, shape)
        losses[str(shape)] = step(first)
        speeds[str(shape)] = tokens / _seconds(partial(_each, step, some))
    return losses, speeds


def _fastest(losses: Mapping[str, float], speeds: Mapping[str, float]) -> Shape:
    """Return TRL's fastest shape that learns what padded rows do."""
    exact = [one for one in SHAPES if abs(losses[str(one)] - losses[str(SHAPES[0])]) < NEAR]
    return max(exact, key=lambda shape: speeds[str(shape)])


def _each(step: Callable[[Sequence[Row]], float], some: Sequence[Sequence[Row]]) -> list[float]:
    return [step(rows) for rows in some]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _summary(
    recipe: Recipe,
    folder: Path,
    traces: Path,
    speeds: Mapping[str, Sequence[float]],
    fastest: Shape,
    tried: Mapping[str, float],
    losses: Mapping[str, float],
    rate: float,
) -> dict[str, Any]:
    weights = sum(one.numel() for one in load_policy(folder, recipe.machine).parameters())
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
    return {
        "weights": weights,
        "tokens_a_second": {side: spread(values) for side, values in speeds.items()},
        "ratio": spread(ratios),
        "share_of_matrix_rate": 6 * weights * median(speeds["beamline"]) / rate,
        "matrix_rate": rate,
        "trl_shape": str(fastest),
        "trl_shapes": tried,
        "losses": losses,
    }


def main() -> None:
    """Measure the cases of the command line, print a table and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    if options.repetitions < 1:
        sys.exit(f"--repetitions {options.repetitions}: ask for at least one")
    before = json.loads(options.output.read_text()) if options.output.is_file() else {"cases": {}}
    rates: dict[str, float] = {}
    for name in options.cases:
        entry = measure(name, options.repetitions)
        before["cases"][name] = entry
        precision = load_settings(name).machine.precision
        rates[precision] = max(rates.get(precision, 0.0), entry["matrix_rate"])
        ours, theirs = (entry["tokens_a_second"][side]["median"] for side in ("beamline", "trl"))
        print(
            f"{name}: {ours:,.0f} tokens a second, TRL {theirs:,.0f} ({entry['trl_shape']}); "
            f"ratio {entry['ratio']['median']:.2f}, "
            f"{entry['share_of_matrix_rate']:.0%} of the machine's matrix products",
            flush=True,
        )
    before["machine"] = machine(rates)
    options.output.write_text(json.dumps(before, indent=1) + "\n")


if __name__ == "__main__":
    main()
