import pytest

from flows.workers import run_names


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([], "retrain tiny"),
        (["reinforce.update.learning_rate=1e-3"], "retrain tiny learning_rate=1e-3"),
        (["seed = 3", "evaluate.questions=9"], "retrain tiny seed=3 questions=9"),
        (["a.steps=1", "b.steps=2"], "retrain tiny a.steps=1 b.steps=2"),
    ],
)
def test_a_run_is_named_after_what_it_changes(changes, name):
    assert run_names.of_run("retrain", "tiny", changes) == name


def test_a_process_of_a_run_knows_the_overrides(monkeypatch):
    assert run_names.from_variable() == []
    for variable, value in run_names.as_variable(["seed=3"]).items():
        monkeypatch.setenv(variable, value)
    assert run_names.from_variable() == ["seed=3"]
