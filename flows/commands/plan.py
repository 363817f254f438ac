"""Check whether a recipe fits a GPU, before anything is downloaded or run.

``beamline plan RECIPE`` prints GPU memory by part, tokens, seconds and disk space, for cards
of 24, 80 and 141 GB and for this machine's GPU, if it has one; ``--card 80`` for that card alone.
Of several learner processes (``machine.processes``) each has such a card, ``--network`` connects
them, and the memory is that of the first one. For a card that is too small it prints the largest
parts and the keys to change. Several recipes give a table. The exit status is 1 where a card that
was asked for, or the GPU here, is too small.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import end_import_phase
from flows.host import disk, gpu_cards, gpu_memory, gpu_seconds, model_shape, remedies
from flows.host.gpu_cards import CARDS, GIB, NETWORKS, Card
from flows.host.gpu_memory import Memory
from flows.host.gpu_seconds import Seconds
from flows.host.memory_shortage import main_memory
from flows.host.model_shape import Shape
from flows.host.proposals import Proposal, proposals
from flows.host.remedies import Remedy
from params.schema.algorithms import Algorithm
from params.schema.recipe import Recipe, algorithm_of
from tasks import recipes
from tasks.recipes import contradictions

PARAMS = Path("params")
LIBRARIES = "Python, its libraries and the processes around need 1.5 to 2.5 GiB more"


@dataclass(frozen=True)
class Planned:
    """A recipe, its algorithm, and its model's shape."""

    name: str
    recipe: Recipe
    row: Algorithm
    config: Any
    shape: Shape


@dataclass(frozen=True)
class Fit:
    """Whether a recipe fits a card, and with which needs."""

    card: Card
    memory: Memory
    seconds: Seconds
    fits: bool
    lacking: str  # "" where it fits
    remedy: Remedy | None  # None where it fits or nothing helps
    proposals: Sequence[Proposal] = ()


def read(name: str) -> Planned:
    """Load and check a recipe; ValueError for a fault in it or a policy of unknown shape."""
    recipe = recipes.load(name, PARAMS)
    config = model_shape.config_of(recipe, PARAMS)
    shape = model_shape.with_teacher(model_shape.shape_of(config, recipe.lora), recipe, PARAMS)
    shape.passed(recipe.machine.precision)  # which refuses what cannot be counted
    return Planned(name, recipe, algorithm_of(recipe, PARAMS), config, shape)


def answer(
    planned: Planned, card: Card, network: float = NETWORKS["400"], proposing: bool = False
) -> Fit:
    """Return whether the recipe fits the card, and if not which changes make it fit.

    ``proposing``: also what faster settings would gain.
    """
    recipe, row, shape = planned.recipe, planned.row, planned.shape
    fits = gpu_memory.fits(recipe, row, shape, card)
    needed = gpu_memory.memory(recipe, row, shape, card)
    return Fit(
        card,
        needed,
        gpu_seconds.seconds_of(recipe, row, shape, card, network),
        fits,
        "" if fits else _lacking(planned, needed, card),
        None if fits else remedies.remedy(recipe, row, planned.config, card),
        proposals(recipe, row, planned.config, card, network) if proposing else (),
    )


def wants_gpu(planned: Planned, asked: Sequence[str] | None) -> bool:
    """Return whether a GPU is asked for: by the recipe, or by the cards of the command line."""
    return bool(asked) or planned.recipe.machine.device == "cuda"


def _lacking(planned: Planned, needed: Memory, card: Card) -> str:
    """Return the largest parts of what is needed; or that vLLM's share is too small."""
    if needed.peak > card.usable:
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in needed.largest())
        return f"of {_gib(needed.peak)} GiB the largest parts are {parts}"
    engine, least = planned.recipe.engine, gpu_memory.least_share(planned.recipe, planned.shape)
    return (
        f"{engine.kind} needs {_gib(least)} GiB, and engine.memory {engine.memory:g} of the card "
        f"is {_gib(engine.memory * card.memory)}"
    )


# ---------------------------------------------------------------- output


def report(planned: Planned, answers: Sequence[Fit]) -> str:
    """Format everything about one recipe."""
    return "\n".join(
        [
            *_model(planned),
            *_parts(answers[-1].memory),
            *_here(planned, answers[-1].memory),
            *_cards(answers),
            *_tokens(planned),
            *_disk(planned),
            *_assumptions(planned),
            *_contradictions(planned),
        ]
    )


def _model(planned: Planned) -> list[str]:
    policy, shape = planned.recipe.prepare.policy, planned.shape
    name = getattr(policy, "name", "a policy of the recipe's own shape")
    machine, row = planned.recipe.machine, planned.recipe.reinforce.algorithm
    learning = f"adapters of {_count(shape.adapters)} learn" if shape.adapters else "all learn"
    active = gpu_seconds.active(planned.recipe, shape)
    mixture = (
        f" ({_count(round(active))} of them for a token)" if active < 0.7 * shape.linear else ""
    )
    return [
        f"{planned.name}: {name}, {_count(shape.weights)} weights{mixture}, {learning}; {row}, "
        f"passes in {machine.precision}",
        *_form(shape),
    ]


def _form(shape: Shape) -> list[str]:
    """Format the form in which the policy learns, where it is not that of trees."""
    rows = f"learns as rows, each context by itself ({shape.form.reason}), not as trees"
    return [] if shape.on_trees else [rows]


def _parts(memory: Memory) -> list[str]:
    """Format GPU memory by part: what stays, and what each phase adds."""
    lines = ["", "GPU memory, at most (GiB)"]
    for title, parts in (
        ("stays", memory.stays),
        ("the update adds", memory.update),
        ("sampling adds", memory.sampling or {"nothing: it is done elsewhere": 0.0}),
        ("the reward model's training adds", memory.reward_model),
        ("its first training needs, in all", memory.first_model),
    ):
        if not parts:
            continue
        lines.append(f"  {title:<34}{_gib(sum(parts.values())):>8}")
        lines += [f"    {part:<32}{_gib(size):>8}" for part, size in parts.items()]
    return lines


def _here(planned: Planned, memory: Memory) -> list[str]:
    """Format what the same takes of main memory, where the processor computes."""
    if planned.recipe.machine.device != "cpu":
        return []
    phases = ", ".join(f"{phase} {_gib(size)}" for phase, size in memory.phases().items())
    there = main_memory()
    of = f" of {_gib(there)} GiB" if there else " GiB"
    return ["", f"main memory here: {phases}{of}; {LIBRARIES}"]


def _cards(answers: Sequence[Fit]) -> list[str]:
    """Format for each card the need of each phase, the seconds, and what to change."""
    lines = [""]
    for each in answers:
        phases = ", ".join(f"{phase} {_gib(size)}" for phase, size in each.memory.phases().items())
        lines.append(
            f"{each.card.name}: {'fits' if each.fits else 'does not fit'}: {phases} of "
            f"{_gib(each.card.usable)} GiB"
        )
        if each.fits:
            seconds = each.seconds
            lines.append(
                f"    an iteration takes some {_time(seconds.total)}: sampling "
                f"{_time(seconds.sampling)} ({seconds.abreast} full paths at once), update "
                f"{_time(seconds.update)}" + _network(seconds)
            )
        else:
            lines += [f"    {each.lacking}", f"    {_advice(each.remedy)}"]
        lines += [_proposed(proposal) for proposal in each.proposals]
    return lines


def _proposed(proposal: Proposal) -> str:
    """Format what faster settings would gain; either with what makes the recipe fit the card."""
    every = (*proposal.changes, *proposal.need.changes)
    changes = "; ".join(change.short for change in every)
    now = "; ".join(change.short for change in proposal.without.changes)
    return (
        f"    with {changes}: {_gib(proposal.need.peak)} GiB, {_time(proposal.need.seconds)} an "
        f"iteration, in place of {_gib(proposal.without.peak)} GiB, "
        f"{_time(proposal.without.seconds)}" + (f" with {now}" if now else "")
    )


def _network(seconds: Seconds) -> str:
    """Format what processes and servers wait for the network, "" where there are none."""
    parts = {
        "communication of the processes": seconds.communication,
        "weights to the servers": seconds.loading,
    }
    return "".join(f", {part} {_time(size)}" for part, size in parts.items() if size)


def _advice(remedy: Remedy | None) -> str:
    if remedy is None:
        return "no setting makes it fit: take a smaller policy, or a larger card"
    changes = "; ".join(map(str, remedy.changes))
    return f"set {changes} (it needs {_gib(remedy.peak)} GiB then)"


def _tokens(planned: Planned) -> list[str]:
    tokens, settings = gpu_seconds.tokens_of(planned.recipe, planned.row), planned.recipe.reinforce
    paths = settings.questions * settings.rollout.leaves
    once = "sampled and trained" if planned.shape.on_trees else "sampled"
    lines = [
        "",
        f"tokens an iteration, at most: {settings.questions} questions x {settings.rollout.leaves} "
        f"paths x {tokens.paths // paths} = {tokens.paths:,}",
        f"    {once} once each: {tokens.most:,} where paths share the prompt alone, "
        f"{tokens.expected:,} where a branch shares half of its parent",
    ]
    if not planned.shape.on_trees:
        lines.append(f"    trained: {tokens.paths:,}, since the policy learns as rows")
    return lines


def _disk(planned: Planned) -> list[str]:
    """Format what the run's files take, as flows/host/disk counts it before a run."""
    shape = planned.shape
    learned = disk.WEIGHT * shape.adapters if shape.adapters else None
    needs = disk.needs(planned.recipe, planned.row, disk.WEIGHT * shape.weights, learned)
    sums = {part: sum(getattr(need, part) for need in needs.values()) for part in disk.PARTS}
    passing = max(need.passing for need in needs.values())
    keep = planned.recipe.reinforce.keep
    parts = ", ".join(f"{part} {_gib(size)}" for part, size in sums.items())
    return [
        "",
        f"disk, at most: {_gib(sum(sums.values()) + passing)} GiB ({parts}, temporary "
        f"{_gib(passing)}); keep.weights_every {keep.weights_every}, optimizer_last "
        f"{keep.optimizer_last}",
    ]


def _assumptions(planned: Planned) -> list[str]:
    recipe = planned.recipe
    share = gpu_seconds.share_of(recipe, planned.shape)
    lines = [
        "an estimate: all responses as long as they may be; "
        f"{share:.0%} of a card's dense {recipe.machine.precision} operations and "
        f"{gpu_cards.BANDWIDTH_SHARE:.0%} of its bandwidth are reached, and a step of decoding "
        f"takes at least {gpu_seconds.STEP_SECONDS * 1000:g} ms; "
        f"{1 - gpu_cards.MEMORY_SHARE:.0%} of its memory is left to CUDA; tools, loading, saving "
        "and the cold start are not counted"
    ]
    if recipe.machine.processes > 1 or gpu_memory.servers(recipe):
        lines.append(
            f"processes: {recipe.machine.processes}, servers: {gpu_memory.servers(recipe)}; work "
            "is shared evenly, and communication does not overlap with computing"
        )
    if recipe.machine.device == "cpu":
        lines.append("machine.device is cpu: the cards are those that it would need with cuda")
    return ["", *lines]


def _contradictions(planned: Planned) -> list[str]:
    found = contradictions.faults(planned.recipe)
    lines = [f"contradicts: {PARAMS / planned.name}.yaml: {line}" for line in found]
    return ["", *lines] if lines else []


def table(answers: Mapping[str, Sequence[Fit]]) -> str:
    """Format recipes by cards, as Markdown."""
    cards = [each.card.name for each in next(iter(answers.values()))]
    lines = [f"| recipe | {' | '.join(cards)} |", "|---|" + "---|" * len(cards)]
    for name, row in answers.items():
        lines.append(f"| `{name}` | {' | '.join(_cell(each) for each in row)} |")
    return "\n".join(lines)


def _cell(each: Fit) -> str:
    peak = f"{_gib(each.memory.peak)} of {_gib(each.card.usable)} GiB"
    if each.fits:
        return f"fits: {peak}, some {_time(each.seconds.total)} an iteration"
    if each.remedy is None:
        return f"refused: {peak}, whatever is set"
    changes = " and ".join(f"`{change.short}`" for change in each.remedy.changes)
    return f"refused: {peak}; fits with {changes} ({_gib(each.remedy.peak)})"


def _count(weights: int) -> str:
    return f"{weights / 1e9:.3g} billion" if weights >= 1e9 else f"{weights / 1e6:.3g} million"


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 0.1 else f"{gib:.2g}"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s"


# ---------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: a recipe that cannot be planned."""
    parser = argparse.ArgumentParser(prog="beamline plan", description=__doc__)
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="recipes of params/")
    parser.add_argument("--card", nargs="+", choices=list(CARDS), help="GB of GPU memory")
    parser.add_argument(
        "--network",
        choices=list(NETWORKS),
        default="400",
        help="that connects learner processes and servers: nvlink, or Gb/s",
    )
    args = parser.parse_args(arguments)
    network = NETWORKS[args.network]
    try:
        planned = {name: read(name) for name in args.recipes}
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    here = None if args.card else gpu_cards.card_here()
    cards = [CARDS[size] for size in args.card or CARDS] + ([here] if here else [])
    answers = {
        name: [
            answer(each, card, network, proposing=len(planned) == 1 and wants_gpu(each, args.card))
            for card in cards
        ]
        for name, each in planned.items()
    }
    if len(planned) > 1:
        print(table(answers))
        found = [line for each in planned.values() for line in _contradictions(each) if line]
        print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr)
    else:
        [(name, row)] = answers.items()
        print(report(planned[name], row))
    required = [
        each
        for name, row in answers.items()
        for each in row
        if args.card or (each.card is here and planned[name].recipe.machine.device == "cuda")
    ]
    return 0 if all(each.fits for each in required) else 1


if __name__ == "__main__":
    end_import_phase()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
