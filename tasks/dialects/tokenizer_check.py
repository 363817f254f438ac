"""Check a brought tokenizer before any work: text has to come back from its ids as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.trees.markers import encode

# What tools read and agents write: lines, indents, case and signs decide what code does.
CODE = 'def F(x):\n    return [x , 1]  # "A" & <b> don\'t\n\nprint(F(2))'
EDGES = "\n  a b  \n"
TIMES = 4  # that a text is encoded; merges that are left out by chance show in one
TAKE_ANOTHER = "or take another policy"


def tokenizer_faults(tokenizer: Any, tags: Sequence[str] = ()) -> list[str]:
    """Return a line for each cause by which a tokenizer changes a text, or its ids; [] if none.

    ``tags``: what a dialect writes around texts whose spaces count.
    """
    return [
        fault
        for fault in (
            _drawing(tokenizer),
            _splitting(tokenizer),
            _changing(tokenizer, CODE),
            _changing(tokenizer, EDGES),
            *(_changing(tokenizer, f"a{tag}\n    b{tag}") for tag in tags),
        )
        if fault
    ][:1]


def _drawing(tokenizer: Any) -> str:
    ids = {tuple(encode(tokenizer, CODE * 4).tolist()) for _ in range(TIMES)}
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    dropout = getattr(model, "dropout", None)
    if len(ids) == 1 and not dropout:
        return ""
    return (
        "the policy's tokenizer gives other ids each time for the same text: set dropout of the "
        f"model in its tokenizer.json to null, {TAKE_ANOTHER}"
    )


def _splitting(tokenizer: Any) -> str:
    end = tokenizer.eos_token
    if not end or tokenizer.eos_token_id in encode(tokenizer, f"a{end}"):
        return ""
    return (
        f"the policy's tokenizer takes the control token {end!r} for a text, so no turn would end "
        "and no prompt have its roles: set split_special_tokens of its tokenizer_config.json to "
        f"false, {TAKE_ANOTHER}"
    )


def _changing(tokenizer: Any, text: str) -> str:
    back = tokenizer.decode(encode(tokenizer, text)).lstrip(" ")
    if back == text:
        return ""
    return (
        f"the policy's tokenizer changes texts: {text!r} becomes {back[: len(text) * 2]!r}, and "
        "code means something else then: correct the normalizer, the vocabulary or the added "
        f"tokens (lstrip, rstrip) of its tokenizer.json, {TAKE_ANOTHER}"
    )
