from pathlib import Path

import pytest

from flows.runs import equal_code, pipeline
from tests import toy_project as toy

FIRST = Path("first.py")


def append(text, file=FIRST):
    file.write_text(file.read_text() + text)


@pytest.fixture
def remembered(ran):
    equal_code.remember("toy")
    return ran


def test_a_comment_starts_no_stage(remembered):
    append("# why\n")
    assert pipeline.status("toy") == {"first@toy": ["code: first.py"]}
    assert equal_code.take_over("toy") == ["first@toy"]
    assert pipeline.status("toy") == {}
    append("# and why else\n")  # the first comment is in dvc.lock, the digests are of before
    assert equal_code.take_over("toy") == ["first@toy"]


def test_code_that_runs_otherwise_starts_its_stage(remembered):
    append("first = 1\n")
    assert equal_code.take_over("toy") == []
    assert "first@toy" in pipeline.status("toy")
    append("first = \n")  # no Python
    assert equal_code.take_over("toy") == []


@pytest.mark.parametrize("change", ["parameter", "out", "command", "lock"])
def test_any_other_change_beside_a_comment_starts_the_stage(remembered, change):
    append("# why\n")
    if change == "parameter":
        toy.write_recipe(remembered, seed=4)
    if change == "out":
        Path("data/toy/first").unlink()
        Path("data/toy/first").write_text("another\n")
    if change == "command":
        file = Path("dvc.yaml")
        file.write_text(file.read_text().replace("python first.py", "python -B first.py"))
    if change == "lock":
        Path("dvc.lock").unlink()
    assert equal_code.take_over("toy") == []
    assert "first@toy" in pipeline.status("toy")


def test_code_edited_after_the_run_is_not_remembered_as_what_ran(ran):
    append("first = 1\n")
    equal_code.remember("toy")
    assert equal_code.take_over("toy") == []
    assert "first@toy" in pipeline.status("toy")


def test_a_lock_of_another_run_is_not_taken_over(remembered):
    append("first = 1\n")
    toy.repro(remembered)
    append("# why\n")
    assert equal_code.take_over("toy") == []


def test_damaged_digests_start_stages(remembered):
    equal_code.FILE.write_text('{"first@toy":')
    append("# why\n")
    assert equal_code.take_over("toy") == []
