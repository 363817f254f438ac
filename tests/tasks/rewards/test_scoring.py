"""Rewards from parts: the usual three, weights, worlds, and that parts add up."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rewards import reward_parts as parts_module
from tasks.rewards.contract import Ending
from tasks.rewards.reward_parts import open_parts, reward_range
from tasks.rewards.scoring import score, score_trees
from tasks.trees.outcomes import ENDED_BY_WORLD, TURN_OUTCOMES
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Observation, Question, Tree
from tests.reward_parts import listed, usual

QUESTION = Question("q", "toy", "12*34?", ("408",))
RIGHT = "<think>t</think><answer>\\boxed{408}</answer>"
ALMOST = "<think>t</think><answer>\\boxed{New York}</answer>"
numbers = st.floats(-5, 5)

OF_WORLDS = [outcome for outcome in TURN_OUTCOMES if not outcome.startswith("program_")]


def node(parent, kind, text, outcome="", observation=None):
    tokens = np.arange(len(text), dtype=np.int32)
    scores = np.zeros(len(tokens) if kind == TURN else 0, np.float32)
    return Node(parent, kind, outcome, text, tokens, scores, scores, observation)


def scored(text, settings, question=QUESTION):
    nodes = [node(-1, PROMPT, "?"), node(0, TURN, text, "answer")]
    (row,) = score_trees([Tree(question, nodes, [1])], settings)
    assert math.fsum(row["parts"].values()) == row["reward"]
    return row


def rewarded(settings, **fields):
    """Return the row of an ending with these fields."""
    usual_fields = {"leaf": 0, "text": "", "trajectory": [node(-1, PROMPT, "?")]}
    ending = Ending(QUESTION, **usual_fields | fields)
    with open_parts(settings) as opened:
        return score(ending, {label: part([ending])[0] for label, part in opened.items()})


def by_the_formula(faults, answer, scored, tools, broken, wrong, bonus):
    """The rule of ARPO in one piece, as it was before there were parts."""
    success = scored == 1 and not faults
    if faults or answer is None:
        return broken
    if scored:
        return scored + bonus * (success and len(tools) > 1)
    return wrong


@given(
    faults=st.sampled_from([(), ("think",)]),
    answer=st.sampled_from([None, "7"]),
    graded=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    tools=st.sampled_from([(), ("python",), ("python", "search")]),
    values=st.tuples(numbers, numbers, numbers),
)
def test_the_usual_parts_give_the_floats_of_the_formula(faults, answer, graded, tools, values):
    graded = 0.0 if answer is None else graded
    broken, wrong, bonus = values
    row = rewarded(
        usual(broken, wrong, bonus),
        answer=answer,
        faults=faults,
        breakdown={"score": graded},
        tools=frozenset(tools),
    )
    expected = by_the_formula(faults, answer, graded, tools, broken, wrong, bonus)
    assert row["reward"] == expected
    assert row["success"] == (graded == 1 and not faults)
    low, high = reward_range(usual(broken, wrong, bonus))
    assert low <= row["reward"] <= high


def test_weights_multiply_scores():
    question = replace(QUESTION, answers=("New York City",), scorer="exact")
    row = scored(
        ALMOST,
        listed(
            {"answer": {"weight": 2.0, "wrong": -0.5}},
            {"scorer": {"name": "f1", "weight": 0.5}},
            {"scorer": {"name": "maths", "weight": -1.0}},
        ),
        question,
    )
    assert row["parts"] == {"answer": -0.5, "scorer_f1": 0.5 * 0.8, "scorer_maths": 0.0}
    row = scored(RIGHT, listed({"answer": {"weight": 2.0}}, {"scorer": {"name": "maths"}}))
    assert row["parts"] == {"answer": 2.0, "scorer_maths": 1.0}


def test_without_the_part_format_a_broken_one_costs_nothing():
    broken = "<answer>\\boxed{408}</answer>"
    row = scored(broken, listed({"answer": {}}))
    assert (row["reward"], row["success"], row["faults"]) == (1.0, True, ["think"])
    assert row["sound"], "what does not count makes no answer unsound"
    row = scored("<think>t", listed({"answer": {"wrong": -0.25}}))
    assert (row["reward"], row["success"], row["answer"]) == (-0.25, False, None)


def test_a_broken_format_silences_answer_and_scorers():
    row = scored("<answer>\\boxed{408}</answer>", listed(*LIST))
    assert row["parts"] == {"answer": 0.0, "format": -2.0, "scorer_f1": 0.0}


LIST = ({"answer": {}}, {"format": {"broken": -2.0}}, {"scorer": {"name": "f1"}})


# ---------------------------------------------------------------- worlds


def world(*observations, said="I win. <answer>\\boxed{408}</answer>"):
    """A tree of one episode whose agent claims to be right in each turn."""
    nodes = [node(-1, PROMPT, "?", observation=Observation("ok", "start", reward=9.0))]
    for observation in observations:
        nodes.append(node(len(nodes) - 1, TURN, said, "call", observation))
        nodes.append(node(len(nodes) - 1, RESULT, "<result>seen</result>", "ok"))
    nodes.pop()  # the last observation has no node of its own
    last = "terminated" if observations[-1].terminated else "truncated"
    nodes[-1] = replace(nodes[-1], outcome=last)
    return Tree(QUESTION, nodes, [len(nodes) - 1])


def step(reward=0.0, terminated=False, **info):
    return Observation("ok", "seen", reward=reward, terminated=terminated, info=info)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ([step(1.0), step(-0.25, terminated=True)], 1.0),
        ([step(1.0), step(-1.0, terminated=True)], 0.0),
        ([step(1.0), step(1.0)], 0.0),  # not ended by the world
        ([step(0.0, terminated=True, score=0.75)], 0.75),
        ([step(0.0, terminated=True, score=0.5, success=True)], 0.5),
        ([step(-1.0, success=True)], 1.0),
        ([step(5.0, terminated=True, success=False)], 0.0),
    ],
)
def test_the_last_observation_scores_an_episode(observations, expected):
    (row,) = score_trees([world(*observations)], listed({"answer": {}}, {"steps": {"weight": 2.0}}))
    assert row["score"] == row["breakdown"]["score"] == row["parts"]["answer"] == expected
    assert row["parts"]["steps"] == 2 * sum(seen.reward for seen in observations)
    assert (row["answer"], row["success"]) == (None, expected == 1)
    assert row["scorer"] == "world"


def test_worlds_and_answers_that_nothing_scored_have_no_lenient_score():
    hidden = Tree(QUESTION, [node(-1, PROMPT, "?"), node(0, TURN, RIGHT, "answer")], [1])
    for tree, names in ((world(step(1.0, terminated=True)), ()), (hidden, {QUESTION.id})):
        (row,) = score_trees([tree], listed({"answer": {}}), hidden=names)
        assert (row["lenient"], row["last_number"]) == (None, None)


@pytest.mark.parametrize("outcome", OF_WORLDS)
def test_an_episode_that_its_agent_ended_earns_the_penalty(outcome):
    tree = world(step(0.5))
    tree.nodes[-1] = replace(tree.nodes[-1], outcome=outcome)
    (row,) = score_trees([tree], listed({"steps": {}}, {"unfinished": {"penalty": -2.0}}))
    limits = {"call", "too_many_calls", "out_of_space", *ENDED_BY_WORLD}
    assert row["parts"]["unfinished"] == (0.0 if outcome in limits else -2.0)
    row = scored("<think>t", listed({"answer": {}}, {"unfinished": {}}))
    assert row["parts"]["unfinished"] == 0.0, "a question without a world"


@given(st.text(alphabet="<>/\\{}408answerboxedthink ", max_size=60))
def test_what_an_agent_writes_earns_nothing_in_a_world(said):
    quiet, loud = (world(step(0.5), step(0.25), said=text) for text in ("", said))
    rows = score_trees([quiet, loud], listed({"answer": {"wrong": -0.5}}, {"steps": {}}))
    assert [row["reward"] for row in rows] == [0.25, 0.25]


@pytest.mark.parametrize("given", [7, -0.1, math.nan, "1"])
def test_a_worlds_score_that_is_none_stops_with_question_and_leaf(given):
    with pytest.raises(ValueError, match="question q, leaf 0: the score in the info"):
        score_trees([world(step(score=given))], listed({"steps": {}}))


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match="question q, leaf 0: the part steps of the reward is inf"):
        score_trees([world(step(math.inf))], listed({"steps": {}}))


def test_ranges():
    assert reward_range(usual()) == (-1.0, 1.1)
    assert reward_range(listed({"steps": {}})) == (-math.inf, math.inf)
    assert reward_range(listed({"steps": {"weight": -2.0, "low": 0.0}})) == (-math.inf, 0.0)
    both = listed({"steps": {"low": 0.0, "high": 10.0}}, {"answer": {"wrong": -1.0}})
    assert reward_range(both) == (-1.0, 11.0)


# ---------------------------------------------------------------- the list in a recipe


def test_all_faults_of_a_list_are_named_with_their_keys():
    entries = [
        {"answer": {"weight": "1"}},
        {"taste": {}},
        "format",
        {"many_tools": {"bonus": 0.1, "malus": 1}},
        {"steps": {"low": 1.0, "high": 0.0}},
        {"scorer": {"name": "rouge"}},
        {"format": None},
        {"format": {"broken": -2.0}},
    ]
    typed, faults = parts_module.parts_of(entries, "mine.yaml")
    expected = [
        ["'reinforce.reward.0.answer.weight' = '1'", "write a decimal number"],
        ["'reinforce.reward.1'", "is called 'taste'", "many_tools"],
        ["'reinforce.reward.2' = 'format'", "- answer: {weight"],
        ["unknown key 'reinforce.reward.3.many_tools.malus'"],
        ["'reinforce.reward.4.steps'", "low 1 exceeds high 0"],
        ["'reinforce.reward.5.scorer'", "is called 'rouge'", "exact, f1, judge, maths"],
        ["several parts called 'format'"],
    ]
    assert [part.name for part in typed] == ["format", "format"]
    for line, words in zip(faults, expected, strict=True):
        assert line.startswith("mine.yaml: ")
        assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("values", [None, [], {}, "answer", {"wrong": 0.0}])
def test_what_is_no_list_of_parts_is_refused(values):
    typed, (fault,) = parts_module.parts_of(values, "mine.yaml")
    assert not typed
    assert (
        "'reinforce.reward'" in fault
        and "answer, format, many_tools, model, program, scorer, steps, unfinished" in fault
    )


def test_keys_see_the_source_of_each_part_and_scorer():
    found = parts_module.sources(listed(*LIST))
    assert set(found) == {
        *(f"reward {name}" for name in ("answer", "format", "scorer")),
        *(f"scorer {name}" for name in ("exact", "f1", "judge", "maths")),
    }
    assert len(set(found.values())) == 7


@pytest.mark.parametrize("kind", [RESULT, PROMPT])
def test_calls_count_in_both_forms_of_prompts(kind):
    """The answer to a call is a result, or the next fresh prompt."""
    turns = ["<think>a</think><python>1</python>", "<search>2</search>", RIGHT]
    nodes = [node(-1, PROMPT, "?")]
    for turn in turns[:2]:
        nodes.append(node(len(nodes) - 1, TURN, turn, "call"))
        nodes.append(node(len(nodes) - 1, kind, "7", "ok"))
    nodes.append(node(len(nodes) - 1, TURN, RIGHT, "answer"))
    (row,) = score_trees([Tree(QUESTION, nodes, [5])], usual(bonus=0.1))
    assert (row["parts"]["many_tools"], row["tool_calls"], row["reward"]) == (0.1, 2, 1.1)
