"""A user's tool in a process of a pool: what tasks/tools/own_tool.py asks there."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tasks.extensions import arguments, user_code_worker
from tasks.extensions.plain_values import plain


class ToolHost:
    """One tool. ``job``: its ``reference``, and its ``settings``."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.run = user_code_worker.make(user_code_worker.load(job["reference"]), job["settings"])
        # One for all calls: a client that the tool keeps belongs to the loop that it was used in.
        self.loop = asyncio.Runner()
        self.model = arguments.model_of(self.run, job["reference"])

    def __call__(self, values: Mapping[str, Any]) -> tuple[str, str]:
        """Return the outcome and the text of one call."""
        try:
            given = arguments.checked(self.model, values)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return "bad_arguments", "; ".join(faults)
        result = self.run(**given)
        if inspect.isawaitable(result):
            result = self.loop.run(_awaited(result))
        return _read(result)


async def _awaited(result: Any) -> Any:
    return await result


def _read(result: Any) -> tuple[str, str]:
    """Return outcome and text of a result: a text, an observation, or what JSON can hold."""
    if isinstance(result, str):
        return "ok", result
    if hasattr(result, "outcome") and hasattr(result, "text"):
        return result.outcome, result.text
    if result is None:
        return "ok", ""
    try:
        return "ok", json.dumps(plain(result), ensure_ascii=False)
    except (TypeError, ValueError):
        kind = type(result).__name__
        raise TypeError(f"the tool returned {kind}: return a text") from None
