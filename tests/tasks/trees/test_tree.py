"""Trees and their tables."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trees.outcomes import Outcome
from tasks.trees.tree import (
    PROMPT,
    RESULT,
    TURN,
    Node,
    Observation,
    Question,
    Tree,
    acts,
    common_prefix,
    join,
    observed_before,
    response,
    response_tokens,
    sampled,
    split,
    step_rewards,
)
from tests.trees import world_tree

# ---- one tree, by hand: two trajectories that part after a tool result


def node(parent: int, kind: str, text: str) -> Node:
    none = np.zeros(0, np.float32)
    return Node(parent, kind, "ok", text, np.zeros(1, np.int32), none, none)


TREE = Tree(
    Question("q", "toy", "prompt", ("1",)),
    [
        node(-1, PROMPT, "prompt"),
        node(0, TURN, "call "),
        node(1, RESULT, "result "),
        node(2, TURN, "first"),
        node(2, TURN, "second"),
    ],
    leaves=[4, 3],
)


def test_a_path_goes_from_the_root_to_the_leaf():
    assert TREE.path(4) == [0, 1, 2, 4]
    assert TREE.path(0) == [0]


def test_trajectories_in_leaf_order_share_nodes():
    second, first = TREE.trajectories()
    assert [response(second), response(first)] == ["call result second", "call result first"]
    assert [n.text for n in sampled(first)] == ["call ", "first"]
    assert all(a is b for a, b in zip(first[:3], second[:3], strict=True))


# ---- worlds


EPISODES = {"ABC": [0.0, -0.1, 1.0], "ABD": [0.0, -0.1, 0.0], "AE": [0.5, 0.0]}


def test_a_world_in_one_growing_dialogue():
    tree = world_tree(EPISODES)
    assert tree.of_world and not TREE.of_world
    assert [tree.contexts(leaf) for leaf in tree.leaves] == [[tree.path(n)] for n in tree.leaves]
    first, second, _ = tree.trajectories()
    assert response(first) == "to BYou see B.to CYou see C.to the end"
    assert response_tokens(first) == sum(len(node.tokens) for node in first[1:])
    assert all(a is b for a, b in zip(first[:3], second[:3], strict=True)), "the first step"


def test_a_world_with_a_fresh_prompt_a_step():
    tree = world_tree(EPISODES, fresh=True)
    assert [tree.contexts(leaf) for leaf in tree.leaves] == [
        [[0, 1], [2, 3], [4, 5]],
        [[0, 1], [2, 6], [7, 8]],
        [[0, 9], [10, 11]],
    ]
    assert [tree.parts(node) for node in range(len(tree.nodes))] == [[n] for n in range(12)]
    assert tree.steps(5) == [[n] for n in range(6)]
    first = next(tree.trajectories())
    assert response(first) == "to Bto Cto the end"
    assert response_tokens(first) == sum(len(node.tokens) for node in sampled(first))


@pytest.mark.parametrize("fresh", [False, True])
def test_steps_of_a_world(fresh):
    tree = world_tree(EPISODES, fresh)
    leaves = list(tree.trajectories())
    assert [observed_before(leaf) for leaf in leaves] == [list("ABC"), list("ABD"), list("AE")]
    assert [step_rewards(leaf) for leaf in leaves] == list(EPISODES.values())
    assert [len(acts(leaf)) for leaf in leaves] == [3, 3, 2]
    assert tree.acts() == ["ok"] * 7, "the shared step counts once"
    assert observed_before(next(TREE.trajectories())) == ["prompt", "result "]
    assert (acts(next(TREE.trajectories())), TREE.acts()) == (["ok"], ["ok"])


@pytest.mark.parametrize("fresh", [False, True])
def test_last_words_are_no_act_but_may_have_a_reward(fresh):
    tree = world_tree({"AB": [0.0, 0.7]}, fresh)
    tree.nodes[-1] = replace(tree.nodes[-1], outcome=Outcome.ANSWER)
    (leaf,) = tree.trajectories()
    assert (acts(leaf), tree.acts(), step_rewards(leaf)) == (["ok"], ["ok"], [0.0, 0.7])


def test_an_observation_is_of_the_last_part_of_a_turn():
    tree = world_tree({"AB": [0.25, 1.0]}, fresh=True)
    whole = tree.nodes[1]
    assert isinstance(whole.observation, Observation)
    nodes, last = split(tree.nodes, {1: [1]}, lambda tokens: "t" * len(tokens))
    assert [nodes[n].observation for n in (1, 2)] == [None, whole.observation]
    parted = Tree(tree.question, nodes, [last[leaf] for leaf in tree.leaves])
    assert parted.contexts(parted.leaves[0]) == [[0, 1, 2], [3, 4]]
    assert step_rewards(next(parted.trajectories())) == [0.25, 1.0]
    assert join(nodes[1:3]).observation == whole.observation


# ---- turns in parts


def turn_of(text: str, outcome: str = "answer", parent: int = 0) -> Node:
    """A turn that is written in bytes: a token is a byte."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return Node(parent, TURN, outcome, text, tokens, logprobs, -logprobs / 100)


def decode(tokens) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def same(ours: Node, theirs: Node) -> bool:
    return all(np.array_equal(value, getattr(theirs, name)) for name, value in vars(ours).items())


@given(st.data(), st.text("aé€😀 \N{REPLACEMENT CHARACTER}", min_size=1, max_size=12))
def test_parts_add_up_to_the_turn(data, text):
    whole = turn_of(text)
    cut = st.integers(1, len(whole.tokens))
    cuts = sorted(data.draw(st.sets(cut, max_size=4)) - {len(whole.tokens)})
    nodes, last = split([TREE.nodes[0], whole], {1: cuts}, decode)
    parts = nodes[1:]
    assert (len(parts), last) == (len(cuts) + 1, [0, len(cuts) + 1])
    assert [len(part.tokens) for part in parts] == np.diff([0, *cuts, len(whole.tokens)]).tolist()
    assert [part.parent for part in parts] == list(range(len(parts)))
    assert [part.outcome for part in parts] == [Outcome.PART] * len(cuts) + ["answer"]
    assert same(join(parts), whole)


def test_split_character_belongs_to_the_later_part():
    nodes, _ = split([TREE.nodes[0], turn_of("né!")], {1: [2]}, decode)
    assert [part.text for part in nodes[1:]] == ["n", "é!"]


def test_incomplete_bytes_stay_with_the_later_part():
    """Another trajectory may complete the character that the shared bytes begin."""
    broken = bytes([ord("n"), 0xC3, ord("!")])
    whole = turn_of("n\N{REPLACEMENT CHARACTER}!")
    tokens = np.frombuffer(broken, np.uint8).astype(np.int32)
    nodes, _ = split([TREE.nodes[0], replace(whole, tokens=tokens)], {1: [2]}, decode)
    assert [part.text for part in nodes[1:]] == ["n", "\N{REPLACEMENT CHARACTER}!"]


def test_split_keeps_parents_before_children():
    tree = [
        node(-1, PROMPT, "prompt"),
        turn_of("abc", "call"),
        turn_of("xyz"),
        node(1, RESULT, "result"),
        turn_of("end", parent=3),
    ]
    nodes, last = split(tree, {2: [1], 1: [1, 2]}, decode)
    assert last == [0, 3, 5, 6, 7]
    assert [n.text for n in nodes] == ["prompt", "a", "b", "c", "x", "yz", "result", "end"]
    assert [n.parent for n in nodes] == [-1, 0, 1, 2, 0, 4, 3, 6]
    assert nodes[6] is not tree[3]
    assert same(nodes[0], tree[0])


def test_trajectories_have_whole_turns():
    """prompt - ab(c - result - d | x)"""
    tree = Tree(
        TREE.question,
        [
            node(-1, PROMPT, "prompt"),
            turn_of("a", Outcome.PART, 0),
            turn_of("b", Outcome.PART, 1),
            turn_of("c", "call", 2),
            node(3, RESULT, "result"),
            turn_of("d", "answer", 4),
            turn_of("x", "cut", 2),
        ],
        leaves=[5, 6],
    )
    assert [tree.path(leaf) for leaf in tree.leaves] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6]]
    assert tree.steps(5) == [[0], [1, 2, 3], [4], [5]]
    first, second = tree.trajectories()
    assert [n.text for n in first] == ["prompt", "abc", "result", "d"]
    assert [(n.text, n.outcome) for n in second[1:]] == [("abx", "cut")]
    assert decode(first[1].tokens) == "abc"
    assert len(first[1].logprobs) == len(first[1].entropies) == 3
    assert (first[1].outcome, first[1].parent) == ("call", 0)
    assert response(second) == "abx"


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("", "a", 0), ("ab", "abc", 2), ("abc", "axc", 1), ("b", "a", 0)],
)
def test_common_prefix(first, second, length):
    assert common_prefix(first, second) == common_prefix(second, first) == length


# ---- tables
