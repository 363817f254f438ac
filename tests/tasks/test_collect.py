"""collect: the tables of all iterations as one each, and the gates that they pass on the way."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from params import schema
from tasks import advantage, reward
from tasks.collect import collect
from tasks.estimators.group import group_relative
from tasks.gate import GateError
from tasks.reward import score_tree
from tasks.trajectory import (
    PROMPT,
    RESULT,
    TURN,
    Node,
    Question,
    Tree,
    read_rows,
    save_trees,
    write_table,
)

LEAVES = 2
RECIPE = schema.load("tiny")
SETTINGS = RECIPE.reinforce.model_copy(
    update={"rollout": RECIPE.reinforce.rollout.model_copy(update={"leaves": LEAVES, "initial": 1})}
)
CALL = "<think>t</think><python>print(2)</python>"
ANSWERS = ("<think>t</think><answer>\\boxed{2}</answer>", "<answer>\\boxed{3}</answer>")


def node(parent, kind, text, outcome=""):
    scores = np.full(3 if kind == TURN else 0, 0.5, np.float32)
    return Node(parent, kind, outcome, text, np.arange(3, dtype=np.int32), -scores, scores)


def tree(question):
    """Two leaves that part after a tool result: one right, one wrong."""
    nodes = [
        node(-1, PROMPT, "1+1?"),
        node(0, TURN, CALL, "call"),
        node(1, RESULT, "<result>2</result>", "ok"),
        node(2, TURN, ANSWERS[0], "answer"),
        node(2, TURN, ANSWERS[1], "answer"),
    ]
    return Tree(Question(question, "sum", "1+1?", ("2",)), nodes, [3, 4])


def iteration(folder):
    """What the ledger remembers of one iteration of two questions, each table as its verb's."""
    trees = [tree("q0"), tree("q1")]
    save_trees(trees, folder / "rollout" / "trees")
    rewards = [row for each in trees for row in score_tree(each, SETTINGS.reward)]
    write_table(
        pa.Table.from_pylist(rewards, schema=reward.TABLE), folder / "reward" / "rewards.parquet"
    )
    values = group_relative(np.array([row["reward"] for row in rewards[:LEAVES]]))
    advantages = [
        {"question": row["question"], "leaf": row["leaf"], "advantage": values[row["leaf"]]}
        for row in rewards
    ]
    write_table(
        pa.Table.from_pylist(advantages, schema=advantage.TABLE),
        folder / "advantage" / "advantages.parquet",
    )
    artifacts = {
        "rollout": {"trees": folder / "rollout" / "trees"},
        "reward": {"rewards": folder / "reward" / "rewards.parquet"},
        "advantage": {"advantages": folder / "advantage" / "advantages.parquet"},
        "update": {},
    }
    return {
        verb: {
            "artifacts": {name: {"path": str(path), "digest": ""} for name, path in made.items()},
            "metrics": {f"{verb}_metric": 1.0},
        }
        for verb, made in artifacts.items()
    }


@pytest.fixture
def done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [iteration(tmp_path / "ledger" / str(number)) for number in range(2)]


def run(done):
    collect.fn(recipe="toy", settings=SETTINGS, dialogue=RECIPE.dialogue, done=done)


def plant(entry, verb, rows):
    """Write the table of one iteration anew, with the fault that is planted in its rows."""
    file = Path(next(iter(entry[verb]["artifacts"].values()))["path"])
    schemas = {"reward": reward.TABLE, "advantage": advantage.TABLE}
    write_table(pa.Table.from_pylist(rows(read_rows(file)), schema=schemas[verb]), file)


def test_tables_of_all_iterations_are_joined_and_pass_their_gates(done):
    run(done)
    data = Path("data/toy")
    rewards = pd.read_parquet(data / "trees" / "rewards.parquet")
    assert rewards["iteration"].tolist() == [0] * 4 + [1] * 4
    assert rewards["reward"].tolist() == [1.0, 0.0] * 4
    assert len(read_rows(data / "trees" / "advantages.parquet")) == 8
    assert len(read_rows(data / "trees" / "nodes.parquet")) == 20
    assert len(read_rows(data / "trees" / "leaves.parquet")) == 8
    assert (data / "curve.csv").read_text().splitlines()[0] == (
        "iteration,reward_metric,rollout_metric,advantage_metric,update_metric"
    )
    for name, rows in (("trajectories", 8), ("rewards", 8), ("advantages", 8)):
        verdict = json.loads((data / "gates" / "reinforce" / f"{name}.json").read_text())
        assert verdict["passed"] and verdict["rows"] == rows and verdict["table"] == name
        assert Path(".beamline/data_docs/toy", name, "index.html").is_file()


@pytest.mark.parametrize(
    ("verb", "fault", "message"),
    [
        (
            "reward",
            lambda rows: [{**rows[0], "reward": 7.0}, *rows[1:]],
            r"table rewards .*\n- the reward is in \[-1, 1.1\]: not so in 1 of 8 rows\n"
            r'    {"iteration": 1, "question": "q0", "leaf": 0, "reward": 7.0}',
        ),
        ("reward", lambda rows: rows[1:], "- there are 8 rows, one a leaf: observed 7"),
        (
            "advantage",
            lambda rows: [*rows[:3], {**rows[3], "leaf": 5}],
            r'the leaf has a reward: not so in 1 of 8 rows\n    {"iteration": 1, "question": "q1", '
            '"leaf": 5, "rewarded": false}',
        ),
        (
            "advantage",
            lambda rows: [{**rows[0], "advantage": 0.0}, *rows[1:]],
            "a group's advantages have mean 0: not so in 2 of 8 rows",
        ),
    ],
)
def test_planted_fault_stops_the_stage_before_an_out_is_written(done, verb, fault, message):
    plant(done[1], verb, fault)
    with pytest.raises(GateError, match=message):
        run(done)
    assert [path.name for path in Path("data/toy").iterdir()] == ["gates"]


def test_trajectory_without_a_token_is_named(done):
    empty = np.zeros(0, np.float32)
    bare = Node(0, TURN, "no_answer", "", np.zeros(0, np.int32), empty, empty)
    made = tree("q0")
    broken = Tree(made.question, [made.nodes[0], bare], [1, 1])
    save_trees([broken, tree("q1")], Path("ledger/1/rollout/trees"))
    with pytest.raises(GateError, match="table trajectories") as caught:
        run(done)
    row = '{"iteration": 1, "question_id": "q0", "leaf": 0, "sampled_tokens": 0}'
    assert "- at least one token is sampled: not so in 2 of 8 rows" in str(caught.value)
    assert row in str(caught.value)
    unusable = "highest_logprob=-inf, lowest_entropy=inf, highest_entropy=-inf"
    assert unusable in str(caught.value)
