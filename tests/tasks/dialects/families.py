"""Small tokenizers with the control tokens and the chat template of published families.

Each is a byte-level BPE with a few hundred merges, so that text merges across the edges of
messages. The templates of this folder are written from the documented format, and name what they
follow; the revisions are not known. Those of ``PUBLISHED`` are the models' own, which TRL brings. A
renderer of the library needs no template: ``for_renderer`` makes a tokenizer with the control
tokens that it asks for.
"""

import base64
import json
import re
import sys
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tasks.dialects.family import QuotingTokenizer, config

TEMPLATES = Path(__file__).parent / "templates"
REAL = Path(sys.prefix) / "tokenizers"  # of published models, which make test-data fetches
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
QWEN35 = QWEN3 | dict.fromkeys(("<|vision_end|>", "<|image_pad|>", "<|video_pad|>"), True)
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
SMOLLM2 = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True)
GEMMA4 = dict.fromkeys(
    (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"),
        *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
        *("<tool_response|>", '<|"|>', "<|image>", "<image|>", "<|image|>"),
        *("<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
    ),
    True,
)
GRANITE = dict.fromkeys(("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), True)
DEEPSEEK = {
    **dict.fromkeys(("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), True),
    **dict.fromkeys(("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), False),
    **{
        f"<｜tool▁{part}｜>": False
        for part in (
            *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
            *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
        )
    },
}
GEMMA = dict.fromkeys(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), True)
FAMILIES = {  # name: template, control tokens, end token
    "qwen3": ("qwen3", QWEN3, "<|im_end|>"),
    "llama-3": ("llama-3", LLAMA, "<|eot_id|>"),
    "glm-4.5": ("glm-4.5", GLM, "<|endoftext|>"),
    "qwen2.5": ("qwen2.5", QWEN, "<|im_end|>"),  # the library has no renderer: default
}
SHAPES = {  # templates of other shapes
    "qwq": ("qwq", QWEN3, "<|im_end|>"),
    "smollm3": ("smollm3", QWEN3, "<|im_end|>"),
    "granite": ("granite", GRANITE, "<|end_of_text|>"),
    "smollm2": ("smollm2", SMOLLM2, "<|im_end|>"),  # contents alone, and no token of a call
    "no-generation-prompt": ("no-generation-prompt", QWEN, "<|im_end|>"),
}


@dataclass(frozen=True)
class Published:
    """A chat template that TRL has as a model brings it, and the tokens of that model."""

    file: str
    control: dict[str, bool]
    end: str
    begin: str | None = None


PUBLISHED = {
    "smolvlm": Published(
        "smolvlm", {"<end_of_utterance>": True, "<image>": True}, "<end_of_utterance>"
    ),
    "gemma": Published("gemma", GEMMA, "<end_of_turn>", "<bos>"),
    "gemma-3": Published("gemma3", GEMMA, "<end_of_turn>", "<bos>"),
    "gemma-4": Published("gemma4_v5", GEMMA4, "<turn|>", "<bos>"),
    "llama-3.2": Published("llama3_2", LLAMA, "<|eot_id|>", "<|begin_of_text|>"),
    "r1-distill": Published(
        "deepseek_r1_distill", DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
    ),
    "qwen3-published": Published("qwen3", QWEN3, "<|im_end|>"),
    "qwen3.5": Published("qwen3_5_think", QWEN35, "<|im_end|>"),
    "gpt-oss": Published("gptoss", HARMONY, "<|return|>", "<|startoftext|>"),
}


def tokenizer(family: str) -> Any:
    """Return the tokenizer of a family."""
    if family in PUBLISHED:
        known = PUBLISHED[family]
        text = (trl_templates() / f"{known.file}.jinja").read_text()
        return small_tokenizer(text, known.control, known.end, known.begin)
    template, control, end = (FAMILIES | SHAPES)[family]
    begin = "<|begin_of_text|>" if "<|begin_of_text|>" in control else None
    return small_tokenizer((TEMPLATES / f"{template}.jinja").read_text(), control, end, begin)


def trl_templates() -> Path:
    """Return the folder with the chat templates that TRL brings; TRL is not imported."""
    spec = find_spec("trl")
    assert spec and spec.origin
    return Path(spec.origin).parent / "chat_templates"


def real_tokenizer(name: str, template: str = "") -> Any:
    """Return a published model's own tokenizer; ``template``: one of ``PUBLISHED`` for it."""
    made = PreTrainedTokenizerFast.from_pretrained(REAL / name)
    if template:
        file = trl_templates() / f"{PUBLISHED[template].file}.jinja"
        made.chat_template = file.read_text()
    return made


def harmony_folder(folder: Path) -> Path:
    """Return a folder with the vocabulary that the library of gpt-oss reads, of its tokenizer.

    The library checks its digest.
    """
    vocabulary = json.loads((REAL / "gptoss/tokenizer.json").read_text())["model"]["vocab"]
    of_text = bytes_of_byte_level()
    lines = (
        base64.b64encode(bytes(of_text[sign] for sign in text)) + b" %d\n" % rank
        for rank, text in sorted((rank, text) for text, rank in vocabulary.items())
    )
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    return folder


def bytes_of_byte_level() -> dict[str, int]:
    """Return the byte that each sign of a byte-level vocabulary stands for (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def small_tokenizer(template: str, control: dict[str, bool], end: str, begin: str | None) -> Any:
    """Return a tokenizer of a few hundred merges with a chat template and control tokens."""
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
    plain.add_tokens([AddedToken(text, special=special) for text, special in control.items()])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=end,
        pad_token="<|endoftext|>" if "<|endoftext|>" in control else end,
        bos_token=begin,
        chat_template=template,
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
