"""Forests on a GPU give what plain attention gives a row at a time, in float32 and in bf16.

In bf16 no two orders of summation agree closely, so the measure is float32 on the same weights: a
forest in bf16 may be at most ``SLACK`` times as far from it as rows in bf16 are.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.update_on_gpu import (
    Architecture,
    Shape,
    forward_backward,
    synthetic_tree,
)
from benchmarks.update_on_gpu import policy as random_policy
from params.schema.algorithms import load_algorithms
from params.schema.base import Machine
from params.schema.reinforce import Lora
from tasks.engines import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import learner, passes
from tasks.learning.algorithm import assemble
from tasks.learning.attention import FLEX, GATHERED, attending, form_for
from tasks.learning.packing import forest, lay_out, uncredited
from tasks.learning.passes import node_logprobs, states, token_logprobs
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, checkpoint, resident
from tasks.policy.lean_transformers import transformers
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.sections import UPDATE
from tests.trees import VOCABULARY, credited, random_tree, small_policy

BF16, FLOAT32 = torch.bfloat16, torch.float32
SLACK = 1.5
TEMPERATURE = 0.7
LONG = Shape(prompt=300, turns=3, turn=60, result=20, leaves=6)  # whole blocks are visible
TREES = {
    "less than a block": lambda: [credited(random_tree(1, 3))],
    "some blocks": lambda: [credited(random_tree(seed, 12)) for seed in (2, 3, 4)],
    "fresh prompts": lambda: [credited(random_tree(seed, 40, fresh=0.5)) for seed in (2, 3)],
    "long nodes": lambda: [synthetic_tree(seed, LONG, VOCABULARY) for seed in (5, 6)],
}
SETTINGS = UPDATE.model_copy(update={"learning_rate": 1e-3, "critic_learning_rate": 1e-3})
GRPO = assemble(load_algorithms()["grpo"], 50).loss


@pytest.fixture(params=TREES)
def made(request, device):
    """A forest of whole trees on the device."""
    layout = lay_out([(tree, range(len(tree.credits))) for tree in TREES[request.param]()])
    return forest(layout, device)


def weights_on(device, dtype=FLOAT32):
    """The same weights in every precision: those that bf16 can write."""
    return small_policy().to(BF16).to(device, dtype)


def by_row(model, made, device):
    """Log-probabilities [views] of the leaves' sampled tokens from the model's own attention.

    It computes each context of a leaf apart.
    """
    found = []
    for packed in made.layout.trees:
        tree = packed.source.tree
        for leaf in packed.leaves:
            for context in tree.contexts(tree.leaves[leaf]):
                nodes = [tree.nodes[node] for node in context]
                row = np.concatenate([node.tokens for node in nodes])
                tokens = torch.from_numpy(row).long().to(device)
                turns = np.concatenate([[node.kind == TURN] * len(node.tokens) for node in nodes])
                own = torch.from_numpy(turns[1:]).to(device)
                every = torch.log_softmax(model(tokens[None]).logits[0].float() / TEMPERATURE, -1)
                found.append(every[:-1].gather(-1, tokens[1:, None])[:, 0][own])
    return torch.cat(found)


def by_forest(model, made, form):
    """The same from the forest, each token computed once."""
    with attending(model, form):
        hidden = states(model.base_model, made)
        logprobs, _ = token_logprobs(model, hidden, made.targets, TEMPERATURE)
    return logprobs[made.entries][made.views][made.mask]


def gradient(model, logprobs):
    """Of a sum that weighs every leaf's every token differently; all weights in one row."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    return torch.cat([weight.grad.float().flatten() for weight in learned(model)])


def learned(model):
    """The weights that decide anything; a single expert needs no router."""
    return [weight for weight in model.parameters() if weight.grad is not None]


def both(model, logprobs):
    return logprobs.detach(), gradient(model, logprobs)


def distance(found, expected):
    """Norm of the difference, relative to what is expected."""
    return float((found.float() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- attention over forests


def test_forest_equals_rows_in_float32(made, device):
    model = weights_on(device)
    expected = both(model, by_row(model, made, device))
    found = both(model, by_forest(model, made, form_for(device)))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert distance(found[1], expected[1]) < 1e-5


def test_forest_in_bf16_is_as_close_as_rows(made, device):
    exact, coarse = weights_on(device), weights_on(device, BF16)
    expected = both(exact, by_row(exact, made, device))
    rows = both(coarse, by_row(coarse, made, device))
    found = both(coarse, by_forest(coarse, made, form_for(device)))
    for name, row, leaf, wanted in zip(
        ("logprobs", "gradient"), rows, found, expected, strict=True
    ):
        error = distance(row, wanted)
        assert 0 < error < 0.2, f"{name}: rows in bf16 are far off themselves"
        assert distance(leaf, wanted) < SLACK * error, name


def test_gathered_and_flex_attention_agree(made, device):
    model = weights_on(device)
    gathered = both(model, by_forest(model, made, GATHERED))
    with torch.no_grad():
        flex = by_forest(model, made, FLEX)
    torch.testing.assert_close(flex, gathered[0], rtol=0, atol=1e-4)
    trained = gradient(model, by_forest(model, made, form_for(device)))
    assert distance(trained, gathered[1]) < 1e-5


SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "pad_token_id": None},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096},
    **{"bos_token_id": None, "eos_token_id": 0, "initializer_range": 0.2},
}
# With the head sizes of gpt-oss and DeepSeek, which test_families_gpu.py cuts; without a choice of
# experts.
OTHERS = {
    "gpt_oss": {
        **{"head_dim": 64, "num_key_value_heads": 2, "num_local_experts": 1},
        **{"num_experts_per_tok": 1, "sliding_window": 40},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "v_head_dim": 128},
        **{"qk_rope_head_dim": 64, "head_dim": 64, "num_key_value_heads": 4},
        "first_k_dense_replace": 2,
    },
}


def other_policy(kind, device, dtype):
    """A small model of an architecture, with weights that bf16 can write."""
    make = transformers.AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **SIZES, **OTHERS[kind])
        model = make(config, attn_implementation="eager", dtype=FLOAT32)
    return model.to(BF16).to(device, dtype).eval()


@pytest.fixture
def long(device):
    layout = lay_out([(tree, range(LONG.leaves)) for tree in TREES["long nodes"]()])
    return forest(layout, device)


@pytest.mark.parametrize("kind", OTHERS)
def test_sinks_and_latent_keys_equal_rows(kind, long, device):
    model = other_policy(kind, device, FLOAT32)
    expected = both(model, by_row(model, long, device))
    found = both(model, by_forest(model, long, form_for(device)))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert distance(found[1], expected[1]) < 1e-5
    with torch.no_grad():
        flex = by_forest(model, long, FLEX)
    torch.testing.assert_close(flex, expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_sinks_and_latent_keys_in_bf16(kind, long, device):
    exact, coarse = (other_policy(kind, device, dtype) for dtype in (FLOAT32, BF16))
    expected = both(exact, by_row(exact, long, device))
    rows = both(coarse, by_row(coarse, long, device))
    found = both(coarse, by_forest(coarse, long, form_for(device)))
    for row, leaf, wanted in zip(rows, found, expected, strict=True):
        assert distance(leaf, wanted) < SLACK * distance(row, wanted)


def test_forests_of_changing_length_keep_masks(device):
    model = weights_on(device)
    for seed in range(12):
        leaves = 2 + 3 * seed
        made = forest(lay_out([(credited(random_tree(seed, leaves)), range(leaves))]), device)
        with torch.no_grad():
            found = by_forest(model, made, form_for(device))
            expected = by_row(model, made, device)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_logprobs_in_parts_are_those_of_all_logits(monkeypatch, device, dtype):
    model = weights_on(device, dtype)
    hidden = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    hidden.requires_grad_()
    targets = torch.arange(300, device=device) % VOCABULARY

    def found(at_once):
        monkeypatch.setattr(passes, "LOGITS_AT_ONCE", dict.fromkeys(("cpu", "cuda"), at_once))
        model.zero_grad()
        hidden.grad = None
        logprobs, entropies = token_logprobs(model, hidden, targets, TEMPERATURE, entropy=True)
        (logprobs.sum() + entropies.sum()).backward()
        return logprobs.detach(), hidden.grad.float(), model.lm_head.weight.grad.float()

    tolerance = 1e-5 if dtype is FLOAT32 else 2e-2
    for some, every in zip(found(VOCABULARY * 64), found(2**24), strict=True):
        assert distance(some, every) < tolerance


def sampled(model, tokenizer):
    """Turns that the engine has sampled, each a tree of its own, and their samples."""
    engine = TransformersEngine(model, tokenizer)
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 90, 6)]
    with engine.session(3, 200, TEMPERATURE, 1.0, ("</answer>",)) as session:
        samples = session.sample(
            [
                SamplingRequest(session.open(), prompt, 17 + i, 60)
                for i, prompt in enumerate(prompts)
            ]
        )
    nothing = np.zeros(0, np.float32)
    trees = []
    for prompt, sample in zip(prompts, samples, strict=True):
        turn = Node(0, TURN, "", "", sample.tokens, sample.logprobs, sample.entropies)
        nodes = [Node(-1, PROMPT, "", "", prompt, nothing, nothing), turn]
        trees.append(uncredited(Tree(Question("q", "k", "t", ("1",)), nodes, [1])))
    return trees, torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))


def of_learner(model, trees, device):
    machine = Machine(threads=1, device=device, precision="float32")
    found = node_logprobs(model, trees, TEMPERATURE, SETTINGS, machine)
    return torch.from_numpy(np.concatenate([by_node[1] for by_node in found]))


def test_the_engine_and_the_learner_agree_in_float32(policy_on_device, tokenizer, device):
    trees, engine = sampled(policy_on_device, tokenizer)
    found = of_learner(policy_on_device, trees, device)
    torch.testing.assert_close(found, engine, rtol=0, atol=1e-4)


def test_engine_and_learner_are_equally_close(policy_on_device, tokenizer, device):
    coarse = copy.deepcopy(policy_on_device).to(BF16)
    exact = copy.deepcopy(coarse).float()
    trees, engine = sampled(coarse, tokenizer)
    expected = of_learner(exact, trees, device)
    error = distance(of_learner(coarse, trees, device), expected)
    assert 0 < error < 0.02
    assert distance(engine, expected) < 2 * error


@pytest.fixture
def policy_on_device(policy, device):
    return copy.deepcopy(policy).to(device)


# ---------------------------------------------------------------- updates


LORA = Lora(rank=4, alpha=8, modules=("q_proj", "v_proj", "down_proj"))
BASE = Artifact("base", "digest")


def every_tree():
    return [tree for make in TREES.values() for tree in make()]


def updated(device, trees, micro_batch_tokens=10_000, precision="float32", lora=None, **settings):
    """Gradients and metrics of one update."""
    machine = Machine(threads=1, device=device, precision=precision)
    learning = resident.Learner(Path("gpu"), weights_on(device), None)
    if lora:
        checkpoint.prepare_adapter(learning, lora, BASE, seed=1)
        stir(learning.model)
    checkpoint.prepare_optimizer(learning, SETTINGS)
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": micro_batch_tokens, **settings})
    metrics = learner.optimize(learning, trees, GRPO, settings, TEMPERATURE, machine, 1)
    weights = [weight for weight in learning.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in weights} == {weight.grad.dtype for weight in weights}
    assert {weight.dtype for weight in weights} == {FLOAT32}
    return torch.cat([weight.grad.flatten().cpu() for weight in weights]), metrics


def stir(model):
    """Give an adapter a part that is not 0, so that both of its parts have a gradient."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=random))


@pytest.mark.parametrize("micro_batch_tokens", [300, 10_000])
def test_update_gives_the_gradient_of_a_cpu(device, micro_batch_tokens):
    trees = every_tree()
    expected, on_cpu = updated("cpu", trees)
    found, metrics = updated(device, trees, micro_batch_tokens)
    assert distance(found, expected) < 1e-4
    assert metrics["trained_views"] == on_cpu["trained_views"]
    assert metrics["loss"] == pytest.approx(on_cpu["loss"], abs=1e-4)


LEARNED = {"all weights": None, "an adapter": LORA}


@pytest.mark.parametrize("lora", LEARNED.values(), ids=LEARNED)
@pytest.mark.parametrize("recompute", [False, True])
def test_update_in_bf16_is_near_float32(device, lora, recompute):
    trees = every_tree()
    exact, measured = updated(device, trees, lora=lora)
    found, coarse = updated(device, trees, precision="bfloat16", lora=lora, recompute=recompute)
    assert 1e-4 < distance(found, exact) < 0.1
    assert coarse["trained_views"] == measured["trained_views"]
    assert coarse["gradient_norm"] == pytest.approx(measured["gradient_norm"], rel=0.05)


@pytest.mark.parametrize("lora", LEARNED.values(), ids=LEARNED)
def test_recomputing_gives_the_same_gradient(device, lora):
    trees = every_tree()
    kept, _ = updated(device, trees, lora=lora)
    again, _ = updated(device, trees, lora=lora, recompute=True)
    assert distance(again, kept) < 1e-6  # sums of an index are in no fixed order on a GPU


DEEP = Architecture(64, layers=8, heads=2, key_value_heads=1, feed_forward=256, vocabulary=97)


def peak(recompute):
    """Bytes that the passes over one forest take on the GPU at most, the second time."""
    learning = resident.Learner(Path("gpu"), random_policy(DEEP, "cuda"), None)
    shape = Shape(prompt=1024, turns=3, turn=256, result=20, leaves=6)
    machine = Machine(threads=1, device="cuda", precision="bfloat16")
    made = forest(lay_out([(synthetic_tree(5, shape, VOCABULARY), range(6))]), "cuda")
    with attending(learning.model, FLEX), passes.recomputing(learning.model, recompute):
        forward_backward(learning, [made], GRPO, machine)
        torch.cuda.reset_peak_memory_stats()
        forward_backward(learning, [made], GRPO, machine)
    return torch.cuda.max_memory_allocated()


def test_recomputing_takes_less_memory(device):
    if device == "cuda":  # elsewhere tests/tasks/test_learner.py counts what is kept
        assert peak(recompute=True) < 0.6 * peak(recompute=False)


def test_adapter_learns_as_on_a_cpu(device):
    trees = every_tree()
    expected, _ = updated("cpu", trees, lora=LORA)
    found, _ = updated(device, trees, lora=LORA)
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_adapters_sampler_agrees_with_learner(
    policy_on_device, tokenizer, device, precision, tolerance
):
    machine = Machine(threads=1, device=device, precision=precision)
    learning = resident.Learner(Path("gpu"), policy_on_device, tokenizer)
    checkpoint.prepare_adapter(learning, LORA, BASE, seed=1)
    stir(learning.model)
    sampling = resident.to_sample(learning.model, machine)
    assert not adapter.attached(sampling)
    trees, engine = sampled(sampling, tokenizer)
    found = node_logprobs(learning.model, trees, TEMPERATURE, SETTINGS, machine)
    found = torch.from_numpy(np.concatenate([by_node[1] for by_node in found]))
    torch.testing.assert_close(found, engine, rtol=0, atol=tolerance)


def test_adapters_base_is_its_reference(policy_on_device, device):
    trees = [uncredited(random_tree(3))]
    expected = of_whole(policy_on_device, trees, device)
    learning = resident.Learner(Path("gpu"), policy_on_device, None)
    checkpoint.prepare_adapter(learning, LORA, BASE, seed=1)
    stir(learning.model)
    machine = Machine(threads=1, device=device, precision="float32")
    with resident.POLICIES.reference_of(Path(BASE.path), learning, machine) as model:
        torch.testing.assert_close(of_whole(model, trees, device), expected, rtol=0, atol=1e-5)
    assert distance(of_whole(learning.model, trees, device), expected) > 1e-3


def of_whole(model, trees, device):
    machine = Machine(threads=1, device=device, precision="float32")
    found = node_logprobs(model, trees, TEMPERATURE, SETTINGS, machine)
    return torch.from_numpy(np.concatenate([node for tree in found for node in tree]))
