"""Advantages in environment steps, compared where leaves of a group share a state. Pure.

The reward of a step is the sum of its tokens' ``token_rewards``, plus ``reward`` at the last step;
each token of a step gets the step's advantage. **Chosen**: the key of a state is the observation
that the step acted on, exact and within the group, that is (question, observation), or with ``key:
history`` all observations of the episode up to it; a truncated episode ends like any other; a step
that several leaves share counts once for each of them.

Equal observations after other histories are other states where what came before matters, which is
the objection of HGPO (arXiv 2602.22817) to GiGPO, and holds for GAGPO too. ``history`` answers it
in the plainest way, and leaves fewer steps to compare; it is not HGPO's algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from params.schema import algorithms
from tasks.learning.estimators import Advantages, Floats, Group, LeafTrajectory
from tasks.learning.estimators.critic import discounted_sums, temporal_differences
from tasks.learning.estimators.group import (
    Keys,
    group_advantages,
    joined,
    mean_by_key,
    relative,
    split_like,
    whitened,
)

OBSERVATION = "observation"  # the state's key, unless a row chooses another


def two_level(groups: Sequence[Group], choice: algorithms.TwoLevel) -> Advantages:
    """Return A = A_episode + omega A_step; GiGPO, arXiv 2505.10978.

    A_episode: group-relative whole reward. A_step: the discounted return from the step on, relative
    to the returns from all steps of the group with an equal state; exactly 0 where the state
    occurs once. ``std``: both divided by their sample standard deviation.
    Raises ValueError where an episode's states do not fit its steps.
    """
    advantages = []
    for group in groups:
        episode_L = group_advantages(group, choice.std)
        returns = discounted_sums([step_rewards(leaf) for leaf in group], choice.gamma)
        relative_N = relative(joined(returns), _state_keys(group, choice.key), choice.std)
        leaves = zip(episode_L, split_like(relative_N, returns), group, strict=True)
        advantages.append(
            [(episode + choice.omega * step_E)[leaf.steps] for episode, step_E, leaf in leaves]
        )
    return advantages


def grouped_gae(groups: Sequence[Group], choice: algorithms.GroupedGae) -> Advantages:
    """Return GAE over steps with the group as the critic; GAGPO, arXiv 2605.13217.

    ``step_advantages``, then by ``normalisation`` (x - mean) / (std + 1e-6) over all steps of the
    group, or of the batch, or nothing. Under ``batch`` every group shifts the others, so one
    without spread gets the same value at each step instead of exactly 0.

    ``omega`` adds an episode term, A = A_step + omega A_episode (0, the paper's algorithm, adds
    none). **Chosen**: A_episode is the group-relative whole reward, divided by its standard
    deviation as GRPO's is, and is added after the normalisation, so omega does not depend on the
    scale of the rewards. Raises ValueError as ``two_level``.
    """
    batch = [step_advantages(group, choice.gamma, choice.lambda_, choice.key) for group in groups]
    advantages = []
    for steps, group in zip(NORMALISATIONS[choice.normalisation](batch), groups, strict=True):
        episode_L = choice.omega * group_advantages(group, std=True)
        leaves = zip(steps, episode_L, group, strict=True)
        advantages.append([(A_E + episode)[leaf.steps] for A_E, episode, leaf in leaves])
    return advantages


def _by_group(batch: Sequence[Sequence[Floats]]) -> Advantages:
    return [whitened([group])[0] for group in batch]


def _as_they_are(batch: Sequence[Sequence[Floats]]) -> Advantages:
    return [list(group) for group in batch]


NORMALISATIONS: dict[str, Callable[[Sequence[Sequence[Floats]]], Advantages]] = {
    "group": _by_group,
    "batch": whitened,
    "none": _as_they_are,
}


def step_advantages(
    group: Group, gamma: float, lambda_: float, key: str = OBSERVATION
) -> list[Floats]:
    """Return GAGPO's advantages before they are standardised; leaf -> [E].

    V(s) = mean discounted return over every occurrence of state s in the group, and 0 after the
    last step; delta_t = r_t + gamma V(s_{t+1}) - V(s_t); A_t = delta_t + gamma lambda A_{t+1}.
    """
    rewards = [step_rewards(leaf) for leaf in group]
    returns = discounted_sums(rewards, gamma)
    values = split_like(mean_by_key(joined(returns), _state_keys(group, key)), returns)
    deltas = [
        temporal_differences(r_E, V_E, gamma) for r_E, V_E in zip(rewards, values, strict=True)
    ]
    return discounted_sums(deltas, gamma * lambda_)


def step_rewards(leaf: LeafTrajectory) -> Floats:
    """Return r_t of each environment step. [E]

    Raises ValueError where ``states`` and ``steps`` differ in number.
    """
    steps = int(leaf.steps.max()) + 1 if len(leaf.steps) else 0
    if steps != len(leaf.states):
        raise ValueError(
            f"an episode has {steps} environment steps and {len(leaf.states)} states: it needs the "
            "observation that each step acted on"
        )
    rewards_E = np.bincount(leaf.steps, leaf.token_rewards, minlength=steps).astype(np.float64)
    rewards_E[-1:] += leaf.reward
    return rewards_E


def state_sharing(groups: Sequence[Group], key: str = OBSERVATION) -> dict[str, float]:
    """Measure how often states are shared; without that these estimators have no step signal.

    ``singleton_share``: the share of steps whose state no other step of the group has.
    ``mean_state_group``: steps per distinct state of a group. **Chosen**: both over all steps of
    all groups; 0 where there is no step.
    """
    sizes_K = _state_counts(groups, key)
    if not len(sizes_K):
        return {"singleton_share": 0.0, "mean_state_group": 0.0}
    return {
        "singleton_share": float((sizes_K == 1).sum() / sizes_K.sum()),
        "mean_state_group": float(sizes_K.mean()),
    }


SIZES = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, ">8": np.inf}  # of state groups -> the largest


def state_group_sizes(groups: Sequence[Group], key: str = OBSERVATION) -> dict[str, int]:
    """Count the steps whose state has that many steps in the group, by SIZES (GAGPO, table 5)."""
    sizes_K = _state_counts(groups, key)
    places_K = np.searchsorted(list(SIZES.values()), sizes_K)
    steps = np.bincount(places_K, sizes_K, minlength=len(SIZES))
    return {name: int(count) for name, count in zip(SIZES, steps, strict=True)}


def _state_counts(groups: Sequence[Group], key: str) -> Keys:
    """Return how many steps each distinct state of each group has. [K]"""
    counts = [np.bincount(_state_keys(group, key)) for group in groups]
    return np.concatenate([np.zeros(0, np.int64), *counts])


def _state_keys(group: Group, key: str) -> Keys:
    """Number the distinct states 0, 1, ... over the steps of all leaves in turn. [N]"""
    numbers: dict[Hashable, int] = {}
    states = [state for leaf in group for state in STATES[key](leaf.states)]
    return np.array([numbers.setdefault(state, len(numbers)) for state in states], np.int64)


def _histories(states: Sequence[str]) -> list[Hashable]:
    return [tuple(states[: step + 1]) for step in range(len(states))]


STATES: dict[str, Callable[[Sequence[str]], Sequence[Hashable]]] = {
    OBSERVATION: lambda states: states,
    "history": _histories,  # all that the episode has shown up to the step
}
