"""What vLLM is asked for with each turn, in a process of this machine or at a server."""

from __future__ import annotations

from typing import Any

from tasks.engines.turns import TurnRequest

MEASURED = 2  # logprobs a token: its own, and the entropy (see ``MeasuringSampler``)
SEEDS = 2**63  # vLLM keeps seeds in a signed number


def sampling_options(turn: TurnRequest) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams for a turn."""
    return {
        "seed": turn.seed % SEEDS,
        "max_tokens": turn.max_tokens,
        "temperature": turn.temperature,
        "top_p": turn.top_p,
        "stop_token_ids": list(turn.stop_tokens),
        "stop": list(turn.stop_texts),
        "detokenize": bool(turn.stop_texts),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": MEASURED,
        "flat_logprobs": True,
    }
