"""A PDDL problem in the planning language of Fast Downward, SAS: once to play, once to plan.

``fast_downward.pddl2sas`` parses and grounds the problem at each call, and most of its time is
grounding. Here both translations share one. Tests hold them against ``pddl2sas``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

# Options of fast_downward.translate as pddl2sas sets them: value to play, value to plan.
OPTIONS = {
    "filter_unimportant_vars": (False, True),
    "filter_unreachable_facts": (False, True),
    "use_partial_encoding": (False, True),
    "skip_variable_reordering": (True, False),
    "add_implied_preconditions": (False, True),
    "invariant_generation_max_candidates": (0, 0),
}


@dataclass
class GroundedTask:
    """A problem as Fast Downward's translator has parsed it; it is grounded at its first use."""

    task: Any
    grounded: list[Any] = field(default_factory=list)

    def sas(self, *, for_planner: bool) -> str:
        """Return the problem in SAS.

        To play, every operator and fact stays; for the planner, what no plan needs is left out.
        """
        translate = _translator()
        for name, values in OPTIONS.items():
            setattr(translate.options, name, values[for_planner])
        text = io.StringIO()
        with redirect_stdout(io.StringIO()), self._grounded_once(translate):
            translate.pddl_to_sas(self.task).output(text)
        return text.getvalue()

    @contextmanager
    def _grounded_once(self, translate: Any) -> Iterator[None]:
        explore = translate.instantiate.explore

        def explored(task: Any) -> Any:
            if not self.grounded:
                self.grounded.append(explore(task))
            return self.grounded[0]

        translate.instantiate.explore = explored
        try:
            yield
        finally:
            translate.instantiate.explore = explore


def parsed(domain: str, problem: str) -> GroundedTask:
    """Return the problem of two texts in PDDL."""
    translate = _translator()
    from fast_downward.translate.pddl_parser import lisp_parser, parsing_functions

    with redirect_stdout(io.StringIO()):
        texts = [lisp_parser.parse_nested_list(text.split("\n")) for text in (domain, problem)]
        task = parsing_functions.parse_task(*texts)
        translate.normalize.normalize(task)
    return GroundedTask(task)


def _translator() -> Any:
    """Return the module that translates, which reads a command line while it is imported."""
    import sys

    given, sys.argv = sys.argv, ["translate.py", "domain", "task"]
    try:
        from fast_downward.translate import translate
    finally:
        sys.argv = given
    return translate
