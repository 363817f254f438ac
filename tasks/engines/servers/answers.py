"""What servers answer to a request for turns: whether it can be right, and its numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.engines.turns import Drawn, TurnRequest
from tasks.engines.vllm_options import MEASURED
from tasks.policy.token_ids import TokenIds
from tasks.trees import marks

ROUNDING = 1e-4  # nats by which a log-probability may be above 0, and an entropy outside 0 to 1
LEAST = -sys.float_info.max  # of a log-probability: a finite one
FINISHES = (None, "stop", "length")  # why a turn ended; None: the transformers server does not say


def fault(
    answer: Any, turns: Sequence[TurnRequest], ids: TokenIds, pieces: Sequence[str]
) -> str | None:
    """Return what is wrong with the parsed answer to a request for turns, or None.

    ``ids``: those of the policy that have a token; ``pieces``: the text of each, at least.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        return "no list of choices"
    if len(choices) != len(turns):
        return f"{len(choices)} choices instead of {len(turns)}"
    pairs = zip(choices, turns, strict=True)
    faults = (_of_choice(choice, turn, ids, pieces) for choice, turn in pairs)
    return next((f"choice {number}: {one}" for number, one in enumerate(faults) if one), None)


def _of_choice(choice: Any, turn: TurnRequest, ids: TokenIds, pieces: Sequence[str]) -> str | None:
    if not isinstance(choice, dict):
        return "no object"
    return (
        _of_tokens(choice.get("token_ids"), turn, ids)
        or _of_measures(choice.get("logprobs"), len(choice["token_ids"]))
        or _of_end(choice, turn, pieces)
    )


def _of_tokens(tokens: Any, turn: TurnRequest, ids: TokenIds) -> str | None:
    if not isinstance(tokens, list):
        return "no list of token_ids"
    if not 1 <= len(tokens) <= turn.max_tokens:
        return f"{len(tokens)} tokens, and 1 to {turn.max_tokens} were asked for"
    unknown = [one for one in tokens if type(one) is not int or one not in ids]
    if unknown:
        return f"{_shown(unknown[0])} is no token of this policy, which has {ids.count}"
    return None


def _of_measures(logprobs: Any, count: int) -> str | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or len(content) != count:
        given = f"{len(content)}" if isinstance(content, list) else "no list of"
        return f"{given} log-probabilities for {count} tokens"
    return next(filter(None, map(_of_measure, content)), None)


def _of_measure(entry: Any) -> str | None:
    """Return what is wrong with the log-probability and the entropy of a token, or None."""
    likeliest = entry.get("top_logprobs") if isinstance(entry, dict) else None
    if not isinstance(likeliest, list) or len(likeliest) != MEASURED:
        return "a token without its log-probability and its entropy"
    entropy = likeliest[1].get("logprob") if isinstance(likeliest[1], dict) else None
    if not _is_between(LEAST, entry.get("logprob"), ROUNDING):
        return f"{_shown(entry.get('logprob'))} is no log-probability"
    if not _is_between(-ROUNDING, entropy, 1 + ROUNDING):
        return f"{_shown(entropy)} is no entropy, which is 0 to 1"
    return None


def _of_end(choice: Any, turn: TurnRequest, pieces: Sequence[str]) -> str | None:
    """Return what is wrong with how a turn ends, or None.

    A turn that is cut short would be trained on as one that the policy has ended.
    """
    tokens, finish = choice["token_ids"], choice.get("finish_reason")
    if finish not in FINISHES:
        return f"finish_reason is {_shown(finish)}"
    if len(tokens) == turn.max_tokens or tokens[-1] in turn.stop_tokens:
        return None
    if finish == "stop" and turn.stop_texts:  # found in the text, by the server's own tokenizer
        return None
    stops = re.compile("|".join(map(re.escape, turn.stop))) if turn.stop else None
    if stops and len(marks.completed(stops, [pieces[token] for token in tokens])):
        return None
    return (
        f"it ends after {len(tokens)} of {turn.max_tokens} tokens, and not with what ends a turn "
        "(is the server's --context too small?)"
    )


def _is_between(least: float, value: Any, most: float) -> bool:
    """Return whether a value is a number of a range; NaN and booleans are not."""
    return type(value) in (int, float) and least <= value <= most


def _shown(value: Any) -> str:
    """Return a value for a message; a container by its kind, as it may be deep."""
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"


def parse_choice(choice: dict[str, Any]) -> Drawn:
    """Return tokens, logprobs and entropies [T] of a turn in an answer without a fault."""
    content = choice["logprobs"]["content"]
    entropies = [entry["top_logprobs"][1]["logprob"] for entry in content]
    return (
        np.array(choice["token_ids"], np.int32),
        np.array([entry["logprob"] for entry in content], np.float32),
        np.array(entropies, np.float32),
    )
