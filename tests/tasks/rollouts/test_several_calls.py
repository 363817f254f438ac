"""Turns of several calls: their order, their results, their ends, and branches after the last one.

The policy speaks the format of Qwen3, which has turns of several calls.
"""

import json
import random
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.agent import Dialogue
from tasks.dialects.contract import Exchange, Turn, observed
from tasks.dialects.native import DIALECT, Native, NativeDialect
from tasks.dialects.tags import TagsDialect
from tasks.engines import Sample
from tasks.environments.contract import EnvironmentKind, OpenEnvironment
from tasks.environments.episodes import open_worlds
from tasks.environments.question import Questions
from tasks.rewards.scoring import score_trees
from tasks.rollouts.rounds import Setting, grow
from tasks.trees import marks as segment
from tasks.trees.metrics import tree_metrics
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import (
    PROMPT,
    RESULT,
    TURN,
    Call,
    Observation,
    Question,
    ToolSpec,
    observed_before,
)
from tests.agents import responding
from tests.examples import examples
from tests.resting import grown_in_parts
from tests.reward_parts import usual
from tests.tasks.dialects import families
from tests.tasks.rollouts.counters_of_a_user import ADD
from tests.tasks.rollouts.test_rounds import MARKS, Scripted, budget, length_of, whole

QUESTION = Question("q", "toy", "How many?", ("7",))
ANSWER = "It is \\boxed{7}."
END = "<|im_end|>"
QWEN3 = families.tokenizer("qwen3")
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PYTHON = ToolSpec("python", "Run code.", TEXT)
COUNTER = "tests/tasks/rollouts/counters_of_a_user.py:Counter"


def calling(*arguments, tool="python", parameter="text"):
    """A turn that makes a call of each argument."""
    calls = ({"name": tool, "arguments": {parameter: argument}} for argument in arguments)
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


class Speaking(Scripted):
    """An engine that writes what ``write(context, seed)`` says, and its end token."""

    def _turn(self, request):
        text, entropies = self.write(self.tokenizer.decode(request.tokens), request.seed)
        tokens = np.array(self.tokenizer.encode(text + END), np.int32)
        stopped = StopReason.END if len(tokens) <= request.max_tokens else StopReason.LENGTH
        tokens = tokens[: request.max_tokens]
        entropies = np.resize(np.array(entropies, np.float32), len(tokens))
        return Sample(tokens, -entropies, entropies, stopped)


def layout(**changes):
    limits = {"turn_tokens": 300, "result_tokens": 200, "response_tokens": 3000, "tool_calls": 9}
    return Dialogue(system="", **limits | changes)


def results_in(context):
    return context.count("<tool_response>")


def script(*turns):
    """Say these turns, one after the other: each after the results of those before it."""

    def write(context, seed):
        said, seen = 0, results_in(context)
        while said < len(turns) and seen > 0:
            seen -= turns[said].count("<tool_call>")
            said += 1
        return turns[said], 0.5

    return write


def speaking(dialogue, specs):
    return DIALECT.open(Native(renderer="qwen3"), QWEN3, dialogue, specs)


def tools_of(asked, names):
    """Tools that keep what they are asked in ``asked``, and fail where that has no 7."""

    def run(codes):
        asked.extend(codes)
        return [Observation("ok" if "7" in each else "error", f"seen {each}") for each in codes]

    return dict.fromkeys(names, run)


def setting_of(
    dialogue, rollout, asked, branching="none", marks="none", dialect=None, tools=("python",)
):
    respond = responding(tools_of(asked, tools))
    specs = [replace(PYTHON, name=name) for name in tools]
    environment = OpenEnvironment(specs, lambda: nullcontext(Questions(respond)))
    spoken = dialect or speaking(dialogue, specs)
    return Setting(QWEN3, dialogue, rollout, spoken, environment, "0", branching, MARKS[marks])


ONE = budget(leaves=1, initial=1, branch=0)


def grown(write, dialogue=None, rollout=ONE, asked=None, **changes):
    setting = setting_of(dialogue or layout(), rollout, [] if asked is None else asked, **changes)
    (tree,) = grow([QUESTION], Speaking(QWEN3, write), setting)
    return tree


# ---- single questions with tools


def test_calls_run_in_their_order_each_with_its_result():
    asked = []
    tree = grown(script(calling("70", "8", "71"), calling("72"), ANSWER), asked=asked)
    assert asked == ["70", "8", "71", "72"]
    (trajectory,) = tree.trajectories()
    assert [node.outcome for node in trajectory[1:]] == ["call", "error", "call", "ok", "answer"]
    _, turn, result, single, _, _ = trajectory
    assert [vars(each) for each in turn.results] == [
        {"id": f"call_{i}", "tool": "python", "outcome": o, "argument": a, "text": f"seen {a}"}
        for i, (a, o) in enumerate([("70", "ok"), ("8", "error"), ("71", "ok")])
    ]
    assert [(each.id, each.argument, each.text) for each in single.results] == [("call_3", "", "")]
    assert result.text == (
        "\n<|im_start|>user\n<tool_response>\nseen 70\n</tool_response>\n<tool_response>\nseen 8\n"
        "</tool_response>\n<tool_response>\nseen 71\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tree.acts() == ["ok", "error", "ok", "ok"]
    counted = tree_metrics([tree], 5)
    assert (counted["tool_calls"], counted["tool_errors"]) == (4, 1)
    assert (counted["environment_steps"], counted["tool_calls_a_leaf"]) == (3, 4)


def test_first_calls_of_all_paths_come_before_second_ones():
    asked = []
    rollout = budget(leaves=2, initial=2, branch=0)
    codes = iter(["70", "71"])

    def write(context, seed):
        return (ANSWER if results_in(context) else calling(code := next(codes), code + "b")), 0.5

    grown(write, rollout=rollout, asked=asked)
    assert asked == ["70", "71", "70b", "71b"]


@pytest.mark.parametrize(("left", "ran"), [(3, ["70", "71", "8"]), (2, ["70", "71"])])
def test_if_fewer_calls_are_left_the_first_ones_run(left, ran):
    asked = []
    turns = script(calling("70", "71"), calling("8", "72"), ANSWER)
    tree = grown(turns, layout(tool_calls=left), asked=asked)
    assert asked == ran
    (trajectory,) = tree.trajectories()
    assert [node.outcome for node in trajectory[1:]] == ["call", "ok", "too_many_calls"]
    assert [result.outcome for result in trajectory[-1].results] == ["error"] * (left - 2)
    assert [result.text for result in trajectory[-1].results] == ["seen 8"] * (left - 2)
    assert tree.acts() == ["ok", "ok", *["error"] * (left - 2)]


def test_tools_that_worked_are_known_without_reading_turns():
    """ARPO's bonus is for more than one of them."""
    dialect = speaking(layout(), [PYTHON])

    class Reader:
        answer, faults = dialect.answer, dialect.faults

        def calls(self, turn):
            raise AssertionError("the tree has the tool")

    def reward(first, second):
        turn = calling(first) + calling(second, tool="search")
        tree = grown(script(turn, ANSWER), tools=("python", "search"))
        (row,) = score_trees([tree], usual(bonus=0.5), reader=Reader())
        return row["reward"]

    assert [reward("70", "71"), reward("70", "8"), reward("9", "71")] == [1.5, 1.0, 1.0]


def test_each_result_has_its_limit_and_all_share_the_room():
    long = "7 " * 300
    turn = calling(long, "7", long)
    usual = layout(turn_tokens=2500, response_tokens=9000, result_tokens=120)
    (_, first, result, *_), *_ = grown(script(turn, ANSWER), usual).trajectories()
    texts = [each.text for each in first.results]
    assert texts[1] == "seen 7" and texts[0] == texts[2]
    assert texts[0].endswith("...") and 100 < len(QWEN3.encode(texts[0])) <= 120
    assert all(text in result.text for text in texts)

    room = len(first.tokens) + 150
    tight = usual.model_copy(update={"response_tokens": room})
    (_, first, result, *_), *_ = grown(script(turn, ANSWER), tight).trajectories()
    assert 90 < len(result.tokens) < 150 and "seen 7\n" in result.text
    none = usual.model_copy(update={"response_tokens": len(first.tokens) + 20})
    (trajectory,) = grown(script(turn, ANSWER), none).trajectories()
    assert trajectory[-1].outcome == Outcome.OUT_OF_SPACE and len(trajectory[-1].results) == 3


def test_a_branch_starts_after_the_last_result_with_the_calls_that_are_left():
    def write(context, seed):
        done = results_in(context)
        return calling("70", "71") if done < 4 else ANSWER, (0.2 if not done else 0.9)

    rollout = budget(leaves=3, initial=1)
    tree = grown(write, layout(tool_calls=3), rollout, branching="entropy")
    decision = tree.decisions[0]
    assert (tree.nodes[decision.node].kind, decision.added) == (RESULT, 2)
    assert tree.nodes[decision.node].text.count("<tool_response>") == 2
    assert decision.position == length_of(tree, decision.node)
    for trajectory in tree.trajectories():
        ids = [result.id for turn in trajectory for result in turn.results]
        assert ids == ["call_0", "call_1", "call_2"]
        assert trajectory[-1].outcome == Outcome.TOO_MANY_CALLS


def test_a_mark_at_calls_lies_after_the_last_result(tmp_path):
    write = script(calling("70", "8"), calling("71"), ANSWER)
    rollout = budget(leaves=4, initial=1, marks_per_rollout=2, branch=1)
    setting = setting_of(layout(), rollout, [], "marks", "tool_call")
    (tree,) = grow([QUESTION], Speaking(QWEN3, write), setting)
    assert [(d.position, d.added) for d in tree.decisions] == [
        (length_of(tree, 2), 1),
        (length_of(tree, 4), 1),
    ]
    assert [tree.nodes[d.node].kind for d in tree.decisions] == [RESULT, RESULT]
    texts = segment.token_texts(QWEN3, len(QWEN3))
    first = next(tree.trajectories())
    ends = np.flatnonzero(segment.ends(MARKS["tool_call"], first, texts)) + 1
    assert ends.tolist() == np.cumsum([len(n.tokens) for n in first if n.kind == TURN])[:2].tolist()
    # the same in parts
    (again,), parts = grown_in_parts([QUESTION], Speaking(QWEN3, write), setting, 1, tmp_path)
    assert whole(again) == whole(tree) and parts > 2
    assert [node.results for node in again.nodes] == [node.results for node in tree.nodes]


@examples(40)
@given(
    seed=st.integers(0, 99),
    most=st.integers(0, 6),
    room=st.integers(200, 2500),
    limit=st.integers(20, 120),
    branching=st.sampled_from(["none", "entropy"]),
)
def test_trees_of_several_calls(seed, most, room, limit, branching):
    def write(context, turn_seed):
        dice = random.Random(f"{seed} {turn_seed}")
        made = dice.randrange(5)
        codes = [dice.choice(["7", "8" * 40, "<|im_end|>"]) for _ in range(made)]
        return (calling(*codes) if made else ANSWER), [dice.random() for _ in range(5)]

    dialogue = layout(tool_calls=most, response_tokens=room, result_tokens=limit, turn_tokens=400)
    rollout, asked = budget(leaves=4), []
    tree = grown(write, dialogue, rollout, asked, branching=branching)
    made = 0
    for trajectory in tree.trajectories():
        results = [result for turn in trajectory for result in turn.results]
        assert len(results) <= most
        assert [each.id for each in results] == [f"call_{i}" for i in range(len(results))]
        assert sum(len(node.tokens) for node in trajectory[1:]) <= room
        for turn, after in zip(trajectory[1::2], trajectory[2::2], strict=False):
            assert (turn.outcome, after.kind) == (Outcome.CALL, RESULT)
            assert len(after.tokens) <= limit * len(turn.results)
            assert after.text.count("<tool_response>\n") == len(turn.results)
        last = trajectory[-1]
        assert last.outcome != Outcome.CALL
        if last.results:
            assert last.outcome in (Outcome.TOO_MANY_CALLS, Outcome.OUT_OF_SPACE)
        if last.outcome == Outcome.TOO_MANY_CALLS:
            assert len(results) == most
    made = sum(len(node.results) for node in tree.nodes)
    assert len(tree.acts()) == made >= len(asked)  # equal calls of a round run once


# ---- worlds


@pytest.fixture(scope="module")
def counters():
    kind = EnvironmentKind(Native, COUNTER, lambda settings: [ADD], lambda *_: [])
    with ExitStack() as stack:
        yield stack.enter_context(open_worlds(kind, Native(), 1, 20.0))


def counted(counters, write, prompt="growing", branching="none", rollout=ONE, **changes):
    fresh = {"prompt": "fresh", "history": 2, "prompt_tokens": 3000} if prompt == "fresh" else {}
    dialogue = layout(**fresh, **changes)
    environment = OpenEnvironment([ADD], counters.session)
    dialect = speaking(dialogue, [ADD])
    setting = Setting(QWEN3, dialogue, rollout, dialect, environment, "0", branching)
    task = replace(QUESTION, data='{"seed": 1}')
    (tree,) = grow([task], Speaking(QWEN3, write), setting)
    return tree


def adding(*numbers):
    return calling(*numbers, tool="add", parameter="number")


@pytest.mark.parametrize("prompt", ["growing", "fresh"])
def test_a_world_takes_the_acts_of_a_turn_one_by_one(counters, prompt, tmp_path):
    turns = iter([adding(1, -1), adding(1, 5, 1)])
    tree = counted(counters, lambda context, seed: (next(turns), 0.5), prompt)
    (trajectory,) = tree.trajectories()
    assert [node.outcome for node in trajectory[1:]] == ["call", "not_admissible", "terminated"]
    _, first, after, last = trajectory
    assert first.observation.text == "at 1\n\nstill at 1" and first.observation.reward == 1.0
    assert (last.observation.text, last.observation.reward) == ("at 2\n\nat 7", 6.0)
    assert [len(turn.results) for turn in (first, last)] == [2, 2], "no act follows the end"
    assert tree.acts() == ["ok", "not_admissible", "ok", "ok"]
    # a step a turn: the state that the second turn acts on is that of the last act
    assert observed_before(trajectory) == ["at 0\nadd", "still at 1\nadd"]
    assert "at 1" in after.text and "still at 1\nactions: add" in after.text
    if prompt == "fresh":
        assert after.kind == PROMPT and after.text.count("step 1: add") == 2
    (row,) = score_trees([tree], ())
    assert (row["score"], row["outcome"]) == (1.0, "terminated")
    save_trees([tree], tmp_path)
    (read,) = load_trees(tmp_path)
    assert [(n.observation, n.results) for n in read.nodes] == [
        (n.observation, n.results) for n in tree.nodes
    ]


def test_a_world_that_ends_within_its_limit_is_not_out_of_calls(counters):
    tree = counted(counters, lambda *_: (adding(1, 5, 1), 0.5), tool_calls=2)
    assert [node.outcome for node in tree.nodes[1:]] == ["terminated"]
    tree = counted(counters, lambda *_: (adding(1, 1, 5), 0.5), tool_calls=2)
    (turn,) = tree.nodes[1:]
    assert (turn.outcome, turn.observation.reward) == (Outcome.TOO_MANY_CALLS, 2.0)


def test_a_branch_of_a_world_is_replayed_act_by_act(counters):
    def write(context, seed):
        return adding(1, -1) if "still" not in context else adding(0, 2), 0.5 + results_in(context)

    tree = counted(counters, write, branching="entropy", rollout=budget(leaves=3, initial=1))
    assert [d.added for d in tree.decisions] == [2]
    for trajectory in tree.trajectories():
        assert trajectory[-1].outcome == Outcome.TERMINATED
        assert trajectory[-1].observation.text == "at 1\n\nat 3"


# ---- dialects of earlier versions


class Earlier(NativeDialect):
    """A user's dialect whose ``observe`` takes one call."""

    def observe(self, prompt, turn, call, observation, limit):
        assert isinstance(call, Call) and isinstance(observation, Observation)
        polite = replace(observation, text=f"Well: {observation.text}")
        return super().observe(prompt, turn, call, polite, limit)


def test_an_earlier_dialect_goes_on_with_one_call_a_turn():
    specs = [PYTHON]
    spoken = speaking(layout(), specs)
    earlier = Earlier("qwen3", spoken.renderer, QWEN3, layout(), specs)
    tree = grown(script(calling("70"), ANSWER), dialect=earlier)
    assert "Well: seen 70" in tree.nodes[2].text
    tree = grown(script(calling("70", "71"), ANSWER), dialect=earlier)
    assert [node.outcome for node in tree.nodes[1:]] == [Outcome.BAD_CALL]


def test_calls_and_observations_may_be_given_alone():
    call, seen = Call("python", "7"), Observation("ok", "1")
    assert Turn(Outcome.CALL, call).calls == (call,) and Turn(Outcome.CALL, call).call == call
    assert Turn(Outcome.ANSWER, None).calls == () and Turn(Outcome.ANSWER).call is None
    exchange = Exchange(np.zeros(0, np.int32), "", call, seen)
    assert (exchange.calls, exchange.observations) == ((call,), (seen,))
    assert (exchange.call, exchange.observation) == (call, seen)


def test_a_dialect_on_tags_may_read_several_calls(tokenizer):
    dialect = TagsDialect(tokenizer, layout(), [])
    nothing, seen = np.zeros(0, np.int32), [Observation("ok", "a"), Observation("ok", "b")]
    exchange = Exchange(nothing, "", [Call("python", "1")] * 2, seen)
    text, tokens = observed(dialect, nothing, nothing, exchange, 99)
    assert text == "<result>a</result><result>b</result>" == tokenizer.decode(tokens)
