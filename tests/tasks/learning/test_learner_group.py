"""Processes that learn together do what one does. They are real ones; torchrun starts some."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import families
from params.schema.reinforce import Lora
from tasks.learning import learner_group
from tasks.learning.learner_group import HERE, open_learners
from tasks.policy import layer_kinds
from tasks.policy.layer_kinds import ROWS as ROWS_FORM
from tasks.policy.layer_kinds import TREES
from tasks.policy.small_copy import small_copy
from tests import learner_processes as work
from tests.launch_learners import forked_learners
from tests.learners import OWN, ROWS, SETTINGS, SHARED, made_trees
from tests.sections import HALF, MACHINE
from tests.trees import small_policy

WHOLE = SETTINGS.model_copy(update={"gradient_clip": 1e9, "epochs": 1, "mini_batches": 1})
LORA = Lora(rank=4, alpha=8.0, modules=("q_proj", "down_proj"))


def machine(count, base=MACHINE):
    return base.model_copy(update={"processes": count})


@contextmanager
def processes_that_learn(count, folder):
    with pytest.MonkeyPatch.context() as patch, open_learners(machine(count)) as opened:
        patch.chdir(folder)
        with forked_learners(count):
            assert opened.run(work.ranks) == [(rank, rank) for rank in range(count)]
        yield opened


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with processes_that_learn(2, tmp_path_factory.mktemp("two")) as opened:
        yield opened


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with processes_that_learn(4, tmp_path_factory.mktemp("four")) as opened:
        yield opened


@pytest.fixture(scope="module", params=["two", "four"])
def learners(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("policy") / "policy"
    small_policy(3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def off_policy(trees):
    random = np.random.default_rng(0)

    def elsewhere(tree):
        return [
            (-4.5 + 0.3 * random.standard_normal(len(node.logprobs))).astype(np.float32)
            for node in tree.tree.nodes
        ]

    return [
        replace(tree, old_logprobs=elsewhere(tree), reference_logprobs=elsewhere(tree))
        for tree in trees
    ]


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def same_as_one_process(learners, folder, trees, loss, settings=WHOLE, **others):
    together = learners.run(work.updated, folder, trees, loss, settings, MACHINE, **others)
    agree(together, HERE.run(work.updated, folder, trees, loss, settings, MACHINE, **others))
    return together


def agree(together, alone):
    assert alone[1], "something learned"
    longest = max(float(gradient.abs().max()) for gradient in alone[1].values())
    assert furthest(together[1], alone[1]) < 1e-5 * max(1.0, longest), "gradients"
    assert together[0] == pytest.approx(alone[0], abs=1e-5, rel=1e-4), "metrics"


def of_every_algorithm(where, folder):
    """Name of a row -> its metrics and gradients."""
    plain = {
        name: off_policy(made_trees(5, seed=7)) for name, row in ROWS.items() if not row.critic
    }
    found = where.run(work.losses_and_gradients, folder, plain, WHOLE, MACHINE)
    for critic in (OWN, SHARED):
        names = [
            name
            for name, row in ROWS.items()
            if row.critic and row.critic.backbone == critic.backbone
        ]
        if names:
            trees = dict.fromkeys(names, off_policy(made_trees(5, seed=7, values=True)))
            found |= where.run(work.losses_and_gradients, folder, trees, WHOLE, MACHINE, critic)
    return found


@pytest.fixture(scope="module")
def together(learners, folder):
    return of_every_algorithm(learners, folder)


@pytest.fixture(scope="module")
def alone(folder):
    return of_every_algorithm(HERE, folder)


@pytest.mark.parametrize("name", ROWS)
def test_every_algorithm_has_the_loss_and_gradient_of_one_process(name, together, alone):
    agree(together[name], alone[name])


# a family -> the form in which it learns, and linear layers of its mixers
FAMILIES = {
    "lfm2": (TREES, ("in_proj", "w1")),
    "qwen3_5_text": (TREES, ("in_proj_qkv", "down_proj")),
    "qwen3_moe": (TREES, ("q_proj", "o_proj")),
    "mamba": (ROWS_FORM, ("in_proj", "x_proj")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, tokenizer):
    """The folder of a small policy of a family, and linear layers of it."""
    form, modules = FAMILIES[request.param]
    model = small_copy(families.config_of(request.param), 2**20)
    assert layer_kinds.learner_form(layer_kinds.described(model.config)).kind == form
    folder = tmp_path_factory.mktemp(request.param) / "policy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, modules


def test_families_learn_as_in_one_process(two, family):
    """Mixers read some weights without a call of their layer: these are whole, too.

    As rows, each process makes one pass a forest, however its rows differ in length.
    """
    folder, modules = family
    trees = made_trees(5, values=True)
    same_as_one_process(two, folder, trees, "grpo", critic=OWN)
    recompute = WHOLE.model_copy(update={"recompute": True})
    same_as_one_process(two, folder, trees, "grpo", recompute, critic=SHARED)
    lora = Lora(rank=4, alpha=8.0, modules=modules)
    together = same_as_one_process(two, folder, trees, "grpo", lora=lora)
    assert {name.split(".")[-4] for name in together[1]} == {*modules}


@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "shared"])
def test_a_critic_learns_as_in_one_process(critic, learners, folder):
    trees = made_trees(5, values=True)
    together = same_as_one_process(learners, folder, trees, "grpo", critic=critic)
    assert any(name.startswith("head") for name in together[1])


def test_an_adapter_learns_as_in_one_process(four, folder):
    together = same_as_one_process(four, folder, made_trees(5), "grpo", lora=LORA)
    assert all("lora_" in name for name in together[1])


def test_recomputed_activations_have_the_same_gradient(two, folder):
    recompute = WHOLE.model_copy(update={"recompute": True})
    same_as_one_process(two, folder, made_trees(5), "grpo", recompute)


def test_several_steps_and_passes_stay_together(learners, folder):
    # the old log-probabilities are computed in a pass without a gradient
    several = SETTINGS.model_copy(
        update={"epochs": 2, "mini_batches": 2, "micro_batch_tokens": 60, "warmup_updates": 0}
    )
    trees = made_trees(6, weighted=False)  # with these, no weight has a gradient near 0
    together = learners.run(work.updated, folder, trees, "grpo", several, MACHINE)
    alone = HERE.run(work.updated, folder, trees, "grpo", several, MACHINE)
    assert together[0]["optimizer_steps"] == 4
    assert furthest(together[2], alone[2]) < 3e-5  # Adam enlarges the rounding of four steps
    assert together[0] == pytest.approx(alone[0], abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("count", [0, 1])
def test_processes_without_a_tree_keep_step(count, learners, folder):
    # one tree has a gradient, or none has
    trees = made_trees(count, seed=5) + made_trees(2, seed=9, zeros=range(5))
    together = learners.run(work.updated, folder, trees, "grpo", WHOLE, MACHINE)
    assert together[0]["optimizer_steps"] == count


def test_bfloat16_differs_as_two_packings_do(two, folder):
    # in bf16 even one process rounds differently when it packs the trees in another way
    trees = off_policy(made_trees(5, seed=7))
    rows = WHOLE.model_copy(update={"micro_batch_tokens": 40})
    together = two.run(work.updated, folder, trees, "grpo", WHOLE, HALF)
    alone, packed = (
        HERE.run(work.updated, folder, trees, "grpo", settings, HALF) for settings in (WHOLE, rows)
    )
    spread = furthest(alone[1], packed[1])
    assert 0 < furthest(together[1], alone[1]) < 2 * spread


def test_each_process_keeps_its_part_of_the_weights(learners, folder):
    own, every = learners.run(work.parts_of_weights, folder, WHOLE, MACHINE)
    assert sum(own) == every
    assert max(own) < 1.2 * every / len(own)


def test_a_checkpoint_loads_at_another_number_of_processes(learners, folder, tmp_path):
    critic = {2: SHARED, 4: OWN}[learners.machine.processes]
    trees = made_trees(5, values=True)
    arguments = (trees, "grpo", WHOLE, MACHINE, critic)
    many, one = tmp_path / "many", tmp_path / "one"
    written = learners.run(work.saved, folder, *arguments, many)
    alone = HERE.run(work.saved, folder, *arguments, one)
    files = {path.name for path in (many / "optimizer").glob("state*")}
    assert len(files) == learners.machine.processes
    for path in one.rglob("config.json"):
        assert path.read_text() == (many / path.relative_to(one)).read_text()
    for found in (
        HERE.run(work.resumed, many / "policy", WHOLE, MACHINE, critic),
        learners.run(work.resumed, many / "policy", WHOLE, MACHINE, critic),
    ):
        for state, expected in zip(found, written, strict=True):
            assert furthest(state, expected) == 0
    for state, expected in zip(
        learners.run(work.resumed, one / "policy", WHOLE, MACHINE, critic), alone, strict=True
    ):
        assert furthest(state, expected) == 0


def test_processes_that_cannot_start_name_their_log(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(learner_group.LAUNCH, "false")
    with (
        open_learners(machine(2)) as opened,
        pytest.raises(RuntimeError, match=r"0 of 2 .*learners\.log"),
    ):
        opened.run(work.fails_in_rank_1)


def test_torchrun_starts_processes_and_an_error_of_one_reaches_the_stage(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learner_group, "END_WAIT", 0.5)  # rank 0 waits for what rank 1 never sends
    with open_learners(machine(2)) as opened:
        assert opened.run(work.ranks) == [(0, 0), (1, 1)]
        with pytest.raises(FileNotFoundError, match="rank 1 refuses"):
            opened.run(work.fails_in_rank_1)
        assert not opened.channels, "and ends them"
