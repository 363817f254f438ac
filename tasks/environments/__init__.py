"""What answers an agent's calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from params.schema.base import Frozen
from tasks.environments.question import respond
from tasks.tools import TOOLS
from tasks.trees.tree import Call, Observation

Respond = Callable[[Sequence[Call]], list[Observation]]  # the calls of a round -> answers, in order


@contextmanager
def open_tools(tools: Mapping[str, Frozen], workers: int, corpus: Path) -> Iterator[Respond]:
    """Open the tools of a recipe, by name, and yield what answers a round of calls.

    They stay warm until the end of the block. ``corpus`` is the folder that search looks in; a
    recipe without search does not touch it. ``workers``: calls that run side by side.
    Raises RuntimeError where the sandbox that the recipe asks for does not work, ValueError for a
    corpus that is missing or empty.
    """
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(TOOLS[name].open(settings, corpus, workers))
            for name, settings in tools.items()
        }
        yield partial(respond, opened)
