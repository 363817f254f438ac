"""Metrics of a batch of trees: lengths, tools, steps, entropies around what answers an act."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tasks.trees.outcomes import Outcome
from tasks.trees.tree import (
    AFTER_RESULT,
    REFUSAL,
    RESULT,
    TURN,
    Decision,
    Node,
    Tree,
    acts,
    program_said,
    response_tokens,
    sampled,
)

Entropies = NDArray[np.float32]  # of consecutive sampled tokens, over ln|V|

REFUSED = "refused"  # metric, and beginning of the names of those by reason
REASON = re.compile(r"(?!again)[a-z][a-z_]{0,29}")
OUT_OF_STEPS = (Outcome.TRUNCATED, Outcome.TOO_MANY_CALLS)
PERCENTILES = (5, 50, 95)
PROFILE_BEFORE, PROFILE_AFTER = 10, 20  # tokens around a tool result


def tree_metrics(trees: Sequence[Tree], window: int) -> dict[str, float]:
    """Return the metrics of a batch of rollouts by name.

    A node that several trajectories share counts once for calls, tokens and entropies. Entropies
    are divided by ln|V|, so in [0, 1]; ``window`` is the number of tokens to average after
    a result. An environment step is a whole turn of the agent, whether it calls a tool or answers,
    and ``episode_steps`` is their mean number in a leaf; in a world, a tool call is an act that was
    executed. Only worlds have ``step_metrics``.
    """
    turns = [node for tree in trees for node in sampled(tree.nodes)]
    executed = [outcome for tree in trees for outcome in tree.acts()]
    before, after = around_results(trees, window)
    leaves = [trajectory for tree in trees for trajectory in tree.trajectories()]
    return {
        "leaves": len(leaves),
        "branches": sum(decision.added for tree in trees for decision in tree.decisions),
        "tool_calls": len(executed),
        "tool_errors": sum(outcome != Outcome.OK for outcome in executed),
        "tool_calls_a_leaf": _mean([len(acts(leaf)) for leaf in leaves]),
        "environment_steps": sum(node.outcome != Outcome.PART for node in turns),
        "episode_steps": _mean([len(sampled(leaf)) for leaf in leaves]),
        "sampled_tokens": sum(len(node.tokens) for node in turns),
        "response_tokens": _mean([response_tokens(leaf) for leaf in leaves]),
        "answer_rate": _mean([leaf[-1].outcome == Outcome.ANSWER for leaf in leaves]),
        "entropy": _mean(np.concatenate([turn.entropies for turn in turns])),
        "entropy_before_result": _mean([float(turn[-window:].mean()) for turn in before]),
        "entropy_after_result": _mean([window_entropy(turn, window) for turn in after]),
        **rise_metrics([decision for tree in trees for decision in tree.decisions]),
        **(step_metrics(turns, leaves) if any(tree.of_world for tree in trees) else {}),
        **program_metrics(trees),
    }


def program_metrics(trees: Sequence[Tree]) -> dict[str, float]:
    """Return the metrics of episodes that a program has led; {} for those of no program.

    ``requests_continued``: of the requests after an episode's first, the share that goes on from
    tokens that were sampled, and not in a prompt of its own; it is missing where there are none.
    ``programs_failed``: the share of the episodes whose program has failed; ``replays_differ``: of
    those whose program asked something else when it was run again for a branch.
    """
    leaves = [leaf for tree in trees for leaf in tree.trajectories() if program_said(leaf)]
    if not leaves:
        return {}
    later = [
        before.kind == RESULT
        for leaf in leaves
        for before, turn in list(pairwise(leaf))[2:]
        if turn.kind == TURN
    ]
    failed = ["fault" in (program_said(leaf) or {}) for leaf in leaves]
    continued = {"requests_continued": _mean(later)} if later else {}
    differ = [leaf[-1].outcome == Outcome.REPLAY_DIFFERS for leaf in leaves]
    return {**continued, "programs_failed": _mean(failed), "replays_differ": _mean(differ)}


def rise_metrics(decisions: Sequence[Decision]) -> dict[str, float]:
    """Return what the entropy does after tool results, and what ARPO's rule makes of it.

    ``initial_entropy`` and ``result_entropy`` are the means of H_initial and H_t, ``entropy_rise``
    of H_t - H_initial; ``rises`` is the share of results after which the entropy is higher,
    ``branches_wanted`` of those at which the rule branches. Percentiles are those of the rise, and
    of the rule's P. Results without a decision, and decisions at marks, do not count. {} for none.
    """
    judged = [decision for decision in decisions if decision.kind == AFTER_RESULT]
    if not judged:
        return {}
    rises = [decision.rise for decision in judged]
    probabilities = [decision.probability for decision in judged]
    return {
        "decisions": len(judged),
        "initial_entropy": _mean([decision.initial_entropy for decision in judged]),
        "result_entropy": _mean([decision.entropy for decision in judged]),
        "entropy_rise": _mean(rises),
        **_percentiles("entropy_rise", rises),
        "rises": _mean([rise > 0 for rise in rises]),
        **_percentiles("branch_probability", [p for p in probabilities if p is not None]),
        "branches_wanted": _mean([decision.wanted for decision in judged]),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(np.array(values, np.float64), PERCENTILES)
    return {f"{name}_p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def step_metrics(turns: Sequence[Node], leaves: Sequence[Sequence[Node]]) -> dict[str, float]:
    """Return the metrics of environments with a state: turns are unique nodes, leaves whole.

    ``terminated``: the share of leaves that their world ended; ``truncated``: that a limit of steps
    ended, the world's or the recipe's. ``step_reward``: the mean reward of a step, one that leaves
    share counting once. ``refused``: the share of the leaves' steps that were not admissible;
    ``refused_again``: of the leaves' steps that wrote once more what had just been refused;
    ``world_broken``: the share of leaves whose world failed, maybe because of what they did.
    """
    ended = [leaf[-1].outcome for leaf in leaves]
    return {
        "terminated": _mean([outcome == Outcome.TERMINATED for outcome in ended]),
        "truncated": _mean([outcome in OUT_OF_STEPS for outcome in ended]),
        "world_broken": _mean([outcome == Outcome.WORLD_BROKEN for outcome in ended]),
        "step_reward": _mean([turn.observation.reward for turn in turns if turn.observation]),
        **refusals(leaves),
    }


def refusals(leaves: Sequence[Sequence[Node]]) -> dict[str, float]:
    """Return ``refused``, ``refused_again`` and ``refused_<reason>`` of ``step_metrics``."""
    steps = [[turn for turn in sampled(leaf) if turn.observation] for leaf in leaves]
    count = max(1, sum(map(len, steps)))
    again = [
        _is_refused(before) and _is_refused(turn) and turn.text.strip() == before.text.strip()
        for of_leaf in steps
        for before, turn in pairwise(of_leaf)
    ]
    refused = [turn for of_leaf in steps for turn in of_leaf if _is_refused(turn)]
    reasons = Counter(reason for turn in refused if (reason := _reason(turn)))
    return {
        REFUSED: len(refused) / count,
        f"{REFUSED}_again": sum(again) / count,
        **{f"{REFUSED}_{reason}": times / count for reason, times in sorted(reasons.items())},
    }


def _is_refused(turn: Node) -> bool:
    return turn.observation is not None and turn.observation.outcome == Outcome.NOT_ADMISSIBLE


def _reason(turn: Node) -> str | None:
    """Return why the world refused an act, if it says so in one short word."""
    assert turn.observation
    reason = str(turn.observation.info.get(REFUSAL, ""))
    return reason if REASON.fullmatch(reason) else None


def around_results(trees: Sequence[Tree], window: int) -> tuple[list[Entropies], list[Entropies]]:
    """Return the entropies of the turns before and of the turns after tool results.

    A fresh prompt below a turn, which shows what the turn was answered, is a result, too. Only
    results that a turn follows count. Where branches share a result, one turn is before it and
    several are after it. Turns after a result are cut to their first ``window`` tokens; turns that
    are equal up to there, because they branch later, count once.
    """
    before: list[Entropies] = []
    after: list[Entropies] = []
    for tree in trees:
        starts = _turns_after_results(tree)
        results = dict.fromkeys(tree.nodes[parts[0]].parent for parts in starts)
        before += [_entropies(tree, tree.parts(tree.nodes[result].parent)) for result in results]
        whole = [parts for parts in starts if tree.nodes[parts[-1]].outcome != Outcome.PART]
        seen = dict.fromkeys(_within(tree, parts, window) for parts in whole)
        after += [_entropies(tree, parts)[:window] for parts in seen]
    return before, after


def _turns_after_results(tree: Tree) -> list[list[int]]:
    """Return the turns after a tool result: one list of parts for each part that it ends with."""
    turns = [tree.parts(index) for index, node in enumerate(tree.nodes) if node.kind == TURN]
    return [parts for parts in turns if tree.nodes[parts[0]].parent > 0]  # 0 is the first prompt


def _within(tree: Tree, parts: Sequence[int], window: int) -> tuple[int, ...]:
    """Return the parts of a turn that contain its first ``window`` tokens."""
    starts = np.cumsum([0, *(len(tree.nodes[part].tokens) for part in parts[:-1])])
    return tuple(part for part, start in zip(parts, starts, strict=True) if start < window)


def _entropies(tree: Tree, parts: Sequence[int]) -> Entropies:
    return np.concatenate([tree.nodes[part].entropies for part in parts])


def entropy_profile(trees: Sequence[Tree]) -> list[dict[str, float]]:
    """Return the mean entropy by token position from a tool result; -1 is the last token before.

    A token that several turns after a result share counts once.
    """
    values: dict[int, list[float]] = {}
    for turn in around_results(trees, PROFILE_AFTER)[0]:
        tail = turn[-PROFILE_BEFORE:]
        for position, entropy in enumerate(tail, start=-len(tail)):
            values.setdefault(position, []).append(float(entropy))
    for tree in trees:
        for *earlier, part in _turns_after_results(tree):
            start = 1 + sum(len(tree.nodes[index].tokens) for index in earlier)
            near = tree.nodes[part].entropies[: max(0, PROFILE_AFTER + 1 - start)]
            for position, entropy in enumerate(near, start=start):
                values.setdefault(position, []).append(float(entropy))
    return [
        {
            "position": position,
            "mean": _mean(entropies),
            "standard_error": float(np.std(entropies) / np.sqrt(len(entropies))),
        }
        for position, entropies in sorted(values.items())
    ]


def _mean(values: Sequence[float] | NDArray[np.float32]) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0


COUNTS = (
    "leaves",
    "branches",
    "decisions",
    "tool_calls",
    "tool_errors",
    "environment_steps",
    "sampled_tokens",
)


def together(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several batches of one iteration: add counts, average the rest.

    What a batch lacks, such as branching decisions, is combined of the others. Reasons for which a
    batch has refused nothing are 0 there.
    """
    names = dict.fromkeys(name for entry in metrics for name in entry)
    reasons = {name: 0.0 for name in names if name.startswith(REFUSED)}
    full = [{**reasons, **entry} if REFUSED in entry else entry for entry in metrics]
    values = {name: [entry[name] for entry in full if name in entry] for name in names}
    return {name: sum(of) / (1 if name in COUNTS else len(of)) for name, of in values.items()}


def window_entropy(entropies: NDArray[np.float32], window: int) -> float:
    """Return the mean of the first ``window`` entropies [S], or of all if there are fewer."""
    return float(np.mean(entropies[:window], dtype=np.float64)) if len(entropies) else 0.0
