"""Trees grown by a scripted engine, where every decision can be recomputed, and by the real one."""

import copy
import random
from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import count, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from params.schema.agent import Dialogue
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.engines import Sample
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.policy.tiny import END as END_TOKEN
from tasks.rollouts.branching import branching_points
from tasks.rollouts.rounds import grow
from tasks.trees import dialogue as talk
from tasks.trees import marks as segment
from tasks.trees.metrics import window_entropy
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome, StopReason
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import AFTER_RESULT, AT_MARK, PROMPT, RESULT, TURN, Observation, Question
from tests.agents import setting_of
from tests.examples import examples
from tests.resting import grown_in_parts

QUESTIONS = [Question(name, "toy", f"{name}?", ("1",)) for name in ("apples", "baskets", "cows")]
CALL, MISSING = "<think>a</think><python>7</python>", "<search>7</search>"
ANSWER = "<answer>\\boxed{7}</answer>"


class Scripted:
    """An engine that writes what ``write(context, seed)`` says: a text, and its entropies in turn.

    It is a session of its own, and watches that handles are opened, used and closed properly.
    """

    def __init__(self, tokenizer, write):
        self.tokenizer, self.write = tokenizer, write
        self.numbers, self.handles = count(), set()
        self.requests, self.rooms = [], []

    def replicas(self, most):
        return [self]

    def release(self):
        pass

    @contextmanager
    def session(self, paths, context, temperature, top_p, stop):
        self.paths, self.context, self.stop = paths, context, stop
        self.rooms.append(paths)
        yield self
        assert not self.handles, "a path was left open"

    def open(self):
        self.handles.add(handle := next(self.numbers))
        assert len(self.handles) <= self.paths
        return handle

    def fork(self, handle):
        assert handle in self.handles, "its parent's row is gone"
        return self.open()

    def close(self, handle):
        self.handles.remove(handle)

    def sample(self, requests):
        assert {request.handle for request in requests} <= self.handles
        self.requests += requests
        return [self._turn(request) for request in requests]

    def _turn(self, request):
        assert request.max_tokens > 0
        assert len(request.tokens) + request.max_tokens <= self.context
        text, entropies = self.write(self.tokenizer.decode(request.tokens), request.seed)
        tokens = talk.encode(self.tokenizer, text)  # what a BREAK parts is tokens of its own
        text = text.replace(talk.BREAK, "")
        stopped = StopReason.END if text.endswith(END_TOKEN) else StopReason.STOP
        if len(tokens) > request.max_tokens or not text.endswith((*self.stop, END_TOKEN)):
            tokens, stopped = tokens[: request.max_tokens], StopReason.LENGTH
        entropies = np.resize(np.array(entropies, np.float32), len(tokens))
        return Sample(tokens, -entropies, entropies, stopped)


def budget(**changes) -> Rollout:
    usual: dict[str, Any] = {
        "leaves": 6,
        "initial": 2,
        "branch": 2,
        "marks_per_rollout": 1,
        "entropy_window": 3,
        "base_probability": 0.5,
        "entropy_weight": 0.2,
        "threshold": 0.5,
        "draw": False,
        "temperature": 1.0,
        "rows": 64,
    }
    return Rollout(**usual | changes)


def layout(**changes) -> Dialogue:
    usual: dict[str, Any] = {
        "system": "",
        "turn_tokens": 40,
        "result_tokens": 10,
        "response_tokens": 150,
        "tool_calls": 3,
    }
    return Dialogue(**usual | changes)


def echo(arguments):
    return [Observation("ok" if "7" in argument else "error", argument) for argument in arguments]


TOOLS = {"python": echo}
MARKS = {
    "none": Marks(kind="none"),
    "every_token": Marks(kind="every_token"),
    "tool_call": Marks(kind="tool_call"),
    "paragraph": Marks(kind="paragraph"),
    "think": Marks(kind="think"),
    "quantile": Marks(kind="entropy", quantile=0.6),
    "threshold": Marks(kind="entropy", threshold=0.5),
    "step": Marks(kind="step"),
}


@pytest.fixture
def engines():
    """The scripted engines of a test."""
    return []


@pytest.fixture
def rollout(tokenizer, engines):
    """Trees of the questions under a script."""

    def run(
        write,
        questions=QUESTIONS[:1],
        seed="0/0",
        dialogue=None,
        tools=TOOLS,
        branching="entropy",
        marks="none",
        **changes,
    ):
        engines.append(Scripted(tokenizer, write))
        room = dialogue or layout()
        tree_budget, answer = budget(**changes), tools
        setting = setting_of(
            tokenizer, room, tree_budget, answer, seed, branching, MARKS.get(marks, marks)
        )
        return grow(questions, engines[-1], setting)

    return run


def results_in(context: str) -> int:
    return context.count("<result>")


def calls_then_answer(calls, entropies=(0.5,)):
    """A script: so many calls, then the answer. ``entropies[i]`` are of the turn after i results.

    Each entry is a number, or what the turn's tokens take in turn.
    """

    def write(context, seed):
        done = results_in(context)
        entropy = entropies[min(done, len(entropies) - 1)]
        return CALL if done < calls else ANSWER, entropy

    return write


def shape(tree):
    """Everything of a tree but its numbers."""
    nodes = [(node.parent, node.kind, node.outcome, node.text) for node in tree.nodes]
    return nodes, tree.leaves


def whole(tree):
    """Everything of a tree, comparable."""
    numbers = [(n.tokens.tolist(), n.logprobs.tolist(), n.entropies.tolist()) for n in tree.nodes]
    return shape(tree), numbers, tree.decisions


# ---- what holds for every tree


def check_tree(tree, rollout: Rollout, dialogue: Dialogue, check=None):
    assert len(tree.leaves) == len(set(tree.leaves)) == rollout.leaves
    reached = {index for leaf in tree.leaves for index in tree.path(leaf)}
    assert reached == set(range(len(tree.nodes))), "a node belongs to no trajectory"
    for node in tree.nodes:
        length = len(node.tokens) if node.kind == TURN else 0
        assert len(node.logprobs) == len(node.entropies) == length
        assert node.outcome in (*TURN_OUTCOMES, Outcome.PART) or node.kind != TURN
    assert all(node.parent < index for index, node in enumerate(tree.nodes))
    for trajectory in tree.trajectories():
        check_trajectory(trajectory, dialogue)
    (check or check_decisions)(tree, rollout)


def check_trajectory(trajectory, dialogue: Dialogue):
    """Prompt, then turns and results in alternation; only the last turn does not call."""
    kinds = [node.kind for node in trajectory]
    assert kinds == [PROMPT, TURN, *[RESULT, TURN] * (len(kinds) // 2 - 1)]
    turns, results = trajectory[1::2], trajectory[2::2]
    assert [turn.outcome == Outcome.CALL for turn in turns] == [True] * len(results) + [False]
    assert len(results) <= dialogue.tool_calls
    assert all(1 <= len(turn.tokens) <= dialogue.turn_tokens for turn in turns)
    assert all(len(result.tokens) <= dialogue.result_tokens for result in results)
    assert sum(len(node.tokens) for node in trajectory[1:]) <= dialogue.response_tokens


def check_decisions(tree, rollout: Rollout):
    """Replay the decisions in order: entropies, probability, and who got what of the budget."""
    assert sorted(d.node for d in tree.decisions) == [
        index for index, node in enumerate(tree.nodes) if node.kind == RESULT
    ], "each result is judged once"
    started = rollout.initial
    branches = sum(decision.added for decision in tree.decisions)
    for decision in tree.decisions:
        if decision.path >= rollout.initial + branches:
            started = rollout.leaves  # a rollout that filled up the budget
        path = tree.path(tree.leaves[decision.path])
        judged = tree.nodes[path[path.index(decision.node) + 1]]
        first = tree.nodes[path[1]]
        window = rollout.entropy_window
        assert decision.initial_entropy == window_entropy(first.entropies, window)
        assert decision.entropy == window_entropy(judged.entropies, window)
        assert decision.kind == AFTER_RESULT
        assert decision.position == length_of(tree, decision.node)
        assert decision.rise == decision.entropy - decision.initial_entropy
        expected = rollout.base_probability + rollout.entropy_weight * decision.rise
        assert decision.probability == pytest.approx(expected)
        if not rollout.draw:
            assert decision.wanted == (decision.probability > rollout.threshold)
        left = rollout.leaves - started
        assert decision.added == (min(rollout.branch, left) if decision.wanted else 0)
        started += decision.added
    children = Counter(node.parent for node in tree.nodes)
    assert children[0] == rollout.leaves - branches
    for decision in tree.decisions:
        assert children[decision.node] == 1 + decision.added


def length_of(tree, node: int) -> int:
    """Tokens from the prompt to the end of a node."""
    return sum(len(tree.nodes[index].tokens) for index in tree.path(node))


def check_marks(tree, rollout: Rollout, tokenizer, marks: Marks):
    """Replay the marks in path order: where they are, and who got what of the budget."""
    expected = []
    left = rollout.leaves - rollout.initial
    trajectories = list(tree.trajectories())
    for path, trajectory in enumerate(trajectories[: rollout.initial]):
        ends = segment.ends(marks, trajectory, segment.token_texts(tokenizer, len(tokenizer)))
        for point in branching_points(trajectory, ends, rollout.marks_per_rollout):
            added = min(rollout.branch, left)
            left -= added
            expected.append((path, point.position, added))
            window = point.entropies[: rollout.entropy_window]
            assert tree.decisions[len(expected) - 1].entropy == window_entropy(window, 99)
    assert [(d.path, d.position, d.added) for d in tree.decisions] == expected
    check_branches(tree, rollout, trajectories)


def check_branches(tree, rollout: Rollout, trajectories):
    """Branches share all tokens before their mark; nothing else is shared but the prompt."""
    branch = rollout.initial
    children = Counter(node.parent for node in tree.nodes)
    assert children.pop(0) == rollout.leaves - sum(d.added for d in tree.decisions)
    for decision in tree.decisions:
        assert (decision.kind, decision.wanted, decision.probability) == (AT_MARK, True, None)
        parent = tree.leaves[decision.path]
        assert decision.node in tree.path(parent)
        if decision.added:
            assert length_of(tree, decision.node) == decision.position
            assert children.pop(decision.node) == 1 + decision.added
        for leaf in tree.leaves[branch : branch + decision.added]:
            assert decision.node in tree.path(leaf)
            np.testing.assert_array_equal(
                flat(tree, leaf)[: decision.position], flat(tree, parent)[: decision.position]
            )
        branch += decision.added
    assert set(children.values()) <= {1}, "a branch has branched"


def flat(tree, leaf: int):
    return np.concatenate([tree.nodes[index].tokens for index in tree.path(leaf)])


budgets = st.builds(
    lambda extra, initial, **rest: budget(leaves=initial + extra, initial=initial, **rest),
    extra=st.integers(0, 7),
    initial=st.integers(1, 6),
    branch=st.integers(0, 4),
    marks_per_rollout=st.integers(1, 4),
    entropy_window=st.integers(1, 30),
    entropy_weight=st.floats(-1, 2),
    threshold=st.floats(0.2, 0.8),
    draw=st.booleans(),
    rows=st.integers(13, 64),
)
layouts = st.builds(
    layout,
    turn_tokens=st.integers(4, 30),
    result_tokens=st.integers(5, 12),
    response_tokens=st.integers(1, 120),
    tool_calls=st.integers(0, 4),
)


def wander(eagerness: float):
    """A script that does anything; ``eagerness`` is how often it calls a tool."""
    others = [ANSWER, "</python>", "so it is" + END_TOKEN, "and so on " * 20]
    thoughts = ["hm ", "\n\n", "\n", "né😀 "]

    def write(context, seed):
        dice = random.Random(seed)
        words = "".join(dice.choice(thoughts) for _ in range(dice.randrange(4)))
        thought = f"<think>{words}</think>"
        call = dice.choice([CALL, "<python>8</python>", "<python>77777777777</python>", MISSING])
        text = call if dice.random() < eagerness else dice.choice(others)
        return thought + text, [dice.random() for _ in range(11)]

    return write


@examples(150)
@given(
    rollout_=budgets,
    dialogue=layouts,
    eagerness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9).map(str),
)
def test_trees_have_leaves_and_reasons(tokenizer, rollout_, dialogue, eagerness, seed):
    engine = Scripted(tokenizer, wander(eagerness))
    setting = setting_of(tokenizer, dialogue, rollout_, TOOLS, seed, "entropy")
    trees = grow(QUESTIONS, engine, setting)
    assert [tree.question for tree in trees] == QUESTIONS
    for tree in trees:
        check_tree(tree, rollout_, dialogue)
    assert all(paths <= rollout_.rows for paths in engine.rooms)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds), "two turns draw the same numbers"


@examples(150)
@given(
    rollout_=budgets,
    dialogue=layouts,
    eagerness=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 9).map(str),
    kind=st.sampled_from(list(MARKS)),
)
def test_trees_branch_at_first_marks(tokenizer, rollout_, dialogue, eagerness, seed, kind):
    engine = Scripted(tokenizer, wander(eagerness))
    setting = setting_of(tokenizer, dialogue, rollout_, TOOLS, seed, "marks", MARKS[kind])
    for tree in grow(QUESTIONS, engine, setting):
        check = partial(check_marks, tokenizer=tokenizer, marks=MARKS[kind])
        check_tree(tree, rollout_, dialogue, check)
        for trajectory in tree.trajectories():
            for turn in trajectory[1::2]:
                assert turn.text == tokenizer.decode(turn.tokens)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds), "two turns draw the same numbers"


@examples(30)
@given(rollout_=budgets, seed=st.integers(0, 9).map(str))
def test_initial_and_branch_need_branching(tokenizer, rollout_, seed):
    """As if all leaves were initial ones, and no path got a branch."""

    def trees(rollout, branching):
        setting = setting_of(tokenizer, layout(), rollout, TOOLS, seed, branching)
        return grow(QUESTIONS, Scripted(tokenizer, wander(0.7)), setting)

    alone = rollout_.model_copy(update={"initial": rollout_.leaves, "branch": 0})
    for tree, expected in zip(trees(rollout_, "none"), trees(alone, "entropy"), strict=True):
        assert whole(tree) == whole(expected)
        check_tree(tree, alone, layout())


# ---- branching, by hand


def test_branches_start_after_the_result(rollout, engines):
    """Prompt, call, result; then the parent's turn, and one of each of its two branches."""
    (tree,) = rollout(calls_then_answer(1, (0.2, 0.9)), initial=1, leaves=3)
    kinds = [(node.parent, node.kind) for node in tree.nodes]
    assert kinds == [(-1, PROMPT), (0, TURN), (1, RESULT), (2, TURN), (2, TURN), (2, TURN)]
    assert tree.leaves == [3, 4, 5]
    result = tree.nodes[2]
    assert (result.outcome, result.text) == ("ok", "<result>7</result>")
    assert len(result.logprobs) == len(result.entropies) == 0
    contexts = [request.tokens.tolist() for request in engines[0].requests]
    assert (
        contexts[1]
        == contexts[2]
        == contexts[3]
        == [token for node in tree.nodes[:3] for token in node.tokens]
    )
    (decision,) = tree.decisions
    assert (decision.node, decision.path, decision.added) == (2, 0, 2)
    assert decision.probability == pytest.approx(0.5 + 0.2 * (0.9 - 0.2))


def test_only_the_first_tokens_after_the_result_count(rollout):
    """The script's entropies repeat, so that other windows would have other means."""
    (tree,) = rollout(
        calls_then_answer(1, ([0.1, 0.2, 0.9], [0.4, 0.6, 0.0, 0.0])),
        initial=1,
        leaves=2,
        entropy_window=2,
    )
    (decision,) = tree.decisions
    assert decision.initial_entropy == pytest.approx(0.15)
    assert decision.entropy == pytest.approx(0.5)


def test_a_turn_without_more_entropy_does_not_branch(rollout):
    (tree,) = rollout(calls_then_answer(2, (0.5, 0.5, 0.4)), initial=1, leaves=3)
    assert [decision.added for decision in tree.decisions[:2]] == [0, 0]
    assert [node.parent for node in tree.nodes].count(0) == 3  # filled from the prompt


def test_a_branch_inherits_its_parents_initial_entropy(rollout):
    """After one result entropy rises and the path branches; a later, smaller rise over the first
    turn is still one. The branches' own first turns (0.9) would hide it."""
    (tree,) = rollout(calls_then_answer(2, (0.2, 0.9, 0.3)), initial=1, leaves=9)
    for decision in tree.decisions:
        assert decision.initial_entropy == pytest.approx(0.2)
    later = [d for d in tree.decisions if d.entropy < 0.5]
    assert [d.added for d in later[:3]] == [2, 2, 2]


def test_a_branchs_own_first_turn_is_not_judged(rollout):
    """Parent and two branches each call once more: one decision at the first result, then three."""
    (tree,) = rollout(calls_then_answer(2, (0.2, 0.9, 0.1)), initial=1, leaves=3)
    assert [decision.path for decision in tree.decisions] == [0, 0, 1, 2]
    assert len({decision.node for decision in tree.decisions}) == 4


def test_path_order_decides_the_last_of_the_budget(rollout):
    (tree,) = rollout(calls_then_answer(1, (0.2, 0.9)), initial=3, leaves=6, branch=2)
    assert [(d.path, d.added) for d in tree.decisions] == [(0, 2), (1, 1), (2, 0)]


def test_fresh_rollouts_fill_what_branching_left(rollout):
    (tree,) = rollout(calls_then_answer(0), initial=2, leaves=5)
    assert tree.decisions == []
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 0, 0, 0]


def test_rollouts_without_branching_share_the_prompt(rollout):
    trees = rollout(calls_then_answer(2, (0.2, 0.9)), questions=QUESTIONS, branching="none")
    for tree in trees:
        parents = Counter(node.parent for node in tree.nodes)
        assert parents.pop(0) == 6
        assert set(parents.values()) == {1}
        assert [decision.added for decision in tree.decisions] == [0] * 12


def test_a_mark_at_a_call_branches_after_its_result(rollout, engines):
    """The result is shared; branches do not branch at their own calls; then fresh rollouts."""
    (tree,) = rollout(calls_then_answer(2), branching="marks", marks="tool_call", leaves=7)
    for decision in tree.decisions:
        assert (decision.kind, decision.added) == (AT_MARK, 2)
        assert tree.path(decision.node)[1:] == tree.steps(decision.node)[1] + [decision.node]
        assert tree.nodes[decision.node].kind == RESULT
    assert [decision.path for decision in tree.decisions] == [0, 1]
    assert [node.parent for node in tree.nodes].count(0) == 3
    assert not any(node.outcome == Outcome.PART for node in tree.nodes)


def test_a_mark_inside_a_turn_splits_its_node(rollout, engines, tokenizer):
    """Prompt, two paragraphs; the branch goes on with the second paragraph of its own."""

    def write(context, seed):
        return ("short" if "\n\n" in context else "<think>é\n\nlong</think>") + ANSWER, 0.25

    (tree,) = rollout(write, branching="marks", marks="paragraph", initial=1, leaves=3)
    assert [(n.parent, n.outcome, n.text) for n in tree.nodes[1:]] == [
        (0, Outcome.PART, "<think>é\n\n"),
        (1, Outcome.ANSWER, "long</think>" + ANSWER),
        (1, Outcome.ANSWER, "short" + ANSWER),
        (1, Outcome.ANSWER, "short" + ANSWER),
    ]
    assert tree.leaves == [2, 3, 4]
    head = np.concatenate([node.tokens for node in tree.nodes[:2]])
    first, *branches = engines[0].requests
    for request in branches:
        np.testing.assert_array_equal(request.tokens, head)
        assert request.max_tokens == first.max_tokens - len(tree.nodes[1].tokens)
    (decision,) = tree.decisions
    assert (decision.node, decision.position, decision.added) == (1, len(head), 2)


def test_think_marks_branch_before_a_thought_and_behind_it(rollout):
    def write(context, seed):
        if context.endswith("</think>"):
            return ANSWER, 0.25
        return (
            "short</think>" if context.endswith("<think>") else "<think>long</think>"
        ) + ANSWER, 0.25

    (tree,) = rollout(
        write,
        branching="marks",
        marks="think",
        marks_per_rollout=2,
        initial=1,
        leaves=3,
        branch=1,
    )
    assert [(n.parent, n.outcome, n.text) for n in tree.nodes[1:]] == [
        (0, Outcome.PART, "<think>"),
        (1, Outcome.PART, "long</think>"),
        (2, Outcome.ANSWER, ANSWER),
        (1, Outcome.ANSWER, "short</think>" + ANSWER),
        (2, Outcome.ANSWER, ANSWER),
    ]


def test_marks_split_a_turn_into_parts(rollout):
    """The budget goes to the earlier marks; where none is left, nothing is split."""

    def write(context, seed):
        return (ANSWER if "x" in context else "x\n\ny\n\nz\n\nw" + ANSWER), 0.5

    (tree,) = rollout(
        write,
        branching="marks",
        marks="paragraph",
        marks_per_rollout=3,
        initial=1,
        leaves=4,
    )
    assert [(n.parent, n.outcome) for n in tree.nodes[1:]] == [
        (0, Outcome.PART),
        (1, Outcome.PART),
        (2, Outcome.ANSWER),
        *[(1, Outcome.ANSWER)] * 2,
        (2, Outcome.ANSWER),
    ]
    assert [n.text for n in tree.nodes[1:4]] == ["x\n\n", "y\n\n", "z\n\nw" + ANSWER]
    assert [(d.node, d.added) for d in tree.decisions] == [(1, 2), (2, 1), (3, 0)]


def test_a_character_may_be_cut_by_a_mark(rollout, tokenizer):
    """Each byte of the sign is a token. Both trajectories spell it out in their own part."""
    sign = "😀"
    assert len(talk.encode(tokenizer, sign)) == 4

    def write(context, seed):
        return ("so" if "\N{REPLACEMENT CHARACTER}" in context else sign) + ANSWER, 0.5

    (tree,) = rollout(
        write,
        branching="marks",
        marks="every_token",
        marks_per_rollout=2,
        initial=1,
        leaves=3,
        branch=1,
    )
    assert [n.text for n in tree.nodes[1:4]] == ["", "", sign + ANSWER]
    for trajectory in tree.trajectories():
        assert trajectory[1].text == tokenizer.decode(trajectory[1].tokens)
        assert "".join(n.text for n in trajectory[1:]) == trajectory[1].text


def test_call_over_a_mark_ends_its_turn(rollout, tokenizer):
    """The engine sees no closing tag in what it samples, and writes on."""
    spelt = f"<python>7<{talk.BREAK}/python>"

    def write(context, seed):
        if results_in(context):
            return ANSWER, 0.5
        return (f"/python>{END_TOKEN}" if context.endswith("7<") else spelt), 0.5

    marks = len(talk.encode(tokenizer, "<python>7<"))
    (tree,) = rollout(
        write,
        branching="marks",
        marks="every_token",
        marks_per_rollout=marks,
        initial=1,
        leaves=marks + 1,
        branch=1,
    )
    *_, last = tree.trajectories()
    assert [node.outcome for node in last[1:]] == [Outcome.CALL, "ok", Outcome.ANSWER]
    assert last[1].text == "<python>7</python>"
    assert len(last[1].tokens) == len(last[1].logprobs) == len(last[1].entropies)


def test_marks_with_nothing_behind_them_do_not_branch(rollout):
    """The step that a trajectory ends with, and the call that is one too many."""
    for write, dialogue in (
        (calls_then_answer(0), layout()),
        (calls_then_answer(9), layout(tool_calls=0)),
    ):
        for marks in ("step", "tool_call"):
            (tree,) = rollout(write, dialogue=dialogue, branching="marks", marks=marks)
            assert (tree.decisions, len(tree.leaves)) == ([], 6)


def test_branches_at_marks_keep_the_count_of_calls(rollout):
    """One call is allowed: what branches after the result may not call again."""
    (tree,) = rollout(
        calls_then_answer(9),
        dialogue=layout(tool_calls=1),
        branching="marks",
        marks="tool_call",
        initial=1,
        leaves=3,
    )
    for trajectory in tree.trajectories():
        assert [node.outcome for node in trajectory[1:]] == [
            Outcome.CALL,
            "ok",
            Outcome.TOO_MANY_CALLS,
        ]


def test_random_branches_come_in_rounds_after_observations(rollout):
    """Tree-GRPO: M rollouts, N branches of each a round, L rounds: M (1 + N L) leaves."""

    def grown(seed, **budget):
        settings = {"branching": "random", "initial": 2, "marks_per_rollout": 2, "leaves": 10}
        return rollout(calls_then_answer(3), QUESTIONS, seed, **settings | budget)

    for tree in grown("1"):
        firsts = Counter(tree.path(leaf)[1] for leaf in tree.leaves)
        assert sorted(firsts.values()) == [5, 5]
        assert [decision.added for decision in tree.decisions] == [1] * 8
        assert {tree.nodes[decision.node].kind for decision in tree.decisions} == {RESULT}
        early, late = tree.decisions[:4], tree.decisions[4:]
        assert {d.path for d in early} <= {0, 1} and max(d.path for d in late) > 1
    places = [[d.node for d in tree.decisions] for tree in grown("1")]
    assert places == [[d.node for d in tree.decisions] for tree in grown("1")]
    assert places != [[d.node for d in tree.decisions] for tree in grown("2")]
    assert len(grown("1", leaves=5)[0].leaves) == 5, "a budget that ends within a round"


def test_rollouts_without_an_observation_do_not_branch_at_random(rollout):
    (tree,) = rollout(calls_then_answer(0), branching="random", initial=2, leaves=6)
    assert (tree.decisions, len(tree.leaves)) == ([], 6)
    assert len({tree.path(leaf)[1] for leaf in tree.leaves}) == 6, "all from the prompt"


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_beta_does_not_count_where_alpha_is_tau(rollout, seed):
    def trees(weight):
        return rollout(
            wander(0.9), QUESTIONS, seed, entropy_weight=weight, leaves=12, entropy_window=20
        )

    usual = trees(0.2)
    assert sum(decision.added for tree in usual for decision in tree.decisions) > 3
    for weight in (0.01, 0.5, 3.0):
        assert [shape(tree) for tree in trees(weight)] == [shape(tree) for tree in usual]


@pytest.mark.parametrize(("probability", "added"), [(1.0, [2, 2, 1]), (0.0, [0, 0, 0])])
def test_drawn_branches_follow_their_probability(rollout, probability, added):
    """The threshold, which would say the opposite, does not count."""
    (tree,) = rollout(
        calls_then_answer(1),
        draw=True,
        base_probability=probability,
        threshold=1 - probability,
        entropy_weight=0.0,
        initial=3,
        leaves=8,
    )
    assert [decision.added for decision in tree.decisions[:3]] == added


def test_drawn_branches_are_drawn_from_the_seed(rollout):
    def added(seed):
        trees = rollout(calls_then_answer(3), QUESTIONS, seed, draw=True, leaves=20, initial=10)
        return [decision.added for tree in trees for decision in tree.decisions[:10]]

    assert added("1") == added("1")
    assert added("1") != added("2")
    assert {0, 2} <= set(added("1"))


# ---- how trajectories end


def only_leaf(rollout, write, **changes):
    (tree,) = rollout(write, initial=1, leaves=1, **changes)
    (trajectory,) = tree.trajectories()
    return trajectory


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (ANSWER, Outcome.ANSWER),
        ("that is all" + END_TOKEN, Outcome.NO_ANSWER),
        ("and so on " * 20, Outcome.CUT),
        ("7</python>", Outcome.BAD_CALL),
    ],
)
def test_one_turn_and_how_it_ends(rollout, tokenizer, text, outcome):
    _, turn = only_leaf(rollout, lambda context, seed: (text, 0.5))
    assert turn.outcome == outcome
    assert turn.text == tokenizer.decode(turn.tokens)
    assert text.startswith(turn.text)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_call_beyond_the_limit_ends_the_path(rollout, allowed):
    dialogue = layout(tool_calls=allowed)
    trajectory = only_leaf(rollout, calls_then_answer(99), dialogue=dialogue)
    assert [node.kind for node in trajectory].count(RESULT) == allowed
    assert trajectory[-1].outcome == Outcome.TOO_MANY_CALLS


def test_a_result_that_does_not_fit_ends_the_trajectory(rollout, tokenizer):
    """A call, its result and one more token fit into this response exactly; then one less does."""
    call, result = (len(talk.encode(tokenizer, text)) for text in (CALL, "<result>7</result>"))
    fits = layout(response_tokens=call + result + 1)
    trajectory = only_leaf(rollout, calls_then_answer(1), dialogue=fits)
    assert [node.outcome for node in trajectory[1:]] == [Outcome.CALL, "ok", Outcome.CUT]
    assert len(trajectory[-1].tokens) == 1
    tight = layout(response_tokens=call + result)
    trajectory = only_leaf(rollout, calls_then_answer(1), dialogue=tight)
    assert [node.outcome for node in trajectory[1:]] == [Outcome.OUT_OF_SPACE]
    assert trajectory[-1].text == CALL


def test_a_long_result_is_cut_to_its_limit(rollout, tokenizer):
    def write(context, seed):
        return (ANSWER if results_in(context) else f"<python>{'7' * 20}</python>"), 0.5

    result = only_leaf(rollout, write)[2]
    assert result.text == "<result>77777...</result>"
    assert len(result.tokens) == layout().result_tokens


def test_unknown_tool_does_not_end_the_path(rollout):
    def write(context, seed):
        return (ANSWER if results_in(context) else MISSING), 0.5

    trajectory = only_leaf(rollout, write, dialogue=layout(result_tokens=30))
    assert [node.outcome for node in trajectory[1:]] == [
        Outcome.CALL,
        "no_such_tool",
        Outcome.ANSWER,
    ]
    assert trajectory[2].text == "<result>no tool search</result>"


def test_a_tool_that_fails_is_an_outcome(rollout):
    def write(context, seed):
        return (ANSWER if results_in(context) else "<python>x</python>"), 0.5

    trajectory = only_leaf(rollout, write)
    assert [node.outcome for node in trajectory[1:]] == [Outcome.CALL, "error", Outcome.ANSWER]


def test_the_calls_of_a_round_run_side_by_side(rollout):
    rounds = []

    def tool(arguments):
        rounds.append(len(arguments))
        return echo(arguments)

    def write(context, seed):
        return f"<python>{seed}</python>" if results_in(context) < 2 else ANSWER, 0.5

    rollout(write, QUESTIONS, tools={"python": tool}, initial=4, leaves=4)
    assert rounds == [12, 12]  # three questions of four paths, two calls each, all different


# ---- batches and seeds


def test_questions_go_in_batches_that_fit_the_rows(rollout, engines):
    rollout(calls_then_answer(0), QUESTIONS, leaves=6, rows=13)
    assert engines[0].rooms == [12, 6]


def test_progress_is_told_as_questions_are_finished(tokenizer):
    finished: list[int] = []
    engine = Scripted(tokenizer, calls_then_answer(0))
    setting = setting_of(tokenizer, layout(), budget(rows=13), TOOLS, "0")
    grow(QUESTIONS, engine, setting, advance=finished.append)
    assert finished == [2, 1]


def test_no_questions_give_no_trees(rollout):
    assert rollout(calls_then_answer(0), []) == []


def test_tree_beyond_the_rows_is_refused(rollout, engines):
    with pytest.raises(ValueError, match="rows"):
        rollout(calls_then_answer(0), leaves=6, rows=5)
    assert not any(engine.requests for engine in engines)


@pytest.mark.parametrize(
    "kind",
    [{}, {"draw": True}, {"branching": "marks", "marks": "quantile", "marks_per_rollout": 2}],
    ids=["threshold", "draw", "marks"],
)
def test_tree_is_independent_of_other_questions(rollout, kind):
    together = rollout(wander(0.8), QUESTIONS, **kind)
    assert any(decision.added for tree in together for decision in tree.decisions)
    for question, tree in zip(QUESTIONS, together, strict=True):
        (alone,) = rollout(wander(0.8), [question], **kind)
        assert whole(alone) == whole(tree)


def test_drawn_branch_depends_on_its_paths_seed(rollout):
    """More paths beside it, and other entropies at the same probability, change no coin."""

    def coins(initial, entropies):
        (tree,) = rollout(
            calls_then_answer(1, entropies),
            draw=True,
            entropy_weight=0.0,
            initial=initial,
            leaves=initial,
        )
        return [decision.wanted for decision in tree.decisions]

    many = coins(20, (0.2, 0.9))
    assert coins(7, (0.2, 0.9)) == many[:7]
    assert coins(20, (0.9, 0.1)) == many
    assert 3 < sum(many) < 17


# ---- in parts


@examples(100)
@given(
    rollout_=budgets,
    dialogue=layouts,
    kind=st.sampled_from([("none", "none"), ("entropy", "none"), *zip(repeat("marks"), MARKS)]),
    seed=st.integers(0, 9).map(str),
    turns=st.integers(1, 3),
)
def test_a_rollout_in_parts_grows_the_trees_of_an_undivided_one(
    tokenizer, tmp_path_factory, rollout_, dialogue, kind, seed, turns
):
    branching, marks = kind
    setting = setting_of(tokenizer, dialogue, rollout_, TOOLS, seed, branching, MARKS[marks])
    undivided = grow(QUESTIONS, Scripted(tokenizer, wander(0.8)), setting)
    engine = Scripted(tokenizer, wander(0.8))
    folder = tmp_path_factory.mktemp("parts")
    trees, parts = grown_in_parts(QUESTIONS, engine, setting, turns, folder)
    assert [whole(tree) for tree in trees] == [whole(tree) for tree in undivided]
    longest = max(len(path[1::2]) for tree in trees for path in tree.trajectories())
    assert parts >= longest / turns


# ---- the real engine


@pytest.fixture(scope="module")
def talkative(policy, tokenizer):
    """The engine over a policy that has half learned to call the tool and to answer."""
    model = copy.deepcopy(policy)
    prompts = [talk.prompt_tokens(tokenizer, layout(), question) for question in QUESTIONS]
    parts = [(CALL, True), ("<result>7</result>", False), (ANSWER, True)]
    traces = [talk.trace_tokens(tokenizer, prompt, parts, limit=24)[0] for prompt in prompts]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(30):
        tokens = torch.from_numpy(traces[step % len(traces)].astype(np.int64))[None]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return TransformersEngine(model, tokenizer)


def real_trees(engine, branching="entropy", marks="none", seed="0/0", grow=grow, **changes):
    usual = {"leaves": 6, "initial": 3, "entropy_window": 20, "marks_per_rollout": 2, "branch": 1}
    rollout = budget(**usual | changes)
    dialogue = layout(turn_tokens=30, response_tokens=90)
    tokenizer = engine.tokenizer
    setting = setting_of(tokenizer, dialogue, rollout, TOOLS, seed, branching, MARKS[marks])
    trees = grow(QUESTIONS, engine, setting)
    check = {"marks": partial(check_marks, tokenizer=tokenizer, marks=MARKS[marks])}
    for tree in trees:
        check_tree(tree, rollout, dialogue, check.get(branching))
    return trees


BEAMINGS = [("entropy", "none"), ("marks", "tool_call"), ("marks", "quantile")]


@pytest.fixture(scope="module", params=BEAMINGS, ids=[" ".join(kind) for kind in BEAMINGS])
def beaming(request):
    return request.param


@pytest.fixture(scope="module")
def grown(talkative, beaming):
    trees = real_trees(talkative, *beaming)
    kinds = Counter(node.kind for tree in trees for node in tree.nodes)
    assert kinds[RESULT] >= 3, "the policy calls too seldom for these tests"
    assert any(decision.added for tree in trees for decision in tree.decisions)
    return trees


@pytest.mark.parametrize("rows", [6, 12])
def test_the_size_of_a_batch_does_not_change_the_trees(talkative, beaming, grown, rows):
    assert [shape(tree) for tree in real_trees(talkative, *beaming, rows=rows)] == [
        shape(tree) for tree in grown
    ]


def test_trees_depend_on_the_seed(talkative, beaming, grown):
    again = real_trees(talkative, *beaming)
    assert [whole(tree) for tree in again] == [whole(tree) for tree in grown]
    for ours, theirs in zip(real_trees(talkative, *beaming, seed="0/1"), grown, strict=True):
        assert shape(ours) != shape(theirs)


def test_branch_logprobs_equal_a_full_pass(talkative, grown):
    """What a branch has of its parent's cache is what it would have computed itself."""
    for trajectory in (each for tree in grown for each in tree.trajectories()):
        tokens = torch.from_numpy(np.concatenate([n.tokens for n in trajectory]).astype(np.int64))
        with torch.inference_mode():
            logits = talkative.model(tokens[None]).logits[0, :-1]
        afresh = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()
        sampled = np.concatenate([np.full(len(n.tokens), n.kind == TURN) for n in trajectory])
        ours = np.concatenate([n.logprobs for n in trajectory])
        np.testing.assert_allclose(ours, afresh[sampled[1:]], atol=1e-4)


def test_branched_trees_are_loaded_as_saved(grown, tmp_path):
    save_trees(grown, tmp_path)
    assert [whole(tree) for tree in load_trees(tmp_path)] == [whole(tree) for tree in grown]


def test_the_real_engine_in_parts(talkative, beaming, grown, tmp_path):
    """A context that is given whole has the sampled tokens of one that has grown."""
    divide = partial(grown_in_parts, turns=1, folder=tmp_path)
    trees = real_trees(talkative, *beaming, grow=lambda *given: divide(*given)[0])
    assert [shape(tree) for tree in trees] == [shape(tree) for tree in grown]
    for ours, theirs in zip(trees, grown, strict=True):
        for one, other in zip(ours.nodes, theirs.nodes, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_real_engine_branches_inside_turns(talkative):
    trees = real_trees(talkative, "marks", "quantile")
    assert sum(node.outcome == Outcome.PART for tree in trees for node in tree.nodes) >= 3


def test_response_beyond_the_context_is_refused(talkative):
    """Positions that the policy has never seen would give noise, not an error."""
    dialogue = layout(response_tokens=talkative.model.config.max_position_embeddings)
    setting = setting_of(talkative.tokenizer, dialogue, budget(), TOOLS, "0")
    with pytest.raises(ValueError, match="context"):
        grow(QUESTIONS, talkative, setting)


def test_two_lanes_grow_the_trees_of_one(talkative, beaming):
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        found.append(real_trees(talkative, *beaming))
    torch.set_num_threads(before)
    for one, two, again in zip(*found, strict=True):
        for nodes in zip(one.nodes, two.nodes, again.nodes, strict=True):
            assert nodes[0].tokens.tolist() == nodes[1].tokens.tolist()
            assert nodes[1].logprobs.tobytes() == nodes[2].logprobs.tobytes()
            np.testing.assert_allclose(nodes[0].logprobs, nodes[1].logprobs, atol=1e-4)
        assert one.leaves == two.leaves == again.leaves
