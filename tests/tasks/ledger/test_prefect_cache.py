"""Prefect's cache uses the ledger's keys, and has what the ledger has, and only that."""

import json
from types import SimpleNamespace

from tasks.ledger import artifacts, prefect_cache
from tests.tasks.ledger.toy import Inputs, Run, train


def test_cache_key_is_the_place_and_stale_results_go(run, tmp_path, monkeypatch):
    monkeypatch.setattr(prefect_cache, "RESULTS", tmp_path / "results")
    context = SimpleNamespace(task=SimpleNamespace(fn=train))  # all that our function reads

    def cache_key(ledger_of):
        arguments = {"step": ledger_of.step(), "inputs": Inputs(), "computed": []}
        return prefect_cache.cache_key(context, arguments)

    key = cache_key(run)
    assert artifacts.ROOT / key == run.place()
    result = prefect_cache.RESULTS / key
    result.parent.mkdir(parents=True)
    result.write_text("a result")
    cache_key(run)
    assert not result.exists(), "the ledger has no record"
    made = run.train()
    result.write_text("a result")
    again = Run()
    cache_key(again)
    assert json.loads(json.loads(result.read_text())["result"]) == made
    assert again.ledger.used == {run.place()}, "a cached sub-step is one that the run uses"
    (run.place() / "table.txt").write_text("damaged")
    cache_key(again)
    assert not result.exists()
