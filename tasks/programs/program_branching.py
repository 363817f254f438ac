"""Where the episodes of a program branch: after results, at marks, or at random.

A program cannot be copied. So a branch is the program from its start, which is given the answers
that were recorded until the branching point, and then samples its own; inside an answer it is given
the beginning of that, and samples the rest. Episodes run to their ends first; then their branches
begin together, so that no decision depends on time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from params.schema.reinforce import Rollout
from tasks.programs.assembling import tree_of
from tasks.programs.episodes import ProgramEpisode, SampledAnswer, seed_of
from tasks.rollouts.branching import branching_points, decide
from tasks.rollouts.paths import Setting
from tasks.trees import marks as segment
from tasks.trees.metrics import window_entropy
from tasks.trees.tree import TURN, Decision


@dataclass(frozen=True)
class BranchPoint:
    """A decision about an episode: before one of its answers, or inside it."""

    episode: ProgramEpisode
    answer: int  # its number in the episode
    decision: Decision
    tokens: int = 0  # of the answer, which branches begin with


def after_results(
    ended: Sequence[ProgramEpisode],
    everyone: Sequence[ProgramEpisode],
    left: int,
    setting: Setting,
) -> list[BranchPoint]:
    """Judge each answer after a result, in the order of episodes; add branches while some are left.

    ARPO, arXiv 2507.19849, section 3.1. What an episode shares with another has been judged there,
    and so has the first answer of a branch.
    """
    points, rollout = [], setting.rollout
    for episode in ended:
        answers = episode.in_order()
        initial = _initial_entropy(answers, rollout)
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


def at_marks(
    ended: Sequence[ProgramEpisode],
    everyone: Sequence[ProgramEpisode],
    left: int,
    setting: Setting,
) -> list[BranchPoint]:
    """Branch the first episodes of a question at their first marks, while branches are left.

    GPG, arXiv 2512.10365. Branches never branch, nor do episodes that fill up the budget.
    """
    rollout = setting.rollout
    first = [each for each in ended if each.first < 0 and each.index < rollout.initial]
    if not first:
        return []
    tree, _ = tree_of(first[0].question, first, setting.tokenizer, setting.policy_steps)
    points = []
    for episode, trajectory in zip(first, tree.trajectories(), strict=True):
        longest = max(int(node.tokens.max(initial=0)) for node in trajectory)
        pieces = segment.token_texts(setting.tokenizer, longest + 1)
        ends = segment.ends(setting.marks, trajectory, pieces)
        for point in branching_points(trajectory, ends, rollout.marks_per_rollout):
            answer = sum(node.kind == TURN for node in trajectory[: point.place])
            tokens = point.tokens if point.inside else 0
            if not _can_begin(episode.in_order(), answer, tokens):
                continue
            decision = decide(
                _initial_entropy(episode.in_order(), rollout),
                point.entropies,
                rollout,
                node=-1,
                path=episode.index,
                position=point.position,
            )
            added = min(rollout.branch, left)
            left -= added
            points.append(BranchPoint(episode, answer, replace(decision, added=added), tokens))
    return points


def at_random(
    ended: Sequence[ProgramEpisode],
    everyone: Sequence[ProgramEpisode],
    left: int,
    setting: Setting,
) -> list[BranchPoint]:
    """Branch after random results: a round of Tree-GRPO (arXiv 2509.21240), in which each initial
    rollout gets ``marks_per_rollout`` branches, from any episode that has begun as it did.
    """
    rollout, points = setting.rollout, []
    grown = [each for each in everyone if each.root < rollout.initial and not each.differs]
    seed = seed_of(everyone[0], f"branch/{len(everyone)}")
    chance = np.random.Generator(np.random.Philox(seed))
    for root in sorted({each.root for each in grown}):
        places = _observed([each for each in grown if each.root == root])
        for _ in range(rollout.marks_per_rollout if places else 0):
            episode, number = places[chance.integers(len(places))]
            answers = episode.in_order()
            decision = decide(
                _initial_entropy(answers, rollout),
                answers[number].sample.entropies,
                rollout,
                node=-1,
                path=episode.index,
                position=len(answers[number].prompt),
            )
            points.append(BranchPoint(episode, number, replace(decision, added=1)))
    return points[:left]


def _observed(episodes: Sequence[ProgramEpisode]) -> list[tuple[ProgramEpisode, int]]:
    """Return the answers that followed something read after a turn; a shared place is there once.

    Each is an episode and the number of the answer in it.
    """
    places: dict[tuple[int, bytes], tuple[ProgramEpisode, int]] = {}
    for episode in episodes:
        answers = episode.in_order()
        for number in range(1, len(answers)):
            if not _can_begin(answers, number):
                continue
            key = id(answers[number - 1]), answers[number].prompt.tobytes()
            places.setdefault(key, (episode, number))
    return list(places.values())


def _can_begin(answers: Sequence[SampledAnswer], number: int, tokens: int = 0) -> bool:
    """Return whether a branch can begin before an answer, or after so many of its tokens.

    The choices of one request are given together, so none begins between two of them, or in one.
    """
    if tokens:
        return answers[number].asked.choices == 1
    return number == 0 or answers[number].asked is not answers[number - 1].asked


def _initial_entropy(answers: Sequence[SampledAnswer], rollout: Rollout) -> float:
    return window_entropy(answers[0].sample.entropies, rollout.entropy_window)


def never(
    ended: Sequence[ProgramEpisode],
    everyone: Sequence[ProgramEpisode],
    left: int,
    setting: Setting,
) -> list[BranchPoint]:
    """Branch nowhere."""
    return []


Where = Callable[
    [Sequence[ProgramEpisode], Sequence[ProgramEpisode], int, Setting], list[BranchPoint]
]
# By the branching of a row: where episodes that have just ended branch, or any that have ended, so
# that at most so many branches begin; none: the budget is filled up from the prompt.
BRANCHING: dict[str, Where] = {
    "none": never,
    "entropy": after_results,
    "marks": at_marks,
    "random": at_random,
}
