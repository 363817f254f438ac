"""Small tokenizers with the control tokens and the chat template of published families.

Each is a byte-level BPE with a few hundred merges, so that text merges across the edges of
messages. No template was downloaded: each is written from the documented format, and names what it
follows; the revisions are not known. A renderer of the library needs no template: ``for_renderer``
makes a tokenizer with the control tokens that it asks for.
"""

import re
from datetime import date
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tasks.dialects.family import QuotingTokenizer, config

TEMPLATES = Path(__file__).parent / "templates"
TEXTS = [
    "system\nYou may call one or more functions.\n\nuser\nassistant\n\n# Tools\n\n",
    '{"type": "function", "function": {"name": "python", "description": "Run code."}}\n\n',
    '{"name": "search", "arguments": {"query": "a\\nb"}}\n</result>\n\n"properties": "string"',
    "The answer is \\boxed{7}.\n\nfor i in range(10):\n    print(i)\n",
]
# Where all of these families split text, before they merge bytes.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Control tokens, in the order of the published vocabularies; True for special ones.
QWEN = {
    **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"), True),
    **dict.fromkeys(("<tool_call>", "</tool_call>", "<|fim_prefix|>"), False),
}
QWEN3 = QWEN | dict.fromkeys(("<tool_response>", "</tool_response>", "<think>", "</think>"), False)
LLAMA = dict.fromkeys(
    (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|finetune_right_pad_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    True,
)
GLM = {
    **dict.fromkeys(("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>"), True),
    **dict.fromkeys(("<|assistant|>", "<|observation|>", "/nothink"), True),
    **dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>"), False),
    **dict.fromkeys(("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), False),
    **dict.fromkeys(("<tool_response>", "</tool_response>"), False),
}
HARMONY = dict.fromkeys(
    (
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ),
    True,
)
FAMILIES = {  # name: template, control tokens, end token
    "qwen3": ("qwen3", QWEN3, "<|im_end|>"),
    "llama-3": ("llama-3", LLAMA, "<|eot_id|>"),
    "glm-4.5": ("glm-4.5", GLM, "<|endoftext|>"),
    "qwen2.5": ("qwen2.5", QWEN, "<|im_end|>"),  # the library has no renderer: default
}


def tokenizer(family: str) -> Any:
    """Return the tokenizer of a family."""
    template, control, end = FAMILIES[family]
    plain = Tokenizer(BPE())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    plain.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator(TEXTS * 3, trainer)
    tokens = [AddedToken(text, special=special) for text, special in control.items()]
    plain.add_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=end,
        pad_token="<|endoftext|>" if "<|endoftext|>" in control else end,
        bos_token="<|begin_of_text|>" if "<|begin_of_text|>" in control else None,
        chat_template=(TEMPLATES / f"{template}.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )


class Learning(QuotingTokenizer):
    """A tokenizer that adds each control token when a renderer first asks for its id."""

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        self._add([tokens] if isinstance(tokens, str) else tokens)
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text: str, *rest: Any, **options: Any) -> list[int]:
        if re.fullmatch(r"<[^<>\s]+>|｜\w+｜", text):
            self._add([text])
        return super().encode(text)

    def _add(self, tokens: list[str]) -> None:
        known = self.tokenizer.get_vocab()
        text = re.compile("think|tool|arg")  # of these families, such marks are no special tokens
        self.tokenizer.add_tokens(
            [AddedToken(t, special=not text.search(t)) for t in tokens if t not in known]
        )


def for_renderer(name: str) -> Any:
    """Return a tokenizer for a renderer of the library; of its own family, where there is one."""
    if name in FAMILIES:
        return tokenizer(name)
    from renderers import create_renderer

    made = tokenizer("qwen2.5")
    renderer = create_renderer(Learning(made, date(2026, 1, 1)), config(name, {}))
    made.eos_token = made.convert_ids_to_tokens(renderer.get_stop_token_ids()[0])
    return made
