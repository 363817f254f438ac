"""Beginnings that contexts share, against a plain count of a trie."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.engines.transformers import prefixes
from tasks.engines.transformers.prefixes import Shared, plan


def contexts(*pieces):
    return [np.concatenate([np.full(n, token, np.int32) for token, n in each]) for each in pieces]


def test_a_system_prompt_and_examples_below_it():
    """Seven begin with 200 tokens; of these, four go on with 150 more, and three with 300."""
    few = [[(1, 200), (2, 150), (10 + i, 5)] for i in range(4)]
    many = [[(1, 200), (3, 300), (20 + i, 9)] for i in range(3)]
    levels, known = plan(contexts(*few, *many), [0] * 7)
    assert levels == [
        [Shared(0, [1, 2, 3, 4, 5, 6], 200)],
        [Shared(0, [1, 2, 3], 350), Shared(4, [5, 6], 500)],
    ]
    assert known == [350] * 4 + [500] * 3


def test_what_saves_little_is_not_planned():
    short = contexts(*[[(1, 20), (2 + i, 40)] for i in range(6)])
    assert plan(short, [0] * 6) == ([], [0] * 6)
    long = contexts(*[[(1, 300), (2 + i, 40)] for i in range(2)])
    assert plan(long, [299, 299]) == ([], [299, 299])


def test_what_one_has_computed_is_copied():
    levels, known = plan(contexts(*[[(1, 300), (2 + i, 9)] for i in range(3)]), [0, 305, 300])
    assert levels == [[Shared(1, [0], 300)]]
    assert known == [300, 305, 300]


def test_the_last_token_is_left_for_its_logits():
    levels, known = plan(contexts([(1, 400)], [(1, 400)]), [0, 0])
    assert levels == [[Shared(0, [1], 399)]] and known == [399, 399]


rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


@given(rows)
def test_whatever_is_given_each_token_is_computed_once(lists):
    """Computed tokens are the nodes of the trie; the last token of each context is its own."""
    prefixes.WORTH, before = 1, prefixes.WORTH
    try:
        tokens = [np.array(one, np.int32) for one in lists]
        levels, known = plan(tokens, [0] * len(tokens))
    finally:
        prefixes.WORTH = before
    held, computed = [0] * len(tokens), 0
    for level in levels:
        for shared in level:
            beginning = lists[shared.leader][: shared.end]
            computed += max(0, shared.end - held[shared.leader])
            for index in (shared.leader, *shared.followers):
                assert lists[index][: shared.end] == beginning
                held[index] = max(held[index], shared.end)
    assert held == known
    assert all(have < len(one) for have, one in zip(known, lists, strict=True))
    rest = sum(len(one) - have for one, have in zip(lists, known, strict=True))
    nodes = {tuple(one[:end]) for one in lists for end in range(1, len(one) + 1)}
    assert len(nodes) <= computed + rest <= len(nodes) + len(lists)
