"""Open a recipe's program: its hosts stay warm from one rollout to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from params.schema.base import Frozen
from tasks.programs.contract import ProgramKind, ProgramSettings
from tasks.programs.own_program import program_kind

if TYPE_CHECKING:
    from tasks.programs.launching import Launcher


class OpenProgram:
    """A program that is ready, for one rollout at a time or several."""

    def __init__(self, kind: ProgramKind, settings: ProgramSettings, stack: ExitStack) -> None:
        self.kind, self.settings, self.stack = kind, settings, stack
        self.idle: list[tuple[Launcher, Path]] = []
        self.lock = threading.Lock()

    def add(self) -> None:
        """Start one more host."""
        from tasks.programs.launching import Launcher, staged  # with asyncio, for programs alone

        folders = self.stack.enter_context(staged())
        launcher = Launcher(self.kind, self.settings, folders)
        self.stack.callback(launcher.close)
        launcher.warm()
        with self.lock:
            self.idle.append((launcher, folders[1]))

    @contextmanager
    def lent(self) -> Iterator[tuple[Launcher, Path]]:
        """Lend a host that no other rollout uses, and the folder of its gateway's socket."""
        with self.lock:
            taken = self.idle.pop() if self.idle else None
        if taken is None:
            self.add()
            with self.lock:
                taken = self.idle.pop()
        try:
            yield taken
        except BaseException:
            taken[0].close()  # episodes may still run, and wait for a gateway that has ended
            raise
        with self.lock:
            self.idle.append(taken)


@contextmanager
def open_program(program: Mapping[str, Frozen]) -> Iterator[OpenProgram | None]:
    """Open the program of a recipe's section (name -> settings); None for an empty one.

    Raises RuntimeError where its sandbox cannot be made, and ValueError for an unknown name.
    """
    if not program:
        yield None
        return
    ((name, settings),) = program.items()
    assert isinstance(settings, ProgramSettings)
    if settings.trusted:
        print(f"program {name}: no sandbox, as 'trusted' says: it may do what you may", flush=True)
    if not settings.repeatable:
        print(f"program {name}: not repeatable: a run that goes on may differ", flush=True)
    with ExitStack() as stack:
        opened = OpenProgram(program_kind(name), settings, stack)
        opened.add()
        yield opened
