"""Reckon seconds an iteration and idle shares for 1 to 64 machines, from parts; nothing is run.

``python -m benchmarks.scale_on_paper`` prints the tables of docs/gpu.md and draws its picture.
Each figure of PARTS names where it comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.host import gpu_seconds, model_shape
from flows.host.gpu_cards import CARDS, NETWORKS
from flows.host.gpu_memory import FULL
from flows.host.model_shape import Shape
from flows.tracking import run_figures
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe, algorithm_of
from tasks import recipes

RECIPE = "llama3.1-8b"
MACHINES = (1, 2, 4, 8, 16, 32, 64)
GPUS = 8  # of a machine: H100
FIGURE = Path(__file__).parents[1] / "docs" / "scale.png"

WAYS = {"in turns": 0, "ahead": 1}  # reinforce.ahead
TRANSFERS = ("folder", "broadcast")  # how weights reach the servers


@dataclass(frozen=True)
class Parts:
    """What an iteration is reckoned from."""

    step: float = 1581.0  # tokens a second a GPU, sampled and trained (NeMo-RL 0.5, 16 H100, 8B)
    card_share: float | None = None  # of an update; None: as flows/host/gpu_cards.py reckons
    network: float = NETWORKS["400"]  # bytes a second a card between machines; nominal
    disk: float = 10e9  # bytes a second of the shared folder in all; an assumption
    decoding: float = gpu_seconds.STEP_SECONDS  # of a path's step at least; an assumption
    orchestration: float = 0.083 / 256  # seconds a path: 8 % of 1.04 s (docs/performance.md)
    tool_call: float = 0.0042  # seconds of a core (docs/performance.md, two forks)
    calls: float = 3.0  # a path; an assumption
    cores: int = 96  # of the stage's machine, which runs the tools; an assumption


PARTS = Parts()


@dataclass(frozen=True)
class Work:
    """An iteration: a recipe and what it does to a model."""

    recipe: Recipe
    row: Algorithm
    shape: Shape

    @property
    def tokens(self) -> int:
        return gpu_seconds.tokens_of(self.recipe, self.row).expected

    @property
    def paths(self) -> int:
        return self.recipe.reinforce.questions * self.recipe.reinforce.rollout.leaves


@dataclass(frozen=True)
class Reckoned:
    """Seconds of an iteration on so many machines, by part."""

    machines: int
    learning: int  # machines that learn; all, if they are also those that sample
    sampling: float
    tail: float  # of sampling: the longest path alone
    update: float
    communication: float
    weights: float
    stage: float  # orchestration and tools
    total: float
    learners_idle: float  # share of the iteration
    servers_idle: float

    @property
    def wall(self) -> str:
        """Return the part that takes longest."""
        parts = {
            "the longest path" if self.sampling == self.tail else "sampling": self.sampling,
            "update": self.update,
            "communication": self.communication,
            "weights to servers": self.weights,
            "the stage": self.stage,
        }
        return max(parts, key=lambda name: parts[name])


def work_of(recipe: Recipe, factor: int = 1) -> Work:
    """Return the work of an iteration with so many times the recipe's questions."""
    settings_of = recipe.reinforce
    more = settings_of.model_copy(update={"questions": factor * settings_of.questions})
    config = model_shape.config_of(recipe)
    changed = recipe.model_copy(update={"reinforce": more, "lora": None})
    return Work(changed, algorithm_of(recipe), model_shape.shape_of(config))


def rates(work: Work, parts: Parts) -> tuple[float, float]:
    """Return tokens a second a GPU of the update and of sampling.

    The update reaches ``card_share`` of the card: six operations a weight and token. What the
    published whole step takes more is sampling, done in turns on the same cards.
    """
    share = parts.card_share or gpu_seconds.share_of(work.recipe, work.shape)
    operations = share * CARDS["80"].operations["bfloat16"]
    update = operations / (6 * work.shape.linear)
    return update, 1 / (1 / parts.step - 1 / update)


def reckon(
    work: Work, machines: int, learning: int, way: str, transfer: str, parts: Parts = PARTS
) -> Reckoned:
    """Reckon an iteration: ``learning`` machines learn and the others sample.

    A single machine does both in turns on its cards, and moves no weights.
    """
    apart = machines > 1
    processes, servers = GPUS * learning, GPUS * (machines - learning if apart else 1)
    update_rate, sampling_rate = rates(work, parts)
    tail = work.recipe.dialogue.response_tokens * parts.decoding
    sampling = max(tail, work.tokens / sampling_rate / servers)
    update = work.tokens / update_rate / processes
    communication = _communication(work, processes, learning, parts)
    weights = _weights(work, servers, transfer, parts) if apart else 0.0
    stage = work.paths * (parts.orchestration + parts.calls * parts.tool_call / parts.cores)
    learned = update + communication + weights  # servers take new weights between two rounds
    sampled = sampling + stage + weights
    in_turns = not apart or WAYS[way] == 0
    total = learned + sampling + stage if in_turns else max(learned, sampled)
    return Reckoned(
        machines,
        learning,
        sampling,
        tail,
        update,
        communication,
        weights,
        stage,
        total,
        1 - (update + communication) / total if apart else stage / total,
        1 - sampling / total if apart else stage / total,
    )


def _communication(work: Work, processes: int, learning: int, parts: Parts) -> float:
    """Return the seconds of all-gathers and reduce-scatters that nothing hides."""
    machine = work.recipe.machine.model_copy(update={"processes": processes})
    recipe = work.recipe.model_copy(update={"machine": machine})
    network = NETWORKS["nvlink"] if learning == 1 else parts.network
    return gpu_seconds.communicated(recipe, work.row, work.shape) / network


def _weights(work: Work, servers: int, transfer: str, parts: Parts) -> float:
    """Return the seconds until all servers have new weights, in float32.

    By folder: one process writes them, and each server reads them from the same disks. Broadcast:
    they pass over each card's port once.
    """
    size = FULL * work.shape.weights
    return (1 + servers) * size / parts.disk if transfer == "folder" else size / parts.network


def best(work: Work, machines: int, way: str, transfer: str, parts: Parts = PARTS) -> Reckoned:
    """Return the division of machines into learners and servers that takes least time."""
    divisions = range(1, machines) if machines > 1 else [1]
    candidates = [reckon(work, machines, learning, way, transfer, parts) for learning in divisions]
    return min(candidates, key=lambda one: one.total)


def sweeps(recipe: Recipe) -> Iterator[tuple[str, list[Reckoned]]]:
    """Yield each table's title and its rows."""
    for title, grows in (("the recipe's batch", False), ("a batch that grows", True)):
        for way in WAYS:
            for transfer in TRANSFERS:
                yield (
                    f"{title}, {way}, weights by {transfer}",
                    [best(work_of(recipe, m if grows else 1), m, way, transfer) for m in MACHINES],
                )


def table(rows: Sequence[Reckoned]) -> str:
    """Format one sweep in Markdown."""
    lines = [
        "| machines (learn + sample) | sampling | update | communication | weights | stage "
        "| iteration (s) | learners idle | servers idle | longest part |",
        "|---|" + "---:|" * 8 + "---|",
    ]
    for one in rows:
        if one.machines > 1:
            split = f"{one.machines} ({one.learning} + {one.machines - one.learning})"
        else:
            split = "1 (both)"
        seconds = (one.sampling, one.update, one.communication, one.weights, one.stage)
        cells = " | ".join(f"{value:.1f}" for value in seconds)
        idle = f"{one.learners_idle:.0%} | {one.servers_idle:.0%}"
        lines.append(f"| {split} | {cells} | {one.total:.0f} | {idle} | {one.wall} |")
    return "\n".join(lines)


def draw(rows_by_title: Mapping[str, Sequence[Reckoned]]) -> Any:
    """Draw seconds an iteration by machines: a panel for each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=run_figures.DOTS_PER_INCH, layout="constrained")
    for axes, batch in zip(
        figure.subplots(1, 2), ("the recipe's batch", "a batch that grows"), strict=True
    ):
        lines = [(title, rows) for title, rows in rows_by_title.items() if title.startswith(batch)]
        for color, (title, rows) in zip(run_figures.LINES, lines, strict=False):
            label = title.partition(", ")[2]
            values = [one.total for one in rows]
            axes.plot(MACHINES, values, "o-", color=color, markersize=3, linewidth=1, label=label)
        axes.set(title=batch, xlabel="machines of 8 GPUs", ylabel="seconds an iteration")
        axes.set_xscale("log", base=2)
        axes.set_xticks(MACHINES, [str(count) for count in MACHINES])
        axes.set_yscale("log")
        axes.grid(color=run_figures.PALE, linewidth=0.6)
        axes.legend(fontsize=7, edgecolor="none")
    return figure


def main() -> None:
    """Print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args()
    recipe = recipes.load(RECIPE)
    rows_by_title = dict(sweeps(recipe))
    update, sampling = rates(work_of(recipe), PARTS)
    print(
        f"{RECIPE}: {work_of(recipe).tokens:,} tokens an iteration; tokens a second a GPU: ", end=""
    )
    print(f"update {update:,.0f}, sampling {sampling:,.0f}")
    for title, rows in rows_by_title.items():
        print(f"\n{title}\n\n{table(rows)}")
    run_figures.save(draw(rows_by_title), args.figure)


if __name__ == "__main__":
    main()
