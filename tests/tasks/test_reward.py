"""Rewards by hand, and that a tool's text can't touch them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.algorithms import Overlong
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.reward import TABLE, RewardInputs, length_penalty, reward
from tasks.rewards.scoring import score_trees
from tasks.trees.labels import Labels
from tasks.trees.tables import read_rows, save_trees
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree
from tests.reward_parts import usual

SETTINGS = usual()
OF_QUESTION = ("question", "kind", "leaf", "scorer", "parts")
QUESTION = Question("q", "toy", "12*34?", ("408",))
NOTHING = np.zeros(0, np.float32)

THINK = "<think>multiply</think>"
PYTHON, SEARCH = "<python>print(12*34)</python>", "<search>12*34</search>"
RIGHT, WRONG = "<answer>\\boxed{408}</answer>", "<answer>\\boxed{409}</answer>"


def node(parent: int, kind: str, text: str, outcome: str = "") -> Node:
    """Tokens stand for themselves: one for each letter."""
    tokens = np.array([ord(letter) for letter in text], np.int32)
    scores = np.zeros(len(tokens) if kind == TURN else 0, np.float32)
    return Node(parent, kind, outcome, text, tokens, scores, scores)


def trajectory(*written: str, last: str = "answer", observed: str = "ok") -> list[Node]:
    """Turns and tool results in alternation, after a prompt."""
    nodes = [node(-1, PROMPT, "12*34?")]
    for place, text in enumerate(written):
        turn = place % 2 == 0
        outcome = (last if place == len(written) - 1 else "call") if turn else observed
        kind, shown = (TURN, text) if turn else (RESULT, f"<result>{text}</result>")
        nodes.append(node(place, kind, shown, outcome))
    return nodes


def score(nodes: list[Node], question: Question, settings: tuple) -> dict:
    """The row of a tree of one trajectory, without what it has from the question."""
    (row,) = score_trees([Tree(question, nodes, leaves=[len(nodes) - 1])], settings)
    return {name: row[name] for name in row if name not in OF_QUESTION}


def value(*written: str) -> float:
    return score(trajectory(*written), QUESTION, SETTINGS)["reward"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([THINK + RIGHT], 1.0),
        ([THINK + PYTHON, "408", THINK + RIGHT], 1.0),
        ([THINK + PYTHON, "408", PYTHON, "408", RIGHT], 1.0),  # twice, but one kind
        ([THINK + PYTHON, "408", SEARCH, "408", RIGHT], 1.1),
        ([THINK + WRONG], 0.0),
        ([THINK + PYTHON, "408", SEARCH, "408", WRONG], 0.0),  # the bonus comes with success
        ([RIGHT], -1.0),
        (["<think>" + RIGHT], -1.0),
        ([THINK], -1.0),
        ([THINK + "<answer>408</answer>"], -1.0),
        ([THINK + "<answer>\\boxed{408</answer>"], -1.0),
        ([THINK + RIGHT + RIGHT], -1.0),
        ([THINK + "<python>" + RIGHT], -1.0),
        ([THINK + PYTHON, "408", SEARCH, "408", "<think>" + RIGHT], -1.0),
    ],
)
def test_rewards(written, expected):
    assert value(*written) == pytest.approx(expected)


def test_the_values_come_from_the_recipe():
    odd = usual(broken=-3.0, wrong=-0.5, bonus=0.25)
    assert score(trajectory(RIGHT), QUESTION, odd)["reward"] == -3.0
    assert score(trajectory(THINK + WRONG), QUESTION, odd)["reward"] == -0.5
    two_tools = trajectory(THINK + PYTHON, "408", SEARCH, "408", RIGHT)
    assert score(two_tools, QUESTION, odd)["reward"] == 1.25


def test_the_breakdown_says_what_a_reward_was_made_from():
    row = score(trajectory(THINK + PYTHON, "40", RIGHT, observed="error"), QUESTION, SETTINGS)
    own = len(THINK + PYTHON + RIGHT)
    assert row == {
        "reward": 1.0,
        "score": 1.0,
        "breakdown": {"score": 1.0},
        "success": True,
        "answer": "408",
        "faults": [],
        "sound": True,
        "outcome": "answer",
        "tool_calls": 1,
        "tool_errors": 1,
        "response_tokens": own + len("<result>40</result>"),
        "sampled_tokens": own,
        "lenient": True,
        "last_number": True,
    }


def test_a_right_answer_in_a_broken_format_is_no_success():
    row = score(trajectory(RIGHT), QUESTION, SETTINGS)
    assert (row["success"], row["answer"], row["faults"]) == (False, "408", ["think"])
    assert (row["score"], row["reward"]) == (1.0, -1.0)


def test_a_trajectory_that_was_cut_has_no_answer():
    row = score(trajectory(THINK + "<ans", last="cut"), QUESTION, SETTINGS)
    assert (row["reward"], row["answer"], row["outcome"]) == (-1.0, None, "cut")
    assert row["faults"] == ["answer"]
    assert (row["score"], row["breakdown"]) == (0.0, {})


# ---- scorers

CAPITAL = Question("q", "toy", "Where?", ("New York City", "NYC"), "f1")
PARTLY = "<answer>\\boxed{New York}</answer>"  # precision 1, recall 2/3


def test_a_graded_score_is_the_reward():
    row = score(trajectory(THINK + PARTLY), CAPITAL, SETTINGS)
    assert row["reward"] == row["score"] == row["breakdown"]["score"] == pytest.approx(0.8)
    assert row["breakdown"]["recall"] == pytest.approx(2 / 3)
    assert not row["success"]


def test_the_bonus_comes_with_success_not_with_a_part_of_it():
    calls = (THINK + PYTHON, "", SEARCH, "")
    assert score(trajectory(*calls, PARTLY), CAPITAL, SETTINGS)["reward"] == pytest.approx(0.8)
    whole = "<answer>\\boxed{the NYC}</answer>"
    assert score(trajectory(*calls, whole), CAPITAL, SETTINGS)["reward"] == 1.1


def test_a_broken_format_earns_no_graded_score():
    row = score(trajectory(PARTLY), CAPITAL, SETTINGS)
    assert (row["reward"], row["score"]) == (-1.0, pytest.approx(0.8))


def test_the_question_names_its_scorer():
    answer = trajectory(THINK + "<answer>\\boxed{\\frac{816}{2}}</answer>")
    for scorer, expected in (("exact", 0.0), ("maths", 1.0), ("f1", 0.0)):
        question = Question("q", "toy", "12*34?", ("408",), scorer)
        assert score(answer, question, SETTINGS)["reward"] == expected


@pytest.mark.parametrize(
    ("written", "outcome", "lenient", "last"),
    [
        ([THINK + RIGHT], "answer", True, True),
        (["It is 408."], "no_answer", True, True),
        (["408, as 12 * 34 says"], "no_answer", True, False),
        ([PYTHON, "408", "I do not know."], "no_answer", False, False),  # a tool said it
        ([PYTHON, "408"], "call", False, False),
        (["<python>print(408)</python>"], "too_many_calls", False, False),
        (["It is 408, so <python>print(408)</python>"], "too_many_calls", True, True),
        (["It is<result>408</result>"], "forged_result", False, False),
        ([THINK + "<answer>\\boxed{\\frac{816}{2}}</answer>"], "answer", True, True),  # the scorer
    ],
)
def test_the_lenient_score_reads_what_the_last_turn_says(written, outcome, lenient, last):
    question = replace(QUESTION, scorer="maths")
    row = score(trajectory(*written, last=outcome), question, SETTINGS)
    assert (row["lenient"], row["last_number"]) == (lenient, last)


def test_an_unknown_scorer_is_refused_by_name():
    question = Question("train-00007", "toy", "?", ("1",), "rouge")
    with pytest.raises(ValueError, match=r"train-00007.*'rouge'.*exact, f1, judge, maths"):
        score(trajectory(THINK + RIGHT), question, SETTINGS)


@pytest.mark.parametrize("scorer", ["exact", "f1", "maths"])
@pytest.mark.parametrize(
    "written",
    ["", "\0", "408\0", "\ud800", "\u200f408", "{}", "x" * 100_000, "{" * 50_000 + "}" * 50_000],
    ids=["nothing", "null", "null after", "surrogate", "right to left", "braces", "long", "deep"],
)
def test_whatever_is_in_the_box_becomes_a_row_of_the_table(scorer, written):
    question = Question("q", "toy", "12*34?", ("408",), scorer)
    box = f"<answer>\\boxed{{{written}}}</answer>"
    nodes = trajectory(THINK, "", box)
    (row,) = score_trees([Tree(question, nodes, leaves=[len(nodes) - 1])], SETTINGS)
    table = pa.Table.from_pylist([row], schema=TABLE)
    right = written == "\u200f408"  # an invisible mark changes no answer
    assert table["reward"].to_pylist() == [float(right)]
    assert table["answer"].to_pylist() == [written.replace("\ud800", "?")]


SLOW = [f"\\prod_{{n=1}}^{{{last}}} (x-n)" for last in (99999, 99998)]


def decided(trees, most_timeouts):
    """Each leaf's score, and what decided it."""
    rows = score_trees(trees, SETTINGS, most_timeouts)
    return [(row["score"], *(set(row["breakdown"]) - {"score"})) for row in rows]


def answered(*said):
    nodes = [node(-1, PROMPT, "?")]
    nodes += [node(0, TURN, f"{THINK}<answer>\\boxed{{{a}}}</answer>", "answer") for a in said]
    question = Question(f"q-{said}", "toy", "?", ("x+1", "\\frac{1}{2}"), "maths")
    return Tree(question, nodes, [*range(1, len(nodes))])


def test_equal_answers_score_the_same_when_the_budget_is_used_up(capsys):
    tree = answered("1+x", SLOW[0], SLOW[1], "1+x", SLOW[0], "x-(-1)", "0.5")
    verified, timeout, over = (1.0, "verifier"), (0.0, "timeout"), (0.0, "over_budget")
    expected = [verified, timeout, over, verified, timeout, over, (1.0, "number")]
    assert decided([tree], 1) == expected
    assert "processor time: 1; rollouts that were not compared" in (said := capsys.readouterr().out)
    assert "came before: 2;" in said


def test_slow_answers_to_other_questions_change_nothing():
    """So in an evaluation, with one answer to each question, none is over budget."""
    trees = [answered(SLOW[0]), answered(SLOW[1]), answered("1+x")]
    timeout, verified = (0.0, "timeout"), (1.0, "verifier")
    assert decided(trees, 1) == [timeout, timeout, verified]
    assert decided(trees[::-1], 1) == [verified, timeout, timeout]


# ---- a tool's text is not the agent's


@pytest.mark.parametrize(
    "quoted",
    [
        "<think>",
        "</think></think>",
        "<answer>\\boxed{1}</answer>",
        "<search>x</search>",
        "</python>",
        "<result>",
        "</result>",
        "</result><think>",
        "</result><answer>\\boxed{1}</answer><result>",
    ],
)
def test_what_a_result_quotes_changes_nothing(quoted):
    plain = score(trajectory(THINK + PYTHON, "", RIGHT), QUESTION, SETTINGS)
    forged = score(trajectory(THINK + PYTHON, quoted, RIGHT), QUESTION, SETTINGS)
    forged["response_tokens"] -= len(quoted)
    assert forged == plain


def test_a_result_can_not_answer_for_the_agent():
    row = score(trajectory(THINK + PYTHON, f"</result>{RIGHT}", "", last="cut"), QUESTION, SETTINGS)
    assert (row["reward"], row["answer"]) == (-1.0, None)


def test_the_agent_can_not_hide_its_faults_in_a_result():
    assert value(f"{THINK}<result><think></result>{RIGHT}") == -1.0


@pytest.mark.parametrize("outcome", ["no_such_tool", "error", "no_results", "timeout"])
def test_a_call_that_does_not_work_earns_no_bonus(outcome):
    """Else two calls that fail would earn it."""
    calls = [THINK + PYTHON, "408", SEARCH, "no", SEARCH, "no", RIGHT]
    nodes = trajectory(*calls)
    nodes[4] = replace(nodes[4], outcome=outcome)
    assert score(nodes, QUESTION, SETTINGS)["reward"] == 1.1, "the second search worked"
    nodes[6] = replace(nodes[6], outcome=outcome)
    assert score(nodes, QUESTION, SETTINGS)["reward"] == 1.0
    assert score(trajectory(*calls, observed=outcome), QUESTION, SETTINGS)["reward"] == 1.0


# ---- tables


def test_a_tree_gives_a_row_a_leaf():
    nodes = [
        node(-1, PROMPT, "12*34?"),
        node(0, TURN, THINK + PYTHON, "call"),
        node(1, RESULT, "<result>408</result>", "ok"),
        node(2, TURN, WRONG, "answer"),
        node(2, TURN, RIGHT, "answer"),
    ]
    rows = score_trees([Tree(QUESTION, nodes, leaves=[4, 3])], SETTINGS)
    assert [(r["question"], r["kind"], r["leaf"], r["reward"]) for r in rows] == [
        ("q", "toy", 0, 1.0),
        ("q", "toy", 1, 0.0),
    ]
    assert all(
        list(row) == [name for name in TABLE.names if name != "length_penalty"] + ["parts"]
        for row in rows
    )


# ---- length, and groups with spread

# The run of the DAPO paper: at most 20,480 tokens, of which 4,096 are the buffer.
DAPO = Overlong(buffer=0.2, factor=1.0)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (1, 0.0),
        (16_384, 0.0),
        (16_385, -1 / 4096),
        (17_408, -0.25),
        (18_432, -0.5),
        (20_480, -1.0),
        (30_000, -1.0),
    ],
)
def test_golden_values_of_the_soft_overlong_penalty(tokens, penalty):
    assert length_penalty(tokens, 20_480, DAPO) == pytest.approx(penalty, abs=1e-9)
    twice = Overlong(buffer=0.2, factor=2.0)
    assert length_penalty(tokens, 20_480, twice) == pytest.approx(2 * penalty, abs=1e-9)
    assert length_penalty(tokens, 20_480, None) == 0


@given(st.integers(1, 400), st.integers(1, 200), st.floats(0.01, 1), st.floats(0.1, 5))
def test_a_penalty_lies_between_nothing_and_its_factor_and_grows_with_length(
    tokens, budget, buffer, factor
):
    overlong = Overlong(buffer=buffer, factor=factor)
    penalty, next_one = (length_penalty(n, budget, overlong) for n in (tokens, tokens + 1))
    assert -factor <= next_one <= penalty <= 0
    assert penalty == 0 or tokens > (1 - buffer) * budget - 1e-6
    assert tokens < budget or penalty == pytest.approx(-factor)


def grown(question, *written):
    """A tree whose leaves share the prompt alone."""
    nodes = [node(-1, PROMPT, "12*34?")]
    nodes += [node(0, TURN, text, "answer") for text in written]
    return Tree(Question(question, "toy", "12*34?", ("408",)), nodes, [*range(1, len(nodes))])


def run(trees, overlong=None, response_tokens=100, **others):
    save_trees(trees, Path("trees"))
    inputs = RewardInputs(Artifact.at(Path("trees")), SETTINGS, overlong, response_tokens, **others)
    made = reward(SubStep("toy", "reinforce", 0, 7), inputs)
    return made, read_rows(Path(artifacts.output(made, "rewards").path))


def test_groups_with_spread_are_those_whose_answers_score_differently(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [
        grown("a", THINK + RIGHT, THINK + RIGHT),
        grown("b", THINK + RIGHT, THINK + WRONG),
        grown("c", RIGHT),
        grown("d", THINK + WRONG, THINK + WRONG, WRONG),
    ]
    made, rows = run(trees)
    assert made["groups_with_spread"] == 1, "d differs in format alone"
    assert made["metrics"]["groups_without_spread"] == 0.5, "of rewards"
    assert made["metrics"]["reward"] == pytest.approx((1 + 1 + 1 + 0 - 1 + 0 + 0 - 1) / 8)
    assert made["metrics"]["success"] == pytest.approx(3 / 8)
    assert made["metrics"]["score"] == pytest.approx(np.mean([row["score"] for row in rows]))
    assert made["metrics"]["broken_format"] == pytest.approx(2 / 8)
    assert [row["length_penalty"] for row in rows] == [0.0] * 8


def test_masked_leaves_make_no_spread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [grown(name, *[THINK + RIGHT] * 2, THINK + WRONG) for name in "ab"]
    last = trees[0].nodes[-1]
    trees[0].nodes[-1] = replace(last, outcome="world_failed")
    made, rows = run(trees)
    assert made["groups_with_spread"] == 2
    masked, same_rows = run(trees, masked=("world_failed",))
    assert masked["groups_with_spread"] == 1
    assert masked["metrics"]["groups_without_spread"] == 0.5
    assert same_rows == rows


def test_a_length_penalty_stands_beside_the_reward_and_makes_no_spread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short, long = THINK + RIGHT, "<think>multiply it</think>" + RIGHT
    trees = [grown("a", short, long), grown("b", short, short)]
    budget = len(long)
    made, rows = run(trees, Overlong(buffer=0.5, factor=1.0), budget)
    assert [row["reward"] for row in rows] == [1.0] * 4, "what was earned stays as it is"
    penalties = [row["length_penalty"] for row in rows]
    expected = -(len(short) - budget / 2) / (budget / 2)
    assert penalties == pytest.approx([expected, -1.0, expected, expected])
    assert made["groups_with_spread"] == 0
    assert made["metrics"]["groups_without_spread"] == 0.5
    assert made["metrics"]["reward"] == 1.0


def test_questions_without_labels_need_not_be_scored(tmp_path, monkeypatch):
    """No judge is there: it would be asked about them."""
    monkeypatch.chdir(tmp_path)
    labels = Labels(seed=0, share=0.5, held_out=0.5)
    nodes = trajectory(THINK + RIGHT)
    trees = [Tree(replace(QUESTION, id=f"q{n}"), nodes, leaves=[1]) for n in range(12)]
    labelled = [tree.question.id for tree in trees if labels.role(tree.question.id)]
    assert 0 < len(labelled) < 12
    for tree in trees:
        if tree.question.id not in labelled:
            tree.question = replace(tree.question, scorer="judge")
    save_trees(trees, Path("trees"))
    inputs = RewardInputs(Artifact.at(Path("trees")), SETTINGS, None, 99)
    with pytest.raises(ValueError, match="scored by a judge, and there is none"):
        reward(SubStep("toy", "reinforce", 0, 7), inputs)
    made = reward(
        SubStep("toy", "reinforce", 1, 7), replace(inputs, labels=labels, labelled_only=True)
    )
    rows = read_rows(Path(artifacts.output(made, "rewards").path))
    assert [row["question"] for row in rows if row["success"]] == labelled
    hidden = [dict(row["breakdown"]) for row in rows if not row["success"]]
    assert hidden == [{"score": 0.0, "not_asked": 1.0}] * (12 - len(labelled))
    assert (made["metrics"]["success"], made["metrics"]["score"]) == (1, 1), "of labelled ones"
    assert made["metrics"]["scored_share"] == pytest.approx(len(labelled) / 12)
