"""Sequences on disk: equal to lists, whatever is selected, mapped and chained."""

import random
from pathlib import Path

import numpy as np
import pytest

from tasks.questions import stored
from tasks.questions.stored import PORTION, Stored, chained, mapped, portions, taken, where


def stored_of(values):
    found = Stored()
    found.extend(values)
    return found


@pytest.mark.parametrize("count", [0, 1, PORTION, 3 * PORTION + 7])
def test_views_equal_lists(count):
    draw = random.Random(count)
    plain = [f"value {number} \ud800" for number in range(count)]  # also what is no UTF-8
    lazy = stored_of(plain)
    for _ in range(6):
        flags = np.array([draw.random() < 0.7 for _ in plain], bool)
        plain, lazy = where(plain, flags), where(lazy, flags)
        plain, lazy = mapped(str.upper, plain), mapped(str.upper, lazy)
        more = [str(draw.random()) for _ in range(draw.randrange(2000))]
        plain, lazy = chained(plain, more), chained(lazy, more)
        assert len(lazy) == len(plain) and list(lazy) == plain and lazy == plain
        places = np.array(draw.choices(range(len(plain)), k=50) if plain else [], int)
        assert list(taken(lazy, places)) == list(taken(plain, places))
        for part in (slice(3), slice(None, None, -2), slice(-5, None)):
            assert list(lazy[part]) == plain[part]
        assert not plain or (lazy[0], lazy[-1]) == (plain[0], plain[-1])
    assert [value for portion in portions(lazy, 100) for value in portion] == plain


def test_two_readers_do_not_disturb_each_other():
    lazy = stored_of(range(5 * PORTION))
    assert all(one == 5 * PORTION - 1 - other for one, other in zip(lazy, lazy[::-1], strict=True))


def test_values_lie_on_disk_in_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored.ROOT.parent.mkdir(parents=True)
    found = stored_of("x" * 1000 for _ in range(4 * PORTION + 1))
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    own = [place for place in opened if place.is_relative_to(tmp_path)]
    assert own, "the file is in the folder of the ledger"
    assert not list(stored.ROOT.parent.iterdir())
    assert found[0] == "x" * 1000
