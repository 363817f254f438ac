"""The variants of a paper's suite (params/suites.yaml), at the size of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from params import suggestions
from params.schema.suites import Part, Suite, load_suites
from tasks import recipes
from tasks.comparison.comparison import Variant
from tasks.comparison.variants import variant_of

SIZE = re.compile(r"\{M(?:([*/])(\d+))?\}")  # {M}, {M/2}, {M*2}: of the recipe's leaves


def suite_of(name: str, parts: Sequence[str] = (), folder: Path = Path("params")) -> Suite:
    """Return a suite with some of its parts, or with all where ``parts`` is empty.

    Tables that the paper prints stay where they have a variant that is left. Raises ValueError for
    unknown names.
    """
    every = load_suites(folder)
    if name not in every:
        raise ValueError(
            f"--suite {name}: {folder / 'suites.yaml'} has no such row"
            f"{suggestions.meant(name, every)}: choose one of {list(every)}"
        )
    suite = every[name]
    if unknown := [part for part in parts if part not in suite.parts]:
        raise ValueError(
            f"--part {' '.join(unknown)}: the suite {name} has no such part"
            f"{suggestions.meant(unknown[0], suite.parts)}: choose of {list(suite.parts)}"
        )
    return _with_parts(suite, {key: suite.parts[key] for key in parts}) if parts else suite


def _with_parts(suite: Suite, parts: dict[str, Part]) -> Suite:
    labels = [label for part in parts.values() for label in part.variants]
    tables = [table for table in suite.published if set(table.methods) & set(labels)]
    baseline = suite.baseline if suite.baseline in labels else labels[0]
    return suite.model_copy(
        update={"parts": parts, "published": tuple(tables), "baseline": baseline}
    )


def variants_of(recipe: str, suite: Suite) -> dict[str, Variant]:
    """Return the variants of a suite by label. Raises ValueError with all faults, by label."""
    leaves = recipes.load(recipe, Path("params")).reinforce.rollout.leaves
    result, faults = {}, []
    for label, one in suite.variants.items():
        try:
            result[label] = variant_of(recipe, one.row, [sized(text, leaves) for text in one.set])
        except ValueError as error:
            faults.append(f"variant '{label}': {error}")
    if faults:
        raise ValueError("\n".join(faults))
    return result


def sized(change: str, leaves: int) -> str:
    """Put the number of leaves into a change, such as ``{M/2}``; a share is at least 1."""

    def number(match: re.Match[str]) -> str:
        factor = int(match[2] or 1)
        return str(leaves * factor if match[1] == "*" else max(1, leaves // factor))

    return SIZE.sub(number, change)
