import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from flows.host import gpu_cards, gpu_memory, gpu_seconds, model_shape, remedies
from flows.host.gpu_cards import CARDS, GIB, Card
from flows.host.gpu_memory import FULL, HALF
from flows.host.model_shape import shape_of
from params import recipe_files
from params.schema import reinforce
from params.schema.algorithms import load_algorithms
from params.schema.architectures import load_architectures
from params.schema.teacher import PretrainedTeacher, RunTeacher
from tasks import recipes
from tasks.learning import learner, passes
from tasks.learning.algorithm import assemble
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, checkpoint, resident
from tasks.policy.checkpoint import make_optimizer
from tasks.recipes import load as settings_of
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.trees import credited

ROWS = load_algorithms()
TINY = settings_of("tiny")
LARGE = settings_of("qwen2.5-3b")
LEARNED = settings_of("tiny-reward-model")
SMALL = {  # no two widths alike, so that a tensor's shape says what it is
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS = {"qwen2": {}, "llama": {}, "qwen3": {"head_dim": 32}}
TOKENS = 300


def config_of(kind="qwen2", **changes):
    return AutoConfig.for_model(kind, **SMALL, **KINDS[kind], **changes)


def model_of(config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        form = "eager" if config.model_type == "gpt_oss" else "sdpa"
        return AutoModelForCausalLM.from_config(config, attn_implementation=form)


def edited(recipe, **changes):
    """A recipe with other values; ``section__key=value``."""
    values = recipe.model_dump(mode="json")
    values["engine"] = dict(recipe.engine)  # some of its keys are in no dump
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    return recipes.check(values, "recipe")


def of_gib(gib):
    return Card("a card", gib * GIB, CARDS["80"].operations, CARDS["80"].bandwidth)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("name", "weights"),  # half of total_size in each one's model.safetensors.index.json
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
    ],
)
def test_known_models_have_their_published_size(name, weights):
    known = load_architectures()[name]
    settings = dict(known.config)
    shape = shape_of(AutoConfig.for_model(settings.pop("model_type"), **settings))
    assert shape.weights == weights
    assert shape.weights - shape.backbone == (
        0 if known.config["tie_word_embeddings"] else shape.head
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_shape_is_that_of_the_real_model(kind, tied):
    config = config_of(kind, tie_word_embeddings=tied)
    model, shape = model_of(config), shape_of(config)
    assert shape.weights == sum(weight.numel() for weight in model.parameters())
    assert shape.backbone == sum(weight.numel() for weight in model.base_model.parameters())
    assert shape.learning == shape.weights


def test_every_recipe_has_a_shape_without_a_download():
    for name in recipe_files.names():
        recipe = settings_of(name)
        assert shape_of(model_shape.config_of(recipe), recipe.lora).weights > 10_000


def test_adapters_are_two_matrices_a_layer_and_alone_learn():
    lora = reinforce.Lora(rank=8, alpha=16, modules=("q_proj", "down_proj"))
    shape = shape_of(config_of(), lora)
    assert shape.learning == shape.adapters == 3 * 8 * ((64 + 64) + (176 + 64))


def test_adapters_on_unknown_layers_are_refused():
    lora = reinforce.Lora(rank=8, alpha=16, modules=("q_proj", "query"))
    with pytest.raises(ValueError, match=r"lora\.modules names query.*'down_proj'.*'q_proj'"):
        shape_of(config_of(), lora)


def pretrained(name, revision=None):
    policy = {"kind": "pretrained", "name": str(name), "revision": revision, "context": 8192}
    return edited(LARGE, prepare__policy=policy)


def test_shape_is_read_from_a_local_folder(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    found = model_shape.config_of(pretrained(tmp_path))
    assert shape_of(found) == shape_of(config_of("llama"))


@pytest.mark.parametrize(
    ("name", "revision"),
    [("nobody/nothing", None), ("Qwen/Qwen3-8B", "0" * 40)],
    ids=["unknown", "another commit"],
)
def test_policy_of_unknown_shape_is_refused(name, revision, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as caught:
        model_shape.config_of(pretrained(name, revision))
    for words in (name, "architectures.yaml", "add a row", f"hf download {name} config.json"):
        assert words in str(caught.value)


def test_wrong_values_of_a_config_are_refused_in_one_sentence(tmp_path):
    config = '{"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"config\.json of .* wrong values .*num_hidden_layers"):
        model_shape.config_of(pretrained(str(tmp_path)))


# ---------------------------------------------------------------- memory, against real tensors


def size_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_what_stays_is_that_of_a_real_optimizer(tied):
    config = config_of(tie_word_embeddings=tied)
    model = model_of(config)
    optimizer = make_optimizer(model.parameters(), TINY.reinforce.update, 1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    found = gpu_memory.memory(TINY, ROWS["arpo"], shape_of(config), CARDS["24"]).stays
    assert found == {
        "master weights": size_of(model.parameters()),
        "gradients": size_of(weight.grad for weight in model.parameters()),
        "Adam's moments": size_of(moments),
    }


def kept(model, bfloat16):
    """Every tensor that autograd keeps in a forward pass, but the weights; storages once."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found = {}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            found[place] = tensor  # held, so that no other storage takes its place
        return tensor

    tokens = torch.arange(TOKENS)[None] % SMALL["vocab_size"]
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
    ):
        model.base_model(input_ids=tokens, use_cache=False)
    return found.values()


def activations_of(model, bfloat16):
    shapes = {tuple(sorted(weight.shape)) for weight in model.parameters()}
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in kept(model, bfloat16)
        if tuple(sorted(tensor.shape)) not in shapes  # a weight's cast is another part
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_of_a_real_forward_pass(kind, precision):
    config = config_of(kind)
    counted = gpu_memory.activations(shape_of(config), TOKENS, precision, recompute=False)
    real = activations_of(model_of(config), precision == "bfloat16")
    assert counted == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_keeps_inputs_and_one_layer(kind, precision):
    config, bfloat16 = config_of(kind), precision == "bfloat16"
    model = model_of(config).train()
    whole = activations_of(model, bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": True})  # whose inputs autograd keeps
    inputs = activations_of(model, bfloat16)
    assert inputs < whole / 3
    model.gradient_checkpointing_disable()
    model.base_model.layers = model.base_model.layers[:2]
    two = activations_of(model, bfloat16)
    model.base_model.layers = model.base_model.layers[:1]
    layer = two - activations_of(model, bfloat16)
    counted = gpu_memory.activations(shape_of(config), TOKENS, precision, recompute=True)
    assert counted == pytest.approx(inputs + layer, rel=0.15)


def test_cast_is_a_bfloat16_copy_of_each_matrix():
    config = config_of()
    model = model_of(config)
    layers = [m.weight for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    shapes = {tuple(sorted(weight.shape)) for weight in layers}
    copies = size_of(
        t
        for t in kept(model, bfloat16=True)
        if t.dtype == torch.bfloat16 and tuple(sorted(t.shape)) in shapes
    )
    chosen = edited(TINY, machine__precision="bfloat16")
    parts = gpu_memory.memory(chosen, ROWS["arpo"], shape_of(config), CARDS["24"]).update
    head = HALF * SMALL["vocab_size"] * SMALL["hidden_size"]
    assert parts["bfloat16 cast"] == copies + head
    plain = gpu_memory.memory(TINY, ROWS["arpo"], shape_of(config), CARDS["24"]).update
    assert "bfloat16 cast" not in plain


def within(recipe, context):
    """The recipe with contexts of so many tokens."""
    policy = recipe.prepare.policy.model_copy(update={"context": context})
    prepare = recipe.prepare.model_copy(update={"policy": policy})
    return recipe.model_copy(update={"prepare": prepare})


def test_keys_and_values_are_those_of_a_real_cache():
    config = config_of("qwen3")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model_of(config)(torch.arange(11)[None], past_key_values=cache, use_cache=True)
    real = sum(size_of((layer.keys, layer.values)) for layer in cache.layers)
    assert gpu_memory.keys_values(within(TINY, 11), shape_of(config)) == real
    half = edited(TINY, machine__precision="bfloat16")
    assert gpu_memory.keys_values(within(half, 22), shape_of(config)) == real


class Live(TorchDispatchMode):
    """The bytes of all tensors that are made while it lasts, at their peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        made = function(*arguments, **(settings or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor.untyped_storage())
        return made

    def watch(self, storage):
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, place):
        self.now -= self.sizes.pop(place)


def question(vocabulary, tokens, leaves=8, seed=0):
    """A credited tree of a short prompt and turns with so many tokens in all."""
    random = np.random.default_rng(seed)

    def node(parent, kind, length):
        drawn = random.integers(0, vocabulary, length).astype(np.int32)
        known = np.zeros(length if kind == TURN else 0, np.float32)
        return Node(parent, kind, "", "", drawn, known, known)

    nodes = [node(-1, PROMPT, 16), *(node(0, TURN, tokens // leaves) for _ in range(leaves))]
    tree = Tree(Question("q", "kind", "text", ("1",)), nodes, list(range(1, leaves + 1)))
    return credited(tree)


def of_an_update(config, precision, vocabulary, monkeypatch):
    """What an update of a model adds at most: as counted, and as its tensors say."""
    monkeypatch.setattr(passes, "lanes", lambda device, pieces: 1)
    tokens, small = 512, {"reinforce__update__micro_batch_tokens": 528}
    recipe = edited(TINY, **small, reinforce__update__mini_batches=1, machine__precision=precision)
    settings = recipe.reinforce.update
    learning = resident.Learner(Path("policy"), model_of(config), None)
    checkpoint.prepare_optimizer(learning, settings)
    loss = assemble(ROWS["grpo"], tokens).loss

    def update(trees):
        learner.optimize(learning, trees, loss, settings, 1.0, recipe.machine, 0)

    update([question(vocabulary, 16)])  # the moments are there from now on
    learning.optimizer.zero_grad(set_to_none=True)
    # micro-batches that meet the gradients of others
    trees = [question(vocabulary, tokens, seed=seed) for seed in range(2)]
    with Live() as live:
        update(trees)
    found = memory(recipe, shape=shape_of(config))
    return found.stays["gradients"] + sum(found.update.values()), live.peak


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "vocabulary", "at_once"),
    [("qwen2", 250, 2**24), ("llama", 2_500, 2**19), ("qwen3", 2_000, 2**24)],
    ids=["layers count most", "logits in parts", "logits count most"],
)
def test_peak_of_a_real_update_is_the_sum_of_parts(
    kind, vocabulary, at_once, precision, monkeypatch
):
    monkeypatch.setattr(passes, "LOGITS_AT_ONCE", {"cpu": at_once})
    wide = {**SMALL, "vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 352}
    config = AutoConfig.for_model(kind, **wide, **KINDS[kind], tie_word_embeddings=False)
    counted, peak = of_an_update(config, precision, vocabulary, monkeypatch)
    assert counted == pytest.approx(peak, rel=0.15)


# A small model of each kind of layer. Attention on a CPU holds keys once for each context, and of
# latent attention all scores, which no kernel of a GPU does: so the sum may be too small here.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
        **{"n_groups": 1, "chunk_size": 16},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
        **{"mamba_n_groups": 1, "mamba_chunk_size": 16},
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"num_local_experts": 4, "block_size": 16},
    },
    "qwen3_moe": {"num_experts": 8, **EXPERTS},
    "gpt_oss": {
        "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
        **EXPERTS,
    },
    "deepseek_v3": {
        **{"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4},
        **EXPERTS,
    },
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **{"global_head_dim": 32, "sliding_window": 32, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SMALL["vocab_size"]},
    },
}


def family(kind, **changes):
    values = {**SMALL, "head_dim": 16, "tie_word_embeddings": False, **FAMILIES[kind], **changes}
    if kind == "nemotron_h":
        del values["num_hidden_layers"]  # which its list says
    return AutoConfig.for_model(kind, **values)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(kind, "float32") for kind in FAMILIES] + [("qwen3_5_text", "bfloat16")],
)
def test_peak_of_an_update_of_each_family(kind, precision, monkeypatch):
    counted, peak = of_an_update(family(kind), precision, SMALL["vocab_size"], monkeypatch)
    assert 0.8 * peak < counted < 1.1 * peak


def test_recurrent_layers_keep_a_state_in_place_of_keys_and_values():
    config = family("qwen3_5_text")
    cache = DynamicCache(config=config)
    model = model_of(config)
    with torch.no_grad():
        model(torch.arange(11)[None], past_key_values=cache, use_cache=True)
    first, _, last = cache.layers
    shape = shape_of(config)
    assert gpu_memory.keys_values(within(TINY, 11), shape) == size_of((last.keys, last.values))
    state = size_of(each for each in tree_leaves(vars(first)) if isinstance(each, torch.Tensor))
    assert gpu_memory.states(shape) == 2 * state
    few, many = (gpu_memory.sampling_load(within(TINY, n), shape, CARDS["80"]) for n in (11, 22))
    assert (many.keys_values, many.states) == (2 * few.keys_values, few.states)


def test_vllm_keeps_latents_and_windows():
    here, vllm = within(TINY, 100), within(edited(TINY, engine__kind="vllm"), 100)
    latent = shape_of(family("deepseek_v3"))
    assert gpu_memory.keys_values(vllm, latent) == 4 * 3 * 100 * (16 + 8)
    windows = shape_of(family("gemma3_text"))
    each = 4 * 2 * 2 * 16  # bytes of a token's keys and values in a layer
    assert gpu_memory.keys_values(here, windows) == 3 * 100 * each
    assert gpu_memory.keys_values(vllm, windows) == (100 + 2 * 32) * each


def test_only_experts_in_use_count_as_operations():
    shape = shape_of(family("qwen3_moe"))
    expert = 3 * 64 * 48
    assert shape.linear - gpu_seconds.active(TINY, shape) == 3 * (8 - 2) * expert
    assert memory(shape=shape).stays["master weights"] == FULL * shape.weights


def test_rows_learn_every_path_whole():
    config = AutoConfig.for_model("bloom", vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    rows, trees = shape_of(config), shape_of(config_of())
    tokens = gpu_seconds.tokens_of(TINY, ROWS["arpo"])
    assert gpu_seconds.learned_tokens(TINY, ROWS["arpo"], trees) == tokens.expected
    assert gpu_seconds.learned_tokens(TINY, ROWS["arpo"], rows) == tokens.paths
    scores = [gpu_memory.activations(rows, 1024, "float32", False, n) for n in (256, 1024)]
    assert scores[1] > 1.5 * scores[0], "its attention keeps all scores"


@pytest.mark.parametrize(
    ("config", "modules"),
    [(config_of("qwen3"), ("q_proj", "up_proj")), (family("lfm2"), ("q_proj",))],
    ids=["in every layer", "from the second layer on"],
)
def test_adapters_hold_what_real_ones_hold(config, modules):
    lora = reinforce.Lora(rank=8, alpha=16, modules=modules)
    model = model_of(config)
    adapter.attach(model, lora, Artifact("base", "0" * 64), 0)
    counted = gpu_memory.activations(shape_of(config, lora), TOKENS, "float32", recompute=False)
    assert counted == pytest.approx(activations_of(model, False), rel=0.15)


# What updates reached: weights in 1e9, tokens of a context, percent of the card's bf16 rate in its
# data sheet (docs/gpu.md has the sources).
REACHED = [
    (0.6, 16384, 11.1),
    (0.6, 65536, 26.8),
    (4, 16384, 21.7),
    (4, 65536, 37.4),
    (4, 16384, 14.7),
    (4, 65536, 36.1),
    (1.7, 1600, 9.0),
    (8, 8192, 36.0),
    (0.49, 1560, 16.5),
    (0.49, 5130, 20.5),
]


def test_share_of_a_card_is_a_fit_to_what_was_reached():
    points = np.array(REACHED)
    terms = np.stack([np.ones(10), np.log(points[:, 0]), np.log(points[:, 1] / 16384)], 1)
    (share, *powers), *_ = np.linalg.lstsq(terms, np.log(points[:, 2] / 100))
    assert math.exp(share) == pytest.approx(gpu_cards.PEAK_SHARE, abs=0.001)
    assert powers == pytest.approx([gpu_cards.BY_WEIGHTS, gpu_cards.BY_CONTEXT], abs=0.001)
    for weights, context, percent in REACHED:
        assert 0.6 < 100 * gpu_cards.peak_share(weights * 1e9, context) / percent < 1.75
    assert gpu_cards.peak_share(1e12, 2**20) == gpu_cards.MOST_SHARE


# ---------------------------------------------------------------- memory, by what a recipe asks

SHAPE = shape_of(config_of(tie_word_embeddings=False))


def memory(recipe=TINY, row="arpo", shape=SHAPE, card=CARDS["80"]):
    return gpu_memory.memory(recipe, ROWS[row], shape, card)


def test_reference_and_critic_are_counted_by_the_row():
    assert {"reference", "critic"}.isdisjoint(memory(row="grpo").stays)
    stays = memory(row="ppo").stays
    assert stays["reference"] == FULL * SHAPE.weights
    assert stays["critic"] == 4 * FULL * SHAPE.backbone < 4 * FULL * SHAPE.weights


def test_a_teacher_is_counted_by_its_own_size(tmp_path):
    """Of a run, whose files are not here yet, by the policy's."""
    assert "teacher" not in memory(row="grpo").stays
    of_run = RunTeacher(kind="run", recipe="tiny", commit="a" * 40, digest="b" * 32 + ".dir")
    shape = model_shape.with_teacher(SHAPE, TINY.model_copy(update={"teacher": of_run}))
    assert memory(row="distil", shape=shape).stays["teacher"] == FULL * SHAPE.weights
    larger = config_of()
    larger.vocab_size *= 2
    larger.save_pretrained(tmp_path)
    teacher = PretrainedTeacher(kind="pretrained", name=str(tmp_path), revision=None)
    shape = model_shape.with_teacher(SHAPE, TINY.model_copy(update={"teacher": teacher}))
    stays = memory(row="distil", shape=shape).stays
    assert stays["teacher"] == FULL * shape_of(larger).weights != FULL * SHAPE.weights


def test_base_of_an_adapter_is_the_reference():
    shape = shape_of(config_of(), reinforce.Lora(rank=4, alpha=8, modules=("o_proj",)))
    row = ROWS["ppo"]
    assert not row.kl.refresh and "reference" not in memory(row="ppo", shape=shape).stays
    refreshed = row.model_copy(update={"kl": row.kl.model_copy(update={"refresh": 2})})
    stays = gpu_memory.memory(TINY, refreshed, shape, CARDS["80"]).stays
    assert stays["reference"] == FULL * shape.weights


def test_with_adapters_only_they_have_gradients_and_moments():
    shape = shape_of(config_of(), reinforce.Lora(rank=4, alpha=8, modules=("o_proj",)))
    stays = memory(shape=shape).stays
    assert stays["master weights"] == FULL * shape.weights
    assert stays["gradients"] == stays["adapters"] == FULL * shape.adapters
    assert stays["Adam's moments"] == 2 * FULL * shape.adapters


def test_phases_take_turns_unless_sampling_runs_ahead():
    apart, together = memory(), memory(edited(TINY, reinforce__ahead=1))
    assert apart.peak == max(apart.phases().values())
    base, update = sum(together.stays.values()), sum(together.update.values())
    assert together.peak == base + update + sum(together.sampling.values())
    assert together.sampling["weights that sample"] == FULL * SHAPE.weights
    assert together.stays["reference"] == FULL * SHAPE.weights, "of the policy that sampled"


def test_a_reward_model_learns_whole_in_phases_of_its_own():
    lora = reinforce.Lora(rank=4, alpha=8, modules=("o_proj",))
    shape = shape_of(config_of(), lora)
    frozen = edited(LEARNED, reward_model__again=None)
    plain = memory(frozen, "grpo", shape)
    assert plain.stays["reward model"] == FULL * shape.backbone
    assert list(plain.phases()) == ["update", "sampling", "first reward model"]
    first = plain.first_model
    assert first["reward model"] == FULL * shape.backbone, "with adapters, too"
    assert first["reward model's gradients and moments"] == 3 * FULL * shape.backbone
    assert first["policy that sampled"] == FULL * shape.weights
    again = memory(LEARNED, "grpo", shape)
    assert "reward model" in again.phases()
    ahead = memory(edited(LEARNED, reinforce__ahead=1), "grpo", shape)
    extra = sum(ahead.reward_model.values()) - sum(again.reward_model.values())
    assert extra == FULL * shape.backbone, "one scores while the other learns"
    both = [sum(parts.values()) for parts in (ahead.stays, ahead.reward_model, ahead.sampling)]
    assert ahead.phases()["reward model and sampling"] == sum(both)


@pytest.mark.parametrize("again", [True, False])
def test_smaller_micro_batches_of_the_reward_model_are_the_remedy(again):
    chosen = edited(LEARNED, reward_model__micro_batch_tokens=2**16)
    chosen = chosen if again else edited(chosen, reward_model__again=None)
    config = config_of()
    peak = memory(chosen, "grpo", shape_of(config)).peak
    card = of_gib(0.75 * peak / GIB)
    found = remedies.remedy(chosen, ROWS["grpo"], config, card)
    assert [change.key for change in found.changes] == ["reward_model.micro_batch_tokens"]
    assert found.peak < card.usable < peak


def test_vllm_takes_its_share_of_the_card():
    settings = {"machine__device": "cuda", "engine__kind": "vllm", "engine__memory": 0.25}
    here = edited(TINY, **settings)
    assert memory(here, card=of_gib(40)).sampling == {"vLLM's share": 10 * GIB}
    away = edited(TINY, **settings, engine__servers=("http://gpu:8000",))
    assert memory(away).sampling == {}
    of_cpu = edited(TINY, engine__kind="vllm", engine__memory=2.0)
    assert sum(memory(of_cpu).sampling.values()) == 2 * GIB + FULL * SHAPE.weights


def test_share_must_hold_weights_and_one_path():
    settings = {"machine__device": "cuda", "engine__kind": "vllm"}
    shape = shape_of(model_shape.config_of(TINY))
    least = gpu_memory.least_share(edited(TINY, **settings), shape) / (10 * GIB)
    for share, enough in ((least * 1.01, True), (least * 0.99, False)):
        chosen = edited(TINY, **settings, engine__memory=share)
        assert gpu_memory.fits(chosen, ROWS["arpo"], shape, of_gib(10)) == enough


def test_path_longer_than_a_micro_batch_is_alone():
    assert gpu_memory.slots(TINY) == 8192
    assert gpu_memory.slots(edited(TINY, reinforce__update__micro_batch_tokens=100)) == 256


def test_logits_never_exceed_those_at_once():
    tokens = gpu_memory.slots(LARGE)
    shape = shape_of(model_shape.config_of(LARGE))
    assert tokens * shape.vocabulary > 2**28
    assert memory(LARGE, shape=shape).update["logits"] == 2**28 * (FULL + HALF)


# ---------------------------------------------------------------- tokens and seconds


def test_tokens_are_counted_by_questions_paths_and_prompts():
    tokens = gpu_seconds.tokens_of(
        TINY, ROWS["arpo"]
    )  # 32 questions, 8 paths of 112 + 144, 4 initial
    assert tokens.paths == 32 * 8 * 256
    assert tokens.most == 32 * (112 + 8 * 144)
    assert tokens.expected == 32 * (112 + 6 * 144)
    plain = gpu_seconds.tokens_of(TINY, ROWS["grpo"])
    assert plain.expected == plain.most == tokens.most


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({}, "grpo", 3),
        ({"reinforce__update__recompute": True}, "grpo", 4),
        ({"lora": {"rank": 4, "alpha": 8, "modules": ["q_proj"]}}, "grpo", 2),
        ({"reinforce__update__mini_batches": 2}, "grpo", 4),
        ({"reinforce__update__epochs": 2}, "grpo", 7),
        ({"reinforce__ahead": 1}, "grpo", 4),
        ({"reinforce__ahead": 3}, "grpo", 4),
        ({"reinforce__ahead": 3, "reinforce__turns_per_policy": 2}, "grpo", 6),
        ({"reinforce__ahead": 3, "reinforce__turns_per_policy": 2}, "rloo", 3 + 3 + 4),
        ({}, "rloo", 5),
        ({}, "ppo", 3 + 1 + 1 + 3),
    ],
)
def test_operations_of_an_update_in_forward_passes(changes, row, expected):
    assert gpu_seconds.forward_equivalents(edited(TINY, **changes), ROWS[row]) == expected


def test_operations_are_two_a_weight_plus_attention():
    shape = shape_of(model_shape.config_of(LARGE))
    share = gpu_cards.peak_share(shape.linear, LARGE.prepare.policy.context)
    rate = share * CARDS["141"].operations["bfloat16"]
    seconds = gpu_seconds.seconds_of(LARGE, ROWS["arpo"], shape, CARDS["141"])
    tokens = gpu_seconds.tokens_of(LARGE, ROWS["arpo"]).expected
    once = seconds.update * rate / gpu_seconds.forward_equivalents(LARGE, ROWS["arpo"])
    assert 1 < once / (2 * shape.linear * tokens) < 1.5


def test_faster_and_larger_cards_do_better():
    shape = shape_of(model_shape.config_of(LARGE))
    slow, fast, large = (
        gpu_seconds.seconds_of(LARGE, ROWS["arpo"], shape, card) for card in CARDS.values()
    )
    assert slow.update > 5 * fast.update == 5 * large.update
    assert slow.sampling > fast.sampling > large.sampling
    assert slow.abreast < fast.abreast < large.abreast <= LARGE.reinforce.rollout.rows


def test_decoding_step_has_a_least_time():
    seconds = gpu_seconds.seconds_of(
        TINY, ROWS["arpo"], shape_of(model_shape.config_of(TINY)), CARDS["141"]
    )
    assert seconds.sampling == pytest.approx(
        TINY.dialogue.response_tokens * gpu_seconds.STEP_SECONDS
    )


# ---------------------------------------------------------------- processes, servers, the network

# Of SHAPE: embedding and head 2 x 97 x 64; three layers of 46,336 and a norm of 64.
ROOT, LAYERS = 12_416, 139_072
FLEET = {"engine__kind": "vllm", "engine__servers": ("http://gpu:8000",)}


def test_processes_share_what_stays_and_gather_a_layer_at_a_time():
    assert (SHAPE.root, SHAPE.weights) == (ROOT, ROOT + LAYERS)
    four = memory(edited(TINY, machine__processes=4), row="ppo")
    one = memory(row="ppo")
    own = four.stays.pop("policy that samples")
    assert own == 4 * (ROOT + LAYERS)
    assert four.stays == {part: size / 4 for part, size in one.stays.items()}
    assert four.update["gathered weights"] == pytest.approx(4 * (ROOT + 2 * LAYERS / 3))
    assert four.update["whole gradients"] == pytest.approx(4 * (ROOT + LAYERS / 3))
    assert one.update.items() <= four.update.items()
    away = memory(edited(TINY, machine__processes=4, **FLEET), row="ppo")
    assert "policy that samples" not in away.stays


def test_processes_receive_weights_twice_and_gradients_once_a_micro_batch():
    """31,232 tokens in micro-batches of 8,192: one for each of four processes, two of two."""
    received = {
        count: gpu_seconds.communicated(edited(TINY, machine__processes=count), ROWS["arpo"], SHAPE)
        for count in (1, 2, 4)
    }
    whole = 4 * (2 * LAYERS + ROOT + LAYERS + ROOT)  # weights, and gradients of all weights
    assert received == {1: 0, 2: 2 * whole / 2, 4: whole * 3 / 4}
    assert received[4] == 1_326_144
    looked = edited(TINY, machine__processes=4, reinforce__update__mini_batches=2)
    more = gpu_seconds.communicated(looked, ROWS["arpo"], SHAPE) - received[4]
    assert more == 3 * (ROOT + LAYERS), "the pass for the old log-probabilities"


def test_seconds_of_processes_and_servers():
    chosen, card = edited(TINY, machine__processes=4, **FLEET), CARDS["80"]
    one = gpu_seconds.seconds_of(TINY, ROWS["arpo"], SHAPE, card)
    four = gpu_seconds.seconds_of(chosen, ROWS["arpo"], SHAPE, card, network=1e6)
    assert four.update == one.update / 4
    assert four.communication == pytest.approx(1.326144)
    assert four.loading == pytest.approx(4 * (ROOT + LAYERS) / 1e6)
    assert (one.communication, one.loading) == (0, 0)


def test_model_too_large_for_a_card_is_dealt_to_processes():
    recipe, row = settings_of("qwen3-14b"), ROWS["arpo"]
    found = remedies.remedy(recipe, row, model_shape.config_of(recipe), CARDS["80"])
    keys = [change.key for change in found.changes]
    assert keys[:2] == ["machine.processes", "engine.servers"]
    changed = with_changes(recipe, found.changes)
    shape = shape_of(model_shape.config_of(recipe))
    assert gpu_memory.fits(changed, row, shape, CARDS["80"])
    fewer = changed.machine.model_copy(update={"processes": changed.machine.processes // 2})
    less = changed.model_copy(update={"machine": fewer})
    assert not gpu_memory.fits(less, row, shape, CARDS["80"])


# ---------------------------------------------------------------- what to change


def with_changes(recipe, changes):
    """The recipe as somebody has it who writes these values into its file."""
    values = {change.key.replace(".", "__"): yaml.safe_load(change.value) for change in changes}
    return edited(recipe, **values)


SAMPLED_HERE = edited(LARGE, engine__kind="transformers", machine__precision="float32")
WANTING = {
    "share": edited(LARGE, engine__memory=0.9),
    "recompute": edited(LARGE, reinforce__update__recompute=False),
    "rows": SAMPLED_HERE,
}


@pytest.mark.parametrize("gib", [24, 40, 141, 400])
@pytest.mark.parametrize("name", WANTING)
def test_advice_makes_the_recipe_fit_and_is_minimal(name, gib):
    recipe, card, row = WANTING[name], of_gib(gib), ROWS["arpo"]
    config = model_shape.config_of(recipe)

    def fits(changes):
        changed = with_changes(recipe, changes)
        return gpu_memory.fits(changed, row, shape_of(config, changed.lora), card)

    if fits([]):
        return
    found = remedies.remedy(recipe, row, config, card)
    if found is None:
        assert gib <= 24
        return
    assert fits(found.changes)
    assert found.peak <= card.usable
    for left_out in range(len(found.changes)):
        assert not fits([c for i, c in enumerate(found.changes) if i != left_out])


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("share", 85, "engine.memory"),
        ("recompute", 100, "reinforce.update.recompute"),
        ("rows", 150, "reinforce.rollout.rows"),
    ],
)
def test_one_key_is_advised_where_it_suffices(name, gib, key):
    recipe = WANTING[name]
    found = remedies.remedy(recipe, ROWS["arpo"], model_shape.config_of(recipe), of_gib(gib))
    assert [change.key for change in found.changes] == [key]


def test_share_and_rows_are_lowered_as_little_as_needed():
    recipe, card = WANTING["share"], of_gib(85)
    config = model_shape.config_of(recipe)
    (change,) = remedies.remedy(recipe, ROWS["arpo"], config, card).changes
    more = edited(recipe, engine__memory=float(change.value) + 0.05)
    assert not gpu_memory.fits(more, ROWS["arpo"], shape_of(config), card)
    recipe, card = WANTING["rows"], of_gib(150)
    (change,) = remedies.remedy(recipe, ROWS["arpo"], model_shape.config_of(recipe), card).changes
    more = edited(recipe, reinforce__rollout__rows=int(change.value) + 16)
    assert not gpu_memory.fits(more, ROWS["arpo"], shape_of(config), card)


def test_adapters_make_a_large_model_fit():
    recipe = settings_of("qwen2.5-7b")
    config = model_shape.config_of(recipe)
    found = remedies.remedy(recipe, ROWS["arpo"], config, CARDS["80"])
    (change,) = found.changes
    assert (change.key, change.short) == ("lora", "lora")
    assert with_changes(recipe, found.changes).lora == remedies.LORA


def test_nothing_is_advised_where_nothing_helps():
    recipe = settings_of("qwen3-14b")
    assert remedies.remedy(recipe, ROWS["arpo"], model_shape.config_of(recipe), CARDS["24"]) is None


def test_cards_are_in_the_order_of_their_memory():
    sizes = [card.memory for card in CARDS.values()]
    assert sizes == sorted(sizes)
    for name, card in CARDS.items():
        assert math.isclose(card.memory / 1e9, int(name), rel_tol=0.1)
