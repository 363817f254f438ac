"""Find and open scorers by the names that questions and recipes give them.

A user's scorer is a function ``(answer, accepted)`` that returns the score, a number in [0, 1], or
a mapping with "score" and further numbers. It runs in processes of its own with a time limit. With
the attribute ``graded = True`` its scores lie between 0 and 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from tasks.extensions import checks, named
from tasks.extensions.pool import Pool, open_pool
from tasks.scorers.contract import Scorer, ScorerKind

MOST_TIMEOUTS = 4  # different answers of a question with which the verifier may run out of time
SECONDS = 10.0  # of one comparison by a user's scorer
WORKERS = min(4, len(os.sched_getaffinity(0)))  # processes of a user's scorer
# Measures that say why an answer was not compared: what reads them takes their name for that.
RESERVED = frozenset({"not_asked", "timeout", "killed"})
SHOWN = 80  # characters of an answer in a message


def names() -> list[str]:
    """Return the names of the scorers of this room."""
    return named.names("scorer")


def project_scorers() -> dict[str, Scorer]:
    """Return the scorers of this room by name, which need no processes of a user's code."""
    return {name: _held(name).compare for name in names()}


def label(name: str) -> str:
    """Return the name of a scorer without the path of its file."""
    return name.rpartition(":")[2]


def scorer_fault(name: str) -> str:
    """Return why questions cannot name this scorer, with the remedy, or ""."""
    try:
        _held(name)
    except ValueError as error:
        return str(error)
    return ""


def scorer_faults(names_by_location: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a line for each scorer that cannot be used, from the names of scorers by location."""
    of_name = {name: scorer_fault(name) for each in names_by_location.values() for name in each}
    return [
        f"{location}: {of_name[name]}"
        for location, each in names_by_location.items()
        for name in dict.fromkeys(each)
        if of_name[name]
    ]


def is_graded(name: str) -> bool:
    """Return whether a scorer says that it gives scores between 0 and 1; False if it is unknown."""
    return not scorer_fault(name) and bool(getattr(_held(name), "graded", False))


def sources(scorer_names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the source of each scorer, by name, for the keys of the ledger."""
    return {name: named.find("scorer", name).sources for name in sorted(set(scorer_names))}


@contextmanager
def open_scorers(
    scorer_names: Iterable[str], seconds: float = SECONDS
) -> Iterator[dict[str, ScorerKind]]:
    """Keep these scorers ready, by name.

    Raises ValueError for a name that stands for no scorer.
    """
    with ExitStack() as stack:
        yield {name: _opened(name, seconds, stack) for name in dict.fromkeys(scorer_names)}


def _held(name: str) -> Any:
    """Return the ScorerKind or the user's function that a name stands for."""
    held = named.find("scorer", name).held
    if not isinstance(held, ScorerKind) and (fault := checks.signature_fault(held, SIGNATURE)):
        raise ValueError(f"{name} {fault}")
    return held


SIGNATURE = "def close(answer, accepted)"


def _opened(name: str, seconds: float, stack: ExitStack) -> ScorerKind:
    held = _held(name)
    if isinstance(held, ScorerKind):
        return held
    reference = named.find("scorer", name).reference
    pool = stack.enter_context(open_pool(reference, {}, WORKERS, seconds))
    return ScorerKind(_pooled(name, pool), graded=bool(getattr(held, "graded", False)))


def _pooled(name: str, pool: Pool) -> Scorer:
    """Return a user's scorer. It raises ValueError where the function fails or returns no score.

    Threads that compare side by side use different processes.
    """
    turn = count()

    def compare(answer: str, accepted: Sequence[str]) -> Mapping[str, float]:
        (reply,) = pool.ask([(next(turn) % WORKERS, "", (answer, list(accepted)))])
        description = (
            f"the scorer {name}, answer {answer[:SHOWN]!r}, accepted {list(accepted)!r:.{SHOWN}}"
        )
        if reply.failure:
            raise ValueError(f"{description}: {reply.failure}: {reply.message}")
        measures = reply.value if isinstance(reply.value, Mapping) else {"score": reply.value}
        if fault := _measures_fault(measures):
            raise ValueError(f"{description}: it returned {reply.value!r:.{SHOWN}}: {fault}")
        found = {str(measure): float(value) for measure, value in measures.items()}
        return found | {"score": checks.within(found["score"], 0.0, 1.0)}

    return compare


def _measures_fault(measures: Mapping[str, Any]) -> str:
    """Return what is wrong with a user's breakdown, or ""."""
    if "score" not in measures:
        return "a mapping needs the entry 'score'"
    if taken := sorted(measures.keys() & RESERVED):
        return f"the measure {taken[0]} has a meaning of its own here: name yours otherwise"
    faults = [
        f"{measure} {fault}"
        for measure, value in measures.items()
        if (fault := checks.number_fault(value, *((0, 1) if measure == "score" else (None, None))))
    ]
    return "; ".join(faults)
