"""Rows of params/suites.yaml: what each paper compares, its figures, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from params import suggestions
from params.schema.algorithms import load_algorithms
from params.schema.base import PARAMS, Float, Frozen, PositiveFloat
from params.schema.benchmarks import load_benchmarks
from params.schema.reading import read_table

Spent = Literal["sampled_tokens", "tool_calls", "environment_steps"]
FigureName = Literal[
    "entropy_by_tool",  # ARPO 2
    "success_by_calls",  # ARPO 7
    "scaling",  # ARPO 8
    "pass_at_k",  # ARPO 6
    "success_by_update",  # GAGPO 2
    "episode_length",  # GAGPO 3
    "dynamics",  # GAGPO 4
    "advantages",  # GAGPO 5
    "state_groups",  # GAGPO, table 5
]
Named = Annotated[str, Field(min_length=1)]


class SuiteVariant(Frozen):
    """A row of algorithms.yaml, with changes as ``--overrides`` of a comparison takes them.

    ``{M}``, ``{M/2}`` and ``{M*2}`` in a change are products with the recipe's own
    ``reinforce.rollout.leaves``, so that a suite has the size of a recipe.
    """

    row: Named
    set: tuple[Named, ...] = ()
    value: Float | None = None  # where the variant stands on the axis of a scaling figure


class Part(Frozen):
    """One table or figure of a paper, as variants by label."""

    of: Named  # which table or figure
    statement: Named  # what it varies, in one sentence
    variants: Annotated[dict[str, SuiteVariant], Field(min_length=1)]
    figures: tuple[FigureName, ...] = ()
    axis: str = ""  # of a scaling figure: what ``value`` is

    @model_validator(mode="after")
    def _scaling_has_values(self) -> Part:
        lacking = [name for name, one in self.variants.items() if one.value is None]
        if "scaling" in self.figures and (lacking or not self.axis):
            raise ValueError(
                f"a figure of scaling needs 'axis', and a 'value' of each variant: {lacking} have "
                "none"
            )
        return self


class PaperNumber(Frozen):
    """A number as a paper prints it, such as ``64.8 ±3.5``."""

    mean: Float
    deviation: Float | None = None


def _read_number(written: Any) -> Any:
    """Split ``64.8 ±3.5``; pydantic judges everything else."""
    if not isinstance(written, str):
        return {"mean": written} if isinstance(written, int | float) else written
    mean, _, deviation = written.partition("±")
    try:
        return {"mean": float(mean), "deviation": float(deviation)}
    except ValueError:
        raise ValueError("write a number, or one with its deviation, such as 64.8 ±3.5") from None


class PaperColumn(Frozen):
    """A column of a paper's table, and which of our tasks it is about.

    ``sets``: rows of benchmarks.yaml that hold the set, each on its own. ``world``: an environment,
    of whose tasks those of ``kinds`` are meant; all where there are none. Without both: the mean of
    the columns before it.
    """

    sets: tuple[Named, ...] = ()
    world: str = ""
    kinds: tuple[Named, ...] = ()
    measure: Literal["success", "score"] = "success"
    beside: str = ""  # its name in the table of our results, where it stands there, too

    @model_validator(mode="after")
    def _is_about_one_thing(self) -> PaperColumn:
        if (self.sets and self.world) or (self.kinds and not self.world):
            raise ValueError("name sets, or a world and perhaps kinds of its tasks, not both")
        return self


Numbers = tuple[Annotated[PaperNumber, BeforeValidator(_read_number)], ...]


class PaperTable(Frozen):
    """A table that a paper prints: by model and method, a number for each column."""

    of: Named  # which table
    source: Named
    unit: Named  # what the numbers are
    columns: Annotated[dict[str, PaperColumn], Field(min_length=1)]
    models: Annotated[dict[str, dict[str, Numbers]], Field(min_length=1)]

    @property
    def methods(self) -> list[str]:
        """Return the methods of all models, each once."""
        return list(dict.fromkeys(method for rows in self.models.values() for method in rows))

    @model_validator(mode="after")
    def _rows_are_whole(self) -> PaperTable:
        faults = [
            f"{model}, {method} has {len(numbers)} numbers, and there are {len(self.columns)} "
            "columns"
            for model, rows in self.models.items()
            for method, numbers in rows.items()
            if len(numbers) != len(self.columns)
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return self


class SpeedClaim(Frozen):
    """A claim: ``of`` reaches a success with ``claimed`` times what ``to`` spends."""

    of: Named
    to: Named
    claimed: PositiveFloat


class Suite(Frozen):
    """A row of params/suites.yaml."""

    statement: Named  # what the paper claims, in one sentence
    paper: Named
    budget: Spent  # what each variant may spend
    baseline: str  # label of the variant that the others are compared with
    parts: Annotated[dict[str, Part], Field(min_length=1)]
    published: tuple[PaperTable, ...]
    ratio: SpeedClaim | None = None
    claims: tuple[Named, ...] = ()  # what the paper says without a table of figures
    missing: tuple[Named, ...] = ()  # what the paper reports, and no source here has
    incomparable: Named  # why the columns of the paper are no target

    @property
    def variants(self) -> dict[str, SuiteVariant]:
        """Return the variants of all parts by label."""
        return {label: one for part in self.parts.values() for label, one in part.variants.items()}

    @model_validator(mode="after")
    def _labels_are_known(self) -> Suite:
        known = self.variants
        faults = [
            f"published {table.of} has none of the variants: choose methods of {list(known)}"
            for table in self.published
            if not set(table.methods) & set(known)
        ]
        if self.baseline not in known:
            faults.append(
                f"baseline '{self.baseline}' is no variant"
                f"{suggestions.meant(self.baseline, known)}: choose one of {list(known)}"
            )
        faults += [
            f"'{label}' in part {name} differs from '{label}' elsewhere: give it another label"
            for name, part in self.parts.items()
            for label, one in part.variants.items()
            if (one.row, one.set) != (known[label].row, known[label].set)
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return self


def load_suites(folder: Path = PARAMS) -> dict[str, Suite]:
    """Read ``<folder>/suites.yaml``. Raises ValueError with all faults, a line each."""
    file = folder / "suites.yaml"
    suites = read_table(file, Suite)
    if faults := [*_unknown_rows(suites, folder), *_unknown_sets(suites, folder)]:
        raise ValueError("\n".join(f"{file}, {line}" for line in faults))
    return suites


def _unknown_rows(suites: Mapping[str, Suite], folder: Path) -> list[str]:
    rows = load_algorithms(folder)
    return [
        f"row {name}: 'parts.{part}.variants.{label}.row' = '{one.row}' is no row of "
        f"{folder / 'algorithms.yaml'}{suggestions.meant(one.row, rows)}: choose one of "
        f"{list(rows)}"
        for name, suite in suites.items()
        for part, table in suite.parts.items()
        for label, one in table.variants.items()
        if one.row not in rows
    ]


def _unknown_sets(suites: Mapping[str, Suite], folder: Path) -> list[str]:
    rows = load_benchmarks(folder)
    return [
        f"row {name}: column {column} of {table.of} is about '{one}', which is no row of "
        f"{folder / 'benchmarks.yaml'}{suggestions.meant(one, rows)}: choose one of {list(rows)}"
        for name, suite in suites.items()
        for table in suite.published
        for column, about in table.columns.items()
        for one in about.sets
        if one not in rows
    ]
