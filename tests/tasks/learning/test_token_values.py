"""What an update saw of each sampled token, against a loop over the leaves."""

from dataclasses import replace

import numpy as np
import pytest

from tasks.learning import learner, passes, token_values
from tasks.learning.losses import RATIOS
from tasks.learning.objectives import Clip
from tasks.trees.tree import TURN, Question
from tests.learners import GRPO, MACHINE, SETTINGS, TEMPERATURE, fresh, made_trees, run

TWICE = SETTINGS.model_copy(update={"epochs": 2, "micro_batch_tokens": 60})  # some trees are split
CLIP = Clip(low=0.02, high=0.03)


def named(trees):
    """The trees, each of a question of its own."""
    questions = [Question(f"q{i}", "kind", "text", ("1",)) for i in range(len(trees))]
    return [
        replace(one, tree=replace(one.tree, question=question))
        for one, question in zip(trees, questions, strict=True)
    ]


def slow_values(trees, before, after, unit):
    """(question, node) -> gap, ratio and share of clipped views of its tokens, token by token."""
    seen = {}
    for credited, old, new in zip(trees, before, after, strict=True):
        tree = credited.tree
        for leaf, credit in zip(tree.leaves, credited.credits, strict=True):
            if not credit.advantages.any():
                continue
            turns = [node for node in tree.path(leaf) if tree.nodes[node].kind == TURN]
            places = [(node, i) for node in turns for i in range(len(tree.nodes[node].tokens))]
            logs = np.array([new[node][i] - old[node][i] for node, i in places])
            ratios = np.exp(logs) if unit == "token" else np.full(len(logs), np.exp(logs.mean()))
            for (node, i), ratio, advantage in zip(places, ratios, credit.advantages, strict=True):
                clipped = ratio > 1 + CLIP.high if advantage > 0 else ratio < 1 - CLIP.low
                gap = old[node][i] - tree.nodes[node].logprobs[i]
                entry = seen.setdefault((tree.question.id, node), {}).setdefault(i, [])
                entry.append((gap, ratio, float(clipped and advantage != 0)))
    return {place: [np.mean(of[i], 0) for i in sorted(of)] for place, of in seen.items()}


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_values_of_tokens_equal_a_loop_over_leaves(initial, unit):
    trees, seen = named(made_trees(3, zeros=(0,))), {}
    loss = replace(GRPO, ratio=RATIOS[unit], clip=CLIP, kl=None)
    settings = TWICE.model_copy(update={"learning_rate": 3e-3})

    def logprobs(learning):
        return passes.node_logprobs(learning.model, trees, TEMPERATURE, settings, MACHINE)

    before = logprobs(fresh(initial, settings))
    learning = fresh(initial, settings)
    once = settings.model_copy(update={"epochs": 1})
    run(learning, trees, once, loss)
    after = logprobs(learning)
    learner.optimize(fresh(initial, settings), trees, loss, settings, TEMPERATURE, MACHINE, 1, seen)
    table = token_values.table(seen).to_pylist()
    expected = slow_values(trees, before, after, unit)
    assert [(row["question"], row["node"]) for row in table] == sorted(expected)
    found = [[row[name] for name in token_values.TABLE.names[2:]] for row in table]
    for (gaps, ratios, clipped), row in zip(found, table, strict=True):
        values = np.array(expected[row["question"], row["node"]]).T
        np.testing.assert_allclose(gaps, values[0], atol=1e-4)
        np.testing.assert_allclose(ratios, values[1], atol=1e-4)
        np.testing.assert_allclose(clipped, values[2], atol=1e-6)
    shares = np.concatenate([of[2] for of in found])
    assert {0.0, 1.0} < set(shares.tolist()), "some views of a token are clipped, others are not"


def test_nodes_without_an_advantage_have_no_row(initial):
    seen = {}
    trees = made_trees(1, zeros=range(5))
    learner.optimize(fresh(initial), trees, GRPO, SETTINGS, TEMPERATURE, MACHINE, 1, seen)
    assert token_values.table(seen).num_rows == 0
