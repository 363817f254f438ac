import pytest

from flows.host import first_check
from tests.checkout import ROOT


def said(command, capsys):
    """The exit status of a command, and what it says; None where the stage goes on."""
    try:
        first_check.check(command)
    except SystemExit as refused:
        printed = capsys.readouterr()
        return refused.code, printed.err + printed.out
    return None


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["evaluate", "--help"], 0, "Run the stage evaluate"),
        (["evaluate"], 2, "required: recipe"),
        (["evaluate", "nosuch"], 2, "no recipe 'nosuch': params/nosuch.yaml does not exist"),
        (["evaluate", "smoke"], 1, "models/smoke/trained, data/smoke/questions/test.parquet"),
        (["verdict", "smoke"], 1, "make run RECIPE=smoke"),
    ],
)
def test_stage_that_cannot_run_is_refused(arguments, status, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params").symlink_to(ROOT / "params")
    stage, *others = arguments
    code, text = said(["python", "-m", f"flows.{stage}", *others], capsys)
    assert code == status
    assert words in text


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "flows.prepare", "smoke"],
        ["python", "-m", "flows.retrain", "nosuch"],  # which says so itself
        ["python", "-m", "torch.distributed.run", "-m", "flows.evaluate"],
        ["python", "-m"],
        ["pytest"],
    ],
)
def test_other_programs_go_on(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert said(command, capsys) is None
