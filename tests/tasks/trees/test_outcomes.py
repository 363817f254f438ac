"""One enumeration of outcomes; they are stored as plain strings."""

import json
import pickle

import numpy as np
import pyarrow.parquet as pq

from tasks.tools import python_worker as worker
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome, StopReason
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

NONE, TOKEN = np.zeros(0, np.float32), np.zeros(1, np.int32)


def tree(outcome: str) -> Tree:
    turn = Node(0, TURN, outcome, "t", TOKEN, np.zeros(1, np.float32), np.zeros(1, np.float32))
    return Tree(
        Question("q", "toy", "q", ("1",)), [Node(-1, PROMPT, "", "q", TOKEN, NONE, NONE), turn], [1]
    )


def test_sandbox_names_the_same_outcomes():
    own = [*worker.OUTCOMES.values(), worker.TIMEOUT, worker.WALL_TIMEOUT]
    assert own == [Outcome.OK, Outcome.ERROR, Outcome.MEMORY, Outcome.TIMEOUT, Outcome.WALL_TIMEOUT]
    assert [worker.OUTPUT_LIMIT, worker.KILLED] == [Outcome.OUTPUT_LIMIT, Outcome.KILLED]


def test_values_are_names_in_lower_case():
    assert all(each.value == each.name.lower() for each in (*Outcome, *StopReason))
    assert len(set(TURN_OUTCOMES)) == len(TURN_OUTCOMES) == 18


def test_outcome_is_stored_as_plain_text(tmp_path):
    save_trees([tree(Outcome.ANSWER)], tmp_path / "enumeration")
    save_trees([tree("answer")], tmp_path / "text")
    files = [tmp_path / folder / "nodes.parquet" for folder in ("enumeration", "text")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [type(v) for v in pq.read_table(files[0])["outcome"].to_pylist()] == [str, str]
    assert load_trees(tmp_path / "enumeration")[0].nodes[1].outcome == Outcome.ANSWER
    assert json.dumps([Outcome.OK]) == '["ok"]'
    assert pickle.loads(pickle.dumps(Outcome.OK)) is Outcome.OK  # decoding workers return samples
