"""The reward model: its losses, its scores, and what training makes of it."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import Qwen2Model

from tasks.learning import outcome
from tasks.learning.replay import Example
from tasks.policy.outcome_model import OutcomeModel, load, save
from tests.sections import HALF, MACHINE
from tests.sections import REWARD_MODEL as SETTINGS
from tests.trees import random_tree, small_policy, world_tree

TREES = [random_tree(seed, name=f"q{seed}") for seed in range(4)]
KINDS = ("classification", "pairs")


def new_model(seed=0):
    """A model whose head is not zero."""
    backbone = small_policy(seed).base_model
    assert isinstance(backbone, Qwen2Model)
    head = torch.nn.Linear(32, 1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head.weight.normal_()
        head.bias.fill_(0.5)
    return OutcomeModel(backbone, head)


def examples(trees=TREES, success=lambda tree, leaf: (tree + leaf) % 2 == 0):
    return [
        Example(place, leaf, tree.question.id, success(place, leaf))
        for place, tree in enumerate(trees)
        for leaf in range(len(tree.leaves))
    ]


def scores(model, trees=TREES, tokens=10_000, machine=MACHINE):
    """The logits of all leaves."""
    leaves = [(place, leaf) for place, tree in enumerate(trees) for leaf in range(len(tree.leaves))]
    return outcome.logits_of(model, trees, leaves, tokens, machine)


def plain_logits(model, tree):
    """The head on the last hidden state of each trajectory, which is passed alone."""
    found = []
    for leaf in tree.leaves:
        chain = tree.contexts(leaf)[-1]
        tokens = np.concatenate([tree.nodes[node].tokens for node in chain])
        hidden = model.backbone(torch.from_numpy(tokens)[None].long()).last_hidden_state
        found.append(model.head(hidden[0, -1])[0])
    return torch.stack(found)


# ---------------------------------------------------------------- losses


def test_losses_have_known_values():
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0])
    known = -sum(logsigmoid(torch.tensor(z)) for z in (2.0, 0.5, 1.0, -1.0)) / 4
    assert outcome.classification(logits) == pytest.approx(known.item())
    known = -sum(logsigmoid(torch.tensor(z)) for z in (3.0, -0.5)) / 2
    assert outcome.pairs(logits) == pytest.approx(known.item())
    assert outcome.pairs(logits + 7) == pytest.approx(known.item(), rel=1e-5)  # no zero of its own


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("tokens", [10_000, 30, 1])
def test_a_score_is_that_of_the_trajectory_alone(tokens):
    model = new_model()
    known = torch.cat([plain_logits(model, tree) for tree in TREES]).detach()
    np.testing.assert_allclose(scores(model, tokens=tokens), known, atol=1e-5)
    chosen = outcome.logits_of(model, TREES, [(2, 1), (0, 0), (2, 1)], tokens, MACHINE)
    some = [plain_logits(model, TREES[tree])[leaf].item() for tree, leaf in ((2, 1), (0, 0))]
    np.testing.assert_allclose(chosen, [*some, some[0]], atol=1e-5)


def test_the_last_prompt_of_an_episode_decides_where_prompts_are_fresh():
    tree = world_tree({"abc": [0, 0, 1], "abd": [0, 0, 0]}, fresh=True)
    model = new_model()
    np.testing.assert_allclose(scores(model, [tree]), plain_logits(model, tree).detach(), atol=1e-5)


def test_half_precision_scores_alike():
    exact, rough = (scores(new_model(), tokens=99, machine=one) for one in (MACHINE, HALF))
    assert 0 < np.abs(exact - rough).mean() < 0.05 * exact.std()


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [10_000, 20])
def test_a_gradient_is_that_of_the_whole_loss(kind, tokens):
    """Whatever the micro-batches are, and with trajectories that are drawn twice."""
    settings = SETTINGS.model_copy(update={"loss": kind, "micro_batch_tokens": tokens, "batch": 40})
    training = outcome.begin(new_model(), settings, MACHINE)
    training.optimizer.step = lambda: None
    (loss,) = outcome.train(training, TREES, examples(), range(1), [5])
    found = [weight.grad.clone() for weight in training.model.weights()]

    model = new_model()
    drawn = [examples()[place] for place in outcome.draw(examples(), kind, 40, [5, 0])]
    logits = torch.stack([plain_logits(model, TREES[one.tree])[one.leaf] for one in drawn])
    known = outcome.LOSSES[kind](logits)
    known.backward()
    assert loss == pytest.approx(known.item(), rel=1e-5)
    for gradient, weight in zip(found, model.weights(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_tells_successes_apart(kind):
    """The last token does; trajectories of other trees are told apart, too."""
    trees = [random_tree(seed, leaves=6, name=f"q{seed}") for seed in range(24)]

    def success(tree, leaf):
        return trees[tree].nodes[trees[tree].leaves[leaf]].tokens[-1] % 2 == 0

    every = examples(trees, success)
    settings = SETTINGS.model_copy(update={"loss": kind, "learning_rate": 3e-3, "batch": 32})
    training = outcome.begin(new_model(), settings, MACHINE)
    losses = outcome.train(training, trees, every, range(60), [0])
    assert np.mean(losses[-5:]) < 0.3 < np.mean(losses[:3])
    scored, right = scores(training.model, trees), np.array([one.success for one in every])
    assert scored[right].mean() > scored[~right].mean() + 1


def test_steps_are_decided_by_their_numbers():
    whole = outcome.begin(new_model(), SETTINGS, MACHINE)
    losses = outcome.train(whole, TREES, examples(), range(4), [7, 2])
    parted = outcome.begin(new_model(), SETTINGS, MACHINE)
    again = outcome.train(parted, TREES, examples(), range(2), [7, 2])
    again += outcome.train(parted, TREES, examples(), range(2, 4), [7, 2])
    assert losses == again
    for one, other in zip(whole.model.weights(), parted.model.weights(), strict=True):
        assert torch.equal(one, other)
    other_key = outcome.begin(new_model(), SETTINGS, MACHINE)
    assert outcome.train(other_key, TREES, examples(), range(4), [7, 3]) != losses


def test_a_saved_model_scores_as_before(tmp_path):
    model = new_model()
    model.calibration = model.calibration.model_copy(update={"temperature": 2.5, "offset": -1.0})
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model", MACHINE)
    assert loaded.calibration == model.calibration
    np.testing.assert_array_equal(scores(model), scores(loaded))


def test_a_gradient_that_is_not_finite_stops_the_training():
    model = new_model()
    with torch.no_grad():
        model.head.weight.fill_(float("inf"))
    training = outcome.begin(model, SETTINGS, MACHINE)
    with pytest.raises(ValueError, match=r"gradient .* lower reward_model\.learning_rate"):
        outcome.train(training, TREES, examples(), range(1), [0])
