from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from params.schema import Machine, Update
from tasks import algorithm, checkpoint, ledger
from tasks.advantage import TABLE
from tasks.ledger import Step
from tasks.policy import use_machine
from tasks.statistics import tree_metrics
from tasks.trajectory import (
    PROMPT,
    RESULT,
    TURN,
    Node,
    Question,
    Tree,
    load_trees,
    save_trees,
    write_table,
)
from tasks.update import update

MACHINE = Machine(threads=1, device="cpu", precision="float32")
SETTINGS = Update(
    learning_rate=1e-2,
    warmup_updates=0,
    weight_decay=0.0,
    adam_betas=(0.9, 0.95),
    gradient_clip=1.0,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=64,
)
ARPO = algorithm.read_row("arpo")


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    use_machine(MACHINE)
    folder = tmp_path_factory.mktemp("policy") / "initial"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint._resident.clear()
    return tmp_path


def node(random, parent, kind, count):
    sampled = count if kind == TURN else 0
    return Node(
        parent=parent,
        kind=kind,
        outcome="",
        text="",
        tokens=random.integers(5, 270, count).astype(np.int32),
        logprobs=np.full(sampled, -5.6, np.float32),
        entropies=np.full(sampled, 0.9, np.float32),
    )


def batch(seed=0, advantages=(1.0, -0.5, 0.25)):
    """Two trees, one of them with a shared beginning; an advantage a leaf. Both as artifacts."""
    random = np.random.default_rng(seed)
    branched = Tree(
        Question("q0", "story", "", ("1",)),
        [
            node(random, -1, PROMPT, 3),
            node(random, 0, TURN, 4),
            node(random, 1, RESULT, 2),
            node(random, 2, TURN, 3),
            node(random, 2, TURN, 5),
        ],
        [3, 4],
    )
    straight = Tree(
        Question("q1", "story", "", ("1",)),
        [node(random, -1, PROMPT, 4), node(random, 0, TURN, 6)],
        [1],
    )
    save_trees([branched, straight], Path(f"trees{seed}"))
    leaves = [("q0", 0), ("q0", 1), ("q1", 0)]
    rows = [
        {"question": question, "leaf": leaf, "advantage": advantage}
        for (question, leaf), advantage in zip(leaves, advantages, strict=True)
    ]
    write_table(pa.Table.from_pylist(rows[::-1], schema=TABLE), Path(f"advantages{seed}.parquet"))
    return {
        "trees": ledger.artifact(Path(f"trees{seed}")),
        "advantages": ledger.artifact(Path(f"advantages{seed}.parquet")),
    }


def arguments(policy, iteration=0, run_seed=7, data=None, **changes):
    return {
        "step": Step("toy", "reinforce", iteration, run_seed),
        "policy": policy,
        "row": ARPO,
        "settings": SETTINGS,
        "temperature": 1.0,
        "machine": MACHINE,
        **(data or batch()),
        **changes,
    }


def run(policy, **changes):
    return update.fn(**arguments(policy, **changes))


def test_an_update_makes_a_policy_that_others_can_load(initial):
    made = run(ledger.artifact(initial))
    assert set(made["artifacts"]) == {"policy", "optimizer"}
    before, after = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (initial, ledger.of(made, "policy").path)
    )
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert made["metrics"]["trained_tokens"] == (4 + 3) + (4 + 5) + 6, "shared tokens once a leaf"
    assert made["metrics"]["gradient_norm"] > 0
    assert set(made["seconds"]) == {"update", "checkpoint"}


def test_an_update_measures_under_names_of_its_own(initial):
    # the metrics of an iteration's verbs become one row of the learning curve
    rollout = tree_metrics(load_trees(Path(batch()["trees"].path)), window=20)
    assert set(run(ledger.artifact(initial))["metrics"]) & set(rollout) == set()


def test_each_leaf_gets_its_own_advantage(initial):
    policy = ledger.artifact(initial)
    digests = set()
    for advantages in ((1.0, -0.5, 0.25), (-0.5, 1.0, 0.25), (1.0, 0.25, -0.5)):
        checkpoint._resident.clear()
        digests.add(ledger.of(run(policy, data=batch(advantages=advantages)), "policy").digest)
    assert len(digests) == 3


def chain(initial, keep_in_memory):
    """Two updates, the second on what the first has made; digests of the second's artifacts."""
    first = run(ledger.artifact(initial), iteration=0)
    if not keep_in_memory:
        checkpoint._resident.clear()
    second = run(ledger.of(first, "policy"), iteration=1, data=batch(seed=1))
    return {name: made["digest"] for name, made in second["artifacts"].items()}


def test_the_next_update_goes_on_in_memory_as_it_would_from_disk(initial, tmp_path, monkeypatch):
    in_memory = chain(initial, keep_in_memory=True)
    (tmp_path / "again").mkdir()
    monkeypatch.chdir("again")
    assert chain(initial, keep_in_memory=False) == in_memory


def test_the_next_sub_step_finds_the_policy_in_memory(initial):
    made = run(ledger.artifact(initial))
    (learning,) = checkpoint._resident
    assert checkpoint.resident(Path(ledger.of(made, "policy").path), MACHINE) is learning


def test_what_is_finished_is_read_back(initial):
    made = run(ledger.artifact(initial))
    checkpoint._resident.clear()
    assert run(ledger.artifact(initial)) == made
    assert checkpoint._resident == [], "no policy was loaded"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": SETTINGS.model_copy(update={"learning_rate": 2e-2})},
        {"row": algorithm.Row(**{**ARPO.model_dump(), "averaging": "token_mean"})},
        {"temperature": 0.5},
        {"iteration": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_input_is_another_update(initial, change):
    policy = ledger.artifact(initial)
    sub_step: Any = update.fn
    places = {sub_step.place(**arguments(policy, **changes)) for changes in [{}, change]}
    assert len(places) == 2


def test_mini_batches_are_drawn_anew_each_iteration_and_for_each_run(initial):
    # decision 4: what is drawn derives from the run's seed and the iteration
    settings = SETTINGS.model_copy(update={"mini_batches": 3})
    policy = ledger.artifact(initial)

    def orders(steps):
        digests = set()
        for iteration, run_seed in steps:
            checkpoint._resident.clear()
            made = run(policy, iteration=iteration, run_seed=run_seed, settings=settings)
            digests.add(ledger.of(made, "policy").digest)
        return digests

    assert len(orders([(iteration, 0) for iteration in range(6)])) > 1
    assert len(orders([(0, run_seed) for run_seed in range(6)])) > 1


def test_a_pruned_policy_that_is_needed_again_can_be_made_again(initial):
    made = run(ledger.artifact(initial))
    policy = ledger.of(made, "policy")
    last = Step("toy", "reinforce", 5, 7)
    ledger.retire(last, "update", keep=1)
    checkpoint._resident.clear()
    with pytest.raises(ledger.PrunedError, match="has been pruned"):
        run(policy, iteration=1, data=batch(seed=1))
    with pytest.raises(ledger.PrunedError):
        ledger.publish(policy, Path("models/trained"))
    assert run(ledger.artifact(initial)) == made, "its record still counts"
    ledger.revive(last.folder)
    assert ledger.of(run(ledger.artifact(initial)), "policy") == policy
    run(policy, iteration=1, data=batch(seed=1))
