"""The parts that a recipe lists in ``reinforce.reward``: check them and open them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from params.schema.reading import validate
from params.schema.reinforce import RewardPart
from tasks import scorers
from tasks.extensions import named
from tasks.rewards import function, model
from tasks.rewards.contract import Part, PartKind

KEY = ("reinforce", "reward")  # of the list in a recipe
DEFAULT = ("answer", "format", "many_tools")  # whose metrics are those of all recipes
FORMAT = "format"
SHOWN = 200  # characters of a value in a message


def kind_of(name: str) -> PartKind:
    """Return the kind of part that a name stands for.

    Raises ValueError with name, reason and remedy where there is none.
    """
    part = named.find("reward", name)
    if isinstance(part.held, PartKind):
        return part.held
    return function.kind_of(part.reference, part.held)


def parts_of(values: Any, where: str) -> tuple[tuple[RewardPart, ...], list[str]]:
    """Return the typed parts of a parsed list, and a line for each fault.

    ``where``: the recipe's file, with which each line begins; then the key's path follows.
    """
    key = ".".join(KEY)
    if not isinstance(values, list | tuple) or not values:
        return (), [
            f"{where}: '{key}' = {values!r:.{SHOWN}} is no list of parts: write each as a line "
            "'- <part>: {<settings>}', such as '- answer: {weight: 1.0, wrong: 0.0}'; parts: "
            f"{', '.join(named.names('reward'))}"
        ]
    typed: list[RewardPart] = []
    faults: list[str] = []
    for index, entry in enumerate(values):
        try:
            typed.append(_part(entry, where, (*KEY, str(index))))
        except ValueError as error:
            faults += str(error).splitlines()
    labels = [label(part) for part in typed]
    for twice in sorted({each for each in labels if labels.count(each) > 1}):
        faults.append(
            f"{where}: '{key}' has several parts called '{twice}': keep one, or rename a function"
        )
    return tuple(typed), faults


def _part(entry: Any, where: str, at: tuple[str, ...]) -> RewardPart:
    """Return an entry's part. Raises ValueError with a line for each fault."""
    if isinstance(entry, RewardPart):
        return entry
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ValueError(
            f"{where}: '{'.'.join(at)}' = {entry!r:.{SHOWN}} is no part: write one name with its "
            "settings, such as '- answer: {weight: 1.0, wrong: 0.0}'"
        )
    ((name, settings),) = ((str(name), settings) for name, settings in entry.items())
    try:
        kind = kind_of(name)
    except ValueError as error:
        raise ValueError(f"{where}: '{'.'.join(at)}': {error}") from None
    section = validate(kind.settings, {} if settings is None else settings, where, (*at, name))
    if faults := kind.faults(section):
        raise ValueError("\n".join(f"{where}: '{'.'.join((*at, name))}': {f}" for f in faults))
    return RewardPart(name=name, settings=section)


# ---------------------------------------------------------------- what the parts are


def label(part: RewardPart) -> str:
    """Return the name of a part in tables and metrics; a recipe has each once."""
    return kind_of(part.name).label(part.name, part.settings)


def is_default(parts: Sequence[RewardPart]) -> bool:
    """Return whether these are the three parts whose metrics every recipe has."""
    return tuple(part.name for part in parts) == DEFAULT


def has_model(parts: Sequence[RewardPart]) -> bool:
    """Return whether the reward model is a part of the reward."""
    return any(part.name == model.NAME for part in parts)


def without_model(parts: Sequence[RewardPart]) -> tuple[RewardPart, ...]:
    """Return the parts that need no reward model, as where its own labels are made."""
    return tuple(part for part in parts if part.name != model.NAME)


def broken_format(parts: Sequence[RewardPart]) -> float | None:
    """Return what a broken format earns; None where the list has no part ``format``."""
    return next((part.settings.broken for part in parts if part.name == FORMAT), None)  # type: ignore[attr-defined]


def silent(parts: Sequence[RewardPart]) -> list[str]:
    """Return the labels of the parts that are 0 where the format is broken, and ``format``."""
    return [label(part) for part in parts if part.name in (*DEFAULT, "scorer", model.NAME)]


def reward_range(parts: Sequence[RewardPart]) -> tuple[float, float]:
    """Return bounds of the reward: the sums of the parts' lowest and highest values."""
    ranges = [kind_of(part.name).range(part.settings) for part in parts]
    return math.fsum(low for low, _ in ranges), math.fsum(high for _, high in ranges)


def sources(parts: Sequence[RewardPart], of_questions: Sequence[str] = ()) -> dict[str, str]:
    """Return a digest of the source of each part, and of each scorer, for the ledger's keys.

    ``of_questions``: scorers that questions may name, beside those of this project's own files.
    """
    used = [name for part in parts for name in kind_of(part.name).scorers(part.settings)]
    of_scorers = scorers.sources([*scorers.names(), *of_questions, *used])
    return {
        **{f"reward {part.name}": named.find("reward", part.name).sources for part in parts},
        **{f"scorer {name}": digest for name, digest in of_scorers.items()},
    }


@contextmanager
def open_parts(parts: Sequence[RewardPart]) -> Iterator[dict[str, Part]]:
    """Keep the parts of a list ready, by label, in the list's order."""
    with ExitStack() as stack:
        yield {
            label(part): stack.enter_context(kind_of(part.name).open(part.settings))
            for part in parts
        }
