import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from params.schema.algorithms import ImportanceChoice, Kl, load_algorithms
from tasks.advantage import TABLE
from tasks.learning import passes
from tasks.learning.batch import UpdateInputs
from tasks.learning.learner_group import open_learners
from tasks.learning.packing import uncredited
from tasks.ledger import artifacts as ledger
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, resident
from tasks.policy.machine import use_machine
from tasks.trees.metrics import tree_metrics
from tasks.trees.tables import load_trees, read_rows, save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree
from tasks.update import update
from tests.launch_learners import forked_learners
from tests.learner_processes import kill_once
from tests.sections import MACHINE, UPDATE
from tests.verbs import call

SETTINGS = UPDATE.model_copy(
    update={"weight_decay": 0.0, "gradient_clip": 1.0, "micro_batch_tokens": 64}
)
ONE_STEP = SETTINGS.model_copy(update={"epochs": 1, "mini_batches": 1})
ROWS = load_algorithms()
ARPO, PPO = ROWS["arpo"], ROWS["ppo"]
NO_WEIGHT = ImportanceChoice(weight="none")
WITHOUT_KL = PPO.model_copy(update={"kl": None})
SHARED = WITHOUT_KL.model_copy(
    update={"critic": PPO.critic and PPO.critic.model_copy(update={"backbone": "shared"})}
)
LEAVES = {("q0", 0): 4 + 3, ("q0", 1): 4 + 5, ("q1", 0): 6}  # sampled tokens


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
    resident.POLICIES.clear()
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


def two_trees(seed=0):
    """Two trees, one of them with a shared beginning."""
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
    return [branched, straight]


def credit(advantages=(1.0, -0.5, 0.25), values=False, dropped=()):
    """Rows of the table of advantages; those of the questions ``dropped`` are not kept."""
    return [
        {
            "question": question,
            "leaf": leaf,
            "kept": True,
            "advantage": advantage,
            "advantages": [advantage] * length,
            "segments": [0] * length,
            "returns": [advantage] * length if values else None,
            "values": [0.0] * length if values else None,
        }
        if question not in dropped
        else {"question": question, "leaf": leaf, "kept": False, "advantage": 0.0}
        for ((question, leaf), length), advantage in zip(LEAVES.items(), advantages, strict=True)
    ]


def artifacts(trees, rows, name):
    """Trees in a batch each and the rows of their leaves, as the ledger would hand them over."""
    for i, tree in enumerate(trees):
        save_trees([tree], Path(f"trees-{name}-{i}"))
    write_table(pa.Table.from_pylist(rows, schema=TABLE), Path(f"advantages-{name}.parquet"))
    return {
        "trees": [Artifact.at(Path(f"trees-{name}-{i}")) for i in range(len(trees))],
        "advantages": Artifact.at(Path(f"advantages-{name}.parquet")),
    }


def batch(seed=0, advantages=(1.0, -0.5, 0.25), **credit_of):
    return artifacts(two_trees(seed), credit(advantages, **credit_of), str(seed))


def arguments(policy, iteration=0, run_seed=7, data=None, **changes):
    return {
        "step": SubStep("toy", "reinforce", iteration, run_seed),
        "policy": policy,
        "policy_steps": 0,
        "samplers": {0: policy},
        "optimizer": None,
        "critic": None,
        "reference": None,
        "algorithm": ARPO,
        "settings": SETTINGS,
        "temperature": 1.0,
        "response_tokens": 20,
        "machine": MACHINE,
        "lora": None,
        **(data or batch()),
        **changes,
    }


def run(policy, **changes):
    return call(update, UpdateInputs, **arguments(policy, **changes))


def test_an_update_makes_a_policy_that_others_can_load(initial):
    made = run(Artifact.at(initial))
    assert set(made["artifacts"]) == {"policy", "optimizer", "tokens"}
    before, after = (
        AutoModelForCausalLM.from_pretrained(path)
        for path in (initial, ledger.output(made, "policy").path)
    )
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert made["metrics"]["trained_tokens"] == 4 + 3 + 5 + 6, "a shared token once"
    assert made["metrics"]["trained_views"] == sum(LEAVES.values()), "and seen by each leaf"
    assert made["metrics"]["gradient_norm"] > 0
    assert set(made["seconds"]) == {"update", "checkpoint"}
    rows = read_rows(Path(ledger.output(made, "tokens").path))
    sizes = {(row["question"], row["node"]): len(row["ratio"]) for row in rows}
    assert sizes == {("q0", 1): 4, ("q0", 3): 3, ("q0", 4): 5, ("q1", 1): 6}


def test_an_update_measures_under_names_of_its_own(initial):
    # the metrics of an iteration's verbs become one row of the learning curve
    rollout = tree_metrics(load_trees(Path(batch()["trees"][0].path)), window=20)
    assert set(run(Artifact.at(initial))["metrics"]) & set(rollout) == set()


def test_each_leaf_gets_its_own_advantage(initial):
    policy = Artifact.at(initial)
    digests = set()
    for advantages in ((1.0, -0.5, 0.25), (-0.5, 1.0, 0.25), (1.0, 0.25, -0.5)):
        resident.POLICIES.clear()
        digests.add(ledger.output(run(policy, data=batch(advantages=advantages)), "policy").digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("counts", "loss"),
    [("leaves", -(1.0 + 0.5 - 1.0) / 3), ("paths", -((1.0 + 0.5) / 2 - 1.0) / 2)],
)
def test_leaves_or_paths_count_once(initial, counts, loss):
    row = ARPO.model_copy(update={"counts": counts, "importance": NO_WEIGHT})
    data = batch(advantages=(1.0, 0.5, -1.0))
    made = run(Artifact.at(initial), algorithm=row, data=data, settings=ONE_STEP)
    assert made["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)


def test_the_ratio_is_to_the_policy_that_sampled(initial):
    learned = ledger.output(run(Artifact.at(initial)), "policy")
    own, ahead = (
        run(learned, iteration=1, samplers={0: sampler})["metrics"]
        for sampler in (learned, Artifact.at(initial))
    )
    assert own["kl"] == 0 < ahead["kl"]


def turns_of(policies):
    """The two trees, with the steps of the policy of each turn: question, node -> steps."""
    trees = two_trees()
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            steps = policies.get((tree.question.id, index), 0)
            tree.nodes[index] = replace(node, policy_steps=steps)
    return artifacts(trees, credit(), "mixed")


def test_each_turn_has_the_ratio_to_the_policy_that_sampled_it(initial):
    learned = ledger.output(run(Artifact.at(initial)), "policy")
    data = turns_of({("q0", 1): 5, ("q0", 3): 6, ("q0", 4): 5, ("q1", 1): 6})
    samplers = {5: Artifact.at(initial), 6: learned}
    mixed, old, own = (
        run(learned, iteration=1, data=data, samplers=chosen, policy_steps=8, settings=ONE_STEP)
        for chosen in (samplers, {5: Artifact.at(initial)}, {6: learned})
    )
    seen, of_old, of_own = (
        {
            (row["question"], row["node"]): (row["ratio"], row["logprob_gap"])
            for row in read_rows(Path(ledger.output(record, "tokens").path))
        }
        for record in (mixed, old, own)
    )
    for node in [("q0", 1), ("q0", 4)]:
        assert seen[node] == of_old[node] != of_own[node]
    for node in [("q0", 3), ("q1", 1)]:
        assert seen[node] == of_own[node] != of_old[node]
    # turns of 4 and 5 tokens by the policy after 5 steps, of 3 and 6 by that after 6
    assert mixed["metrics"]["staleness"] == pytest.approx((9 * 3 + 9 * 2) / 18)
    assert mixed["metrics"]["staleness_highest"] == 3


def test_a_turn_of_a_policy_that_is_not_there_is_named(initial):
    data = turns_of({("q1", 1): 4})
    samplers = {0: Artifact.at(initial), 5: Artifact.at(initial)}
    learned = ledger.output(run(Artifact.at(initial)), "policy")
    with pytest.raises(ValueError, match=r"question q1 .* after 4 optimizer steps.*\[0, 5\]"):
        run(learned, iteration=1, data=data, samplers=samplers)


def chain(initial, keep_in_memory):
    """Two updates, the second on what the first has made; digests of the second's artifacts."""
    first = run(Artifact.at(initial), iteration=0)
    if not keep_in_memory:
        resident.POLICIES.clear()
    optimizer = ledger.output(first, "optimizer")
    second = run(
        ledger.output(first, "policy"), iteration=1, data=batch(seed=1), optimizer=optimizer
    )
    return {name: made["digest"] for name, made in second["artifacts"].items()}


def test_the_next_update_goes_on_in_memory_as_it_would_from_disk(initial, tmp_path, monkeypatch):
    in_memory = chain(initial, keep_in_memory=True)
    (tmp_path / "again").mkdir()
    monkeypatch.chdir("again")
    assert chain(initial, keep_in_memory=False) == in_memory


def test_the_next_sub_step_finds_the_policy_in_memory(initial):
    made = run(Artifact.at(initial))
    learning = resident.POLICIES.learner
    assert (
        resident.POLICIES.load_learner(Path(ledger.output(made, "policy").path), MACHINE)
        is learning
    )


@pytest.mark.parametrize("row", [ARPO, WITHOUT_KL], ids=["policy", "with a critic"])
def test_no_gradients_are_held_while_the_next_iteration_samples(initial, row):
    run(Artifact.at(initial), algorithm=row, data=batch(values=True))
    learning = resident.POLICIES.learner
    backbone = learning.critic.backbone if learning.critic else None
    held = [*learning.model.parameters(), *(backbone.parameters() if backbone else ())]
    assert all(weight.grad is None for weight in held)


def test_what_is_finished_is_read_back(initial):
    made = run(Artifact.at(initial))
    resident.POLICIES.clear()
    assert run(Artifact.at(initial)) == made
    assert resident.POLICIES.learner is None, "no policy was loaded"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": SETTINGS.model_copy(update={"learning_rate": 2e-2})},
        {"algorithm": ARPO.model_copy(update={"averaging": "token_mean"})},
        {"temperature": 0.5},
        {"response_tokens": 21},
        {"critic": ledger.Artifact("critic", "1")},
        {"optimizer": ledger.Artifact("optimizer", "1")},
        {"reference": ledger.Artifact("reference", "1")},
        {"samplers": {0: ledger.Artifact("sampler", "1")}},
        {"policy_steps": 1},
        {"iteration": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_input_is_another_update(initial, change):
    policy = Artifact.at(initial)
    names = {entry.name for entry in fields(UpdateInputs)}
    places = set()
    for changes in [{}, change]:
        given = arguments(policy, **changes)
        inputs = UpdateInputs(**{name: given[name] for name in names})
        places.add(given["step"].place(update, inputs))
    assert len(places) == 2


def test_mini_batches_are_drawn_anew_each_iteration_and_for_each_run(initial):
    # decision 4: what is drawn derives from the run's seed and the iteration
    settings = SETTINGS.model_copy(update={"mini_batches": 3})
    policy = Artifact.at(initial)

    def orders(steps):
        digests = set()
        for iteration, run_seed in steps:
            resident.POLICIES.clear()
            made = run(policy, iteration=iteration, run_seed=run_seed, settings=settings)
            digests.add(ledger.output(made, "policy").digest)
        return digests

    assert len(orders([(iteration, 0) for iteration in range(6)])) > 1
    assert len(orders([(0, run_seed) for run_seed in range(6)])) > 1


def test_a_pruned_policy_that_is_needed_again_can_be_made_again(initial):
    first = SubStep("toy", "reinforce", 0, 7)
    last = replace(first, iteration=5)  # of the same run, and so with the same ledger
    made = run(Artifact.at(initial), step=first)
    policy = ledger.output(made, "policy")
    last.ledger.retire(last, "update", last=1, every=9, weights=(), small=("tokens",))
    assert Path(ledger.output(made, "tokens").path).is_file(), "for the table of the whole run"
    resident.POLICIES.clear()
    with pytest.raises(ledger.PrunedError, match="has been pruned"):
        run(policy, iteration=1, data=batch(seed=1))
    with pytest.raises(ledger.PrunedError):
        ledger.publish(policy, Path("models/trained"))
    assert run(Artifact.at(initial), step=first) == made, "its record still counts"
    last.ledger.revive(last.folder)
    assert ledger.output(run(Artifact.at(initial), step=first), "policy") == policy
    run(policy, iteration=1, data=batch(seed=1))


def test_weights_without_their_optimizer_are_not_silently_trained_on(initial):
    made = run(Artifact.at(initial))
    policy, optimizer = (ledger.output(made, name) for name in ("policy", "optimizer"))
    last = SubStep("toy", "reinforce", 5, 7)
    last.ledger.retire(last, "update", last=1, every=1, weights=("policy", "critic"))
    resident.POLICIES.clear()
    assert Path(policy.path).is_dir()
    with pytest.raises(ledger.PrunedError, match="optimizer has been pruned"):
        run(policy, iteration=1, data=batch(seed=1), optimizer=optimizer)


# ---------------------------------------------------------------- rows of the table of advantages


def test_rows_belong_to_their_leaves_whatever_their_order(initial):
    policy = Artifact.at(initial)
    digests = set()
    for name, rows in (("forth", credit()), ("back", credit()[::-1])):
        resident.POLICIES.clear()
        made = run(policy, data=artifacts(two_trees(), rows, name))
        digests.add(ledger.output(made, "policy").digest)
    assert len(digests) == 1


def test_what_the_group_filter_has_dropped_is_not_there_for_the_update(initial):
    policy = Artifact.at(initial)
    made = run(policy, data=batch(dropped=("q1",)))
    resident.POLICIES.clear()
    alone = run(policy, data=artifacts(two_trees()[:1], credit()[:2], "alone"))
    assert ledger.output(made, "policy").digest == ledger.output(alone, "policy").digest
    assert made["metrics"] == alone["metrics"]
    assert made["metrics"]["trained_tokens"] == 4 + 3 + 5


@pytest.mark.parametrize("updates", [{}, {"epochs": 2, "mini_batches": 2}], ids=["one", "four"])
def test_an_update_without_any_kept_group_leaves_the_policy_as_it_is(initial, updates):
    made = run(
        Artifact.at(initial),
        settings=SETTINGS.model_copy(update=updates),
        data=batch(dropped=("q0", "q1")),
    )
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (initial, ledger.output(made, "policy").path)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert made["metrics"]["trained_tokens"] == 0
    assert np.isfinite(list(made["metrics"].values())).all()


def test_segments_of_the_table_are_the_units_of_the_ratio(initial):
    """Off policy, where units of another size have another ratio."""
    settings = SETTINGS.model_copy(update={"mini_batches": 1, "epochs": 2})
    row = ROWS["gagpo"].model_copy(update={"kl": None})
    digests = set()
    for name, halves in (("whole", False), ("halves", True)):
        rows = credit()
        for entry in rows if halves else []:
            length = len(entry["advantages"])
            entry["segments"] = [int(i >= length // 2) for i in range(length)]
        resident.POLICIES.clear()
        data = artifacts(two_trees(), rows, name)
        made = run(Artifact.at(initial), algorithm=row, settings=settings, data=data)
        digests.add(ledger.output(made, "policy").digest)
    assert len(digests) == 2


# ---------------------------------------------------------------- reference


def with_kl(place, coefficient=10.0):
    estimator = "k3" if place == "loss" else "k1"
    kl = Kl(place=place, estimator=estimator, coefficient=coefficient)
    return ARPO.model_copy(update={"kl": kl})


def test_a_kl_term_is_measured_against_the_reference(initial):
    """Two policies that differ by an update: the k3 mean over leaf views, by the model's own."""
    cold_start = Artifact.at(initial)
    policy = ledger.output(run(cold_start), "policy")
    data = batch(seed=1, advantages=(0.0, 0.0, 0.0))
    made = run(policy, iteration=1, data=data, algorithm=with_kl("loss"), reference=cold_start)
    differences = []
    for tree in two_trees(1):
        both = [
            passes.node_logprobs(
                checkpoint.load_policy(path, MACHINE), [uncredited(tree)], 1.0, SETTINGS, MACHINE
            )[0]
            for path in (initial, policy.path)
        ]
        for leaf in tree.leaves:
            of_reference, own = (
                np.concatenate([found[n] for n in tree.path(leaf)]) for found in both
            )
            differences.append(of_reference - own)
    d = np.concatenate(differences)
    assert len(d) == sum(LEAVES.values()) == made["metrics"]["trained_views"]
    expected = np.mean(np.exp(d) - d - 1)
    assert expected > 1e-3, "they have parted"
    assert made["metrics"]["kl_reference"] == pytest.approx(expected, rel=1e-3)


def test_a_kl_term_has_no_gradient_where_the_policy_is_its_reference(initial):
    cold_start = Artifact.at(initial)
    data = batch(advantages=(0.0, 0.0, 0.0))
    made = run(cold_start, data=data, algorithm=with_kl("loss"), reference=cold_start)
    assert made["metrics"]["gradient_norm"] == pytest.approx(0, abs=1e-5)
    assert made["metrics"]["kl_reference"] == pytest.approx(0, abs=1e-8)
    assert made["metrics"]["trained_tokens"] == 18, "zero advantages skip nothing here"


def test_without_a_term_that_needs_them_leaves_of_no_advantage_skip_the_model(initial):
    made = run(Artifact.at(initial), data=batch(advantages=(0.0, 0.0, 0.25)))
    assert made["metrics"]["trained_tokens"] == 6


def test_a_kl_term_without_a_reference_is_refused(initial):
    with pytest.raises(ValueError, match="no reference_logprobs"):
        run(Artifact.at(initial), algorithm=with_kl("loss"))


# ---------------------------------------------------------------- critic


def values_of(folder):
    """The values of a saved checkpoint for the batch, by the verb's own way in."""
    resident.POLICIES.clear()
    learning = resident.POLICIES.load_learner(Path(folder), MACHINE)
    checkpoint.prepare_critic(learning, PPO.critic, MACHINE)
    trees = [uncredited(tree) for tree in two_trees()]
    found = passes.node_values(learning, trees, SETTINGS, MACHINE)
    return np.concatenate([node for tree in found for node in tree])


def test_a_critic_of_its_own_is_an_artifact_and_learns_its_returns(initial):
    made = run(Artifact.at(initial), algorithm=WITHOUT_KL, data=batch(values=True))
    assert set(made["artifacts"]) == {"policy", "optimizer", "critic", "tokens"}
    critic = Path(ledger.output(made, "critic").path)
    AutoModel.from_pretrained(critic)
    assert (critic / "head.safetensors").is_file()
    assert np.abs(values_of(ledger.output(made, "policy").path)).max() > 1e-3, "a new one says 0"
    assert made["metrics"]["value_error"] == pytest.approx(
        (7 * 1.0**2 + 9 * 0.5**2 + 6 * 0.25**2) / 22
    )


def test_a_critic_on_the_policys_backbone_has_a_head_alone(initial):
    made = run(Artifact.at(initial), algorithm=SHARED, data=batch(values=True))
    critic = Path(ledger.output(made, "critic").path)
    assert [path.name for path in critic.iterdir()] == ["head.safetensors"]
    assert made["metrics"]["value_loss"] == pytest.approx(0.5 * made["metrics"]["value_error"])


@pytest.mark.parametrize("row", [WITHOUT_KL, SHARED], ids=["own", "shared"])
def test_with_a_critic_too_memory_and_disk_give_the_same_bytes(initial, row):
    digests = []
    for name, forget in (("memory", False), ("disk", True)):
        first = run(Artifact.at(initial), algorithm=row, data=batch(values=True), run_seed=5)
        if forget:
            resident.POLICIES.clear()
        second = call(
            update,
            UpdateInputs,
            **arguments(
                ledger.output(first, "policy"),
                iteration=1,
                algorithm=row,
                critic=ledger.output(first, "critic"),
                data=batch(seed=1, values=True),
                run_seed=5,
            )
            | {"step": SubStep(name, "reinforce", 1, 5)},
        )
        digests.append({made: entry["digest"] for made, entry in second["artifacts"].items()})
    assert digests[0] == digests[1]


def test_a_row_without_a_critic_keeps_none_of_another_rows_critic(initial):
    """A comparison starts every row from the same cold start, which may still be in memory."""
    learning = resident.POLICIES.load_learner(initial, MACHINE)
    checkpoint.prepare_critic(learning, PPO.critic, MACHINE)
    made = run(Artifact.at(initial))
    assert set(made["artifacts"]) == {"policy", "optimizer", "tokens"}


# ---------------------------------------------------------------- several processes


def test_processes_that_are_killed_repeat_their_update(initial, folder):
    # twice in processes that live on, and with rank 1 killed in the middle of the second update
    several = MACHINE.model_copy(update={"processes": 2})
    digests = []
    with forked_learners(2), open_learners(several) as learners:
        for mark in (None, folder / "killed"):
            first = run(Artifact.at(initial), machine=several, learners=learners)
            if mark:
                learners.run(kill_once, mark)
            second = run(
                ledger.output(first, "policy"),
                iteration=1,
                data=batch(seed=1),
                optimizer=ledger.output(first, "optimizer"),
                machine=several,
                learners=learners,
            )
            digests.append({name: made["digest"] for name, made in second["artifacts"].items()})
            shutil.rmtree(ledger.ROOT)
            assert not mark or mark.exists(), "it was killed"
    assert digests[0] == digests[1]
