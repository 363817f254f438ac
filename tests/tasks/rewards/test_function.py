"""A user's function as a part of the reward, and as a scorer: in processes of their own."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.extensions.checks import number_fault, within
from tasks.rewards import function
from tasks.rewards.contract import Ending
from tasks.rewards.function import read, written
from tasks.rewards.reward_parts import parts_of
from tasks.rewards.scoring import score_trees
from tasks.scorers import _measures_fault
from tasks.trees.tree import PROMPT, TURN, Message, Node, Observation, Question, Tree
from tests.reward_parts import listed

QUESTION = Question("train-7", "toy", "?", ("408",), before=(Message("system", "Be brief."),))
RIGHT = "<think>t</think><answer>\\boxed{408}</answer>"
PARTS = """
import time


def brevity(ending):
    return max(0.0, 1 - len(ending.text) / 100)


def looks(ending):
    question = ending.question
    assert question.before[0].content == "Be brief." and question.answers == ("408",)
    assert ending.trajectory[-1].outcome == "answer" and ending.sound and ending.score == 1
    return ending.success and ending.leaf == 0


def too_much(ending):
    return 1.5


def not_a_number(ending):
    return float("nan")


def a_text(ending):
    return "0.5"


def an_array(ending):
    import numpy

    return numpy.float32(0.25)


def a_comparison(ending):
    import numpy

    return numpy.isclose(ending.score, 1)


def raises(ending):
    raise KeyError("lost")


def hangs(ending):
    time.sleep(60)


def two(ending, more):
    return 1.0


class Brief:
    pass


def close(answer, accepted):
    return {"score": float(answer in accepted), "length": len(answer)}


def compared(answer, accepted):
    import numpy

    return numpy.float32(408) == float(answer)


def half(answer, accepted):
    return 0.5


half.graded = True


def beyond(answer, accepted):
    return 2


def fails(answer, accepted):
    return 1 / 0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder ``own/`` with PARTS, below the working directory; a part has one process."""
    monkeypatch.setattr(function, "WORKERS", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own").mkdir()
    Path("own/parts_of_mine.py").write_text(PARTS)
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        monkeypatch.delitem(sys.modules, name)
    return "own/parts_of_mine.py"


def tree(*texts, question=QUESTION):
    nothing = np.zeros(0, np.float32)
    nodes = [Node(-1, PROMPT, "", "?", np.zeros(1, np.int32), nothing, nothing)]
    one = np.zeros(1, np.float32)
    nodes += [Node(0, TURN, "answer", text, np.zeros(1, np.int32), one, one) for text in texts]
    return Tree(question, nodes, [*range(1, len(nodes))])


def test_a_users_function_is_a_part_like_any_other(own, monkeypatch):
    monkeypatch.setattr(function, "WORKERS", 2)
    settings = listed(
        {"answer": {}},
        {f"{own}:brevity": {"weight": 0.5}},
        {f"{own}:an_array": {"weight": -2.0}},
        {f"{own}:a_comparison": {}},
    )
    rows = score_trees([tree(RIGHT, "x" * 40), tree("x" * 200)], settings)
    assert [row["parts"]["brevity"] for row in rows] == [
        0.5 * (1 - len(RIGHT) / 100),
        pytest.approx(0.3),
        0.0,
    ]
    assert {row["parts"]["an_array"] for row in rows} == {-0.5}
    assert [row["parts"]["a_comparison"] for row in rows] == [1.0, 0.0, 0.0]


def test_it_sees_the_whole_ending(own):
    (row,) = score_trees([tree(RIGHT)], listed({f"{own}:looks": {}}))
    assert row["reward"] == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_much", ["the value is 1.5, outside [0, 1]", "'low' and 'high'"]),
        ("not_a_number", ["returned nan", "not finite"]),
        ("a_text", ["returned '0.5'", "is of type str, and no number"]),
        ("raises", ["raised", "KeyError: 'lost'"]),
        ("hangs", ["timeout", "no answer within 0.5 seconds"]),
    ],
)
def test_a_function_that_fails_stops_the_run(own, name, words):
    settings = listed({f"{own}:{name}": {"seconds": 0.5}})
    with pytest.raises(ValueError, match=f"{own}:{name}, question train-7, leaf 0: ") as caught:
        score_trees([tree(RIGHT, RIGHT)], settings)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_declared_range_is_checked_before_the_weight(own):
    (row,) = score_trees([tree(RIGHT)], listed({f"{own}:too_much": {"high": 2.0, "weight": 10.0}}))
    assert row["reward"] == 15.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", ["takes other arguments than ending", "def brevity(ending)"]),
        ("Brief", ["is no function", "def brevity(ending)"]),
        ("lost", ["holds no 'lost'", "brevity"]),
    ],
)
def test_what_is_no_such_function_is_refused_before_any_work(own, name, words):
    typed, (fault,) = parts_of([{f"{own}:{name}": {}}], "mine.yaml")
    assert not typed and fault.startswith("mine.yaml: 'reinforce.reward.0': ")
    assert [word for word in words if word not in fault] == []


def test_an_ending_is_read_as_it_was_written():
    observation = Observation("ok", "seen", 0.5, actions=("left",), info={"score": 1})
    nothing, none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    nodes = [Node(-1, PROMPT, "", "?", nothing, none, none, observation)]
    ending = Ending(QUESTION, 3, nodes, "t", None, ("think",), {"score": 1.0}, frozenset("a"), True)
    found = read(written(ending))
    assert found.question == QUESTION and found.trajectory[0].observation == observation
    assert (found.leaf, found.tools, found.sound, found.world) == (3, frozenset("a"), False, True)


# ---------------------------------------------------------------- a user's scorer


def test_a_users_scorer_compares_answers(own):
    question = Question("train-7", "toy", "?", ("408",), f"{own}:close")
    rows = score_trees([tree(RIGHT, "x", question=question)], listed({"answer": {}}))
    assert rows[0]["breakdown"] == {"score": 1.0, "length": 3.0}
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert rows[0]["scorer"] == f"{own}:close"
    question = replace(question, scorer=f"{own}:compared")
    rows = score_trees([tree(RIGHT, question=question)], listed({"answer": {}}))
    assert rows[0]["breakdown"] == {"score": 1.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beyond", ["it returned 2", "score is 2, outside [0, 1]"]),
        ("fails", ["raised", "ZeroDivisionError"]),
        ("brevity", ["takes other arguments than answer, accepted"]),
    ],
)
def test_a_scorer_that_fails_stops_with_the_question(own, name, words):
    question = Question("train-7", "toy", "?", ("408",), f"{own}:{name}")
    with pytest.raises(ValueError, match="question train-7: ") as caught:
        score_trees([tree(RIGHT, question=question)], listed({"answer": {}}))
    assert [word for word in (name, *words) if word not in str(caught.value)] == []


def test_a_scorer_says_that_it_is_graded(own):
    from tasks.scorers import is_graded, scorer_faults

    assert is_graded(f"{own}:half") and not is_graded(f"{own}:close") and not is_graded("lost")
    chosen = {"row a": ["exact", f"{own}:half"], "row b": ["rouge", f"{own}:lost"]}
    first, second = scorer_faults(chosen)
    assert first.startswith("row b: nothing in tasks/scorers/ is called 'rouge'")
    assert second.startswith("row b: own/parts_of_mine.py holds no 'lost'")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (1.0000000000000002, ""),
        (-1e-12, ""),
        (1.00000001, "is 1.00000001, outside [0, 1]"),
        (2, "is 2, outside [0, 1]"),
    ],
)
def test_rounding_passes_no_bound(value, fault):
    assert number_fault(value, 0, 1) == fault
    assert fault or within(value, 0, 1) in (0.0, 1.0)


@pytest.mark.parametrize("name", ["not_asked", "timeout", "killed"])
def test_measures_that_mean_something_here_are_refused(name):
    assert name in _measures_fault({"score": 1.0, name: 0.0})
    assert _measures_fault({"score": 1.0, "mine": 0.0}) == ""
