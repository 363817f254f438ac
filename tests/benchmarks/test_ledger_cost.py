"""The benchmark of the ledger: it measures what it says, on iterations of the size it says."""

import time
from types import SimpleNamespace

import pytest

from benchmarks import ledger_cost as bench
from flows.host import disk
from flows.runs import ledger_mirror


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "size"), [("1 M", 1e6), ("100 M", 1e8)])
def test_policies_have_the_size_of_their_names(name, size):
    policy = bench.recipe_of(bench.POLICIES[name]).prepare.policy
    assert disk.parameters(policy) == pytest.approx(size, rel=0.06)


def test_clock_counts_nested_calls_once(monkeypatch):
    inner = SimpleNamespace(work=lambda: time.sleep(0.02))
    outer = SimpleNamespace(work=lambda: inner.work())
    before = outer.work
    monkeypatch.setattr(bench, "TIMED", ((inner, "work"), (outer, "work")))
    with bench.clock() as spent:
        outer.work()
        time.sleep(0.05)
    wall, processor = spent
    assert 0.02 <= wall < 0.05
    assert processor < 0.02, "it slept"
    assert outer.work is before


@pytest.mark.parametrize("shared", [False, True])
def test_measure_gives_the_ledgers_share(monkeypatch, shared):
    monkeypatch.setenv(ledger_mirror.VARIABLE, "")
    shape = {"hidden": 16, "layers": 1, "heads": 1, "key_value_heads": 1, "feed_forward": 16}
    found = bench.measure(shape, 2, shared)
    processor = found["processor"]
    for of in ("wall", "processor"):
        assert 0 < found["share"][of] == found[of]["ledger"] / found[of]["iteration"] < 1
    assert processor["ledger"] <= found["wall"]["ledger"] * 4
    assert found["parameters"] < 20_000
