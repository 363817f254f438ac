"""Faults that are planted to see that tests find them: a sound list, and what came of each."""

import ast
import subprocess

import pytest

from benchmarks.planted_faults import FAULTS, Fault, chosen_of, judge_all, load, main, planted
from tests.checkout import ROOT

SUMS = "def total(values):\n    return sum(values)\n"
TESTS = """
import time
from sums import total

def test_total():
    assert total([1, 2]) == 3

def test_nothing():
    if total([]):
        time.sleep(60)
"""
LIST = """
sums:
  found: {file: sums.py, old: sum(values), new: sum(values) + 1, test: test_sums.py::test_total}
  missed: {file: sums.py, old: sum(values), new: sum(values) * 1, test: test_sums.py}
others:
  broken: {file: sums.py, old: return, new: retrun, test: test_sums.py}
"""
RESULTS = {"found": "found", "missed": "not found", "broken": "not run"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in {"sums.py": SUMS, "test_sums.py": TESTS, FAULTS: LIST}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", load(ROOT / FAULTS), ids=lambda fault: fault.name)
def test_each_fault_of_the_list_can_be_planted_and_has_a_test(fault):
    text = fault.planted((ROOT / fault.file).read_text())
    if fault.file.endswith(".py"):
        ast.parse(text)
    file, _, test = fault.test.partition("::")
    assert f"def {test}" in (ROOT / file).read_text()


def test_a_text_that_is_there_twice_or_stays_is_no_fault():
    fault = Fault("sums", "one", "sums.py", "a", "b", "test_sums.py")
    assert fault.planted("cat") == "cbt"
    with pytest.raises(ValueError, match="2 times"):
        fault.planted("a cat")
    with pytest.raises(ValueError, match="equal"):
        Fault("sums", "one", "sums.py", "a", "a", "test_sums.py").planted("cat")


def test_a_planted_fault_is_taken_out_with_its_byte_code(tmp_path):
    file, byte_code = tmp_path / "sums.py", tmp_path / "__pycache__/sums.cpython-311.pyc"
    file.write_text("cat")
    byte_code.parent.mkdir()
    byte_code.write_bytes(b"of cat")
    with planted(Fault("sums", "one", "sums.py", "a", "b", "test_sums.py"), tmp_path):
        assert file.read_text() == "cbt"
        assert not byte_code.exists()
        byte_code.write_bytes(b"of cbt")
    assert file.read_text() == "cat"
    assert not byte_code.exists()


def test_a_fault_is_found_by_a_test_that_fails_and_by_nothing_else(project):
    faults = load()
    with pytest.raises(ValueError, match="unknown"):
        chosen_of(faults, ["sums", "unknown"])
    assert [one.name for one in chosen_of(faults, ["sums", "broken"])] == [*RESULTS]
    outcomes = list(judge_all(faults, project, jobs=2))
    assert {one.fault: one.result for one in outcomes} == RESULTS
    assert [one.by for one in outcomes] == ["test_sums.py::test_total", "", ""]
    assert (project / "sums.py").read_text() == SUMS


def test_a_test_that_does_not_end_has_found_nothing(project):
    fault = Fault("sums", "endless", "sums.py", "sum(values)", "sum(values) or 1", "test_sums.py")
    (outcome,) = judge_all([fault], project, seconds=8)
    assert outcome.result == "no end" and outcome.seconds < 30


def test_a_fault_that_is_not_found_is_the_exit_status(project, capsys):
    assert main(["found"]) == 0
    assert main(["--table", "table.csv", "missed", "found"]) == 1
    assert "1 of 2 faults" in capsys.readouterr().out
    _, *rows = (project / "table.csv").read_text().splitlines()
    assert [row.split(",")[4] for row in rows] == ["found", "not found"]


def test_a_test_that_fails_anyway_finds_nothing(project, capfd):
    with (project / "test_sums.py").open("a") as file:
        file.write("\ndef test_sound():\n    assert False\n")
    outcomes = list(judge_all(load(), project))
    assert [one.result for one in outcomes] == ["found", "fails anyway", "fails anyway"]
    assert "test_sound" in capfd.readouterr().err


def test_what_has_no_place_is_said(project, capsys):
    (project / "sums.py").write_text("")
    assert main([]) == 2
    assert "0 times" in capsys.readouterr().err
