"""The gate between two stages: check a table, and stop the run if it breaks an expectation.

The other modules of this folder describe the expectations of one table each as plain data;
``check`` runs them with Great Expectations, which is imported only inside functions (the import
takes seconds). Great Expectations skips missing values, so each module's ``prepare`` finds them
with ``unusable``. A condition that is more than one comparison becomes a column, computed by pandas
for speed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tasks.stand_ins import Later, instead
from tasks.trees.words import printable

DOCS = Path(".beamline/data_docs")  # Data Docs of all stages; no outs, because they have times
ROWS_KEPT = 10  # offending rows in the verdict and in Data Docs
ROWS_SHOWN = 3  # of these in the error message
CHARACTERS_SHOWN = 120  # of a value in an offending row

# Great Expectations does without the first where they are not installed, and needs the others for
# expectations of distributions, which no gate has.
WITHOUT = {
    **dict.fromkeys(("boto3", "botocore", "google", "sqlalchemy")),
    **{name: Later(name) for name in ("altair", "scipy.stats")},
}

SITE: Any = {
    "class_name": "SiteBuilder",
    "show_how_to_buttons": False,
    "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": "site/"},
    "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
}


class GateError(RuntimeError):
    """A table failed critical expectations; the message names each one and shows rows."""


@dataclass(frozen=True)
class Expectation:
    """One condition of a table. If it fails, a critical one stops the run, others only warn."""

    words: str
    type: str  # name of the kind in Great Expectations
    arguments: Mapping[str, Any]
    critical: bool = True


def between(words: str, column: str, low: float | None, high: float | None) -> Expectation:
    """Expect every value of ``column`` in [low, high]; None leaves that side open."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_values_to_be_between", arguments)


def mean_between(words: str, column: str, low: float, high: float) -> Expectation:
    """Expect the mean of ``column`` in [low, high]; not critical."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_mean_to_be_between", arguments, critical=False)


def among(words: str, column: str, values: Collection[Any]) -> Expectation:
    """Expect every value of ``column`` to be one of ``values``."""
    arguments = {"column": column, "value_set": sorted(values)}
    return Expectation(words, "expect_column_values_to_be_in_set", arguments)


def unique(words: str, column: str) -> Expectation:
    """Expect no value of ``column`` twice."""
    return Expectation(words, "expect_column_values_to_be_unique", {"column": column})


def sum_between(words: str, column: str, low: float, high: float | None) -> Expectation:
    """Expect the sum of ``column`` in [low, high]; None sets no upper limit."""
    arguments = {"column": column, "min_value": low, "max_value": high}
    return Expectation(words, "expect_column_sum_to_be_between", arguments)


def rows_between(words: str, low: int, high: int | None) -> Expectation:
    """Expect ``low`` to ``high`` rows; None sets no upper limit."""
    arguments = {"min_value": low, "max_value": high}
    return Expectation(words, "expect_table_row_count_to_be_between", arguments)


def unusable(
    table_name: str, table: pd.DataFrame, columns: Sequence[str], names: Collection[str] = ()
) -> pd.Series:
    """List each row's missing, NaN and infinite values, such as "reward=nan, kind=None", or "".

    ``names`` are the columns whose values must be printable strings. Raises ValueError for a column
    that the table lacks.
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
        bad = values.isna().to_numpy(copy=True)
        if pd.api.types.is_float_dtype(values):
            bad |= np.isinf(values.to_numpy())
        if column in names:
            bad |= ~values.map(_is_name).to_numpy(bool)
        faults[bad] += [f"{column}={printable(str(value))}, " for value in values[bad]]
    return pd.Series([fault.removesuffix(", ") for fault in faults], table.index, dtype=object)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def legible(table: pd.DataFrame, columns: Sequence[str]) -> dict[str, pd.Series]:
    """Convert columns to printable strings, so that any row can be named.

    Missing values stay missing.
    """
    return {
        column: table[column].map(lambda value: printable(str(value)), na_action="ignore")
        for column in columns
    }


def check(
    table_name: str,
    table: pd.DataFrame,
    expectations: Sequence[Expectation],
    verdict: Path,
    docs: Path,
) -> dict[str, Any]:
    """Check a table that ``prepare`` returned; its named index identifies the rows.

    Writes the verdict (JSON, the same bytes for the same table) and replaces ``docs`` by the site
    of Great Expectations with a copy of the verdict, both also for a table that fails.
    flows/tracking/gate_report.py renders a readable page from them.
    Returns the verdict. Prints a line for each failed expectation that is not critical. Raises
    GateError if a critical one fails, ValueError if ``docs`` has other content.
    """
    if docs.exists() and any(docs.iterdir()) and not (docs / "validations").is_dir():
        raise ValueError(f"docs folder {docs} holds something else: name one to be overwritten")
    building = docs.with_name(f"{docs.name}.building")
    results = _validate(table_name, table, expectations, building)
    judged = [_judge(table, *pair) for pair in zip(expectations, results, strict=True)]
    passed = all(each["passed"] for each in judged if each["critical"])
    record = {"table": table_name, "rows": len(table), "passed": passed, "expectations": judged}
    shutil.rmtree(docs, ignore_errors=True)
    (building / "gx" / "site").rename(docs)
    shutil.rmtree(building)
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    for file in (verdict, docs / "verdict.json"):  # DVC drops outs of a failed stage
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
    table_name: str, table: pd.DataFrame, expectations: Sequence[Expectation], building: Path
) -> list[Any]:
    """Run the expectations and build Data Docs; return the results in the same order."""
    gx = _great_expectations()
    context = _context(building)
    suite = gx.ExpectationSuite(table_name, expectations=_translate(expectations))
    asset = context.data_sources.add_pandas("pandas").add_dataframe_asset(table_name)
    whole = asset.add_batch_definition_whole_dataframe("whole")
    definition = gx.ValidationDefinition(
        name=table_name, data=whole, suite=context.suites.add(suite)
    )
    # Pass only the columns that are checked, because every value is hashed, and a positional index,
    # because rows of a named index are collected one by one: 3 s for 100,000 of them.
    columns = {each.arguments["column"] for each in expectations if "column" in each.arguments}
    cells = pd.DataFrame({column: _cells(table[column]) for column in sorted(columns)})
    outcome = context.validation_definitions.add(definition).run(
        batch_parameters={"dataframe": cells},
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": ROWS_KEPT},
    )
    context.build_data_docs()
    return sorted(outcome.results, key=lambda result: result.expectation_config.meta["number"])


def _great_expectations() -> Any:
    """Import the library without what it needs for databases, clouds and charts: half of it.

    Keep the garbage collector from its lasting objects: looking through half a million again and
    again took an eighth of the time of a file of 100,000 questions.
    """
    first = "great_expectations" not in sys.modules
    with instead(WITHOUT):
        import great_expectations

    if first:
        _keep_templates()
        gc.freeze()
    return great_expectations


def _keep_templates() -> None:
    """Compile each template of Data Docs once: Great Expectations does it anew for every page."""
    from great_expectations.render.view import view
    from jinja2.bccache import Bucket, BytecodeCache

    compiled: dict[str, Any] = {}

    class Kept(BytecodeCache):
        def load_bytecode(self, bucket: Bucket) -> None:
            bucket.code = compiled.get(bucket.checksum)

        def dump_bytecode(self, bucket: Bucket) -> None:
            compiled[bucket.checksum] = bucket.code

    plain: Any = view
    plain.Environment = partial(plain.Environment, bytecode_cache=Kept())


def _context(building: Path) -> Any:
    """Make a new project of Great Expectations without progress bars and without telemetry."""
    from great_expectations.data_context.types.base import ProgressBarsConfig

    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    context = _great_expectations().get_context(mode="file", project_root_dir=building)
    context.enable_analytics(False)
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    context.update_data_docs_site("local_site", SITE)
    return context


def _translate(expectations: Sequence[Expectation]) -> list[Any]:
    """Convert to objects of Great Expectations, numbered because results come in another order."""
    from great_expectations.expectations.metadata_types import FailureSeverity
    from great_expectations.expectations.registry import get_expectation_impl

    return [
        get_expectation_impl(each.type)(
            **_printed(each.arguments),
            description=escape(each.words),
            severity=FailureSeverity("critical" if each.critical else "warning"),
            meta={"number": number},
        )
        for number, each in enumerate(expectations)
    ]


def _printed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write a set of values in the same way as ``_cells`` writes the column."""
    if "value_set" not in arguments:
        return dict(arguments)
    return {**arguments, "value_set": [_cell(value) for value in arguments["value_set"]]}


def _cells(values: pd.Series) -> pd.Series:
    """Escape and shorten a column, because Great Expectations prints values as they are."""
    if pd.api.types.is_numeric_dtype(values):  # also of bool
        return values.reset_index(drop=True)
    if isinstance(values.dtype, pd.CategoricalDtype):  # a byte a row
        return values.reset_index(drop=True).map(_cell, na_action="ignore")
    cells = {value: _cell(value) for value in values.dropna().unique()}
    return pd.Series([cells.get(value) for value in values], dtype=object)


def _cell(value: Any) -> Any:
    """Return a number as it is, anything else as short escaped text, unique to the value."""
    if isinstance(value, bool | np.bool_ | int | float | np.number):
        return value
    text = str(value)
    if len(text) > CHARACTERS_SHOWN:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        text = f"{text[:CHARACTERS_SHOWN]}… ({len(text)} characters, SHA-256 {digest[:16]})"
    return escape(printable(text))


def _judge(table: pd.DataFrame, expectation: Expectation, result: Any) -> dict[str, Any]:
    """Extract what is the same in equal runs from one result: no ids, times or paths."""
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


def _rows(table: pd.DataFrame, positions: Sequence[int], column: str) -> list[dict[str, Any]]:
    """Return the rows at ``positions``: their index and their value of ``column``, by name."""
    rows = []
    for position in positions:
        label = table.index[position]
        labels = label if isinstance(label, tuple) else (label,)
        row = dict(zip(table.index.names, labels, strict=True))
        row[column] = table[column].iloc[position]
        rows.append({str(name): _plain(value) for name, value in row.items()})
    return rows


def _plain(value: Any) -> Any:
    """Convert a value to a short one of a JSON type."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int) or (isinstance(value, float) and np.isfinite(value)):
        return value
    text = str(value)
    short = text if len(text) <= CHARACTERS_SHOWN else text[:CHARACTERS_SHOWN] + "…"
    return printable(short)


def _describe(judged: Mapping[str, Any], count: int) -> str:
    shown = judged.get("rows", [])[:ROWS_SHOWN]
    rows = [f"\n    {json.dumps(row, ensure_ascii=False)}" for row in shown]
    return f"{judged['expectation']}: {found(judged, count)}{''.join(rows)}"


def found(judged: Mapping[str, Any], count: int) -> str:
    """Describe what an expectation found: "not so in 3 of 24 rows", "observed 0.5"."""
    if "observed" in judged:
        return f"observed {judged['observed']}"
    if judged["passed"]:
        return "in all rows" if count else "no rows"
    return f"not so in {judged['unexpected']:,} of {count:,} rows"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)
