"""Which sampled trajectories become traces, with which tokens, and why the others do not."""

import numpy as np
import pytest

from tasks.rollouts.rejection import as_sampled, fault, reasons, select
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Observation, Question, Tree

QUESTION = Question("q", "toy", "question", ("1",))
NONE = np.zeros(0, np.float32)


def node(parent, kind, *tokens, outcome="", text=""):
    return Node(parent, kind, outcome, text, np.array(tokens, np.int32), NONE, NONE)


def row(outcome=Outcome.ANSWER, answer="1", score=1.0, faults=()):
    return {"outcome": outcome, "answer": answer, "score": score, "faults": list(faults)}


def answers(*turns):
    """A tree of one turn a leaf."""
    nodes = [node(-1, PROMPT, 9), *(node(0, TURN, *turn) for turn in turns)]
    return Tree(QUESTION, nodes, list(range(1, len(nodes))))


@pytest.mark.parametrize(
    ("scored", "world", "reason"),
    [
        (row(), False, ""),
        (row(answer="2", score=0.0), False, "wrong_answer"),
        (row(score=0.5), False, "wrong_answer"),
        (row(faults=["think"]), False, "broken_format"),
        (row(Outcome.NO_ANSWER, None, 0.0), False, "broken_format"),
        (row(Outcome.CUT, None, 0.0, ["answer"]), False, "cut"),
        (row(Outcome.OUT_OF_SPACE, None, 0.0), False, "cut"),
        (row(Outcome.TERMINATED, None, 1.0), True, ""),
        (row(Outcome.TERMINATED, None, 0.0), True, "wrong_answer"),
        (row(Outcome.WORLD_FAILED, None, 0.0), True, "world_failed"),
    ],
)
def test_only_right_and_sound_ones_are_kept(scored, world, reason):
    assert fault(scored, world=world)[0] == reason


def test_a_question_gives_different_traces_and_at_most_so_many():
    tree = answers((1, 2), (1, 2), (3,), (4,), (5,), (3,))
    rows = [row(), row(), row(score=0.0), row(), row(), row()]
    attempts = select(tree, rows, most=2)
    found = [attempt.reason for attempt in attempts]
    assert found == ["", "duplicate", "wrong_answer", "", "too_many", "too_many"]
    assert reasons(attempts) == {"": 2, "duplicate": 1, "wrong_answer": 1, "too_many": 2}


def test_traces_have_the_sampled_tokens_and_train_turns_alone():
    nodes = [
        node(-1, PROMPT, 1, 2),
        node(0, TURN, 3, 4, outcome=Outcome.PART, text="ca"),
        node(1, TURN, 5, outcome=Outcome.CALL, text="ll"),
        node(2, RESULT, 6, 7, text="seen"),
        node(3, TURN, 8, outcome=Outcome.ANSWER, text="done"),
    ]
    (attempt,) = select(Tree(QUESTION, nodes, [4]), [row()], most=1)
    (trace,) = as_sampled(attempt)
    assert trace["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trace["trained"].tolist() == [False, False, True, True, True, False, False, True]
    assert trace["text"] == "callseendone"
    assert (trace["question_id"], trace["flaw"]) == ("q", "none")


def test_each_fresh_prompt_is_a_trace_of_its_own():
    nodes = [
        node(-1, PROMPT, 1),
        node(0, TURN, 2, outcome=Outcome.CALL),
        node(1, PROMPT, 3, 4),
        node(2, TURN, 5, outcome=Outcome.TERMINATED),
    ]
    nodes[0] = Node(**{**vars(nodes[0]), "observation": Observation(Outcome.OK, "start")})
    (attempt,) = select(Tree(QUESTION, nodes, [3]), [row(Outcome.TERMINATED, None)], most=1)
    assert [trace["tokens"].tolist() for trace in as_sampled(attempt)] == [[1, 2], [3, 4, 5]]
    assert [trace["trained"].tolist() for trace in as_sampled(attempt)] == [
        [False, True],
        [False, False, True],
    ]
