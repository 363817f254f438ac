"""Programs branch by being run again: what they had been answered is answered so once more."""

from collections import Counter

import pytest

from params.schema.algorithms import Marks
from tests.tasks.programs.test_clients import answers, calling
from tests.tasks.programs.test_token_exactness import check, in_tags

FORGETFUL = """
from itertools import count
from pathlib import Path
from own.wanderer import ask

def numbered(name):
    # Episodes run at once: creating a file, unlike counting files, gives a number to one of them.
    for number in count():
        try:
            Path("{folder}", f"{{name}}-{{number}}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number

def run(task, endpoint):
    number = numbered(task.id)
    messages = list(task.messages)
    if number >= 2:
        messages[-1] = dict(messages[-1], content="Another question?")
    for _ in range(3):
        message = ask(endpoint, messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append(dict(role="tool", tool_call_id=call["id"], content="7"))
    return "7"
"""

BOTH = """
import random
from concurrent.futures import ThreadPoolExecutor
from own.wanderer import ask

def run(task, endpoint):
    asides = [[{"role": "user", "content": f"Check {n}."}] for n in range(3)]
    random.shuffle(asides)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda one: ask(endpoint, one), asides))
    ask(endpoint, task.messages)
    return "7"
"""


def thinking(seed):
    text, ended = in_tags(seed)
    return f"<think>{seed % 9}</think>{text}", ended


def tree_texts(tree, leaf):
    return "".join(tree.nodes[index].text for index in tree.path(leaf))


def check_sampled(trees, drawn):
    """Raise AssertionError unless each token that was drawn is trained once, behind its own."""
    turns = [node for tree in trees for node in tree.nodes if node.kind == "turn"]
    assert sum(len(node.tokens) for node in turns) == sum(len(turn) for _, turn in drawn)
    assert all(len(node.tokens) == len(node.logprobs) == len(node.entropies) for node in turns)
    contexts = [
        [token for index in context for token in tree.nodes[index].tokens.tolist()]
        for tree in trees
        for leaf in tree.leaves
        for context in tree.contexts(leaf)
    ]
    for before, turn in drawn:
        sampled = [*before, *turn]
        assert any(context[: len(sampled)] == sampled for context in contexts)


def test_branches_share_what_was_sampled(own, running):
    asking = running(calling)
    trees, counts = asking.grow("own/wanderer.py:one_at_a_time", 4, 8, "entropy", lanes=32)
    for tree in trees:
        assert len(tree.leaves) == len(set(tree.leaves)) == 8
        added = [decision for decision in tree.decisions if decision.added]
        assert sum(decision.added for decision in added) <= 6
        for decision in added:
            children = [node for node in tree.nodes if node.parent == decision.node]
            assert tree.nodes[decision.node].kind == "result"
            assert len(children) == 1 + decision.added, "the first way on, and the branches"
            assert decision.rise > 0
    assert any(decision.added for tree in trees for decision in tree.decisions)
    check_shared(trees, asking.engine.drawn)
    assert counts.requests > len(asking.engine.drawn), "recorded answers are not sampled again"


def check_shared(trees, drawn):
    """Raise AssertionError unless each sampled turn is in the trees once, behind its own tokens."""
    turns = sum(node.kind == "turn" for tree in trees for node in tree.nodes)
    assert turns == len(drawn)
    check(trees, drawn)


def test_branches_at_marks_go_on_inside_turns(own, running):
    asking = running(thinking)
    trees, _ = asking.grow("own/wanderer.py:one_at_a_time", 4, 8, "marks", lanes=32)
    inside = 0
    for tree in trees:
        assert len(set(tree.leaves)) == 8
        assert len(tree.decisions) == 2, "each of the first two episodes branches at one mark"
        for decision in tree.decisions:
            node = tree.nodes[decision.node]
            assert decision.added == 2
            assert sum(other.parent == decision.node for other in tree.nodes) == 3
            inside += node.outcome == "part"
            assert node.outcome != "part" or node.text == "<think>"
    assert inside
    check_sampled(trees, asking.engine.drawn)


def test_a_call_that_began_before_the_branch_ends_its_turn(own, running):
    """The engine sees no stop string that began in what a branch is given."""
    ends = iter([("<think>a</th", True)] * 2)
    asking = running(lambda seed: next(ends, ("ink><answer>7</answer> more", False)))
    trees, _ = asking.grow("own/wanderer.py:once", 1, 4, "marks", marks=Marks(kind="every_token"))
    first, *_, branch = [tree_texts(trees[0], leaf) for leaf in trees[0].leaves]
    assert first.endswith("</th<|end|>")
    assert branch.endswith("</answer>"), branch


def test_branches_at_random_begin_after_results(own, running):
    asking = running(in_tags)
    trees, _ = asking.grow("own/wanderer.py:one_at_a_time", 4, 8, "random", lanes=32)
    for tree in trees:
        assert len(set(tree.leaves)) == 8
        assert sum(decision.added for decision in tree.decisions) in (0, 6)
        assert all(tree.nodes[each.node].kind != "turn" for each in tree.decisions)
    assert any(tree.decisions for tree in trees)
    check_shared(trees, asking.engine.drawn)


@pytest.mark.parametrize("branching", ["entropy", "marks", "random"])
def test_branching_is_the_same_again(own, running, branching):
    def told(lanes):
        trees, _ = running(in_tags).grow(
            "own/wanderer.py:one_at_a_time", 3, 6, branching, lanes=lanes
        )
        tokens = [node.tokens.tolist() for tree in trees for node in tree.nodes]
        return [(tree.leaves, tree.decisions) for tree in trees], tokens

    assert told(2) == told(18)


def test_requests_of_one_moment_may_change_their_order(own, running):
    (own / "both.py").write_text(BOTH)
    trees, _ = running(in_tags).grow("own/both.py:run", 4, 4, "random", lanes=2)
    outcomes = Counter(tree.nodes[leaf].outcome for tree in trees for leaf in tree.leaves)
    assert outcomes == {"answer": 16}
    assert all(tree.decisions for tree in trees)


SEVERAL = """
from own.wanderer import ask

def run(task, endpoint):
    messages = list(task.messages)
    for number in range(2):
        messages += [ask(endpoint, messages, n=2), {"role": "user", "content": f"On {number}."}]
    return "7"
"""
# Two agents side by side, of which sometimes one and sometimes the other goes on first.
SIDE_BY_SIDE = """
import random, time
from concurrent.futures import ThreadPoolExecutor
from own.wanderer import ask

def one(endpoint, messages):
    for number in range(2):
        time.sleep(0.02 * random.random())
        messages = [*messages, ask(endpoint, messages), {"role": "user", "content": f"{number}"}]

def run(task, endpoint):
    begun = [[*task.messages, {"role": "user", "content": name}] for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: one(endpoint, each), begun))
    return "7"
"""


@pytest.mark.parametrize("branching", ["entropy", "marks", "random"])
@pytest.mark.parametrize("code", [SEVERAL, SIDE_BY_SIDE], ids=["several choices", "side by side"])
def test_branches_of_programs_with_many_requests(own, running, code, branching):
    (own / "asking.py").write_text(code)
    trees, _ = running(thinking).grow("own/asking.py:run", 4, 8, branching, lanes=32)
    outcomes = Counter(tree.nodes[leaf].outcome for tree in trees for leaf in tree.leaves)
    assert outcomes == {"answer": 32}


def test_a_program_that_asks_something_else_is_left_out(own, running, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    (own / "forgetful.py").write_text(FORGETFUL.format(folder=seen))
    asking = running(calling)
    trees, _ = asking.grow("own/forgetful.py:run", 6, 4, "entropy")
    outcomes = Counter(tree.nodes[leaf].outcome for tree in trees for leaf in tree.leaves)
    assert outcomes["replay_differs"] == sum(d.added for tree in trees for d in tree.decisions) > 0
    assert outcomes.total() == 24
    check_shared(trees, asking.engine.drawn)
    assert "7" in answers(trees)
