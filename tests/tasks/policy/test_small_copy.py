"""Small copies have every kind of layer of a policy, and little else."""

import pytest
import torch

from tasks.policy import layer_kinds, small_copy
from tasks.policy.lean_transformers import transformers

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
CONTEXT = 100_000  # longer than all windows
KINDS = {  # of the copy's layers
    "llama": None,
    "gpt2": None,  # other names for everything
    "qwen3_moe": None,  # experts
    "deepseek_v3": None,  # latents, and layers without experts
    "gpt_neo": None,  # kinds of layers by a pattern
    "gemma3_text": {"sliding_attention", "full_attention"},
    "gemma4_text": {"sliding_attention", "full_attention"},  # layers with their own settings
    "llama4_text": {"chunked_attention", "full_attention"},
    "mistral": None,
    "phi3": None,
    "qwen3_next": {"linear_attention", "full_attention"},
    "lfm2": None,  # short convolutions
    "mamba2": {"linear_attention"},
    "jamba": {"linear_attention", "full_attention"},
    "recurrent_gemma": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_small_and_their_tokens_matter(kind):
    config = CONFIGS[kind]()
    model = small_copy.small_copy(config, CONTEXT)
    text = model.config.get_text_config(decoder=True)
    assert model.num_parameters() < 1_000_000
    assert not model.training and model.dtype == torch.float32
    if expected := KINDS[kind]:
        assert set(text.layer_types) == expected
    layers = next(getattr(text, key) for key in layer_kinds.COUNTS if hasattr(text, key))
    assert 2 <= layers <= small_copy.MOST_LAYERS
    for name in small_copy.WINDOWS:
        assert (getattr(text, name, None) or 0) <= small_copy.WINDOW
    tokens = torch.randint(3, 96, (1, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        tokens[0, 60] += 1  # within any window
        changed = model(input_ids=tokens, use_cache=False).logits[0]
    assert float(logits.std(-1).mean()) > 1
    assert torch.equal(logits[:60], changed[:60])
    assert float((logits - changed)[61:65].abs().max()) > 0.01
    torch.testing.assert_close(
        small_copy.small_copy(config, CONTEXT).get_output_embeddings().weight,
        model.get_output_embeddings().weight,
    )


def test_windows_and_original_contexts_that_no_context_exceeds_stay():
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = CONFIGS["mistral"](
        sliding_window=4096,
        rope_parameters={**scaled, "original_max_position_embeddings": 2048},
    )
    for context, window, original in ((4097, 16, 32), (4096, 4096, 32), (2048, 4096, 2048)):
        copy = small_copy.small_copy(config, context).config
        assert copy.sliding_window == window
        assert copy.rope_parameters["original_max_position_embeddings"] == original
        assert copy.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize("part", [1.0, 0.75, 0.5])
def test_scaled_positions_of_a_part_of_a_head_are_copied(part):
    """Phi-4-mini as it is published: three quarters of a head are rotated, each pair by its own."""
    factors = [1.0 + pair for pair in range(int(128 * part) // 2)]
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING["phi3"](
        partial_rotary_factor=part,
        num_attention_heads=24,
        original_max_position_embeddings=4096,
        max_position_embeddings=131072,
        rope_scaling={"type": "longrope", "short_factor": factors, "long_factor": factors},
        pad_token_id=0,
    )
    copy = small_copy.small_copy(config, CONTEXT).config
    assert copy.hidden_size == small_copy.HIDDEN
    assert len(copy.rope_parameters["long_factor"]) == int(small_copy.HEAD * part) // 2


def test_each_mixture_of_kinds_is_there_once():
    config = CONFIGS["cohere2_moe"](
        num_hidden_layers=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
        * 2,
        mlp_layer_types=["dense"] * 2 + ["sparse"] * 6,
    )
    copy = small_copy.small_copy(config, CONTEXT).config
    pairs = list(zip(copy.layer_types, copy.mlp_layer_types, strict=True))
    assert pairs == [
        ("sliding_attention", "dense"),
        ("full_attention", "sparse"),
        ("sliding_attention", "sparse"),
    ]


def test_sizes_whose_cut_is_invalid_stay():
    """Groups of keys are cut together, or not at all."""

    class Odd(transformers.Qwen2Config):
        model_type = "odd"

        def __init__(self, **values):
            super().__init__(**values)
            if self.vocab_size != 200:
                raise ValueError("the vocabulary is 200")

    small = next(small_copy.small_configs(Odd(vocab_size=200, hidden_size=512), CONTEXT))
    assert (small.vocab_size, small.hidden_size) == (200, small_copy.HIDDEN)


def test_without_any_copy_the_reason_is_said():
    config = CONFIGS["llama"](vocab_size=128, hidden_size=48, num_attention_heads=4)
    config.hidden_act = "an activation that there is not"
    with pytest.raises(ValueError, match="an activation that there is not"):
        small_copy.small_copy(config, CONTEXT)
