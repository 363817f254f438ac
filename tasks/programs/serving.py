"""Serve a trained policy at the address that its program asked at in training.

A program goes on with the same client, tools and dialect. Answers are drawn at a temperature of the
server, since a request's own is refused as in training. Nothing is recorded.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from params.schema.agent import Dialogue
from params.schema.base import Frozen
from tasks.engines import Engine
from tasks.programs.asking import FixedSampling
from tasks.programs.contract import ProgramSettings
from tasks.programs.episodes import EpisodeLimits, ProgramEpisode
from tasks.programs.gateway import Gateway, KeyHolder
from tasks.programs.request_queue import RequestQueue
from tasks.programs.sampling_rounds import Rounds
from tasks.trees.tree import Question

CONVERSATIONS = 32  # that are sampled side by side, at most
REMEMBERED = 64  # answers of each, from which its conversations go on
ENDLESS = 2**62  # requests, tokens and calls


def serve(
    engine: Engine,
    tokenizer: Any,
    dialogue: Dialogue,
    sampling: FixedSampling,
    settings: ProgramSettings,
    dialect: Mapping[str, Frozen],
    key: str,
    address: tuple[str, int],
    begun: Callable[[int], object],
) -> None:
    """Answer the key until this process is interrupted; ``begun`` is told the port.

    ``address``: where it listens, with port 0 for any. Raises OSError where that is taken.
    """
    limits = EpisodeLimits(ENDLESS, settings.prompt_tokens, ENDLESS, ENDLESS)
    seed = secrets.token_hex(8)
    held = [
        ProgramEpisode(Question(f"served-{number}", "served", "", ()), 0, seed, limits)
        for number in range(CONVERSATIONS)
    ]
    queue = RequestQueue(held, CONVERSATIONS, settings.patience, together=False)
    rounds = Rounds(held, engine, tokenizer, dialogue, sampling, settings, dialect, queue)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway = stack.enter_context(Gateway(queue, sampling, folder, *address))
        holders = gateway.admit(key, held)
        queue.begin()
        begun(gateway.port)
        while True:
            if requests := queue.take():
                rounds.sample(requests, stack)
                forget(holders)


def forget(holders: Sequence[KeyHolder]) -> None:
    """Forget old conversations."""
    for holder in holders:
        del holder.episode.answers[:-REMEMBERED]
        for prefix in list(holder.episode.counts)[:-REMEMBERED]:
            del holder.episode.counts[prefix]
        for text in list(holder.requests)[:-REMEMBERED]:
            if holder.requests[text].answered.done():
                del holder.requests[text]
