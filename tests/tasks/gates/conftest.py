"""How the gates' tests check a table: by the real gate, or fast by the kinds' own definitions."""

import json

import pytest

from tasks.gates import gate

ROWS = {  # kind of expectation about rows -> the rows that break it; missing values break none
    "expect_column_values_to_be_between": lambda values, min_value, max_value: (
        (values < (-float("inf") if min_value is None else min_value))
        | (values > (float("inf") if max_value is None else max_value))
    ),
    "expect_column_values_to_be_in_set": lambda values, value_set: (
        values.notna() & ~values.isin(value_set)
    ),
    "expect_column_values_to_be_unique": lambda values: (
        values.notna() & values.duplicated(keep=False)
    ),
}


def broken(prepared, expectations):
    """The critical expectations that a table breaks: {words: at most ten rows, or what was seen}.

    Great Expectations is not asked, which takes a second; ``judge`` holds both to the same answers.
    """
    found = {}
    for each in (expectation for expectation in expectations if expectation.critical):
        arguments = dict(each.arguments)
        column = arguments.pop("column", None)
        if each.type in ROWS:
            rows = prepared[ROWS[each.type](prepared[column], **arguments)]
            if len(rows):
                index = rows.index.to_frame(index=False)
                index[column] = rows[column].to_numpy()
                found[each.words] = index[:10].to_dict("records")
            continue
        seen = len(prepared) if column is None else prepared[column].sum()
        low, high = arguments["min_value"], arguments["max_value"]
        if seen < low or (high is not None and seen > high):
            found[each.words] = seen
    return found


@pytest.fixture
def judge(tmp_path):
    """Check a prepared table by the gate; its failed critical expectations as ``broken`` has them.

    Asserts that the error names each of them with its first three rows, and nothing else.
    """

    def judged(name, prepared, expectations):
        verdict = tmp_path / f"{name}.json"
        message = ""
        try:
            gate.check(name, prepared, expectations, verdict, tmp_path / "docs" / name)
        except gate.GateError as error:
            message = str(error)
        record = json.loads(verdict.read_text())
        failed = [e for e in record["expectations"] if e["critical"] and not e["passed"]]
        assert bool(failed) == bool(message) == (not record["passed"])
        assert message.count("\n- ") == len(failed)
        for each in failed:
            assert f"- {each['expectation']}: " in message
            shown = each.get("rows", [])
            assert len(shown) == min(each.get("unexpected", 0), 10)
            for row in shown[:3]:
                assert json.dumps(row, ensure_ascii=False) in message
        found = {each["expectation"]: each.get("rows", each.get("observed")) for each in failed}
        assert broken(prepared, expectations) == found
        return found

    return judged
