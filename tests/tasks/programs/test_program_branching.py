"""Programs branch by being run again: what they had been answered is answered so once more."""

from collections import Counter

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


def test_branching_is_the_same_again(own, running):
    def told(lanes):
        trees, _ = running(in_tags).grow(
            "own/wanderer.py:one_at_a_time", 3, 6, "entropy", lanes=lanes
        )
        tokens = [node.tokens.tolist() for tree in trees for node in tree.nodes]
        return [(tree.leaves, tree.decisions) for tree in trees], tokens

    assert told(2) == told(18)


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
