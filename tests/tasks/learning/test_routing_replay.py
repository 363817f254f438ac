"""The learner sends tokens to the experts that the sampler has chosen, in trees as in rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, silu, softmax

from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import learner, passes
from tasks.learning.attention import GATHERED, ROWS, attending
from tasks.learning.packing import LEAVES_APART, Credited, forest, lay_out, uncredited
from tasks.learning.passes import OWN_CHOICE, node_logprobs, recomputing
from tasks.policy import resident
from tasks.policy.lean_transformers import transformers
from tasks.policy.routed_experts import UNKNOWN, Recording, routers_of, shape_of, using
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.learners import GRPO, SETTINGS
from tests.sections import HALF, MACHINE
from tests.trees import credited, random_tree

VOCABULARY, EXPERTS, CHOSEN, LAYERS = 97, 16, 3, 3
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    **{"moe_intermediate_size": 24, "norm_topk_prob": True, "initializer_range": 0.3},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1},
}


@pytest.fixture(scope="module")
def model():
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def routed(tree, seed=0):
    """The tree with random experts for its tokens; the last one of each leaf has none."""
    random = np.random.default_rng(seed)
    nodes = []
    for index, node in enumerate(tree.nodes):
        count = len(node.tokens) - (index in tree.leaves)
        every = random.random((count, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN]
        nodes.append(replace(node, experts=every.astype(np.uint8)))
    return replace(tree, nodes=nodes)


def gradients(model, layout, form, recompute=False):
    model.zero_grad()
    made = forest(layout, "cpu")
    with attending(model, form), recomputing(model, recompute):
        value, metrics = learner.objective(
            resident.Learner(None, model, None), made, GRPO, 1.0, 50.0, 50, MACHINE
        )
        value.backward()
    found = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    return found, metrics


def naive_logits(model, tokens, experts):
    """The model's pass over one row, with an expert after the other; ``experts`` [T, layers, k]."""
    states = model.model.embed_tokens(tokens)[None]
    positions = torch.arange(len(tokens))[None]
    rotary = model.model.rotary_emb(states, positions)
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    for number, layer in enumerate(model.model.layers):
        normed = layer.input_layernorm(states)
        mixed = layer.self_attn(
            hidden_states=normed, position_embeddings=rotary, attention_mask=mask
        )[0]
        states = states + mixed
        normed, block = layer.post_attention_layernorm(states)[0], layer.mlp
        scores = softmax(linear(normed, block.gate.weight), -1)
        added = torch.zeros_like(normed)
        for token, vector in enumerate(normed):
            chosen = experts[token, number].tolist()
            for expert in chosen:
                gate, up = linear(vector, block.experts.gate_up_proj[expert]).chunk(2)
                out = linear(silu(gate) * up, block.experts.down_proj[expert])
                added[token] += out * scores[token, expert] / scores[token, chosen].sum()
        states = states + added[None]
    return model.lm_head(model.model.norm(states))[0]


def test_forced_choice_is_that_of_a_slow_loop(model):
    tree = routed(random_tree(3, leaves=1, vocabulary=VOCABULARY))
    (found,) = node_logprobs(model, [uncredited(tree)], 1.0, SETTINGS, MACHINE)
    (own,) = node_logprobs(model, [uncredited(tree)], 1.0, SETTINGS, MACHINE, OWN_CHOICE)
    path = tree.path(tree.leaves[0])
    tokens = torch.from_numpy(np.concatenate([tree.nodes[n].tokens for n in path])).long()
    experts = np.concatenate([tree.nodes[n].experts for n in path])
    with torch.no_grad():
        logprobs = naive_logits(model, tokens[:-1], experts).log_softmax(-1)
    after = logprobs.gather(-1, tokens[1:, None])[:, 0]
    sampled = np.concatenate(
        [np.full(len(tree.nodes[n].tokens), tree.nodes[n].kind == TURN) for n in path]
    )
    expected = after[sampled[1:]].numpy()
    np.testing.assert_allclose(np.concatenate([found[n] for n in path]), expected, atol=1e-4)
    assert np.abs(np.concatenate([own[n] for n in path]) - expected).max() > 0.1


@pytest.mark.parametrize("fresh", [0.0, 0.5])
@pytest.mark.parametrize("recompute", [False, True])
def test_trees_with_replay_equal_rows_with_replay(model, fresh, recompute):
    tree = routed(random_tree(5, leaves=6, vocabulary=VOCABULARY, fresh=fresh))
    source = credited(tree)
    trees, metrics = gradients(model, lay_out([(source, range(6))]), GATHERED, recompute)
    rows, _ = gradients(model, lay_out([(source, range(6))]), ROWS, recompute)
    apart, _ = gradients(model, lay_out([(source, range(6))], LEAVES_APART), GATHERED)
    largest = max(float(value.abs().max()) for value in rows.values())
    for name, expected in rows.items():
        for found in (trees, apart):
            torch.testing.assert_close(
                found[name], expected, rtol=0, atol=1e-5 * max(1.0, largest), msg=name
            )
    gate = "model.layers.1.mlp.gate.weight"
    assert float(trees[gate].abs().max()) > 1e-4  # the weights of the chosen have a gradient
    assert metrics["experts_differ"] / metrics["experts"] > 0.9  # the choice was random
    own, _ = gradients(model, lay_out([(credited(replace_experts(tree)), range(6))]), GATHERED)
    assert float((own[gate] - trees[gate]).abs().max()) > 1e-4


def replace_experts(tree):
    return replace(tree, nodes=[replace(node, experts=None) for node in tree.nodes])


class Tokenizer:
    eos_token_id = -1

    def batch_decode(self, tokens):
        return ["".join(chr(0x4E00 + token) for token in each) for each in tokens]


def sampled_tree(model, seed=0):
    """A tree of two leaves that the engine has sampled: one goes on after a result."""
    random = np.random.default_rng(seed)
    root, result = (random.integers(2, VOCABULARY, n).astype(np.int32) for n in (14, 5))
    none = np.zeros(0, np.float32)
    with TransformersEngine(model, Tokenizer()).session(4, 96, 1.0, 1.0, []) as session:
        first, other = session.open(), session.open()
        turn, short = session.sample(
            [SamplingRequest(first, root, seed + 1, 20), SamplingRequest(other, root, seed + 2, 9)]
        )
        whole = np.concatenate([root, turn.tokens, result])
        (last,) = session.sample([SamplingRequest(first, whole, seed + 3, 20)])
    begun = len(root) + len(turn.tokens)
    nodes = [
        Node(-1, PROMPT, "", "", root, none, none, experts=last.experts[: len(root)]),
        Node(0, TURN, "", "", turn.tokens, turn.logprobs, none, experts=last.experts[14:begun]),
        Node(1, "result", "", "", result, none, none, experts=last.experts[begun : len(whole)]),
        Node(2, TURN, "", "", last.tokens, last.logprobs, none, experts=last.experts[len(whole) :]),
        Node(0, TURN, "", "", short.tokens, short.logprobs, none, experts=short.experts[14:]),
    ]
    return Tree(Question("q", "", "", ()), nodes, [3, 4])


def apart(model, tree, machine, *more):
    """Mean |log-probability| between sampler and learner, over sampled tokens."""
    (found,) = node_logprobs(model, [uncredited(tree)], 1.0, SETTINGS, machine, *more)
    pairs = zip(found, tree.nodes, strict=True)
    return float(np.abs(np.concatenate([f - node.logprobs for f, node in pairs])).mean())


def test_own_choice_in_float32_changes_nothing(model):
    tree = sampled_tree(model)
    assert apart(model, tree, MACHINE) < 1e-5
    (replayed,) = node_logprobs(model, [uncredited(tree)], 1.0, SETTINGS, MACHINE)
    (own,) = node_logprobs(model, [uncredited(tree)], 1.0, SETTINGS, MACHINE, OWN_CHOICE)
    np.testing.assert_allclose(np.concatenate(replayed), np.concatenate(own), atol=1e-6)


def test_replay_narrows_the_difference_of_bfloat16(model):
    low = resident.to_sample(model, HALF)
    trees = [sampled_tree(low, seed) for seed in range(6)]
    own = np.mean([apart(model, tree, HALF, OWN_CHOICE) for tree in trees])
    replayed = np.mean([apart(model, tree, HALF) for tree in trees])
    print(f"\nmean |difference|: own choice {own:.4f}, replayed {replayed:.4f} nats")
    assert replayed < 0.8 * own


def test_equal_tokens_sampled_apart_take_the_choice_of_the_first_node():
    none, tokens = np.zeros(0, np.float32), np.array([5, 6, 7], np.int32)

    def node(parent, kind, experts):
        return Node(parent, kind, "", "", tokens, none, none, experts=np.array(experts, np.uint8))

    every = [node(-1, PROMPT, np.full((3, 1, 2), 9))]
    every += [node(0, TURN, np.full((2, 1, 2), 1)), node(0, TURN, np.full((3, 1, 2), 2))]
    tree = Tree(Question("q", "", "", ()), every, [1, 2])
    for leaves in ([0], [1], [0, 1]):  # whichever leaves a pass is over
        layout = lay_out([(Credited(tree, uncredited(tree).credits), leaves)])
        assert layout.experts[:, 0, 0].tolist() == [9, 9, 9, 1, 1, 2]
    tree.nodes[2] = replace(tree.nodes[2], experts=None)
    layout = lay_out([(uncredited(tree), [0, 1])])
    assert layout.experts[:, 0, 0].tolist() == [9, 9, 9, 1, 1, UNKNOWN]
    tree.nodes[1] = node(0, TURN, np.full((2, 3, 2), 1))
    with pytest.raises(ValueError, match="2 shapes"):
        lay_out([(uncredited(tree), [0, 1])])


def test_lanes_have_choices_of_their_own(model):
    machine = MACHINE.model_copy(update={"threads": 2})
    trees = [uncredited(routed(random_tree(s, vocabulary=VOCABULARY), s)) for s in range(4)]
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": 40})
    together = node_logprobs(model, trees, 1.0, settings, machine)
    for tree, found in zip(trees, together, strict=True):
        (alone,) = node_logprobs(model, [tree], 1.0, SETTINGS, MACHINE)
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(alone), atol=1e-5)


def test_reference_chooses_for_itself_unless_it_sampled(model):
    from tasks.learning import batch
    from tasks.ledger.artifacts import Artifact

    one, other = (Artifact(f"/{name}", name) for name in "ab")
    assert batch._experts_of(one, [one]) is passes.RECORDED
    assert batch._experts_of(other, [one]) is passes.OWN_CHOICE


def test_what_is_recorded_is_what_the_policy_chooses(model):
    tree = sampled_tree(model)
    for leaf in tree.leaves:
        path = tree.path(leaf)
        tokens = np.concatenate([tree.nodes[n].tokens for n in path])[:-1]
        recording = Recording(shape_of(routers_of(model)))
        with torch.no_grad(), using(model, recording):
            model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False)
        stored = np.concatenate([tree.nodes[n].experts for n in path])
        expected = recording.taken().numpy()
        assert (np.sort(stored, -1) == np.sort(expected, -1)).all()


@pytest.mark.parametrize(("routers", "chosen"), [(2, 3), (5, 3), (3, 2)])
def test_a_choice_of_other_routers_is_refused(model, routers, chosen):
    whole = random_tree(3, vocabulary=VOCABULARY)
    of_one = np.tile(np.arange(chosen, dtype=np.uint8), (routers, 1))
    nodes = [replace(node, experts=np.stack([of_one] * len(node.tokens))) for node in whole.nodes]
    other = uncredited(replace(whole, nodes=nodes))
    with pytest.raises(ValueError, match=f"choice of {routers} routers with {chosen} experts"):
        node_logprobs(model, [other], 1.0, SETTINGS, MACHINE)
    trees = [uncredited(routed(whole)), other, uncredited(whole)]
    with pytest.raises(ValueError, match="experts of 2 shapes"):
        lay_out([(tree, [0]) for tree in trees])
