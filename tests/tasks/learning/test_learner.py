import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import attention, learner, passes
from tasks.learning.algorithm import assemble
from tasks.learning.attention import FLEX, GATHERED, attending
from tasks.learning.credit import episodes_of
from tasks.learning.packing import (
    BLOCK,
    LEAVES_APART,
    Credited,
    forest,
    lay_out,
    uncredited,
)
from tasks.learning.passes import node_logprobs, token_logprobs
from tasks.policy import checkpoint, resident
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.examples import examples
from tests.learners import (
    GRPO,
    LOSSES,
    OWN,
    RESPONSE_TOKENS,
    ROWS,
    SETTINGS,
    SHARED,
    TEMPERATURE,
    fresh,
    made_trees,
    run,
    same,
    weights,
)
from tests.sections import HALF, MACHINE
from tests.trees import credited, lengths, random_tree, small_policy


def off_policy(trees, seed=0):
    """The same as if another policy had sampled: log-probabilities elsewhere, on both sides."""
    random = np.random.default_rng(seed)

    def elsewhere(tree):
        return [
            (-4.5 + 0.3 * random.standard_normal(len(node.logprobs))).astype(np.float32)
            for node in tree.tree.nodes
        ]

    return [
        replace(tree, old_logprobs=elsewhere(tree), reference_logprobs=elsewhere(tree))
        for tree in trees
    ]


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def close(one, other, tolerance=1e-5):
    """All are, of the longest of them: a strong KL term has gradients of 10, which round so."""
    tolerance *= max(1.0, *(float(value.abs().max()) for value in one.values()))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance, msg=name)


def objective_gradients(model, layout, loss, denominator, critic=None, form=GATHERED):
    """Gradients of one micro-batch that holds a layout."""
    model.zero_grad()
    learning = resident.Learner(None, model, None, critic=critic)
    with attending(model, form):
        value, metrics = learner.objective(
            learning, forest(layout, "cpu"), loss, TEMPERATURE, denominator, 100, MACHINE
        )
    value.backward()
    return gradients(model), float(value.detach()), metrics


def in_trees(trees):
    return lay_out([(tree, range(len(tree.credits))) for tree in trees])


def in_rows(trees):
    return lay_out([(tree, range(len(tree.credits))) for tree in trees], LEAVES_APART)


# ---------------------------------------------------------------- every prefix once

KINDS = ["different prompts", "equal prompts", "equal beginnings"]  # of trees


@examples(6)
@given(st.integers(0, 10_000), st.integers(1, 8))
@pytest.mark.parametrize("name", ROWS)
def test_trees_and_rows_give_the_same_gradient(name, seed, leaves):
    model = small_policy(seed % 5)
    trees = off_policy(made_trees(2, seed, leaves=leaves), seed)
    denominator = learner.loss_denominator(trees, LOSSES[name])
    whole = objective_gradients(model, in_trees(trees), LOSSES[name], denominator)
    rows = objective_gradients(model, in_rows(trees), LOSSES[name], denominator)
    close(whole[0], rows[0])
    assert whole[1] == pytest.approx(rows[1], abs=1e-5)


@pytest.mark.parametrize("name", ROWS)
def test_gradient_equals_plain_torch_leaf_by_leaf(name):
    model, trees = small_policy(), off_policy(made_trees(2))
    denominator = learner.loss_denominator(trees, LOSSES[name])
    found = objective_gradients(model, in_trees(trees), LOSSES[name], denominator)[0]
    close(found, plain_gradients(model, trees, LOSSES[name], denominator))


@pytest.mark.parametrize("lay", [in_trees, in_rows])
@pytest.mark.parametrize("form", [GATHERED, FLEX])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gagpo"])
@pytest.mark.parametrize("kind", [{}, {"prompts": 2}, {"vocabulary": 2}], ids=KINDS)
def test_fresh_prompts_have_the_gradient_of_a_row_a_context(name, form, lay, kind, monkeypatch):
    """Their branches start inside a step, after a result and at a fresh prompt."""
    monkeypatch.setattr(attention, "flex_attention", masked_attention)
    model, loss = small_policy(), LOSSES[name]
    made = [random_tree(seed, 7, fresh=0.6, **kind) for seed in range(2)]
    trees = off_policy([credited(tree, seed) for seed, tree in enumerate(made)])
    assert all(len(set(kinds_below(tree.tree))) == 3 for tree in trees)
    denominator = learner.loss_denominator(trees, loss)
    found = objective_gradients(model, lay(trees), loss, denominator, form=form)[0]
    close(found, plain_gradients(model, trees, loss, denominator))


@pytest.mark.parametrize("kind", [{}, {"prompts": 2}, {"vocabulary": 2}], ids=KINDS)
def test_logprobs_after_fresh_prompts_are_those_of_a_row_a_context(kind):
    model = small_policy()
    trees = [uncredited(random_tree(seed, 7, fresh=0.6, **kind)) for seed in range(2)]
    found = node_logprobs(model, trees, TEMPERATURE, SETTINGS, MACHINE)
    for tree, by_node in zip([tree.tree for tree in trees], found, strict=True):
        for leaf in tree.leaves:
            for context in tree.contexts(leaf):
                own = np.concatenate([by_node[node] for node in context])
                expected = plain_logprobs(model, [tree.nodes[node] for node in context])
                assert own == pytest.approx(expected.detach().numpy(), abs=1e-4)


def masked_attention(query, key, value, *, block_mask, scale, enable_gqa):
    """What flex attention computes; it has no backward pass on a CPU."""
    slots = torch.arange(query.shape[-2])
    blocks = block_mask.to_dense()[0, 0].bool()
    computed = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    seen = block_mask.mask_mod(0, 0, slots[:, None], slots[None])
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen & computed[: len(slots), : len(slots)],
        scale=scale,
        enable_gqa=enable_gqa,
    )


def kinds_below(tree):
    """Of the nodes where several trajectories part; a turn in parts there is one inside a step."""
    parents = [node.parent for node in tree.nodes]
    return [tree.nodes[n].kind for n in range(len(parents)) if n and parents.count(n) > 1]


def plain_gradients(model, trees, loss, denominator):
    """From the model's own logits and causal attention, without forests."""
    model.zero_grad()
    for tree in trees:
        for leaf, credit in enumerate(tree.credits):
            value, _ = learner.policy_loss(plain_views(model, tree, leaf), loss, denominator)
            (credit.weight * value).backward()
    return gradients(model)


def plain_logprobs(model, nodes):
    """Log-probabilities of the sampled tokens of these nodes, which are one row. [S]"""
    tokens = torch.from_numpy(np.concatenate([node.tokens for node in nodes]).astype(np.int64))
    own = torch.from_numpy(
        np.concatenate([np.full(len(node.tokens), node.kind == TURN) for node in nodes])
    )
    every = torch.log_softmax(model(input_ids=tokens[None]).logits[0] / TEMPERATURE, -1)
    return every[:-1].gather(-1, tokens[1:, None])[:, 0][own[1:]]


def plain_views(model, tree, leaf):
    path = tree.tree.path(tree.tree.leaves[leaf])
    contexts = tree.tree.contexts(tree.tree.leaves[leaf])
    rows = [[tree.tree.nodes[node] for node in context] for context in contexts]
    logprobs = torch.cat([plain_logprobs(model, row) for row in rows])

    def along(by_node):
        return torch.from_numpy(np.concatenate([by_node[node] for node in path]))[None]

    credit = tree.credits[leaf]
    return learner.Views(
        logprobs=logprobs[None],
        old_logprobs=along(tree.old_logprobs),
        advantages=torch.from_numpy(credit.advantages)[None],
        mask=torch.ones(1, len(logprobs), dtype=torch.bool),
        segments=torch.from_numpy(credit.segments)[None],
        sampler_logprobs=along([node.logprobs for node in tree.tree.nodes]),
        entropies=along([node.entropies for node in tree.tree.nodes]),
        reference_logprobs=along(tree.reference_logprobs),
    )


@pytest.mark.parametrize("entropy_bonus", [0.0, 0.3])
def test_entropy_bonus_reaches_the_weights(entropy_bonus):
    model, loss = small_policy(), replace(GRPO, entropy_bonus=entropy_bonus)
    trees = off_policy(made_trees(2))
    denominator = learner.loss_denominator(trees, loss)
    whole = objective_gradients(model, in_trees(trees), loss, denominator)[0]
    close(whole, objective_gradients(model, in_rows(trees), loss, denominator)[0])
    without = objective_gradients(model, in_trees(trees), GRPO, denominator)[0]
    assert same(whole, without) == (entropy_bonus == 0)


def test_shared_critic_same_gradient_from_trees_and_rows():
    model = small_policy()
    head = torch.nn.Linear(32, 1)
    critic = resident.ValueModel(head, None, 0.5, 0.1)
    trees = off_policy(made_trees(2, values=True))
    found = []
    for layout in (in_trees(trees), in_rows(trees)):
        head.zero_grad()
        gradient = objective_gradients(model, layout, LOSSES["ppo"], 30.0, critic)[0]
        found.append({**gradient, "head": head.weight.grad.clone()})
    close(*found)
    alone = objective_gradients(model, in_trees(trees), LOSSES["ppo"], 30.0)[0]
    assert not same(alone, found[0]), "the values' error reaches the backbone"


@pytest.mark.parametrize("zeros", [(), (1, 4)], ids=["all credited", "two without advantage"])
@pytest.mark.parametrize("prompts", [0.0, 0.6], ids=["one prompt", "fresh prompts"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 10_000])
def test_micro_batches_give_the_same_gradient(initial, zeros, prompts, micro_batch_tokens):
    trees = [credited(random_tree(seed, fresh=prompts), seed, zeros) for seed in range(3)]
    whole = fresh(initial)
    run(whole, trees)
    expected = gradients(whole.model)
    cut = fresh(initial)
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    run(cut, trees, settings)
    close(gradients(cut.model), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_trained_tokens_and_views_are_counted(initial, count):
    trees = made_trees(count)
    metrics = run(fresh(initial), trees)
    nodes = [node for tree in trees for node in tree.tree.nodes if node.kind == TURN]
    assert metrics["trained_tokens"] == sum(len(node.tokens) for node in nodes)
    assert metrics["trained_views"] == sum(sum(lengths(tree.tree)) for tree in trees)


def test_leaves_without_advantage_count_but_are_skipped(initial):
    trees = made_trees(zeros=(0, 3))
    skipping, computing = fresh(initial), fresh(initial)
    fewer = run(skipping, trees)
    found = gradients(skipping.model)
    tiny = replace(GRPO, entropy_bonus=1e-30)  # a term that needs all leaves
    every = run(computing, trees, loss=tiny)
    close(found, gradients(computing.model), 1e-6)
    assert fewer["trained_views"] < every["trained_views"]


def test_a_kl_penalty_needs_every_leaf(initial):
    trees = off_policy(made_trees(zeros=range(5)))
    learning = fresh(initial)
    before = weights(learning.model)
    metrics = run(learning, trees, loss=LOSSES["gigpo"])
    assert metrics["kl_reference"] > 0
    assert not same(weights(learning.model), before)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("at_once", [97, 97 * 5, 2**24])
@pytest.mark.parametrize("entropy", [False, True])
def test_logprobs_in_parts_are_those_of_all_logits(monkeypatch, at_once, entropy):
    monkeypatch.setattr(passes, "LOGITS_AT_ONCE", dict.fromkeys(("cpu", "cuda"), at_once))
    model = small_policy()
    states = torch.randn(23, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(23)
    logprobs, entropies = token_logprobs(model, states, targets, TEMPERATURE, entropy)
    full = torch.log_softmax(model.lm_head(states) / TEMPERATURE, -1)
    expected = full.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    weighted = torch.linspace(-1, 1, 23)
    (found,) = torch.autograd.grad((logprobs * weighted).sum(), states, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * weighted).sum(), states, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (entropies is None) == (not entropy)
    if entropies is not None:
        spread = -(full.exp() * full).sum(-1) / math.log(97)
        torch.testing.assert_close(entropies, spread, rtol=0, atol=1e-5)


def test_logits_stay_within_their_limit(monkeypatch):
    monkeypatch.setattr(passes, "LOGITS_AT_ONCE", dict.fromkeys(("cpu", "cuda"), 97 * 4))
    model, kept, made = small_policy(), [], []

    def look(tensor):
        if tensor.shape[-1:] == (97,) and len(tensor) != 32:  # logits, not the head's weights
            kept.append(tensor)
        return tensor

    model.lm_head.register_forward_hook(lambda _, __, logits: made.append(logits.numel()))
    states = torch.randn(40, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        logprobs, _ = token_logprobs(model, states, torch.arange(40), 1.0)
    logprobs.sum().backward()
    assert not kept, "nothing over the vocabulary waits for the backward pass"
    assert made == [97 * 4] * 20, "each part once forward, once again in the backward pass"


def test_logprobs_by_node_equal_those_of_rows():
    model = small_policy()
    trees = [uncredited(random_tree(seed)) for seed in (1, 2)]
    for micro_batch_tokens in (10, 10_000):
        settings = SETTINGS.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        found = node_logprobs(model, trees, TEMPERATURE, settings, MACHINE)
        for tree, by_node in zip(trees, found, strict=True):
            padded = replace(tree, old_logprobs=by_node, reference_logprobs=by_node)
            for leaf in range(len(tree.credits)):
                views = plain_views(model, padded, leaf)
                torch.testing.assert_close(
                    views.old_logprobs, views.logprobs.detach(), rtol=0, atol=1e-5
                )
    assert model.training, "as it was before"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_learner_agree_on_logprobs(initial, temperature):
    learning = fresh(initial)
    engine = TransformersEngine(learning.model, learning.tokenizer)
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 9, 6)]
    with engine.session(3, 40, temperature, 1.0, ("</answer>",)) as session:
        samples = session.sample(
            [
                SamplingRequest(session.open(), prompt, 17 + i, 20)
                for i, prompt in enumerate(prompts)
            ]
        )
    nothing = np.zeros(0, np.float32)
    trees = []
    for prompt, sample in zip(prompts, samples, strict=True):
        turn = Node(0, TURN, "", "", sample.tokens, sample.logprobs, sample.entropies)
        nodes = [Node(-1, PROMPT, "", "", prompt, nothing, nothing), turn]
        trees.append(uncredited(Tree(Question("q", "k", "t", ("1",)), nodes, [1])))
    found = node_logprobs(learning.model, trees, temperature, SETTINGS, MACHINE)
    for by_node, sample in zip(found, samples, strict=True):
        np.testing.assert_allclose(by_node[1], sample.logprobs, atol=1e-5)


# ---------------------------------------------------------------- steps and metrics


def test_single_step_needs_no_old_logprobs(initial):
    """No forward pass is spent on old log-probabilities, and every ratio is exactly 1."""
    learning, passes = fresh(initial), []
    learning.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    metrics = run(learning, made_trees())
    assert len(passes) == 1
    assert metrics["ratio_highest"] == metrics["ratio_lowest"] == 1
    assert metrics["clip_fraction"] == metrics["kl"] == 0
    assert metrics["mismatch_highest"] > 0, "random log-probabilities are not this policy's"


def test_later_steps_compare_with_the_sampling_policy(initial):
    learning, passes = fresh(initial), []
    learning.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    metrics = run(learning, made_trees(), SETTINGS.model_copy(update={"epochs": 3}))
    assert len(passes) == 1 + 3
    assert metrics["ratio_highest"] > 1 > metrics["ratio_lowest"]
    assert metrics["kl"] > 0


def test_batch_without_advantage_changes_nothing(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    metrics = run(learning, made_trees(zeros=range(5)))
    assert same(weights(learning.model), before)
    assert learning.updates == 0
    assert metrics["trained_tokens"] == metrics["gradient_norm"] == 0
    assert np.isfinite(list(metrics.values())).all()


def test_batch_without_trees_changes_nothing(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    metrics = run(learning, [])
    assert same(weights(learning.model), before)
    assert metrics["trained_tokens"] == 0


@pytest.mark.parametrize("name", ["arpo", "gspo", "ppo"])
def test_two_lanes_equal_one_lane(initial, name):
    trees = made_trees(5, values=True)
    machine = MACHINE.model_copy(update={"threads": 2})
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": 150, "epochs": 2})
    found = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        learning = fresh(initial, settings, ROWS[name].critic)
        trees = [replace(t, reference_logprobs=[n.logprobs for n in t.tree.nodes]) for t in trees]
        metrics = learner.optimize(
            learning, trees, LOSSES[name], settings, TEMPERATURE, machine, seed=1
        )
        found.append((gradients(learning.model), weights(learning.model), metrics))
    torch.set_num_threads(MACHINE.threads)
    close(found[0][0], found[1][0])
    assert same(found[1][1], found[2][1])
    assert found[1][2] == found[2][2]
    for measure in ("trained_tokens", "trained_views"):
        assert found[0][2][measure] == found[1][2][measure]


def named(name, credited_tree):
    """The same tree of another question."""
    question = replace(credited_tree.tree.question, id=name)
    return replace(credited_tree, tree=replace(credited_tree.tree, question=question))


@pytest.mark.parametrize("critic", [None, OWN, SHARED], ids=["none", "own", "shared"])
def test_a_batch_ends_where_the_policy_has_moved_too_far(initial, critic):
    """The step whose tokens show it is not taken; the first one always is."""
    trees = [named(str(i), tree) for i, tree in enumerate(made_trees(4, values=True))]

    def learned(epochs, most):
        changes = {"epochs": epochs, "mini_batches": 2, "learning_rate": 0.01, "stop_at_kl": most}
        settings, seen = SETTINGS.model_copy(update=changes), {}
        learning = fresh(initial, settings, critic)
        arguments = (learning, trees, GRPO, settings, TEMPERATURE, MACHINE, 1, seen)
        return learner.optimize(*arguments), weights(learning.model), set(seen)

    free, moved, nodes = learned(3, None)
    assert "steps_left_out" not in free and free["optimizer_steps"] == 6
    wide = learned(3, 1e9)
    assert wide[0] == {**free, "steps_left_out": 0} and same(wide[1], moved)
    narrow = [learned(epochs, 1e-12) for epochs in (1, 3)]
    assert [made["optimizer_steps"] for made, _, _ in narrow] == [1, 1]
    assert [made["steps_left_out"] for made, _, _ in narrow] == [0.5, pytest.approx(5 / 6)]
    assert same(narrow[0][1], narrow[1][1]) and not same(narrow[0][1], moved)
    assert narrow[1][2] <= nodes
    trees = off_policy(trees)
    assert learned(1, 1e-12)[0]["optimizer_steps"] == 1, "far from the sampler before any step"
    trees = [replace(tree, old_logprobs=None) for tree in trees]
    between = learned(3, free["kl"])[0]
    assert 1 < between["optimizer_steps"] < 6, "the mean movement of all steps is passed in between"


# ---------------------------------------------------------------- precision of passes


def distance(found, expected):
    """Norm of the difference of two dicts of tensors, relative to the second."""
    both = [torch.cat([one[name].flatten() for name in expected]) for one in (found, expected)]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.parametrize("critic", [None, OWN, SHARED], ids=["none", "own", "shared"])
def test_bf16_leaves_weights_and_gradients_in_float32(initial, critic):
    trees = made_trees(values=True)
    found = []
    for machine in (MACHINE, HALF):
        learning = fresh(initial, critic=critic)
        metrics = learner.optimize(learning, trees, GRPO, SETTINGS, TEMPERATURE, machine, seed=1)
        found.append((gradients(learning.model), metrics))
        held = [learning.optimizer, learning.critic and learning.critic.optimizer]
        for optimizer in filter(None, held):
            for weight in (w for group in optimizer.param_groups for w in group["params"]):
                kinds = {weight.dtype, weight.grad.dtype, optimizer.state[weight]["exp_avg"].dtype}
                assert kinds == {torch.float32}
    (exact, measured), (coarse, close_by) = found
    assert 1e-4 < distance(coarse, exact) < 0.05, "near what float32 gives, and not the same"
    for name, value in measured.items():
        assert close_by[name] == pytest.approx(value, rel=0.05, abs=0.02), name


def test_bf16_logprobs_and_values_are_near_float32(initial):
    trees = made_trees(2)
    learning = fresh(initial, critic=OWN)
    torch.nn.init.normal_(learning.critic.head.weight)
    found = {
        machine.precision: (
            node_logprobs(learning.model, trees, TEMPERATURE, SETTINGS, machine),
            passes.node_values(learning, trees, SETTINGS, machine),
        )
        for machine in (MACHINE, HALF)
    }
    for exact, coarse in zip(found["float32"], found["bfloat16"], strict=True):
        one, other = (
            np.concatenate([node for tree in each for node in tree]) for each in (exact, coarse)
        )
        assert one.dtype == other.dtype == np.float32
        # bf16 has 8 bits; the sums over a few layers lose two more
        assert 0 < np.abs(one - other).max() < 2**-6 * np.abs(one).max()
    assert learning.model.dtype == torch.float32


def test_two_lanes_in_bf16_equal_one_lane(initial):
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": 150, "recompute": True})
    found = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        learning = fresh(initial, settings)
        machine = HALF.model_copy(update={"threads": threads})
        learner.optimize(learning, made_trees(5), GRPO, settings, TEMPERATURE, machine, seed=1)
        found.append(gradients(learning.model))
    torch.set_num_threads(MACHINE.threads)
    assert distance(found[0], found[1]) < 0.01
    assert same(found[1], found[2])


# ---------------------------------------------------------------- activations computed again


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["arpo", "ppo"])
def test_recomputation_gives_the_same_gradients(initial, name, threads):
    row, found = ROWS[name], []
    torch.set_num_threads(threads)
    for recompute in (False, True):
        settings = SETTINGS.model_copy(update={"micro_batch_tokens": 150, "recompute": recompute})
        learning = fresh(initial, settings, row.critic)
        metrics = run(learning, off_policy(made_trees(5, values=True)), settings, LOSSES[name])
        found.append((gradients(learning.model), weights(learning.model), metrics))
        if learning.critic and learning.critic.backbone:
            found[-1][0].update(gradients(learning.critic.backbone))
    torch.set_num_threads(MACHINE.threads)
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def kept_bytes(model, recompute):
    """What the forward pass over one forest keeps for the backward pass, weights left out.

    Nor are the inputs of layers that recompute counted, a number a hidden state each.
    """
    owned = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that none is met twice
        return tensor

    made = forest(in_trees(made_trees(2)), "cpu")
    with (
        attending(model, GATHERED),
        passes.recomputing(model, recompute),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        passes.states(model.base_model, made)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_recomputed_activations_are_not_kept():
    model = small_policy()
    assert 5 * kept_bytes(model, recompute=True) < kept_bytes(model, recompute=False)


def test_recomputation_ends_with_the_update(initial):
    settings = SETTINGS.model_copy(update={"recompute": True})
    learning = fresh(initial, settings)
    run(learning, made_trees(), settings)
    assert not learning.model.is_gradient_checkpointing
    assert not learning.model.get_input_embeddings()._forward_hooks


def test_model_without_recomputation_is_refused(initial, monkeypatch):
    settings = SETTINGS.model_copy(update={"recompute": True})
    learning = fresh(initial, settings)
    monkeypatch.setattr(type(learning.model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"recompute is true, and Qwen2ForCausalLM .* to false"):
        run(learning, made_trees(), settings)


# ---------------------------------------------------------------- clipping, passes, metrics


def test_gradients_are_clipped_to_their_global_norm(initial):
    learning = fresh(initial, critic=OWN)
    settings = SETTINGS.model_copy(update={"gradient_clip": 0.01})
    for _ in range(2):  # the head of a new critic is 0, and so is the gradient behind it
        metrics = run(learning, made_trees(2, values=True), settings)
    of_policy = gradients(learning.model).values()
    of_critic = [weight.grad for weight in learning.critic.weights() if weight.grad is not None]
    for found in (of_policy, of_critic):
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["gradient_norm"] > 0.01


def test_infinite_gradient_is_refused_before_the_step(initial):
    learning = fresh(initial)
    before = weights(learning.model)
    trees = made_trees()
    trees[1].credits[2].advantages[0] = math.inf
    with pytest.raises(
        RuntimeError, match=r"update 1 is (nan|inf): lower reinforce\.update\.learn"
    ):
        run(learning, trees)
    assert same(weights(learning.model), before)
    assert learning.updates == 0


@pytest.mark.parametrize(
    ("epochs", "mini_batches", "count"), [(1, 1, 6), (3, 1, 6), (2, 3, 7), (1, 9, 4)]
)
def test_epoch_takes_every_tree_once(initial, epochs, mini_batches, count):
    learning, trees = fresh(initial), made_trees(count)
    settings = SETTINGS.model_copy(update={"epochs": epochs, "mini_batches": mini_batches})
    metrics = run(learning, trees, settings)
    views = sum(sum(lengths(tree.tree)) for tree in trees)
    assert metrics["trained_views"] == epochs * views
    assert learning.updates == epochs * min(mini_batches, count)
    assert np.isfinite(list(metrics.values())).all()


def test_metrics_are_means_over_tokens_of_all_steps(initial):
    # learning rate 0: every step sees the same policy, so two steps or four must say the same
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    trees = made_trees(4)
    two = run(fresh(initial), trees, SETTINGS.model_copy(update={**still, "epochs": 2}))
    more = {**still, "epochs": 2, "mini_batches": 2}
    four = run(fresh(initial), trees, SETTINGS.model_copy(update=more))
    for name in ("kl", "trained_entropy", "clip_low", "clip_high", "importance_weight"):
        assert four[name] == pytest.approx(two[name], abs=1e-6), name
    assert four["trained_tokens"] == two["trained_tokens"]


def rates_of(learning):
    return [group["lr"] for group in learning.optimizer.param_groups]


def test_learning_rate_warms_up_across_a_restart(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"warmup_updates": 4})
    learning = fresh(initial, settings)
    shares = []
    for number in range(6):
        run(learning, made_trees(1), settings)
        (rate,) = set(rates_of(learning))
        shares.append(rate / settings.learning_rate)
        if number == 1:
            checkpoint.save(learning, tmp_path)
            learning = fresh(tmp_path / checkpoint.POLICY, settings)
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_weight_decay_is_for_matrices_only(initial):
    learning = fresh(initial)
    decays = {
        weight: group["weight_decay"]
        for group in learning.optimizer.param_groups
        for weight in group["params"]
    }
    for name, weight in learning.model.named_parameters():
        assert decays[weight] == (0.1 if weight.ndim > 1 else 0.0), name


def test_update_follows_the_advantages(initial):
    tree = random_tree(5, leaves=2)
    good, bad = (
        replace(credit, advantages=np.full_like(credit.advantages, sign))
        for credit, sign in zip(credited(tree).credits, (1, -1), strict=True)
    )
    learning = fresh(initial)

    def totals():
        (by_node,) = node_logprobs(
            learning.model, [uncredited(tree)], TEMPERATURE, SETTINGS, MACHINE
        )
        apart = [
            set(tree.path(tree.leaves[i])) - set(tree.path(tree.leaves[1 - i])) for i in (0, 1)
        ]
        return [sum(by_node[node].sum() for node in nodes) for nodes in apart]

    before = totals()
    run(
        learning, [Credited(tree, [good, bad])], SETTINGS.model_copy(update={"learning_rate": 1e-3})
    )
    after = totals()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_an_update_needs_its_optimizer_first(initial):
    resident.POLICIES.clear()
    with pytest.raises(AssertionError, match="prepare_optimizer comes first"):
        run(resident.POLICIES.load_learner(initial, MACHINE), made_trees())


# ---------------------------------------------------------------- critics


@pytest.mark.parametrize("choice", [OWN, SHARED], ids=["own", "shared"])
def test_a_critic_learns_what_returns_its_leaves_have(initial, choice):
    learning = fresh(initial, critic=choice)
    trees = made_trees(2, values=True, zeros=range(5))  # nothing for the policy to learn
    errors = []
    for _ in range(60):
        values = passes.node_values(learning, trees, SETTINGS, MACHINE)
        now = [with_values(tree, by_node) for tree, by_node in zip(trees, values, strict=True)]
        errors.append(run(learning, now, SETTINGS, LOSSES["reinforce"])["value_error"])
    assert errors[-1] < 0.5 * errors[0]


def with_values(tree, by_node):
    turns = [n for n in range(len(tree.tree.nodes)) if tree.tree.nodes[n].kind == TURN]
    credits = []
    for leaf, credit in enumerate(tree.credits):
        path = [node for node in tree.tree.path(tree.tree.leaves[leaf]) if node in turns]
        credits.append(replace(credit, values=np.concatenate([by_node[node] for node in path])))
    return replace(tree, credits=credits)


def test_a_new_critic_values_everything_at_nothing(initial):
    learning = fresh(initial, critic=OWN)
    (by_node,) = passes.node_values(learning, [uncredited(random_tree(1))], SETTINGS, MACHINE)
    assert not any(values.any() for values in by_node)


def test_own_critic_leaves_the_policy_alone(initial):
    learning = fresh(initial, critic=OWN)
    before = weights(learning.model)
    run(learning, made_trees(2, values=True, zeros=range(5)))
    assert same(weights(learning.model), before)
    assert bool(learning.critic.head.weight.any())


@pytest.mark.parametrize("choice", [OWN, SHARED], ids=["own", "shared"])
def test_learner_with_a_critic_resumes(initial, choice, tmp_path):
    trees = made_trees(2, values=True)
    unbroken = fresh(initial, critic=choice)
    run(unbroken, trees)
    checkpoint.save(unbroken, tmp_path)
    run(unbroken, trees)
    resumed = fresh(tmp_path / checkpoint.POLICY, critic=choice)
    run(resumed, trees)
    assert same(weights(resumed.model), weights(unbroken.model))
    assert torch.equal(resumed.critic.head.weight, unbroken.critic.head.weight)
    for one, other in zip(resumed.critic.weights(), unbroken.critic.weights(), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- soft and hard credit


def with_estimator(tree, rewards, name):
    """The tree credited as a row of the table credits it."""
    group = episodes_of(tree, rewards, ROWS[name])
    (advantages,) = assemble(ROWS[name], RESPONSE_TOKENS).estimator([group])
    blank = uncredited(tree)
    credits = [
        replace(credit, advantages=values.astype(np.float32))
        for credit, values in zip(blank.credits, advantages, strict=True)
    ]
    return Credited(tree, credits)


@examples(15)
@given(st.integers(0, 10_000))
def test_soft_and_hard_credit_agree_under_token_mean_only(seed):
    model, tree = small_policy(), random_tree(seed, leaves=6)
    rewards = np.random.default_rng(seed).random(6).tolist()
    found = {}
    for averaging in ("dapo", "grpo"):  # token mean, sequence mean
        for name in ("arpo", "arpo_hard"):
            trees = [with_estimator(tree, rewards, name)]
            denominator = learner.loss_denominator(trees, LOSSES[averaging])
            found[averaging, name] = objective_gradients(
                model, in_trees(trees), LOSSES[averaging], denominator
            )[0]
    close(found["dapo", "arpo"], found["dapo", "arpo_hard"])
    shared = any(
        sum(node in tree.path(leaf) for leaf in tree.leaves) > 1
        for node in range(len(tree.nodes))
        if tree.nodes[node].kind == TURN
    )
    if shared and len(set(lengths(tree))) > 1:
        difference = max(
            float((found["grpo", "arpo"][n] - found["grpo", "arpo_hard"][n]).abs().max())
            for n in found["grpo", "arpo"]
        )
        assert difference > 1e-6
