"""The families of chat formats that the library ``renderers`` knows, and which one a policy has.

``auto`` takes the family whose own rendering has the text of the tokenizer's chat template: a
folder says little about the model that it holds, and a wrong family trains a policy in a format
that it has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from tasks.dialects.prompt_check import has_clock
from tasks.dialects.written_calls import TEXT_CALLS, TextCalls
from tasks.trees.clock import formatted, template_clock
from tasks.trees.markers import BREAK

AUTO = "auto"
DEFAULT = "default"  # renders each turn anew by the chat template
PARSER = "tool_parser"  # the option of renderer default that says how calls are read
HARMONY = "gpt-oss"  # its library fetches a vocabulary of its own when it is first used
HARMONY_TOKENS = {"<|channel|>", "<|message|>", "<|call|>", "<|return|>"}
# How the library writes a date in its settings; without one, a family may ask the machine.
DATES = {"conversation_start_date": "%Y-%m-%d", "date_string": "%d %b %Y"}
# What vLLM calls the parser of a family's tool calls, and that of its thoughts.
TOOL_CALL_PARSERS = {
    "qwen3": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "prime-qwen3": "qwen3_coder",
    "llama-3": "llama3_json",
    "gpt-oss": "openai",
    "glm-4.5": "glm45",
    "glm-5": "glm47",
    "minimax-m2": "minimax_m2",
    "deepseek-v3": "deepseek_v3",
    "deepseek-r1": "deepseek_v3",
    "kimi-k2": "kimi_k2",
}
REASONING_PARSERS = {
    "qwen3": "qwen3",
    "qwen3.5": "qwen3",
    "qwen3.6": "qwen3",
    "gpt-oss": "openai_gptoss",
    "glm-4.5": "glm45",
    "minimax-m2": "minimax_m2",
    "deepseek-r1": "deepseek_r1",
}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
PROBE_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "probe", "arguments": {"text": "a"}},
}
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
_CALLED: list[dict[str, Any]] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "name": "probe", "tool_call_id": "call_0", "content": "7"},
]
PROBES: list[tuple[list[dict[str, Any]], list[Any] | None]] = [
    ([{"role": "system", "content": "Be brief."}, *_ASKED], None),
    (_CALLED, [PROBE_TOOL]),
]


class QuotingTokenizer:
    """A tokenizer that encodes text on both sides of ``BREAK`` separately, and has the day ``day``.

    A renderer writes control tokens by their ids and encodes everything else as text, in which
    quoted marks are split (tasks/trees/markers.py).
    """

    def __init__(self, tokenizer: Any, day: date) -> None:
        self.tokenizer, self.day = tokenizer, day
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        parts = filter(None, text.split(BREAK))
        encode = self.tokenizer.encode
        return [token for part in parts for token in encode(part, add_special_tokens=False)]

    def decode(self, token_ids: Any, *rest: Any, **options: Any) -> str:
        return str(self.tokenizer.decode(token_ids, *rest, **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.tokenizer.convert_tokens_to_ids(tokens)

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        given = template_clock(self.day) | options
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **given)
        return self.encode(text) if tokenize else text

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":  # it would give offsets, of text that is not split
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def families() -> list[str]:
    """Return the names of the families that the library knows."""
    from renderers.base import MODEL_RENDERER_MAP

    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def parsers() -> list[str]:
    """Return the names of the parsers of calls, which the renderer default takes."""
    from renderers.parsers import TOOL_PARSERS

    return [*TOOL_PARSERS, TEXT_CALLS]


def canonical(name: str) -> str:
    """Return the library's name of a family that is written otherwise: llama_3, Llama3, glm45.

    Letters and digits decide. A name that fits no family is returned as it is.
    """
    names = {_letters_and_digits(known): known for known in (*families(), AUTO, DEFAULT)}
    return names.get(_letters_and_digits(name), name)


def _letters_and_digits(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def config(name: str, options: Mapping[str, Any]) -> Any:
    """Return the library's settings of a family. Raises ValueError for what it does not know."""
    from renderers import config_from_name

    plain = config_from_name(name)
    if plain is None:
        raise ValueError(f"the renderer {name} has no options: name a family")
    return type(plain)(**options)


def faults(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return one line for each of these settings that the library does not take."""
    if (name := canonical(name)) == AUTO:
        return []
    if name not in (*families(), DEFAULT):
        return [
            f"dialect.native.renderer {name} is unknown: choose {AUTO}, {DEFAULT} or one of "
            f"{', '.join(families())}"
        ]
    try:
        config(name, options)
    except ValueError as error:
        errors = getattr(error, "errors", None)
        details = errors() if errors else [{"loc": (), "msg": str(error)}]
        return [
            f"dialect.native.options{''.join(f'.{part}' for part in each['loc'])}: {each['msg']}; "
            f"correct or remove what the renderer {name} does not take"
            for each in details
        ]
    return []


def open_renderer(
    name: str, options: Mapping[str, Any], tokenizer: Any, day: date
) -> tuple[str, Any]:
    """Return the name of a family, and the library's renderer of it for this tokenizer.

    ``day``: what clocks show.

    Raises ValueError where no family fits the chat template, or the tokenizer lacks control tokens
    of the family.
    """
    quoting = QuotingTokenizer(tokenizer, day)
    if canonical(name) in (AUTO, DEFAULT) and tokenizer.get_vocab().keys() >= HARMONY_TOKENS:
        raise ValueError(
            f"dialect.native.renderer {name} does not read the channels of {HARMONY}, in which the "
            f"policy speaks: set it to {HARMONY}, or choose the dialect tags"
        )
    if (name := canonical(name)) != AUTO:
        try:
            return name, _create(quoting, _dated(name, options, quoting))
        except (AssertionError, OSError, RuntimeError) as error:
            if name == HARMONY and "vocab" in str(error):
                raise ValueError(
                    f"dialect.native.renderer {name}: its library has no vocabulary ({error}): put "
                    "o200k_base.tiktoken into a folder, and name that in TIKTOKEN_ENCODINGS_BASE"
                ) from error
            raise ValueError(
                f"dialect.native.renderer {name} does not fit the policy's tokenizer: {error}; "
                f"set it to {AUTO}, or take the policy's own family"
            ) from error
    for family, renderer in _fitting(quoting, options):
        return family, renderer
    raise ValueError(
        "dialect.native.renderer auto: the policy's chat template is that of no known family "
        f"({', '.join(families())}): name the family whose format the policy was trained on, set "
        "renderer to default, which renders each turn anew, or choose the dialect tags"
    )


def _create(tokenizer: Any, settings: Any) -> Any:
    """Return the library's renderer; the parser of calls that are text is ours."""
    from renderers import create_renderer

    if getattr(settings, PARSER, None) != TEXT_CALLS:
        return create_renderer(tokenizer, settings)
    renderer = create_renderer(tokenizer, settings.model_copy(update={PARSER: None}))
    renderer._tool_parser = TextCalls(tokenizer)
    return renderer


def _dated(name: str, options: Mapping[str, Any], tokenizer: QuotingTokenizer) -> Any:
    """Return a family's settings with the tokenizer's day, where the chat template has a clock.

    A template may have a fixed date instead, which then is the library's own.
    """
    fields = DATES.keys() & type(config(name, {})).model_fields.keys()
    if not fields or not (name == HARMONY or has_clock(tokenizer.tokenizer)):
        return config(name, options)
    dates = {key: formatted(tokenizer.day, DATES[key]) for key in fields}
    return config(name, {**dates, **options})


def _fitting(tokenizer: QuotingTokenizer, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the families whose rendering of all probes has the text of the chat template's."""
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    for name in [known] if known else families():
        if name == HARMONY:  # which is refused before
            continue
        equal = bool(known)
        with suppress(Exception):  # the library asserts that a family's tokens are there
            # without options, with which the library may write more than the template does
            plain = _dated(name, {}, tokenizer)
            equal = equal or _equal(tokenizer, _create(tokenizer, plain), plain)
        if equal:
            yield name, _create(tokenizer, _dated(name, options, tokenizer))


def _equal(tokenizer: QuotingTokenizer, renderer: Any, settings: Any) -> bool:
    fields = {name: getattr(settings, name) for name in settings.template_field_names()}
    known = {name: value for name, value in fields.items() if name not in DATES}
    given = {name: value for name, value in known.items() if value is not None}
    compared = 0
    for messages, tools in PROBES:
        try:
            expected = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, **given
            )
        except Exception:  # a template may refuse a kind of conversation, with any exception
            continue
        rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        if tokenizer.decode(rendered) != tokenizer.decode(expected):
            return False
        compared += 1
    return compared > 0


def serving(name: str, stop_tokens: Sequence[int], stop: Sequence[str]) -> dict[str, Any]:
    """Return what an inference server needs to speak a family's format.

    The chat template is in the tokenizer's own files. ``tool_call_parser`` and ``reasoning_parser``
    are names of vLLM's; null where none is known here.
    """
    return {
        "dialect": "native",
        "renderer": name,
        "stop_token_ids": list(stop_tokens),
        "stop": list(stop),
        "tool_call_parser": TOOL_CALL_PARSERS.get(name),
        "reasoning_parser": REASONING_PARSERS.get(name),
    }
