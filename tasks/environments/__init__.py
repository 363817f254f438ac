"""Environments: they answer an agent's calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from params.schema.base import Frozen
from tasks.environments.question import respond
from tasks.tools import TOOLS
from tasks.trees.tree import Call, Observation

Respond = Callable[[Sequence[Call]], list[Observation]]  # a round's calls -> their observations


@contextmanager
def open_tools(tools: Mapping[str, Frozen], workers: int, corpus: Path) -> Iterator[Respond]:
    """Open a recipe's tools (name -> settings); yield the function that answers a round of calls.

    The tools stay ready until the end of the block. ``corpus`` is the folder of documents, which is
    only read by search; ``workers`` is the number of calls that may run in parallel.

    Raises RuntimeError if the sandbox that the recipe names does not work, and ValueError for a
    corpus that is missing or empty.
    """
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(TOOLS[name].open(settings, corpus, workers))
            for name, settings in tools.items()
        }
        yield partial(respond, opened)
