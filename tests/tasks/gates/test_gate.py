"""The gate itself: its verdict, its message, its Data Docs, and when it stops a run."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from flows.tracking import gate_report
from tasks.gates import gate

EXPECTATIONS = [
    gate.rows_between("there are rows", 1, None),
    gate.between("the size is in [0, 9]", "size", 0, 9),
    gate.unique("no name occurs twice", "name"),
    gate.among("the colour is known", "colour", ["red", "blue"]),
    gate.sum_between("the sizes make at most 100", "size", 0, 100),
    gate.mean_between("the mean size is in [2, 3]", "size", 2, 3),
]


def table(**columns):
    good = {"size": [1, 2, 3, 4], "name": list("abcd"), "colour": ["red", "blue"] * 2}
    return pd.DataFrame(good | columns).rename_axis("row")


def failing():
    return table(
        size=[10, 2, -1, 1000], name=["a", "a", "b", "b"], colour=["red"] * 3 + ["x" * 500]
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A table that fails in every way, checked twice: its folder and the two errors."""
    folder = tmp_path_factory.mktemp("gate")
    errors = []
    for run in ("first", "second"):
        with pytest.raises(gate.GateError) as caught:
            gate.check(
                "things", failing(), EXPECTATIONS, folder / run / "verdict.json", folder / "docs"
            )
        errors.append(str(caught.value))
    return folder, errors


def test_import_does_not_load_great_expectations():
    code = (
        "import sys; import tasks.gates.gate, tasks.gates.questions, tasks.gates.traces, "
        "tasks.gates.trajectories, tasks.gates.rewards, tasks.gates.advantages"
        "; print('great_expectations' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_good_table_passes_silently(tmp_path, capfd):
    verdict = tmp_path / "new" / "verdict.json"
    record = gate.check("things", table(), EXPECTATIONS, verdict, tmp_path / "docs" / "things")
    assert record == json.loads(verdict.read_text())
    assert record["passed"] and record["rows"] == 4 and record["table"] == "things"
    assert [each["expectation"] for each in record["expectations"]] == [
        each.words for each in EXPECTATIONS
    ]
    assert all(each["passed"] for each in record["expectations"])
    assert capfd.readouterr() == ("", "")


def test_message_shows_three_rows(failed):
    folder, errors = failed
    assert errors[0] == errors[1]
    assert errors[0].splitlines() == [
        "table things fails critical expectations:",
        "- the size is in [0, 9]: not so in 3 of 4 rows",
        '    {"row": 0, "size": 10}',
        '    {"row": 2, "size": -1}',
        '    {"row": 3, "size": 1000}',
        "- no name occurs twice: not so in 4 of 4 rows",
        '    {"row": 0, "name": "a"}',
        '    {"row": 1, "name": "a"}',
        '    {"row": 2, "name": "b"}',
        "- the colour is known: not so in 1 of 4 rows",
        '    {"row": 3, "colour": "' + "x" * 120 + '…"}',
        "- the sizes make at most 100: observed 1011",
        f"correct the data or the stage that made it; see {folder / 'docs' / 'index.html'}",
    ]


def test_verdict_bytes_repeat(failed):
    folder, _ = failed
    first, second = ((folder / run / "verdict.json").read_bytes() for run in ("first", "second"))
    assert first == second
    record = json.loads(first)
    assert not record["passed"]
    assert record["expectations"][1] == {
        "expectation": "the size is in [0, 9]",
        "critical": True,
        "passed": False,
        "unexpected": 3,
        "rows": [{"row": 0, "size": 10}, {"row": 2, "size": -1}, {"row": 3, "size": 1000}],
    }
    assert record["expectations"][5] == {
        "expectation": "the mean size is in [2, 3]",
        "critical": False,
        "passed": False,
        "observed": 252.75,
    }


def test_data_docs_show_failures_first(failed):
    folder, _ = failed
    docs = folder / "docs"
    gate_report.publish(docs)
    index = (docs / "index.html").read_text()
    assert "Table things: refused" in index and "4 rows; 1 of 6 expectations hold" in index
    places = [index.index(each.words) for each in EXPECTATIONS]
    assert sorted(places) == [*places[1:5], places[5], places[0]]  # refused, warned, held
    assert "not so in 3 of 4 rows" in index and "<td>1000</td>" in index
    report = docs / re.search(r'<a href="(validations/[^"]+)"', index)[1]
    assert "the colour is known" in report.read_text()
    assert len(list((docs / "validations").rglob("*.html"))) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["docs", "first", "second"]
    assert [path.name for path in (folder / "first").iterdir()] == ["verdict.json"]


def test_data_docs_run_no_script(failed):
    folder, _ = failed
    gate_report.publish(folder / "docs")
    pages = list((folder / "docs").rglob("*.html"))
    assert len(pages) == 3
    for page in pages:
        head = page.read_text().partition("<head>")[2]
        assert head.startswith('<meta http-equiv="Content-Security-Policy" content="default-src')
        assert "script-src" not in head and "http:" not in head.partition(">")[0]


HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=alert(1)>"


def test_hostile_values_are_shown_as_they_are(tmp_path):
    names = [HOSTILE, HOSTILE, "a\x1b[2J\ud800\u202e", "$name {{ x }} %s"]
    expectations = [gate.unique(f"no {HOSTILE} twice", "name"), gate.among("known", "name", ["a"])]
    things = pd.DataFrame({"name": pd.Series(names, dtype=object)}).set_index("name", drop=False)
    with pytest.raises(gate.GateError) as caught:
        gate.check("things", things, expectations, tmp_path / "verdict", tmp_path / "docs")
    gate_report.publish(tmp_path / "docs")
    lines = str(caught.value).splitlines()
    assert f'    {{"name": "{HOSTILE}"}}' in lines
    assert '    {"name": "a\\\\x1b[2J\\\\ud800\\\\u202e"}' in lines
    assert str(caught.value).replace("\n", "").isprintable()
    pages = [page.read_text() for page in (tmp_path / "docs").rglob("*.html")]
    assert not any("<script>document" in page or "<img src=x" in page for page in pages)
    assert sum("&lt;img src=x onerror=alert(1)&gt;" in page for page in pages) == 3


def test_values_of_a_set_are_escaped_alike(tmp_path):
    known = ["<b>", "x" * 10_000, "a&b", "\x1b", 3]
    things = pd.DataFrame({"name": pd.Series(known, dtype=object)})
    suite = [gate.among("the name is known", "name", known[:4]), gate.unique("once", "name")]
    verdict = tmp_path / "verdict"
    with pytest.raises(gate.GateError, match="not so in 1 of 5 rows"):
        gate.check(
            "things",
            things,
            [
                gate.Expectation(
                    "the name is known",
                    "expect_column_values_to_be_in_set",
                    {"column": "name", "value_set": known[:4]},
                )
            ],
            verdict,
            tmp_path / "docs",
        )
    gate.check("things", things.iloc[:4], suite, verdict, tmp_path / "docs")


def test_long_values_that_differ_at_the_end(tmp_path):
    long = ["x" * 10_000_000 + end for end in "ab"]
    things = pd.DataFrame({"name": long})
    suite = [gate.unique("no name occurs twice", "name")]
    gate.check("things", things, suite, tmp_path / "verdict", tmp_path / "docs")
    with pytest.raises(gate.GateError) as caught:
        gate.check("things", things.iloc[[0, 0]], suite, tmp_path / "verdict", tmp_path / "docs")
    assert len(str(caught.value)) < 1000
    assert max(path.stat().st_size for path in (tmp_path / "docs").rglob("*.html")) < 200_000


def test_verdict_keeps_ten_rows_and_the_message_three(tmp_path):
    things = pd.DataFrame({"size": range(12)}).rename_axis("row")
    with pytest.raises(gate.GateError) as caught:
        gate.check(
            "things", things, [gate.between("none", "size", 50, 60)], tmp_path / "v", tmp_path / "d"
        )
    assert str(caught.value).count('{"row"') == 3
    assert len(json.loads((tmp_path / "v").read_text())["expectations"][0]["rows"]) == 10


def test_failure_that_is_not_critical_only_warns(tmp_path, capsys):
    record = gate.check(
        "things", table(size=[9, 9, 9, 9]), EXPECTATIONS, tmp_path / "verdict", tmp_path / "docs"
    )
    assert record["passed"] and not record["expectations"][5]["passed"]
    assert capsys.readouterr().out == (
        "warning: table things: the mean size is in [2, 3]: observed 9.0\n"
    )


def test_empty_table_is_refused(tmp_path):
    with pytest.raises(gate.GateError, match="there are rows: observed 0"):
        gate.check(
            "things", table().iloc[:0], EXPECTATIONS, tmp_path / "verdict", tmp_path / "docs"
        )


def test_folder_with_other_things_is_not_overwritten(tmp_path):
    (tmp_path / "page.md").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        gate.check("things", table(), EXPECTATIONS, tmp_path / "verdict", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_unusable_names_missing_and_infinite_values():
    values = pd.DataFrame(
        {
            "number": [1.0, np.nan, -np.inf, 4.0],
            "word": ["a", None, "c", "d\n"],
            "list": [[1], [2], None, []],
        },
        index=[7, 7, 8, 9],
    )
    assert gate.unusable("things", values, ["number", "word", "list"]).tolist() == [
        "",
        "number=nan, word=nan",
        "number=-inf, list=None",
        "",
    ]
    assert gate.unusable("things", values, ["word", "list"], ["word", "list"]).tolist() == [
        "list=[1]",
        "word=nan, list=[2]",
        "list=None",
        "word=d\n, list=[]",
    ]


def test_legible_columns_are_printable():
    values = pd.DataFrame({"word": pd.Series(["a", None, ["b"], "\ud800"], dtype=object)})
    legible = gate.legible(values, ["word"])["word"]
    assert legible.isna().tolist() == [False, True, False, False]
    assert legible.dropna().tolist() == ["a", "['b']", "\\ud800"]


def test_lacking_column_is_named():
    with pytest.raises(ValueError, match=r"table things lacks the columns \['weight'\]"):
        gate.unusable("things", table(), ["size", "weight"])


def test_great_expectations_comes_without_databases_and_charts():
    code = (
        "from tasks.gates import gate; gate._great_expectations(); import sys"
        "; print([name for name in ('altair', 'botocore', 'scipy.stats', 'sqlalchemy')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
