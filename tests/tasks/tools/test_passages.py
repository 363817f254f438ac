"""Passages of a text: within the limit, in order, and those that fit the question."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tools.passages import GAP, cut, split

TEXT = "\n".join(f"line {n} of words number{n} here and there" for n in range(30))


def test_best_passages_in_the_order_of_the_text():
    seen = cut(TEXT, "number20 number5", 8, 120)
    assert seen == (
        f"{GAP}\nline 5 of words number5 here and there\n{GAP}\n"
        f"line 20 of words number20 here and there\n{GAP}"
    )
    assert cut(TEXT, "", 8, 60) == f"line 0 of words number0 here and there\n{GAP}"
    assert cut("short", "x", 8, 10) == "short"


@given(st.text(max_size=300), st.text(max_size=20), st.integers(1, 9), st.integers(1, 80))
def test_limit_holds(text, question, count, characters):
    seen = cut(text, question, count, characters)
    assert len(seen) <= characters
    assert bool(seen) == bool(text.strip())


@pytest.mark.parametrize(
    "hostile",
    [
        "a" + "\u0315\u0300" * 60_000,
        "\uff9e\u0315" * 60_000,
        "\ufdfa" * 100_000,
        "\ufdfa " * 50_000,
    ],
)
def test_characters_that_grow_or_pile_up_take_little_time(hostile):
    started = time.process_time()
    assert "bridge" in cut(f"{hostile} bridge", "bridge", 1, 60)
    assert time.process_time() - started < 3  # it took half a minute


@given(st.text(), st.integers(1, 9))
def test_passages_hold_every_word(text, count):
    assert "".join("".join(split(text, count)).split()) == "".join(text.split())
