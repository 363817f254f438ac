"""Helpers of tests that write to MLflow: what a store holds, and traces to write."""

import numpy as np
import pyarrow as pa

from flows.tracking import store, traces
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.reward import TABLE
from tasks.trees.tables import save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree

CALL = "<think>first</think><python>print(6*7)</python>"


# what a store holds


def runs(client):
    experiment = client.get_experiment_by_name(store.EXPERIMENT)
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def history(client, run, name):
    return [(p.step, p.timestamp, p.value) for p in client.get_metric_history(run.id, name)]


def found_traces(client, filter_string=None, **options):
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    return client.search_traces(locations=[experiment], filter_string=filter_string, **options)


# traces to write


def node(parent, kind, outcome, text, length):
    measures = np.full(length if kind == TURN else 0, 0.25, np.float32)
    return Node(parent, kind, outcome, text, np.zeros(length, np.int32), -measures, measures)


def branched(name="train-00007", call=CALL, result="<result>42</result>", outcome="ok"):
    """A tree of which two leaves share a tool call and its result; the third stands alone."""
    question = Question(name, "chain", f"What is 6 times 7? ({name})", ("42",))
    nodes = [
        node(-1, PROMPT, "", question.text, 10),
        node(0, TURN, "call", call, 8),
        node(1, RESULT, outcome, result, 4),
        node(2, TURN, "answer", "<think>so</think><answer>\\boxed{42}</answer>", 6),
        node(2, TURN, "answer", "<think>so</think><answer>\\boxed{41}</answer>", 6),
        node(0, TURN, "cut", "<think>hm, hm, hm", 7),
    ]
    return Tree(question, nodes, leaves=[3, 4, 5])


# of a tree's leaves, which are right, wrong, and without an answer: answer, reward, faults
SCORES = [
    ("42", 1.0, []),
    ("41", 0.0, []),
    (None, -1.0, ["think", "answer"]),
]


def scores(tree, of_leaves=SCORES):
    """Rows of the table of rewards."""
    return [
        {
            "question": tree.question.id,
            "leaf": leaf,
            "reward": reward,
            "score": max(0.0, reward),
            "breakdown": [("score", max(0.0, reward))],  # as a table gives a map back
            "success": reward > 0,
            "answer": answer,
            "faults": faults,
            "outcome": tree.nodes[tree.leaves[leaf]].outcome,
            "response_tokens": 18,
            "sampled_tokens": 14,
        }
        for leaf, (answer, reward, faults) in enumerate(of_leaves)
    ]


def save_iteration(folder, *trees):
    """Save trees and their rewards as the ledger keeps an iteration's; both artifacts."""
    rows = [row for tree in trees for row in scores(tree)]
    save_trees(trees, folder / "trees")
    write_table(pa.Table.from_pylist(rows, schema=TABLE), folder / "rewards.parquet")
    return Artifact.at(folder / "trees"), Artifact.at(folder / "rewards.parquet")


def sample(artifacts, at=1_700_000_000.0):
    return traces.sample(SubStep("tiny", "reinforce", 20, 0), *artifacts, at, size=9)
