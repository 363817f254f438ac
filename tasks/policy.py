"""Where a policy comes from: built small from the recipe, a hub name, or a folder."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from params.schema import Machine, PretrainedPolicy, TinyPolicy
from tasks import adapter

PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of passes

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
TAGS = tuple(
    f"<{slash}{tag}>"
    for tag in ("think", "python", "search", "result", "answer")
    for slash in ("", "/")
)
# Standard deviation of the random weights. A narrow policy learns to copy numbers several times
# sooner than with the 0.02 that suits wide ones.
INITIAL_SPREAD = 0.06
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


def build_tokenizer(texts: Iterable[str], settings: TinyPolicy) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``texts``: any text can be written.

    Digits are one token each, so numbers can be copied; so are the tags, which are ordinary tokens
    (``decode`` keeps them). Raises ValueError for a vocabulary without room for these.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(TAGS) + len((END, USER, ASSISTANT))
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
        vocab_size=settings.vocabulary - len(TAGS),
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TAGS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
    )


def build_policy(settings: TinyPolicy, tokenizer: Any, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2-architecture policy with random weights drawn from ``seed``."""
    config = tiny_config(settings, len(tokenizer), tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def tiny_config(settings: TinyPolicy, vocabulary: int, end: int | None = None) -> Qwen2Config:
    """The shape of a policy with so many tokens, of which ``end`` ends a turn."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        initializer_range=INITIAL_SPREAD,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a policy folder, exactly as it was saved.

    AutoTokenizer would take the architecture's usual class, which splits text in its own way.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder)


def fetch_policy(settings: PretrainedPolicy) -> tuple[Any, Any]:
    """Model and tokenizer of a hub name at its pinned revision, or of a local folder."""
    tokenizer = AutoTokenizer.from_pretrained(settings.name, revision=settings.revision)
    model = AutoModelForCausalLM.from_pretrained(settings.name, revision=settings.revision)
    return model, tokenizer


# Of glibc's mallopt(3): what is kept at the top, taken beyond a need, mapped on its own. Bytes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_MEMORY = {M_TRIM_THRESHOLD: 2**30, M_TOP_PAD: 2**26, M_MMAP_THRESHOLD: 2**25}


def use_machine(machine: Machine) -> None:
    """Set threads, and choose deterministic kernels, so that equal runs give equal weights.

    Keeps transformers quiet: a run shows its own progress.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(machine.threads)
    torch.use_deterministic_algorithms(True, warn_only=machine.device != "cpu")
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 12 %
    _keep_memory()


def _keep_memory() -> None:
    """Tell the C library to keep freed memory for the next tensor of its size.

    To hand it back and take it anew costs a tenth of an update of a small policy. Settings of the
    user's own (MALLOC_...) win; a library without ``mallopt`` is left as it is.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not own:
        for option, size in KEPT_MEMORY.items():
            mallopt(option, size)


def passes(machine: Machine) -> torch.autocast:
    """In this block a model with float32 weights computes its passes in the recipe's precision.

    Matrix products and attention are in bf16 then; sums, norms and the weights' gradients are not
    (mixed precision, arXiv 1710.03740, sections 3.1 and 3.3). It is a mode of the thread: each lane
    enters it. Weights are cast anew at each use, since the cache of cast ones belongs to all
    threads, outlives a pass without gradients, and would add gradients up in bf16.
    """
    kind = PRECISION[machine.precision]
    low = kind is not torch.float32
    return torch.autocast(machine.device, kind if low else None, enabled=low, cache_enabled=False)


def load_policy(folder: str | Path, machine: Machine, revision: str | None = None) -> Any:
    """A causal language model from a folder or a hub name, on the recipe's device, in float32.

    The folder of an adapter gives its base with the adapter, which alone can learn. Raises OSError
    (from transformers) where nothing is found.
    """
    if base := adapter.base_of(Path(folder)):
        return adapter.load(_load(AutoModelForCausalLM, base, machine, None), Path(folder))
    return _load(AutoModelForCausalLM, folder, machine, revision)


def load_backbone(folder: Path, machine: Machine) -> Any:
    """The same without a head over the vocabulary."""
    return _load(AutoModel, folder, machine, None)


def _load(kind: Any, folder: str | Path, machine: Machine, revision: str | None) -> Any:
    model = kind.from_pretrained(
        folder, revision=revision, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(torch.device(machine.device))
