"""The gate between two stages: a table passes its expectations, or the run stops and says why.

A drawer of ``tasks/expectations/`` describes a table's expectations as plain data; ``check`` runs
them with Great Expectations, which is imported there and nowhere else (the import takes seconds).
Great Expectations skips missing values, so each drawer's ``prepare`` looks for them itself, with
``unusable``; what is more than one comparison it computes into a column, with pandas, to be fast.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DOCS = Path(".beamline/data_docs")  # where stages put their Data Docs; no outs: they hold times
ROWS_SHOWN = 3
CHARACTERS_SHOWN = 120  # of a value in an offending row

SITE: Any = {
    "class_name": "SiteBuilder",
    "show_how_to_buttons": False,
    "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": "site/"},
    "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
}
# Every page of Data Docs loads its logo from the maker's site, with an id of the project in it.
BEACON = re.compile(r"https://great-expectations-web-assets\.[^\"')]*")


class GateError(RuntimeError):
    """A table failed a critical expectation; the message names each one and shows rows."""


@dataclass(frozen=True)
class Expectation:
    """What must hold of a table. A failed critical one stops the run, another one only warns."""

    words: str
    type: str  # Great Expectations' own name of the kind
    arguments: Mapping[str, Any]
    critical: bool = True


def between(words: str, column: str, low: float | None, high: float | None) -> Expectation:
    """Every value of ``column`` lies in [low, high]; None leaves that side open."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_values_to_be_between", arguments)


def mean_between(words: str, column: str, low: float, high: float) -> Expectation:
    """The mean of ``column`` lies in [low, high]; not critical."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_mean_to_be_between", arguments, critical=False)


def among(words: str, column: str, values: Collection[Any]) -> Expectation:
    """Every value of ``column`` is one of ``values``."""
    arguments = {"column": column, "value_set": sorted(values)}
    return Expectation(words, "expect_column_values_to_be_in_set", arguments)


def unique(words: str, column: str) -> Expectation:
    """No value of ``column`` occurs twice."""
    return Expectation(words, "expect_column_values_to_be_unique", {"column": column})


def sum_between(words: str, column: str, low: float, high: float | None) -> Expectation:
    """The sum of ``column`` lies in [low, high]; None leaves it without an upper limit."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_sum_to_be_between", arguments)


def rows_between(words: str, low: int, high: int | None) -> Expectation:
    """The table has ``low`` to ``high`` rows; None leaves it without an upper limit."""
    arguments = {"min_value": low, "max_value": high}
    return Expectation(words, "expect_table_row_count_to_be_between", arguments)


def unusable(table_name: str, table: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """A row's missing, NaN and infinite values, such as "reward=nan, kind=None"; "" where none.

    Raises ValueError for a column that the table lacks.
    """
    lacking = [column for column in columns if column not in table]
    if lacking:
        raise ValueError(
            f"table {table_name} lacks the columns {lacking}; it has {list(table.columns)}: "
            "let the stage that writes it add them"
        )
    faults = np.full(len(table), "", dtype=object)
    for column in columns:
        values = table[column]
        bad = values.isna()
        if pd.api.types.is_float_dtype(values):
            bad |= np.isinf(values)
        faults[bad] += np.array([f"{column}={value}, " for value in values[bad]], dtype=object)
    return pd.Series(faults, index=table.index, dtype="str").str.removesuffix(", ")


def check(
    table_name: str,
    table: pd.DataFrame,
    expectations: Sequence[Expectation],
    verdict: Path,
    docs: Path,
) -> dict[str, Any]:
    """Judge a table that a drawer prepared; its named index tells one row from another.

    Writes the verdict (JSON, the same bytes for the same table) and, in place of what was there,
    Data Docs (a static site, ``docs/index.html``, with a copy of the verdict), both also for a
    table that fails. Returns the verdict. Prints a line for a failed expectation that is not
    critical; raises GateError for the critical ones.
    """
    if docs.exists() and any(docs.iterdir()) and not (docs / "validations").is_dir():
        raise ValueError(f"docs folder {docs} holds something else: name one to be overwritten")
    results = _validate(table_name, table, expectations, docs)
    judged = [_judge(table, *pair) for pair in zip(expectations, results, strict=True)]
    passed = all(each["passed"] for each in judged if each["critical"])
    record = {"table": table_name, "rows": len(table), "passed": passed, "expectations": judged}
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    for file in (verdict, docs / "verdict.json"):  # the first is an out, which a failed stage loses
        _write(file, text)
    failed = [each for each in judged if not each["passed"]]
    for each in failed:
        if not each["critical"]:
            print(f"warning: table {table_name}: {_describe(each, len(table))}")
    if not passed:
        faults = [f"- {_describe(each, len(table))}\n" for each in failed if each["critical"]]
        raise GateError(
            f"table {table_name} fails critical expectations:\n{''.join(faults)}"
            f"correct the data or the stage that made it; see {docs / 'index.html'}"
        )
    return record


def _validate(
    table_name: str, table: pd.DataFrame, expectations: Sequence[Expectation], docs: Path
) -> list[Any]:
    """Run the expectations and build Data Docs; Great Expectations' results, in the order given."""
    import great_expectations as gx

    building = docs.with_name(f"{docs.name}.building")
    context = _context(building)
    suite = gx.ExpectationSuite(table_name, expectations=_translate(expectations))
    asset = context.data_sources.add_pandas("pandas").add_dataframe_asset(table_name)
    whole = asset.add_batch_definition_whole_dataframe("whole")
    definition = gx.ValidationDefinition(
        name=table_name, data=whole, suite=context.suites.add(suite)
    )
    # Only what is judged, because every value is hashed, and with positions for an index: the
    # rows of a named index are collected one by one, three seconds for 100,000 of them.
    columns = {each.arguments["column"] for each in expectations if "column" in each.arguments}
    outcome = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": table[sorted(columns)].reset_index(drop=True)},
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": ROWS_SHOWN},
    )
    context.build_data_docs()
    _publish(building, docs)
    return sorted(outcome.results, key=lambda result: result.expectation_config.meta["number"])


def _context(building: Path) -> Any:
    """A fresh project of Great Expectations that shows no progress bars and reports to nobody."""
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    context = gx.get_context(mode="file", project_root_dir=building)
    context.enable_analytics(False)
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    context.update_data_docs_site("local_site", SITE)
    return context


def _translate(expectations: Sequence[Expectation]) -> list[Any]:
    """The same expectations as objects of Great Expectations, numbered: results come reordered."""
    from great_expectations.expectations.metadata_types import FailureSeverity
    from great_expectations.expectations.registry import get_expectation_impl

    return [
        get_expectation_impl(each.type)(
            **each.arguments,
            description=each.words,
            severity=FailureSeverity("critical" if each.critical else "warning"),
            meta={"number": number},
        )
        for number, each in enumerate(expectations)
    ]


def _publish(building: Path, docs: Path) -> None:
    """Move the finished site to ``docs`` and drop what built it."""
    site = building / "gx" / "site"
    for page in site.rglob("*.html"):
        page.write_text(BEACON.sub("data:,", page.read_text()))
    # The index lists its pages with a script from the net; this link works without.
    index, report = site / "index.html", next((site / "validations").rglob("*.html"))
    link = f'<p><a href="{report.relative_to(site).as_posix()}">Each expectation</a></p>'
    index.write_text(index.read_text().replace("<body>", f"<body>{link}", 1))
    for picture in site.rglob("*.gif"):  # 3 MB of tutorial that no page shows
        picture.unlink()
    shutil.rmtree(docs, ignore_errors=True)
    site.rename(docs)
    shutil.rmtree(building)


def _judge(table: pd.DataFrame, expectation: Expectation, result: Any) -> dict[str, Any]:
    """One result without what differs between equal runs (ids, times, paths)."""
    details = result.result
    if "unexpected_count" not in details and "observed_value" not in details:
        raise RuntimeError(f"could not check '{expectation.words}': {result.exception_info}")
    judged = {
        "expectation": expectation.words,
        "critical": expectation.critical,
        "passed": bool(result.success),
    }
    if "observed_value" in details:
        return {**judged, "observed": _plain(details["observed_value"])}
    positions = details.get("partial_unexpected_index_list") or []
    return {
        **judged,
        "unexpected": int(details["unexpected_count"]),
        "rows": _rows(table, positions, expectation.arguments["column"]),
    }


def _rows(table: pd.DataFrame, positions: list[int], column: str) -> list[dict[str, Any]]:
    """The rows at ``positions``, each as its index names it with its value of ``column``."""
    rows = table.index[positions].to_frame(index=False)
    rows[column] = table[column].iloc[positions].to_list()
    return [
        {str(name): _plain(value) for name, value in row.items()} for row in rows.to_dict("records")
    ]


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, and short."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int) or (isinstance(value, float) and np.isfinite(value)):
        return value
    text = str(value)
    return text if len(text) <= CHARACTERS_SHOWN else text[:CHARACTERS_SHOWN] + "…"


def _describe(judged: Mapping[str, Any], count: int) -> str:
    if "observed" in judged:
        return f"{judged['expectation']}: observed {judged['observed']}"
    rows = [f"\n    {json.dumps(row, ensure_ascii=False)}" for row in judged["rows"]]
    return (
        f"{judged['expectation']}: not so in {judged['unexpected']} of {count} rows{''.join(rows)}"
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)
