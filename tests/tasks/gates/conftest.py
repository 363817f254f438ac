"""How the gates' tests judge a table: with the real gate, and its message read closely."""

import json

import pytest

from tasks.gates import gate


@pytest.fixture
def judge(tmp_path):
    """Check a prepared table; its failed critical expectations: {words: rows, or what was seen}.

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
        return {each["expectation"]: each.get("rows", each.get("observed")) for each in failed}

    return judged
