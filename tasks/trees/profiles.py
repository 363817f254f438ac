"""Token entropy around tool results, by the tool that was called (ARPO, figure 2). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tasks.trees.metrics import PROFILE_AFTER, PROFILE_BEFORE
from tasks.trees.tree import TURN, Tree

Values = dict[int, list[float]]  # token position from a tool result -> entropies over ln|V|
Profile = dict[str, list[float]]  # columns of equal length
COLUMNS = ("position", "mean", "standard_error", "tokens")


def entropy_by_tool(trees: Sequence[Tree], tool_of: Callable[[str], str]) -> dict[str, Profile]:
    """Return the mean entropy by token position from a tool result, for each tool.

    Position -1 is the last token before the result, 1 the first after it. ``tool_of``: the text of
    a turn that is answered -> the name of its tool. A token that several turns share counts once. A
    profile has COLUMNS: entropies over ln|V|, and how many tokens they are of.
    """
    values: dict[str, Values] = {}
    for tree in trees:
        tools: dict[int, str] = {}  # by node of a result that a turn follows
        for index, node in enumerate(tree.nodes):
            parts = tree.parts(index) if node.kind == TURN else []
            result = tree.nodes[parts[0]].parent if parts else 0
            if result <= 0:  # no turn, or the first one, which follows the prompt
                continue
            if result not in tools:
                calling = tree.parts(tree.nodes[result].parent)
                tools[result] = tool_of("".join(tree.nodes[part].text for part in calling))
                entropies = np.concatenate([tree.nodes[part].entropies for part in calling])
                tail = entropies[-PROFILE_BEFORE:]
                _add(values.setdefault(tools[result], {}), -len(tail), tail.tolist())
            start = 1 + sum(len(tree.nodes[part].tokens) for part in parts[:-1])
            near = node.entropies[: max(0, PROFILE_AFTER + 1 - start)]
            _add(values[tools[result]], start, near.tolist())
    return {tool: _profile(by_position) for tool, by_position in sorted(values.items())}


def _add(values: Values, first: int, entropies: Sequence[float]) -> None:
    for position, entropy in enumerate(entropies, start=first):
        values.setdefault(position, []).append(entropy)


def _profile(values: Values) -> Profile:
    rows = sorted(values.items())
    return {
        "position": [position for position, _ in rows],
        "mean": [float(np.mean(entropies)) for _, entropies in rows],
        "standard_error": [
            float(np.std(entropies) / np.sqrt(len(entropies))) for _, entropies in rows
        ],
        "tokens": [len(entropies) for _, entropies in rows],
    }


def pooled(profiles: Sequence[Mapping[str, Sequence[float]]]) -> Profile:
    """Return the profile of several together, each position weighted by its tokens."""
    counts: dict[float, list[tuple[float, float, float]]] = {}
    for profile in profiles:
        for position, *estimate in zip(*(profile[name] for name in COLUMNS), strict=True):
            counts.setdefault(position, []).append((estimate[0], estimate[1], estimate[2]))
    rows = []
    for position, estimates in sorted(counts.items()):
        means, errors, tokens = np.array(estimates).T
        total = tokens.sum()
        mean = float(means @ tokens / total)
        # within each profile and between them
        squares = float(tokens @ (errors**2 * tokens + (means - mean) ** 2)) / total
        rows.append((position, mean, float(np.sqrt(squares / total)), float(total)))
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    return {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
