"""What the command refuses before it loads anything, and how its input ends."""

import io
from pathlib import Path

import pytest

from flows.commands import ask
from flows.runs import without_run
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the recipes, in which nothing has been trained."""
    (tmp_path / "params").symlink_to(Path("params").resolve())
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smoke"], "smoke has not been trained here: run `make run RECIPE=smoke` first"),
        (["smoke", "--policy", "models/none"], "--policy models/none holds no policy"),
        (["smoke", "--question", "1 + 1", "--task", "1"], "choose a task with --task"),
        (["tiny-lake", "--question", "left"], "choose a task with --task"),
        (["none"], "no recipe 'none'"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_remedy(checkout, capsys, arguments, words):
    assert ask.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_trained_policy_comes_before_the_cold_start(checkout):
    for agent in ("cold_start", "trained"):
        Path("models/toy", agent).mkdir(parents=True)
        Path("models/toy", agent, "config.json").touch()
        assert without_run.policy_folder("toy", None) == Path("models/toy", agent)


def test_a_task_is_drawn_by_the_seed_or_chosen_by_its_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = [Question(str(number), "toy", f"task {number}", ()) for number in range(9)]
    save_questions(tasks, Path("data/toy/questions/test.parquet"))
    assert ask.task("toy", "test", 3, 0) == tasks[3]
    drawn = {ask.task("toy", "test", None, seed).id for seed in range(9)}
    assert len(drawn) > 1
    assert ask.task("toy", "test", None, 5) == ask.task("toy", "test", None, 5)
    with pytest.raises(ValueError, match="--task 9: test has the tasks 0 to 8"):
        ask.task("toy", "test", 9, 0)
    with pytest.raises(ValueError, match="make run RECIPE=toy"):
        ask.task("toy", "train", 0, 0)


@pytest.mark.parametrize("typed", ["one\ntwo\n", "one\ntwo\n\nthree\n"])
def test_input_ends_at_an_empty_line_or_its_end(monkeypatch, typed):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert list(ask.lines("? ")) == ["one", "two"]


def test_ctrl_c_at_the_prompt_ends_without_a_traceback(monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert list(ask.lines("? ")) == []


def test_bytes_that_are_no_text_are_replaced():
    assert ask.own_question("what \udcff?").text == "what ??"
    with pytest.raises(ValueError, match="empty"):
        ask.own_question(" ")
