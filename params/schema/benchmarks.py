"""Rows of params/benchmarks.yaml: sets of questions, and how to read their records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from params import suggestions
from params.schema.base import PARAMS, Flag, Frozen
from params.schema.reading import read_table

BY_FIELD = "field"  # in the table of scorers, the key of the record's field


def _named_scorers(scorer: str | dict[str, str]) -> str | dict[str, str]:
    """Return a scorer, or a table of scorers by field; raise ValueError for an incomplete one."""
    if isinstance(scorer, dict) and (BY_FIELD not in scorer or len(scorer) < 2):
        raise ValueError(
            "name a scorer, such as 'exact', 'maths' or 'f1', or write {field: <field of the "
            "record>, <its value>: <scorer>, ...}"
        )
    return scorer


class Hub(Frozen):
    """Files of a dataset on the Hugging Face hub, at one commit."""

    name: str
    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]  # a commit, since branches move
    files: dict[str, str]  # split -> file in the dataset's repository


class Benchmark(Frozen):
    """A row of params/benchmarks.yaml: where a set of questions is, and how to read a record.

    A field is a dotted path into the record, such as "prompt.0.content"; a number is an index.
    """

    hub: Hub | None = None  # null: only files below data/sources/<set>/
    question: str  # field: a text, or a chat (a list of role and content)
    answer: str  # field: a text, a number, or a list of accepted answers
    # keep what follows the last of these marks ("####"); null: keep all
    answer_after: str | None = None
    solution: str | None = None  # field of a worked solution; null: none
    # field of the list of records, in a JSON file that is not itself a list
    records: str | None = None
    # One for all records, or a field of the record, and the scorer of each of its values. A scorer
    # is a file of tasks/scorers, or a user's function, such as own/close.py:close.
    scorer: Annotated[str | dict[str, str], AfterValidator(_named_scorers)]
    aliases: str | None = None  # field of a list of further accepted forms, which may be empty
    boxed: Flag = False  # the answer is what the last \\boxed{} of its field holds
    only: dict[str, str] | None = None  # field -> its text ("": empty); others are left out
    decode: Literal["xor_canary"] | None = None  # how texts are encrypted (questions/encrypted.py)
    papers_scorer: Literal["f1", "judge"] | None = None  # what the papers grade the set with
    # They decide no result, so they are in no key.
    licence: Annotated[str | None, Field(exclude=True)] = None
    terms: Annotated[str | None, Field(exclude=True)] = None  # what its authors ask of its users

    @property
    def scorers(self) -> list[str]:
        """Return the names of the scorers of this set's questions."""
        if isinstance(self.scorer, str):
            return [self.scorer]
        return [name for field, name in self.scorer.items() if field != BY_FIELD]


def benchmark_of(reference: str, sets: Mapping[str, Benchmark]) -> Benchmark:
    """Return the row of a set, given as ``set`` or as ``set/split``.

    Raises ValueError for a set without a row.
    """
    name = reference.partition("/")[0]
    if name not in sets:
        raise ValueError(
            f"prepare names the set '{reference}', and params/benchmarks.yaml has no row '{name}'"
            f"{suggestions.meant(name, sets)}: choose one of {sorted(sets)}, or add a row"
        )
    return sets[name]


def load_benchmarks(folder: Path = PARAMS) -> dict[str, Benchmark]:
    """Return the rows of ``<folder>/benchmarks.yaml`` by name.

    Raises ValueError with file, row, key and remedy.
    """
    return read_table(folder / "benchmarks.yaml", Benchmark)
