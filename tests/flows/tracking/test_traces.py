import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.tracking import traces
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.reward import TABLE
from tasks.rewards.scoring import HIDDEN
from tasks.trees.outcomes import TURN_OUTCOMES, Outcome
from tasks.trees.tables import save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, CallResult, Message, Node, Question, Tree
from tests import mlflow_store

NONE = np.zeros(0, np.float32)
QUESTION = Question("train-00007", "chain", "What is 6 times 7, plus 1?", ("43", "43.0"))
STEP = SubStep("tiny", "reinforce", 20, 3)
CALL = "<think>first</think><python>print(6*7)</python>"
RIGHT = "<think>one more</think><answer>\\boxed{43}</answer>"
WRONG = "<think>done</think><answer>\\boxed{42}</answer>"


def prompt(question, length=10):
    return Node(-1, PROMPT, "", question.text, np.zeros(length, np.int32), NONE, NONE)


def turn(parent, outcome, text, length, logprob=-0.5, entropy=0.25):
    tokens = np.zeros(length, np.int32)
    return Node(
        parent,
        TURN,
        outcome,
        text,
        tokens,
        np.full(length, logprob, np.float32),
        np.full(length, entropy, np.float32),
    )


def result(parent, outcome, text, length):
    return Node(parent, RESULT, outcome, text, np.zeros(length, np.int32), NONE, NONE)


SCORES = [  # of the tree's leaves: answer, reward, faults
    ("43", 1.0, []),
    ("42", 0.0, []),
    (None, -1.0, ["think", "answer"]),
]


@pytest.fixture
def tree():
    """Three leaves: two share a call and its result, the third is alone.

    prompt(10) - 1: call(8) - 2: result(4) - 3: right(6)
                                           - 4: wrong(5)
               - 5: cut(7)
    """
    nodes = [
        prompt(QUESTION),
        turn(0, "call", CALL, 8),
        result(1, "ok", "<result>42</result>", 4),
        turn(2, "answer", RIGHT, 6, logprob=-1.0, entropy=0.5),
        turn(2, "answer", WRONG, 5),
        turn(0, "cut", "<think>hm, hm, hm", 7),
    ]
    return Tree(QUESTION, nodes, leaves=[3, 4, 5])


def traced(tree, leaf=0):
    return traces.trace(
        tree, leaf, mlflow_store.scores(tree, SCORES)[leaf], STEP, key="ab" * 16, began=1000
    )


# one trajectory


def test_spans_are_turns_and_tool_calls_in_order(tree):
    whole, *parts = traced(tree).spans
    assert (whole.name, whole.kind) == ("agent", "AGENT")
    assert [(part.name, part.kind) for part in parts] == [
        ("turn 1", "CHAT_MODEL"),
        ("python", "TOOL"),
        ("turn 2", "CHAT_MODEL"),
    ]


def test_calls_that_ended_a_trajectory_have_spans(tree):
    """The first call of a turn with too many ran, and no node has its result."""
    ran = (CallResult("call_1", "python", "error", "8", "division by zero"),)
    last = replace(tree.nodes[5], text=CALL, outcome="too_many_calls", results=ran)
    tree.nodes[5] = last
    *_, turn, call = traced(tree, 2).spans
    assert (turn.name, call.name, call.kind) == ("turn 1", "python", "TOOL")
    assert (call.outputs, call.outcome) == ({"result": "division by zero"}, "error")
    assert (call.start, call.end) == (turn.end, turn.end)


def test_whole_has_question_in_and_answer_out(tree):
    whole = traced(tree).spans[0]
    assert whole.inputs == {"messages": [{"role": "user", "content": QUESTION.text}]}
    assert whole.outputs == {"answer": "43"}
    assert traced(tree, 2).spans[0].outputs == {"answer": None}


def test_turn_reads_only_what_is_new(tree):
    _, first, call, second = traced(tree).spans
    assert first.inputs["messages"] == [{"role": "user", "content": QUESTION.text}]
    assert first.outputs["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert (call.inputs, call.outputs) == (
        {"call": "print(6*7)"},
        {"result": "<result>42</result>"},
    )
    assert second.inputs["messages"] == [{"role": "tool", "content": "<result>42</result>"}]


def test_messages_before_the_question_are_shown(tree):
    tree.question = replace(QUESTION, before=(Message("assistant", "Ask me."),))
    whole, first, *_ = traced(tree).spans
    assert whole.inputs == first.inputs
    assert [entry["content"] for entry in first.inputs["messages"]] == ["Ask me.", QUESTION.text]


def test_times_are_token_positions(tree):
    whole, *parts = traced(tree).spans
    assert (whole.start, whole.end) == (0, 28)
    assert [(part.start, part.end) for part in parts] == [(10, 18), (18, 22), (22, 28)]
    assert "token" in whole.attributes["times"]


def test_uncertainty_is_a_mean_over_sampled_tokens(tree):
    whole, first, call, second = traced(tree).spans
    assert first.attributes["mean_logprob"] == -0.5
    assert second.attributes["mean_entropy"] == 0.5
    assert whole.attributes["mean_logprob"] == pytest.approx((8 * -0.5 + 6 * -1.0) / 14, abs=1e-4)
    assert "mean_entropy" not in call.attributes


def test_non_finite_values_are_left_out(tree):
    tree.nodes[3] = turn(2, "answer", RIGHT, 6, logprob=-np.inf, entropy=np.nan)
    made = traced(tree)
    assert "mean_entropy" not in made.spans[3].attributes
    json.dumps([vars(span) for span in made.spans], allow_nan=False)


def test_tokens_read_and_written_add_up(tree):
    turns = [span for span in traced(tree).spans if span.kind == "CHAT_MODEL"]
    assert [span.attributes["tokens_read"] for span in turns] == [10, 4]
    read_and_written = [s.attributes["tokens_read"] + s.attributes["tokens"] for s in turns]
    assert sum(read_and_written) == 28


def test_shared_nodes_name_their_leaves(tree):
    whole, first, call, second = traced(tree, 1).spans
    assert whole.attributes["path"] == [0, 1, 2, 4]
    assert [part.attributes["leaves"] for part in (first, call, second)] == [[0, 1], [0, 1], [1]]
    assert [part.attributes["shared"] for part in (first, call, second)] == [True, True, False]
    assert [part.attributes["parent"] for part in (first, call, second)] == [0, 1, 2]
    alone = traced(tree, 2).spans[1]
    assert (alone.attributes["node"], alone.attributes["shared"]) == (5, False)


def test_turn_with_a_branch_inside_is_one_span():
    """A part of three tokens is shared by a call of five more and by another leaf of seven."""
    tree = Tree(
        QUESTION,
        [
            prompt(QUESTION),
            turn(0, Outcome.PART, CALL[:9], 3),
            turn(1, "call", CALL[9:], 5),
            result(2, "ok", "<result>42</result>", 4),
            turn(3, "answer", RIGHT, 6),
            turn(1, "cut", "hm, hm", 7),
            turn(0, "cut", "hm", 2),
        ],
        leaves=[4, 5, 6],
    )
    whole, first, call, second = traced(tree).spans
    assert (whole.attributes["path"], whole.end) == ([0, 1, 2, 3, 4], 28)
    assert [(part.name, part.start, part.end) for part in (first, call, second)] == [
        ("turn 1", 10, 18),
        ("python", 18, 22),
        ("turn 2", 22, 28),
    ]
    assert first.outputs["choices"][0]["message"]["content"] == CALL
    assert call.inputs == {"call": "print(6*7)"}
    own = first.attributes
    assert (own["node"], own["parent"], own["tokens"], own["tokens_read"]) == (2, 0, 8, 10)
    assert (own["leaves"], own["shared"], own["shared_tokens"]) == ([0], False, 3)
    (other,) = traced(tree, 1).spans[1:]
    assert (other.name, other.start, other.end, other.outcome) == ("turn 1", 10, 20, "cut")
    assert other.attributes["shared_tokens"] == 3


def test_only_parts_that_ended_well_are_sound(tree):
    assert all(span.sound for span in traced(tree).spans)
    assert [span.sound for span in traced(tree, 2).spans] == [False, False]
    tree.nodes[2] = result(1, "out_of_memory", "<result></result>", 4)
    assert [span.sound for span in traced(tree).spans] == [True, True, False, True]
    failed = [outcome for outcome in TURN_OUTCOMES if outcome not in ("answer", "call")]
    whole = traced(tree).spans[0]
    assert not any(replace(whole, outcome=outcome).sound for outcome in failed)


def test_trace_has_question_answer_and_reward(tree):
    made = traced(tree)
    assert (made.question, made.answer) == (QUESTION.text, "43")
    assert made.name == "train-00007 leaf 0, iteration 20"
    assert made.feedback == {"reward": 1.0, "success": True, "outcome": "answer"}
    assert made.reason == "the answer is right"
    assert made.accepted == ("43", "43.0")
    assert made.tags == {
        "recipe": "tiny",
        "stage": "reinforce",
        "iteration": "20",
        "question": "train-00007",
        "kind": "chain",
        "leaf": "0",
        "outcome": "answer",
        "reward": "1",
        "success": "true",
        "faults": "none",
        "page": "reports/tiny/page.html#iteration=20&question=train-00007&leaf=0",
    }


def test_failed_trajectory_names_its_faults(tree):
    wrong, cut = traced(tree, 1), traced(tree, 2)
    assert (wrong.answer, wrong.tags["reward"], wrong.reason) == ("42", "0", "the answer is wrong")
    assert (cut.answer, cut.tags["reward"]) == ("no answer (cut)", "-1")
    assert cut.tags["faults"] == "think, answer"
    assert cut.reason == "format faults: think, answer"


def test_partly_right_answer_shows_its_breakdown(tree):
    score = mlflow_store.scores(tree, SCORES)[1] | {
        "reward": 0.6,
        "score": 0.6,
        "breakdown": {"score": 0.6, "precision": 0.5, "recall": 0.75},
    }
    made = traces.trace(tree, 1, score, STEP, key="ab" * 16, began=1000)
    assert made.reason == "the answer is partly right: score 0.6, precision 0.5, recall 0.75"
    assert made.tags["reward"] == "0.6"


def test_an_answer_that_was_not_scored_is_not_called_wrong(tree):
    score = mlflow_store.scores(tree, SCORES)[1] | {"breakdown": HIDDEN}
    made = traces.trace(tree, 1, score, STEP, key="ab" * 16, began=1000)
    assert (made.reason, made.tags["success"]) == ("the answer was not scored", "not scored")
    assert made.feedback == {"reward": 0.0, "outcome": "answer"}


# texts that nobody planned for


def test_long_text_is_cut_with_a_note():
    cut = traces.printable("x" * 100_000, 50)
    assert len(cut) == 50
    assert cut.endswith("[cut: 100,000 characters in all]")
    assert traces.printable("x" * 50, 50) == "x" * 50


@given(st.text(st.characters(codec=None, categories=None), max_size=60), st.integers(1, 80))
def test_every_text_becomes_printable_utf8(text, limit):
    shown = traces.printable(text, limit)
    shown.encode()
    assert not any(ord(sign) < 32 and sign not in "\t\n\r" for sign in shown)
    assert len(shown) <= max(limit, 40)
    assert len(shown) == len(text) or len(text) > limit


def test_hostile_turns_can_be_written(tree):
    text = "\x00\ud800\x1b[2J<python>" + "x" * 100_000 + "</python>"
    tree.nodes[1] = turn(0, "call", text, 8)
    tree.nodes[2] = result(1, "error", "\udfff" * 30_000, 4)
    made = traced(tree)
    json.dumps([vars(span) for span in made.spans], ensure_ascii=False).encode()
    call = made.spans[2]
    assert call.inputs["call"].endswith("[cut: 100,000 characters in all]")
    assert call.outputs["result"].startswith("\ufffd")


def test_result_of_an_unreadable_call_is_shown(tree):
    tree.nodes[1] = turn(0, "call", "no tags at all", 8)
    call = traced(tree).spans[2]
    assert (call.name, call.inputs) == ("tool", {"call": "no tags at all"})


# a sample of an iteration


@pytest.fixture
def iteration(tree, tmp_path):
    """Two trees and their rewards as the ledger keeps them."""
    other = replace(tree, question=replace(QUESTION, id="train-00008"))
    save_trees([tree, other], tmp_path / "trees")
    rows = [row for each in (tree, other) for row in mlflow_store.scores(each, SCORES)]
    write_table(pa.Table.from_pylist(rows, schema=TABLE), tmp_path / "rewards.parquet")
    return [Artifact.at(tmp_path / name) for name in ("trees", "rewards.parquet")]


def test_sample_has_all_leaves_of_first_questions(iteration):
    assert [m.name.split(",")[0] for m in traces.sample(STEP, *iteration, at=2.0, size=1)] == [
        "train-00007 leaf 0",
        "train-00007 leaf 1",
        "train-00007 leaf 2",
    ]
    assert len(traces.sample(STEP, *iteration, at=2.0, size=9)) == 6


def test_newest_first_keeps_the_order_of_leaves(iteration):
    assert [m.began for m in traces.sample(STEP, *iteration, at=2.0, size=1)] == [2000, 1999, 1998]


def test_keys_do_not_depend_on_the_clock(iteration):
    made = traces.sample(STEP, *iteration, at=2.0, size=2)
    keys = [trace.key for trace in made]
    assert len(set(keys)) == 6
    assert all(len(bytes.fromhex(key)) == 16 for key in keys)
    assert keys == [trace.key for trace in traces.sample(STEP, *iteration, at=9.0, size=2)]
    trees, rewards = iteration
    others = [
        traces.sample(replace(STEP, iteration=40), trees, rewards, at=2.0, size=2),
        traces.sample(replace(STEP, recipe="mine"), trees, rewards, at=2.0, size=2),
        traces.sample(STEP, replace(trees, digest="other"), rewards, at=2.0, size=2),
        traces.sample(STEP, trees, replace(rewards, digest="other"), at=2.0, size=2),
    ]
    assert all(set(keys).isdisjoint(trace.key for trace in other) for other in others)


def test_rewards_have_all_that_a_trace_shows(tree):
    assert set(TABLE.names) >= set(mlflow_store.scores(tree, SCORES)[0])
