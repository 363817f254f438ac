"""The gateway before the official client of OpenAI's protocol."""

import time

import pytest

from tests.tasks.programs.test_token_exactness import check, in_tags


def answers(trees):
    """Return what the program has returned in each leaf, or how it has failed."""
    leaves = [tree.nodes[leaf] for tree in trees for leaf in tree.leaves]
    return [leaf.observation.info["program"].get("answer", leaf) for leaf in leaves]


def calling(seed):
    return '<add>{"a": 3, "b": 4}</add>', False


def answering(seed):
    return f"<think>I know.</think><answer>\\boxed{{{seed % 7}}}</answer>", False


def test_a_dialogue_goes_on_from_what_was_sampled(own, running):
    asking = running(calling)
    trees, counts = asking.grow("own/client.py:run", leaves=3)
    assert answers(trees) == ["tool_calls False; tool_calls True"] * 3
    assert (counts.rounds, asking.engine.batches) == (2, [3, 3])
    (tree,) = trees
    kinds = [[tree.nodes[index].kind for index in tree.path(leaf)] for leaf in tree.leaves]
    assert kinds == [["prompt", "turn", "result", "turn"]] * 3
    first = tree.nodes[tree.path(tree.leaves[0])[1]]
    assert [(each.tool, each.outcome) for each in first.results] == [("add", "ok")]


def test_streamed_answers_are_whole(own, running):
    asking = running(calling)
    trees, _ = asking.grow("own/client.py:streaming")
    assert answers(trees) == ['add{"a": 3, "b": 4} True']


def test_calls_that_were_not_offered_are_text(own, running):
    (own / "plain.py").write_text(
        "from own.wanderer import ask\n"
        "def run(task, endpoint):\n"
        "    message = ask(endpoint, task.messages, tools=None)\n"
        "    assert 'tool_calls' not in message\n"
        "    return message['content']\n"
    )
    trees, _ = running(calling).grow("own/plain.py:run")
    assert answers(trees) == ['<add>{"a": 3, "b": 4}</add>']


def test_calls_keep_names_of_their_own_where_messages_are_dropped(own, running):
    (own / "window.py").write_text(
        "from own.wanderer import ask\n"
        "def run(task, endpoint):\n"
        "    turns, names = [], []\n"
        "    for _ in range(5):\n"
        "        message = ask(endpoint, [*task.messages, *turns[-4:]])\n"
        "        (call,) = message['tool_calls']\n"
        "        names.append(call['id'])\n"
        "        result = {'role': 'tool', 'tool_call_id': call['id'], 'content': '7'}\n"
        "        turns += [message, result]\n"
        "    return ' '.join(names)\n"
    )
    trees, _ = running(calling).grow("own/window.py:run")
    assert answers(trees) == ["call_0 call_1 call_2 call_3 call_4"]


def test_several_answers_and_equal_requests(own, running):
    def slowly(seed):
        time.sleep(0.3)
        return answering(seed)

    asking = running(slowly)
    trees, _ = asking.grow("own/client.py:several")
    (told,) = answers(trees)
    assert told.startswith("3 True True"), "equal requests at one time are one, later ones are new"
    assert int(told.split()[-1]) > 1, "each answer has a seed of its own"
    check(trees, asking.engine.drawn)


def test_the_newer_protocol(own, running):
    asking = running(in_tags)
    trees, _ = asking.grow("own/client.py:responses", leaves=8)
    assert all(answer is None or isinstance(answer, str) for answer in answers(trees))
    check(trees, asking.engine.drawn)
    kinds = [
        tree.nodes[index].kind
        for tree in trees
        for leaf in tree.leaves
        for index in tree.path(leaf)
    ]
    assert "result" in kinds and kinds.count("prompt") == 8, "calls go on from what was sampled"


def test_what_would_change_the_draw_is_refused(own, running):
    trees, _ = running(answering).grow("own/client.py:refused")
    (told,) = answers(trees)
    *faults, other, model = told.split(" | ")
    assert [fault[-3:] for fault in faults] == ["400"] * 4
    assert all(
        name in told for name in ("temperature is 0.2", "seed is 3", "tool_choice", "nonsense")
    )
    assert (other, model) == ("AuthenticationError", "policy")


def test_what_asks_for_nothing_is_taken(own, running):
    trees, _ = running(lambda seed: ("abe", True)).grow("own/client.py:neutral", ignored=("seed",))
    assert answers(trees) == ["3 stop"]


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_lanes_and_speed_change_nothing(own, running, lanes):
    """Trees are the same however many episodes run side by side, and whoever is faster."""

    def told(some):
        asking = running(in_tags)
        trees, counts = asking.grow(
            "own/wanderer.py:one_at_a_time", questions=6, leaves=2, lanes=some
        )
        assert counts.early_rounds == 0
        nodes = [node for tree in trees for node in tree.nodes]
        return [(node.kind, node.outcome, node.text, node.tokens.tolist()) for node in nodes]

    assert told(lanes) == told(12)
