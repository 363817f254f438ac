"""Open the models that are asked in messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from params.schema.chat import ChatEndpoint, ChatLimits
from tasks.chat.cached import Cached
from tasks.chat.call_budget import CallBudget

FOLDER = "BEAMLINE_CHAT_CACHE"  # environment variable: another folder than this one
DEFAULT = Path(".beamline/cache/chat")


@contextmanager
def open_chat(
    endpoints: Sequence[ChatEndpoint], limits: ChatLimits, section: str, account: str
) -> Iterator[list[Cached]]:
    """Keep a chat model ready for each endpoint, in their order; they share one budget.

    What a model answers is kept on disk and asked for once, by all runs of a checkout. What is
    spent is counted there, too, for each ``account`` (such as "tiny-judge"), so the budget of
    ``limits`` holds over restarts. ``section`` is the section of the recipe, for messages.

    Raises ValueError where a key is not set. ``ask`` of the models raises RuntimeError where no
    request can succeed: no server, a wrong key, an unknown model, a spent budget.
    """
    from tasks.chat.endpoint import open_endpoint  # openai takes seconds to import

    folder = _folder()
    budget = CallBudget(account_of(account), limits.budget, section)
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal(name="chat"))
        models = []
        for endpoint in endpoints:
            opened = open_endpoint(endpoint, limits, budget, section)
            answer = stack.enter_context(portal.wrap_async_context_manager(opened))
            models.append(Cached(endpoint.name, answer, folder, portal, limits.concurrency))
        yield models


def account_of(name: str) -> Path:
    """Return the file that counts what is spent on an account."""
    return _folder() / "spent" / f"{name}.jsonl"


def _folder() -> Path:
    return Path(os.environ.get(FOLDER) or DEFAULT)
