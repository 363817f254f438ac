"""Tiny random models of many architectures: trees give what the model's own pass over rows gives.

Windows are shorter than the contexts, and logits spread by more than 1. What has no form on trees
learns from rows; ``python -m benchmarks.families`` holds every family to the same.
"""

import numpy as np
import pytest
import torch

from benchmarks import families
from params.schema.base import Machine
from tasks.engines.contract import SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning import attention, packing, passes
from tasks.learning.attention import FLEX, GATHERED, ROWS, attending, form_of
from tasks.learning.packing import forest, lay_out, row_batches
from tasks.policy import layer_kinds
from tasks.policy.lean_transformers import transformers
from tasks.policy.logits import backbone_of, head_of
from tasks.policy.small_copy import small_copy
from tests.trees import credited, random_tree

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
VOCABULARY, WINDOW = 96, 12
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "head_dim": 12},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "initializer_range": 0.25},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LAST = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EVERY = {"sliding_window": WINDOW}
CHUNKS = {
    **{"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]},
    **{"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 16},
    **{"num_local_experts": 2, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
}
FAMILIES = {
    # what their forward pass does to the logits: scaled, divided, bounded
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 0.25},
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 64, "init_std": 0.25, "num_key_value_heads": 4},
    # windows
    "cohere2": {**MIXED, "logit_scale": 0.5},
    "cohere2_moe": {**MIXED, "logit_scale": 0.5},
    "cwm": MIXED,
    "exaone4": MIXED,
    "exaone_moe": MIXED,
    "gemma3_text": MIXED,
    "laguna": MIXED,
    "ministral": EVERY,
    "ministral3": EVERY,
    "mistral": EVERY,
    "mixtral": {**EVERY, "num_local_experts": 4},
    "olmo3": MIXED,
    "phi3": EVERY,
    "qwen2": LAST,
    "qwen3": LAST,
    "qwen3_moe": {**LAST, **EXPERTS},
    "smollm3": {**MIXED, "use_sliding_window": True},
    "starcoder2": EVERY,
    "vaultgemma": {**MIXED, "attn_logit_softcapping": 2.0},
    # chunks, and queries that grow with their position
    "llama4_text": CHUNKS,
}
BOUNDED = ("gemma2", "vaultgemma")  # their scores of attention, which sdpa would leave out


class Tokenizer:
    """As much of one as the engine asks for."""

    eos_token_id = 2


def model_of(kind):
    torch.manual_seed(0)
    config = CONFIGS[kind](**{**SIZES, **FAMILIES[kind]})
    attention = "eager" if kind in BOUNDED else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.0 if weight.ndim > 1 else 1.0 + 0.3 * torch.randn(()))
    return model.eval()


@pytest.fixture(scope="module")
def made():
    """A forest of three trees of five leaves, with contexts longer than the window."""
    trees = [random_tree(seed, leaves=5, vocabulary=VOCABULARY) for seed in range(3)]
    packed = forest(lay_out([(credited(tree), range(5)) for tree in trees]), "cpu")
    assert packed.longest > 2 * WINDOW
    return packed


def logits_of_forest(model, made, form):
    with attending(model, form):
        states = backbone_of(model)(
            input_ids=made.tokens, position_ids=made.positions, use_cache=False, forest=made
        ).last_hidden_state[0]
    logits = head_of(model)(states)
    paths = [path for packed in made.layout.trees for path in packed.paths]
    return [logits[torch.from_numpy(path)] for path in paths]


def logits_of_rows(model, made):
    by_leaf = []
    for packed in made.layout.trees:
        tree = packed.source.tree
        for leaf in packed.leaves:
            nodes = tree.path(tree.leaves[leaf])
            row = np.concatenate([tree.nodes[node].tokens for node in nodes])
            by_leaf.append(model(input_ids=torch.from_numpy(row).long()[None]).logits[0])
    return by_leaf


def gradients(model, logits):
    """The gradients of a sum in which every logit counts differently."""
    model.zero_grad()
    total = sum(
        (part.float() * torch.cos(torch.arange(part.numel())).view_as(part)).sum()
        for part in logits
    )
    total.backward()
    return {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("kind", FAMILIES)
def test_trees_give_the_logits_and_gradients_of_rows(kind, made):
    model = model_of(kind)
    rows = logits_of_rows(model, made)
    assert max(float(row.detach().std()) for row in rows) > 0.3
    expected = gradients(model, rows)
    for form in (GATHERED, FLEX):
        with torch.no_grad():
            for own, row in zip(logits_of_forest(model, made, form), rows, strict=True):
                torch.testing.assert_close(own, row.detach(), rtol=0, atol=1e-4)
    computed = gradients(model, logits_of_forest(model, made, GATHERED))
    assert computed.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(computed[name], value, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_sampler_reports_the_log_probabilities_of_a_plain_pass(kind, monkeypatch):
    model = model_of(kind)
    engine = TransformersEngine(model, Tokenizer())
    monkeypatch.setattr(engine, "pieces", lambda: [chr(40 + i) for i in range(VOCABULARY)])
    random = np.random.default_rng(0)
    prompt = random.integers(3, VOCABULARY, 3 * WINDOW).astype(np.int32)
    turns = []
    with engine.session(2, 120, 1.0, 1.0, []) as session:
        first = session.open()
        handles, contexts = [first, session.fork(first)], [prompt, prompt]
        for turn in range(2):
            pairs = enumerate(zip(handles, contexts, strict=True))
            requests = [SamplingRequest(h, tokens, 20, 2 * turn + i) for i, (h, tokens) in pairs]
            turns += zip(requests, samples := session.sample(requests), strict=True)
            result = random.integers(3, VOCABULARY, 5).astype(np.int32)
            ends = zip(contexts, samples, strict=True)
            contexts = [np.concatenate([tokens, one.tokens, result]) for tokens, one in ends]
    for request, sample in turns:
        row = torch.from_numpy(np.concatenate([request.tokens, sample.tokens])).long()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=row[None]).logits[0].float(), -1)
        own = logprobs[len(request.tokens) - 1 : -1].gather(1, row[len(request.tokens) :, None])
        np.testing.assert_allclose(sample.logprobs, own[:, 0].numpy(), rtol=0, atol=1e-4)


COPIES = {  # whose windows are tried with small ones, below
    *("afmoe", "dots1", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss"),
    *("granite_swa", "granitemoe_swa", "mimo_v2_flash", "modernbert-decoder", "phi4_multimodal"),
    *("phimoe", "qwen2_moe"),
}


def test_every_architecture_whose_windows_are_sound_is_tried_here():
    windows = {kind for kind, changes in FAMILIES.items() if "sliding_window" in changes}
    assert windows | COPIES == layer_kinds.WINDOWED
    assert {kind for kind in FAMILIES if FAMILIES[kind] is CHUNKS} == layer_kinds.CHUNKED


# ---- rows


@pytest.mark.parametrize(
    "kind, learner",
    [
        ("qwen3_5_moe_text", "trees"),  # a state from token to token, and experts
        ("bamba", "trees"),
        ("olmo_hybrid", "trees"),
        ("falcon_mamba", "rows"),  # a state, in a model that passes nothing on
        ("deepseek_v3", "trees"),  # latent attention
        ("deepseek_v32", "rows"),  # which an index makes sparse
        ("gpt_oss", "trees"),  # sinks and windows
        ("granite_swa", "trees"),
        ("granitemoe_swa", "trees"),
        ("mimo_v2_flash", "trees"),  # sinks in some layers, and values of another size
        ("phimoe", "trees"),  # windows that only masks know
        ("qwen2_moe", "trees"),
        ("dots1", "trees"),  # windows
        ("gemma3n_text", "trees"),
        ("modernbert-decoder", "trees"),
        ("phi4_multimodal", "trees"),
        ("stablelm", "trees"),  # layers that pass on positions alone
        ("llama4", "trees"),  # a policy that also reads pictures
        ("bloom", "rows"),  # attention of its own
        ("afmoe", "trees"),
        ("gemma4_text", "trees"),  # windows, and heads whose size differs by layer
        ("gemma4_unified_text", "trees"),
        ("bart", "refused: which has an encoder and a decoder"),
    ],
)
def test_a_family_learns_and_samples_as_its_own_pass(kind, learner):
    """As ``python -m benchmarks.families`` measures it."""
    family = families.family(kind)
    assert (family.learner, family.fault) == (learner, "")
    parts = {"learner", "gradient", "sampler"} if family.layers else set()
    assert parts <= family.found.keys() <= parts | {"experts", "replay"}
    assert all(found.holds for found in family.found.values()), families.row_of(family)


@pytest.fixture(scope="module")
def recurrent():
    """A model that learns as rows, in evaluation mode."""
    return small_copy(families.config_of("falcon_mamba"), 2**20)


@pytest.fixture(scope="module")
def fresh():
    """Credited trees with fresh prompts, and their forest."""
    trees = [credited(random_tree(seed, 5, VOCABULARY, fresh=0.5)) for seed in range(3)]
    return trees, forest(lay_out([(tree, range(5)) for tree in trees]), "cpu")


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_end_at_fresh_prompts_and_padding_changes_nothing(
    processes, recurrent, fresh, monkeypatch
):
    """Processes that learn together make one pass a forest, as the others of them do."""
    _, packed = fresh
    made = []
    monkeypatch.setattr(attention.world, "size", lambda: processes)
    monkeypatch.setattr(packing, "ROW_TOKENS", 1)
    monkeypatch.setattr(passes, "padded", lambda rows: made.append(rows) or packing.padded(rows))
    slots = torch.arange(packed.tokens.shape[1])
    with torch.no_grad():
        states = passes.states(backbone_of(recurrent), packed, slots)
        for context in packed.layout.contexts:
            own = backbone_of(recurrent)(packed.tokens[0, context][None])
            torch.testing.assert_close(states[context], own.last_hidden_state[0], rtol=0, atol=1e-4)
    assert (len(made) == 1) == (processes == 2)


def test_rows_that_are_recomputed_have_the_same_gradient(recurrent, fresh):
    def gradient(recompute):
        recurrent.zero_grad()
        with passes.recomputing(recurrent, recompute):
            passes.states(backbone_of(recurrent), fresh[1]).square().sum().backward()
        return {n: w.grad.clone() for n, w in recurrent.named_parameters() if w.grad is not None}

    kept, again = gradient(recompute=False), gradient(recompute=True)
    assert kept.keys() == again.keys() and len(kept) > 10
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-5)


def test_a_pass_has_so_many_tokens_of_rows(recurrent, fresh):
    """Also where a tree is cut between its leaves."""
    trees, _ = fresh
    cost = passes.training_cost(recurrent, form_of(recurrent, "cpu"))
    machine = Machine(threads=1, device="cpu", precision="float32")
    batch = [(tree, range(5)) for tree in trees]
    for most in (60, 120, 10_000):
        lanes = passes.forests_of_lanes(batch, most, cost, machine)
        packed = [part for lane in lanes for part in lane]
        leaves = [sum(len(tree.leaves) for tree in part.layout.trees) for part in packed]
        assert sum(leaves) == 15
        for part, count in zip(packed, leaves, strict=True):
            computed = sum(len(one) * max(map(len, one)) for one in row_batches(part.layout))
            assert computed == cost.tokens(part.layout)
            assert computed <= most or count == 1
    assert form_of(recurrent, "cuda") == ROWS


def test_the_price_of_rows_is_said(recurrent, fresh):
    trees, packed = fresh
    said = passes.price_of_rows(recurrent, trees)
    rows = sum(len(row) for row in packed.layout.rows)
    assert "(2 of 2 layers linear_attention)" in said and f"computes {rows} tokens" in said
    assert f"instead of {packed.tokens.shape[1]}, " in said
    assert passes.price_of_rows(model_of("qwen3"), trees) == ""


@pytest.mark.parametrize(
    ("name", "dropping"),
    [
        ("opt", {**FAMILIES["opt"], "dropout": 0.2, "layerdrop": 0.5}),
        ("starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.2}),
    ],
)
def test_recomputing_drops_nothing_out(name, dropping):
    model = small_copy(CONFIGS[name](**{**SIZES, **dropping}), 2**30).eval()
    ids = torch.arange(3, 43)[None]
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        with passes.recomputing(model, recompute):
            model(ids, use_cache=False).logits.square().mean().backward()
        gradients.append([w.grad.clone() for w in model.parameters() if w.grad is not None])
    assert not any(part.training for part in model.modules())
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)
