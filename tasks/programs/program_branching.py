"""Where the episodes of a program branch: after a tool's result, by ARPO's rule.

A program cannot be copied. So a branch is the program from its start, which is given the answers
that were recorded until the branching point, and then samples its own. Episodes run to their ends
first; then their branches begin together, so that no decision depends on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from params.schema.reinforce import Rollout
from tasks.programs.episodes import ProgramEpisode, seed_of
from tasks.rollouts.branching import decide
from tasks.trees.metrics import window_entropy
from tasks.trees.tree import Decision


@dataclass(frozen=True)
class BranchPoint:
    """A decision after a result of an episode, and the answer before which branches begin."""

    episode: ProgramEpisode
    answer: int  # its number in the episode
    decision: Decision


def judge(ended: Sequence[ProgramEpisode], left: int, rollout: Rollout) -> list[BranchPoint]:
    """Judge each answer after a result, in the order of episodes; add branches while some are left.

    ARPO, arXiv 2507.19849, section 3.1. What an episode shares with another has been judged there,
    and so has the first answer of a branch.
    """
    points = []
    for episode in ended:
        answers = episode.in_order()
        initial = window_entropy(answers[0].sample.entropies, rollout.entropy_window)
        first = episode.shared + 1 if episode.shared else 1
        for number in range(first, len(answers)):
            answer = answers[number]
            if answer.before is not answers[number - 1]:
                continue
            coin = np.random.Generator(np.random.Philox(seed_of(episode, f"branch/{number}")))
            decision = decide(
                initial,
                answer.sample.entropies,
                rollout,
                coin.random(),
                node=-1,
                path=episode.index,
                position=len(answer.prompt),
            )
            added = min(rollout.branch, left) if decision.wanted else 0
            left -= added
            points.append(BranchPoint(episode, number, replace(decision, added=added)))
    return points
