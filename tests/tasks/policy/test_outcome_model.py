"""The reward model in memory: who loads and drops it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tasks.policy import outcome_model
from tasks.policy.outcome_model import OutcomeModel
from tests.sections import MACHINE


def test_the_thread_that_samples_has_its_reward_model_whatever_the_other_one_drops(monkeypatch):
    scoring, loaded = outcome_model.Scoring(), []
    begun, dropped = Event(), Event()

    def load(folder, machine):
        begun.set()
        dropped.wait(0.05)  # it does not come: the thread that drops waits for the lock
        loaded.append(folder)
        return OutcomeModel(None, None)

    monkeypatch.setattr(outcome_model, "load", load)

    def drop():
        begun.wait()
        scoring.drop()
        dropped.set()

    with ThreadPoolExecutor(3) as threads:
        dropping = threads.submit(drop)
        model = scoring.load(Path("first"), MACHINE)
        dropping.result()
        assert isinstance(model, OutcomeModel)
        assert scoring.model is None
        both = threads.map(scoring.load, [Path("next")] * 2, [MACHINE] * 2)
        assert len({id(one) for one in both}) == 1
    assert loaded == [Path("first"), Path("next")], "two threads load it once"
