"""Rows of a cache that paths share, against a cache of plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.engines.transformers.rows import Rows, Wanted
from tests.examples import examples

PATHS = 6


class Cache(RuleBasedStateMachine):
    """Paths that sample in turns, fork and close, in whatever order.

    ``self.tokens``: what must be in the row of each path. ``self.store``: what is in each row.
    """

    def __init__(self):
        super().__init__()
        self.rows = Rows(PATHS)
        self.store = [[] for _ in range(PATHS)]
        self.tokens = {}

    @precondition(lambda self: len(self.tokens) < PATHS)
    @rule()
    def open(self):
        self.tokens[self.rows.open()] = []

    @precondition(lambda self: 0 < len(self.tokens) < PATHS)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tokens[self.rows.fork(parent)] = list(self.tokens[parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data):
        handle = data.draw(st.sampled_from(sorted(self.tokens)))
        self.rows.close(handle)
        del self.tokens[handle]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def sample(self, data):
        """Extend some paths by a drawn token each; a few first go back to an earlier token."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        groups = {}
        for handle in chosen:
            kept = len(self.tokens[handle]) - data.draw(st.sampled_from([0, 0, 0, 1, 2]))
            new = data.draw(st.sampled_from("ab"))
            self.tokens[handle] = [*self.tokens[handle][: max(0, kept)], new]
            groups.setdefault(tuple(self.tokens[handle]), []).append(handle)
        wanted = [
            Wanted(handles, self.rows.row[handles[0]] if len(tokens) > 1 else None, len(tokens) - 1)
            for tokens, handles in groups.items()
        ]
        rows, copies = self.rows.arrange(wanted)
        assert sorted(rows) == list(range(len(wanted))), "they are the first rows"
        taken = [self.store[row][: copies.positions] for row in copies.source]
        for row, beginning in zip(copies.target, taken, strict=True):
            self.store[row] = beginning + self.store[row][len(beginning) :]
        for row, one, tokens in zip(rows, wanted, groups, strict=True):
            self.store[row] = [*self.store[row][: one.known], tokens[-1]]
            for handle in one.handles:
                self.rows.length[handle] = len(tokens)

    @invariant()
    def each_path_has_its_tokens(self):
        for handle, tokens in self.tokens.items():
            row = self.rows.row[handle]
            assert tokens == ([] if row is None else self.store[row][: len(tokens)])


TestCache = Cache.TestCase
TestCache.settings = examples(150, stateful_step_count=25, deadline=None)


@given(st.integers(1, 4))
def test_a_path_too_many_is_refused(count):
    rows = Rows(count)
    for _ in range(count):
        rows.open()
    with pytest.raises(RuntimeError, match=f"all {count} paths"):
        rows.open()


def test_a_row_that_nobody_leaves_is_not_copied():
    rows = Rows(4)
    first, second, other = (rows.open() for _ in range(3))
    rows.arrange([Wanted([first, second], None, 0), Wanted([other], None, 0)])
    assert rows.row[first] == rows.row[second] == 0
    found, copies = rows.arrange([Wanted([first, second], 0, 5), Wanted([other], 1, 7)])
    assert (found, copies.source) == ([0, 1], [])
    found, copies = rows.arrange([Wanted([first], 0, 9), Wanted([second], 0, 9)])
    assert (found, copies.source, copies.target) == ([0, 1], [0, 1], [1, 3])
    assert rows.row[other] == 3, "it has made room"
