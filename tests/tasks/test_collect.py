"""collect: the tables of all iterations as one each, and the gates that they pass on the way."""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from params.schema.algorithms import Kl, load_algorithms
from tasks import advantage, estimate, reward
from tasks.collect import (
    CollectInputs,
    _join,
    _measures,
    _of_advantages,
    _rewards,
    collect,
    publish_collected,
)
from tasks.gates import gate
from tasks.gates.gate import GateError
from tasks.learning import token_values
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.recipes import load as settings_of
from tasks.rewards.scoring import score_trees
from tasks.trees.tables import load_trees, read_rows, save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree
from tests.trees import world_tree

LEAVES = 2
ROWS = load_algorithms()
RECIPE = settings_of("tiny")
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


def iteration(
    folder, batches=(("q0", "q1"),), dropped=(), penalties=(0.0, 0.0), credit=None, grow=tree
):
    """What one iteration has made: its tables by name, and its metrics by verb.

    ``batches``: the questions of each batch that it took; those ``dropped`` the group filter did
    not keep; ``penalties``: length penalties of a tree's leaves; ``credit``: their advantages;
    ``grow``: the tree of a question.
    """
    names = ("trees", "estimates", "rewards", "parts", "verdicts", "advantages", "tokens")
    tables = {name: [] for name in names}
    advantages = []
    for number, questions in enumerate(batches):
        trees = [grow(question) for question in questions]
        save_trees(trees, folder / f"rollout{number}" / "trees")
        tables["trees"].append(folder / f"rollout{number}" / "trees")
        rewards = score_trees(trees, SETTINGS.reward)
        for row in rewards:
            row["length_penalty"] = penalties[row["leaf"]]
        file = folder / f"reward{number}" / "rewards.parquet"
        write_table(pa.Table.from_pylist(rewards, schema=reward.TABLE), file)
        write_table(reward.part_table(rewards), file.with_name("parts.parquet"))
        tables["rewards"].append(file)
        tables["parts"].append(file.with_name("parts.parquet"))
        values = credit or relative([r["reward"] + r["length_penalty"] for r in rewards[:LEAVES]])
        advantages += [
            {
                "question": row["question"],
                "leaf": row["leaf"],
                "kept": row["question"] not in dropped,
                "advantage": 0.0 if row["question"] in dropped else values[row["leaf"]],
            }
            for row in rewards
        ]
    file = folder / "advantage" / "advantages.parquet"
    write_table(pa.Table.from_pylist(advantages, schema=advantage.TABLE), file)
    tables["advantages"].append(file)
    file = folder / "update" / "tokens.parquet"
    rows = [
        {"question": question, "node": 1, "logprob_gap": [0.0], "ratio": [1.0], "clipped": [0.0]}
        for question in questions
    ]
    write_table(pa.Table.from_pylist(rows, schema=token_values.TABLE), file)
    tables["tokens"].append(file)
    counts = {"rollout": len(batches), "reward": len(batches), "advantage": 1, "update": 1}
    metrics = {
        verb: [{f"{verb}_metric": float(number)} for number in range(count)]
        for verb, count in counts.items()
    }
    return {"tables": tables, "metrics": metrics}


def relative(rewards):
    values = np.array(rewards) - np.mean(rewards)
    return (values / (np.std(rewards, ddof=1) + 1e-6)).tolist()


@pytest.fixture
def done(tmp_path, monkeypatch):
    """What two iterations have made, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return [iteration(tmp_path / "ledger" / str(number)) for number in range(2)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder in which the same two iterations are collected, and what was made."""
    folder = tmp_path_factory.mktemp("plain")
    done = [iteration(folder / "ledger" / str(number)) for number in range(2)]
    with contextlib.chdir(folder):
        return folder, done, run(done)


def run(done, row="arpo", asked=()):
    """Collect and publish in the working folder; see ``inputs_of``."""
    inputs = inputs_of(done, row, asked)
    made = collect(SubStep("toy", "reinforce", 0, 7), inputs)
    publish_collected(inputs, made, Path("data/toy"))
    return made


def inputs_of(done, row, asked=()):
    """What collect needs; ``asked``: rewards by the iterations that each policy learned from."""
    return CollectInputs(
        leaves=LEAVES,
        reward=SETTINGS.reward,
        algorithm=ROWS[row] if isinstance(row, str) else row,
        dialogue=RECIPE.dialogue,
        tables=[
            {name: list(map(Artifact.at, files)) for name, files in entry["tables"].items()}
            for entry in done
        ],
        metrics=[entry["metrics"] for entry in done],
        validation={number: Artifact.at(file) for number, file in dict(asked).items()},
    )


def plant(entry, name, rows):
    """Write a table of one iteration anew, with the fault that is planted in its rows."""
    (file,) = entry["tables"][name]
    schemas = {"rewards": reward.TABLE, "advantages": advantage.TABLE}
    write_table(pa.Table.from_pylist(rows(read_rows(file)), schema=schemas[name]), file)


def test_tables_of_all_iterations_are_joined_and_pass_their_gates(plain):
    folder, *_ = plain
    data = folder / "data/toy"
    rewards = pd.read_parquet(data / "trees" / "rewards.parquet")
    assert rewards["iteration"].tolist() == [0] * 4 + [1] * 4
    assert rewards["reward"].tolist() == [1.0, 0.0] * 4
    assert len(read_rows(data / "trees" / "advantages.parquet")) == 8
    assert len(read_rows(data / "trees" / "nodes.parquet")) == 20
    assert len(read_rows(data / "trees" / "leaves.parquet")) == 8
    values = pd.read_parquet(data / "trees" / "tokens.parquet")
    assert values.groupby("iteration")["question"].agg(list).tolist() == [["q0", "q1"]] * 2
    assert (data / "curve.csv").read_text().splitlines()[0] == (
        "iteration,reward_metric,rollout_metric,advantage_metric,update_metric"
    )
    for name, rows in (("trajectories", 8), ("rewards", 8), ("advantages", 8)):
        verdict = json.loads((data / "gates" / "reinforce" / f"{name}.json").read_text())
        assert verdict["passed"] and verdict["rows"] == rows and verdict["table"] == name
        assert (folder / ".beamline/data_docs/toy" / name / "verdict.json").is_file()


def estimate_leaves(done, first):
    """Give the leaves of each tree estimates of a reward model: ``first``, and 1/8 less."""
    for entry in done:
        (rewards,) = entry["tables"]["rewards"]
        rows = [
            {name: row[name] for name in ("question", "leaf")}
            | {"estimate": first - row["leaf"] / 8}
            for row in read_rows(rewards)
        ]
        file = rewards.parents[1] / "estimate" / "estimates.parquet"
        write_table(pa.Table.from_pylist(rows[::-1], schema=estimate.TABLE), file)
        entry["tables"]["estimates"] = [file]


def test_curve_has_the_validation_of_policies_and_rewards_the_estimates_of_a_model(done, plain):
    estimate_leaves(done, 0.25)
    rewards = done[0]["tables"]["rewards"][0]
    run(done, asked={0: rewards, 2: rewards})
    tables = [folder / "data/toy/trees/rewards.parquet" for folder in (Path(), plain[0])]
    found, without = ([row["estimate"] for row in read_rows(table)] for table in tables)
    assert found == [0.25, 0.125] * 4
    assert without == [None] * 8
    curve = pd.read_csv("data/toy/curve.csv")
    assert curve["iteration"].tolist() == [0, 1, 2]
    assert curve["validation_success"].isna().tolist() == [False, True, False]
    assert curve["validation_success"][0] == 0.5
    assert curve["update_metric"].isna().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("name", "fault", "messages"),
    [
        (
            "rewards",
            lambda rows: [{**rows[0], "reward": 7.0}, *rows[1:3]],
            [
                r"- the reward is in \[-1, 1.1\]: not so in 1 of 7 rows\n"
                r'    {"iteration": 1, "question": "q0", "leaf": 0, "reward": 7.0}',
                "- there are 8 rows, one a leaf: observed 7",
                r"estimates are in \[0, 1\].*: not so in 7 of 7 rows",
            ],
        ),
        (
            "advantages",
            lambda rows: [{**rows[0], "advantage": 0.0}, *rows[1:3], {**rows[3], "leaf": 5}],
            [
                r"the leaf has a reward: not so in 1 of 8 rows\n"
                r'    {"iteration": 1, "question": "q1", "leaf": 5, "rewarded": false}',
                "a group's advantages have mean 0: not so in 2 of 8 rows",
            ],
        ),
    ],
)
def test_planted_faults_stop_the_stage_before_an_out_is_written(done, name, fault, messages):
    if name == "rewards":
        estimate_leaves(done, 1.25)
    plant(done[1], name, fault)
    with pytest.raises(GateError, match=rf"table {name} ") as caught:
        run(done)
    for message in messages:
        assert re.search(message, str(caught.value)), message
    assert not Path("data/toy").exists()
    verdict = Path(".beamline/data_docs/toy", name, "verdict.json")
    assert not json.loads(verdict.read_text())["passed"], "its page is made of this"


def test_trajectory_without_a_token_is_named(done):
    empty = np.zeros(0, np.float32)
    bare = Node(0, TURN, "no_answer", "", np.zeros(0, np.int32), empty, empty)
    made = tree("q0")
    broken = Tree(made.question, [made.nodes[0], bare], [1, 1])
    save_trees([broken, tree("q1")], Path("ledger/1/rollout0/trees"))
    with pytest.raises(GateError, match="table trajectories") as caught:
        run(done)
    row = '{"iteration": 1, "question_id": "q0", "leaf": 0, "sampled_tokens": 0}'
    assert "- at least one token is sampled: not so in 2 of 8 rows" in str(caught.value)
    assert row in str(caught.value)
    unusable = "highest_logprob=-inf, lowest_entropy=inf, highest_entropy=-inf"
    assert unusable in str(caught.value)


def test_collected_tables_are_published_again_without_their_gates(plain, tmp_path, monkeypatch):
    shutil.copytree(plain[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    _, done, first = plain
    files = {file: file.read_bytes() for file in Path("data").rglob("*.*")}
    monkeypatch.setattr(gate, "check", None)
    shutil.rmtree("data")
    assert run(done) == first
    assert {file: file.read_bytes() for file in Path("data").rglob("*.*")} == files
    other = [done[0], iteration(tmp_path / "other")]
    plant(other[1], "rewards", lambda rows: [{**rows[0], "score": 0.5}, *rows[1:]])
    with pytest.raises(TypeError):  # other rewards are judged anew
        run(other)


# ---------------------------------------------------------------- worlds


def lake(question, fresh=True):
    made = world_tree({"ABC": [0.0, -0.1, 1.0], "AD": [-0.1, 0.0]}, fresh)
    made.question = replace(made.question, id=question, answers=("2",))
    return made


def test_worlds_are_joined_with_their_steps_and_tasks(tmp_path, monkeypatch):
    """In the first iteration with growing prompts, in the second one with fresh ones."""
    monkeypatch.chdir(tmp_path)
    done = [
        iteration(
            tmp_path / str(fresh), [("q0",), ("q1",)], grow=lambda q, fresh=fresh: lake(q, fresh)
        )
        for fresh in (False, True)
    ]
    run(done)
    folder = Path("data/toy/trees")
    assert len(read_rows(folder / "steps.parquet")) == 4 * (1 + 3 + 2)
    for fresh in (False, True):
        for loaded, question in zip(load_trees(folder, int(fresh)), ("q0", "q1"), strict=True):
            assert loaded.question == lake(question).question
            observed = [node.observation for node in loaded.nodes]
            assert observed == [node.observation for node in lake(question, fresh).nodes]


def test_a_run_without_worlds_has_no_table_of_steps(plain):
    folder = plain[0] / "data/toy/trees"
    names = {path.name for path in folder.iterdir()}
    tables = ("questions", "nodes", "leaves", "decisions", "rewards", "advantages", "tokens")
    assert names == {f"{name}.parquet" for name in tables}
    assert "data" not in read_rows(folder / "questions.parquet")[0]


def test_what_the_gate_measures_of_a_fresh_prompt_a_step():
    growing, fresh = (list(map(_measures, lake("q", form).trajectories())) for form in (0, 1))
    for found in (*growing, *fresh):
        assert found["logprob_count"] == found["sampled_tokens"] > 0
    assert all(found["observed_tokens"] > 0 for found in growing)
    assert [found["observed_tokens"] for found in fresh] == [0, 0], "prompts are no response"
    assert [found["tool_calls"] for found in (*growing, *fresh)] == [3, 2] * 2


# ---------------------------------------------------------------- several batches an iteration


def test_all_batches_of_an_iteration_are_in_its_tables_and_in_its_point_of_the_curve(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    batches = [("q0", "q1"), ("q2", "q3"), ("q4", "q5")]
    run([iteration(tmp_path / "a", batches, dropped=("q1", "q4")), iteration(tmp_path / "b")])
    data = Path("data/toy")
    for name, leaves in (("rewards", 16), ("advantages", 16), ("leaves", 16), ("questions", 8)):
        rows = pd.read_parquet(data / "trees" / f"{name}.parquet")
        assert len(rows) == leaves
        assert rows["iteration"].value_counts().to_dict() == {0: leaves * 3 // 4, 1: leaves // 4}
    advantages = pd.read_parquet(data / "trees" / "advantages.parquet")
    assert set(advantages[~advantages["kept"]]["question"]) == {"q1", "q4"}
    first, second = pd.read_csv(data / "curve.csv").to_dict("records")
    assert (first["reward_metric"], first["rollout_metric"]) == (1.0, 1.0), "means of 0, 1 and 2"
    assert (first["update_metric"], second["reward_metric"]) == (0.0, 0.0)


# ---------------------------------------------------------------- what the gate of advantages knows


@pytest.fixture
def credited(tmp_path, monkeypatch):
    """Have the gate of advantages judge iterations: each is the changes of one."""
    monkeypatch.chdir(tmp_path)

    def judge(row, *iterations):
        done = [iteration(tmp_path / str(n), **each) for n, each in enumerate(iterations)]
        inputs = inputs_of(done, row)
        frames = (_rewards(inputs.tables), _join(inputs.tables, "advantages"))
        checked = _of_advantages(inputs, *(each.to_pandas() for each in frames))
        gate.check("advantages", *checked, tmp_path / "verdict.json", tmp_path / "docs")

    return judge


NO_CREDIT = "where a group's rewards are equal, none has credit"


def test_rewards_that_differ_by_a_length_penalty_alone_may_have_credit(credited):
    # rewards 1 and 0 with penalties that make them -1 and 0, and equal in the second iteration
    first, second = {"penalties": (-2.0, 0.0)}, {"penalties": (-1.0, 0.0)}
    credited("dapo", first, second)
    with pytest.raises(GateError, match=NO_CREDIT):
        credited("dapo", first, second | {"credit": [0.7, -0.7]})


def test_with_kl_in_the_reward_equal_rewards_may_have_credit(credited):
    """RLOO measures r - coefficient * k1 against its group; the table of rewards has r alone."""
    equal = {"penalties": (-1.0, 0.0), "credit": [0.02, -0.02]}
    assert ROWS["rloo"].kl == Kl(place="reward", estimator="k1", coefficient=0.05)
    credited("rloo", equal)
    without = ROWS["rloo"].model_copy(update={"kl": None})
    with pytest.raises(GateError, match=NO_CREDIT):
        credited(without, equal)


def test_credit_that_is_not_measured_against_the_group_need_not_have_mean_0(credited):
    credited("arpo_hard", {"credit": [0.5, 0.25]})
    with pytest.raises(GateError, match="a group's advantages have mean 0"):
        credited("arpo", {"credit": [0.5, 0.25]})
