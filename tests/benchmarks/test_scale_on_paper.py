import pytest

from benchmarks import scale_on_paper as scale
from tasks.recipes import load as settings_of
from tests import toy_project as toy

WORK = scale.work_of(settings_of(scale.RECIPE))
PAGE = (toy.ROOT / "docs/gpu.md").read_text()


def test_tables_are_those_of_the_page():
    found = dict(scale.sweeps(settings_of(scale.RECIPE)))
    for title, rows in found.items():
        totals = " | ".join(f"{one.total:.0f}" for one in rows)
        assert f"| {title} | {totals} |" in PAGE
    for way in ("folder", "broadcast"):
        assert scale.table(found[f"the recipe's batch, ahead, weights by {way}"]) in PAGE


def test_one_machine_in_turns_is_as_fast_as_published():
    """Without communication and the stage, it takes the published time of a whole step."""
    one = scale.reckon(WORK, 1, 1, "in turns", "folder")
    assert one.sampling + one.update == pytest.approx(WORK.tokens / 1581 / 8)
    assert one.total == pytest.approx(one.sampling + one.update + one.communication + one.stage)


def test_sampling_ahead_overlaps_with_learning():
    turns, ahead = (scale.reckon(WORK, 4, 2, way, "broadcast") for way in scale.WAYS)
    learned = ahead.update + ahead.communication + ahead.weights
    sampled = ahead.sampling + ahead.stage + ahead.weights
    assert ahead.total == max(learned, sampled)
    assert turns.total == pytest.approx(learned + sampled - ahead.weights)
    assert turns.learners_idle > ahead.learners_idle


def test_weights_by_folder_grow_with_servers_and_by_broadcast_they_do_not():
    """8.03 billion weights in float32, written once and read by 16 or 32 servers at 10 GB/s."""
    few, many = (scale.reckon(WORK, 8, 8 - n, "ahead", "folder").weights for n in (2, 4))
    size = 4 * WORK.shape.weights / 10e9
    assert (few, many) == (pytest.approx(17 * size), pytest.approx(33 * size))
    for n in (2, 4):
        broadcast = scale.reckon(WORK, 8, n, "ahead", "broadcast").weights
        assert broadcast == pytest.approx(4 * WORK.shape.weights / 50e9)


def test_best_division_is_the_shortest():
    best = scale.best(WORK, 8, "ahead", "folder")
    others = [scale.reckon(WORK, 8, n, "ahead", "folder").total for n in range(1, 8)]
    assert best.total == min(others)
