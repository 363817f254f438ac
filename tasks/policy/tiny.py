"""Build a small Qwen2-architecture policy with random weights and a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from params.schema.prepare import TinyPolicy
from tasks.policy.lean_transformers import transformers
from tasks.trees.dialogue import TAGS

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"  # control tokens
# Standard deviation of the random weights. With it and a rotary base of 100, a narrow policy of up
# to 256 tokens of context learns to copy numbers several times faster than with the usual 0.02 and
# 10,000, and on every seed that was tried (docs/results.md). Names of one token, in contexts of 300
# to 800 tokens, are copied better with a base of 10,000; codes of digits are not
# (docs/worlds.md#household).
INITIAL_SPREAD = 0.08
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    + ASSISTANT
    + "{{ message['content'] }}"
    + END
    + "{% else %}"
    + USER
    + "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer(
    texts: Iterable[str], settings: TinyPolicy, tags: Sequence[str] = TAGS
) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on ``texts``; it can encode any text.

    Each digit is one token, so that numbers can be copied. Each of ``tags``, which the dialect
    names, is one ordinary token, so ``decode`` keeps it. Raises ValueError for a vocabulary that is
    too small for these.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(tags) + len((END, USER, ASSISTANT))
    if settings.vocabulary < least:
        raise ValueError(
            f"prepare.policy.vocabulary {settings.vocabulary} is too small: bytes, tags and "
            f"control tokens alone are {least}; raise it"
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=settings.vocabulary - len(tags),
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(tags))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
    )


def build_policy(settings: TinyPolicy, tokenizer: Any, seed: int) -> transformers.Qwen2ForCausalLM:
    """Build a Qwen2-architecture policy with random weights drawn from ``seed``."""
    config = tiny_config(settings, len(tokenizer), tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen2ForCausalLM(config)


def tiny_config(
    settings: TinyPolicy, vocabulary: int, end: int | None = None
) -> transformers.Qwen2Config:
    """Return the configuration for ``vocabulary`` tokens, of which ``end`` ends a turn."""
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        initializer_range=INITIAL_SPREAD,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rotary_base},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )
