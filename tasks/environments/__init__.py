"""Environments: they answer an agent's acts (contract.py)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from params.schema.base import Frozen
from tasks.environments.contract import OpenEnvironment, Recorded
from tasks.environments.episodes import Worlds, open_worlds
from tasks.environments.own_world import environment_kind
from tasks.environments.question import Questions, answer
from tasks.environments.question import Respond as Respond
from tasks.environments.recorded import recorded_session
from tasks.tools.contract import Opening, OpenTool
from tasks.tools.own_tool import open_tool, tool_kind
from tasks.tools.recording import Origin, open_recorded, replayed_calls
from tasks.trees.tree import ToolSpec


@contextmanager
def open_environment(
    tools: Mapping[str, Frozen], environment: Mapping[str, Frozen], workers: int, corpus: Path
) -> Iterator[OpenEnvironment]:
    """Open a recipe's tools and its environment (each: name -> settings).

    Without an environment the tasks are single questions. With one, they are episodes of its
    worlds; calls of the recipe's tools are answered by these, and the world does not see them. All
    stay ready until the end of the block. ``corpus`` is the folder of documents, which is only read
    by search; ``workers`` is the number of calls, or worlds, that may run side by side.

    Raises RuntimeError if a sandbox or a world's process does not start, and ValueError for a name
    that stands for nothing, for two tools of one name, and for a corpus that is missing or empty.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(tools, workers, corpus))
        worlds = None
        if environment:
            ((name, settings),) = environment.items()
            worlds = stack.enter_context(open_worlds(environment_kind(name), settings, workers))
        acting = _acting(opened, worlds)
        _check_names(acting.specs)
        repeatable = {name: tool_kind(name).repeatable for name in opened}
        fixed = all(environment_kind(name).repeatable for name in environment)
        if not fixed or not all(repeatable.values()):
            acting = replace(acting, recorded=partial(_recorded, opened, repeatable, worlds, fixed))
        yield acting


def _acting(opened: Mapping[str, OpenTool], worlds: Worlds | None) -> OpenEnvironment:
    """Return the environment of tools that are open, and of worlds where there are any."""
    respond = partial(answer, list(opened.values()))
    specs = [spec for tool in opened.values() for spec in tool.specs]
    if worlds is None:
        return OpenEnvironment(specs, lambda: nullcontext(Questions(respond)))
    offered = frozenset(spec.name for spec in specs)
    return OpenEnvironment(
        [*worlds.specs.values(), *specs], partial(worlds.session, respond, offered)
    )


@contextmanager
def _recorded(
    opened: Mapping[str, OpenTool],
    repeatable: Mapping[str, bool],
    worlds: Worlds | None,
    fixed: bool,
    origin: Origin,
    scratch: Callable[[], Path],
) -> Iterator[Recorded]:
    """Record the results of tools, and the answers of worlds, that are not repeatable.

    ``fixed``: whether the worlds are. A rollout that was killed begins its worlds anew: an answer
    alone does not bring back their state.
    """
    folder = scratch() if fixed else None
    with open_recorded(opened, repeatable, folder, replayed_calls(origin)) as recorder:
        acting = _acting(recorder.tools, worlds)
        if not fixed:
            acting = replace(acting, session=partial(recorded_session, acting.session, recorder))
        yield Recorded(acting, recorder.save_calls, recorder.ask_again)


@contextmanager
def _opened(
    tools: Mapping[str, Frozen], workers: int, corpus: Path
) -> Iterator[dict[str, OpenTool]]:
    """Open tools by name. Raises ValueError where two of them offer a tool of the same name."""
    opening = Opening(corpus, workers)
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(open_tool(name, settings, opening))
            for name, settings in tools.items()
        }
        _check_names([spec for tool in opened.values() for spec in tool.specs])
        yield opened


def _check_names(specs: Sequence[ToolSpec]) -> None:
    twice = [name for name, times in Counter(spec.name for spec in specs).items() if times > 1]
    if twice:
        raise ValueError(
            f"the agent would have several tools called {', '.join(twice)}: rename or remove one"
        )
