"""Stand-ins for modules, while a library is imported that imports more than a run uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def instead(stand_ins: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let imports and ``find_spec`` find other modules; None: there is none of that name.

    Modules that are loaded already stay.
    """
    modules: dict[str, Any] = sys.modules
    added = {name: module for name, module in stand_ins.items() if name not in modules}
    modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del modules[name]


class Later(ModuleType):
    """Stands for a module whose import waits until an attribute of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            raise AttributeError(f"{self.__name__}.{name} is asked for while it waits")
        return getattr(importlib.import_module(self.__name__), name)
