"""Names and descriptions of runs."""

import pytest

from flows.tracking.run_summary import LONGEST_NAME, changes_line, differing, run_name

BEFORE = {
    "seed": "0",
    "champion": "null",
    "teacher": "null",
    "reinforce.iterations": "60",
    "reinforce.update.learning_rate": "0.001",
    "cold_start.learning_rate": "0.01",
    "reinforce.algorithm": "grpo",
    "algorithm.clip.high": "0.2",
}


def test_values_differ_where_a_run_would_differ():
    now = {
        **BEFORE,
        **{"seed": "3", "champion": '{"version": 1}', "judge": "null", "expect": "much"},
        **{"algorithm.clip.high": "0.28", "teacher.kind": "server"},
    }
    del now["teacher"]
    assert differing(BEFORE, now) == {
        "seed": ("0", "3"),
        "algorithm.clip.high": ("0.2", "0.28"),
        "teacher.kind": ("none", "server"),
    }
    without_row = {key: BEFORE[key] for key in BEFORE if not key.startswith("algorithm.")}
    assert differing(without_row, BEFORE) == {}, "an older run did not keep its row"
    assert differing({"text": "a" * 6_000}, {"text": "a" * 7_000}) == {}, "MLflow cuts it"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"seed": "3"}, "tiny seed=3"),
        (
            {"reinforce.update.learning_rate": "0.003", "reinforce.iterations": "20"},
            "tiny learning_rate=0.003 iterations=20",
        ),
        (
            {"reinforce.update.learning_rate": "0.003", "cold_start.learning_rate": "0.1"}
            | {"reinforce.questions": "64"},
            "tiny update.learning_rate=0.003 +2",
        ),
        (
            {"dialogue.system": "Use the tool:\nit is exact, and fast", "seed": "1"},
            "tiny system=Use the tool: it is exa… seed=1",
        ),
    ],
)
def test_name_has_what_is_special(changed, named):
    told = run_name("tiny", {key: ("before", value) for key, value in changed.items()})
    assert told == named
    assert len(told) <= LONGEST_NAME


def test_line_of_many_changes_is_short():
    many = {f"tools.t{number}.seconds": ("1", "2") for number in range(30)}
    line = changes_line(many, "`base`")
    assert line.startswith("**Recipe**: `tools.t0.seconds` 1 → 2, ")
    assert line.endswith(", 22 more, beside `base`")
    assert changes_line({}, "`base`") == "**Recipe**: the same, beside `base`"
