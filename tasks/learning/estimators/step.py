"""Advantages in environment steps, compared where the leaves of a group met equal states. Pure.

The reward of a step is the sum of its tokens' ``token_rewards``, plus ``reward`` at the last step;
each token of a step gets the step's advantage. **Chosen**: the key of a state is the observation
that the step acted on, exact and without history, within the group, that is (question,
observation); a truncated episode ends like any other; a step that several leaves share counts once
for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.learning.estimators import Episode, Estimator, Floats, Group
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


def two_level(omega: float, gamma: float, std: bool) -> Estimator:
    """A = A_episode + omega A_step; GiGPO, arXiv 2505.10978.

    A_episode: group-relative whole reward. A_step: the discounted return from the step on, relative
    to the returns from all steps of the group with an equal state; exactly 0 where the state
    occurs once. ``std``: both divided by their sample standard deviation.
    The estimator raises ValueError where an episode's states do not fit its steps.
    """

    def estimate(groups: Sequence[Group]) -> list[list[Floats]]:
        return [_two_level(group, omega, gamma, std) for group in groups]

    return estimate


def grouped_gae(gamma: float, lambda_: float) -> Estimator:
    """GAE over steps with the group as the critic; GAGPO, arXiv 2605.13217.

    ``step_advantages``, then (x - mean) / (std + 1e-6) over all steps of the group. There is no
    episode term. Raises as ``two_level``'s.
    """

    def estimate(groups: Sequence[Group]) -> list[list[Floats]]:
        return [_grouped_gae(group, gamma, lambda_) for group in groups]

    return estimate


def step_advantages(group: Group, gamma: float, lambda_: float) -> list[Floats]:
    """GAGPO's advantages before they are standardised; leaf -> [E].

    V(s) = mean discounted return over every occurrence of state s in the group, and 0 after the
    last step; delta_t = r_t + gamma V(s_{t+1}) - V(s_t); A_t = delta_t + gamma lambda A_{t+1}.
    """
    rewards = [step_rewards(leaf) for leaf in group]
    returns = discounted_sums(rewards, gamma)
    values = split_like(mean_by_key(joined(returns), _state_keys(group)), returns)
    deltas = [
        temporal_differences(r_E, V_E, gamma) for r_E, V_E in zip(rewards, values, strict=True)
    ]
    return discounted_sums(deltas, gamma * lambda_)


def step_rewards(leaf: Episode) -> Floats:
    """r_t of each environment step. [E] ValueError where ``states`` and ``steps`` do not fit."""
    steps = int(leaf.steps.max()) + 1 if len(leaf.steps) else 0
    if steps != len(leaf.states):
        raise ValueError(
            f"an episode has {steps} environment steps and {len(leaf.states)} states: it needs the "
            "observation that each step acted on"
        )
    rewards_E = np.bincount(leaf.steps, leaf.token_rewards, minlength=steps).astype(np.float64)
    rewards_E[-1:] += leaf.reward
    return rewards_E


def state_sharing(groups: Sequence[Group]) -> dict[str, float]:
    """How often states meet: without shared states these estimators have no signal of their own.

    ``singleton_share``: the share of steps whose state no other step of the group has.
    ``mean_state_group``: steps per distinct state of a group. **Chosen**: both over all steps of
    all groups; 0 where there is no step.
    """
    sizes = [np.bincount(_state_keys(group)) for group in groups]
    sizes_K = np.concatenate([np.zeros(0, np.int64), *sizes])
    if not len(sizes_K):
        return {"singleton_share": 0.0, "mean_state_group": 0.0}
    return {
        "singleton_share": float((sizes_K == 1).sum() / sizes_K.sum()),
        "mean_state_group": float(sizes_K.mean()),
    }


def _two_level(group: Group, omega: float, gamma: float, std: bool) -> list[Floats]:
    episode_M = group_advantages(group, std)
    returns = discounted_sums([step_rewards(leaf) for leaf in group], gamma)
    steps = split_like(relative(joined(returns), _state_keys(group), std), returns)
    return [
        (episode + omega * step_E)[leaf.steps]
        for episode, step_E, leaf in zip(episode_M, steps, group, strict=True)
    ]


def _grouped_gae(group: Group, gamma: float, lambda_: float) -> list[Floats]:
    (advantages,) = whitened([step_advantages(group, gamma, lambda_)])
    return [A_E[leaf.steps] for A_E, leaf in zip(advantages, group, strict=True)]


def _state_keys(group: Group) -> Keys:
    """0, 1, ... for each distinct observation, over the steps of all leaves in turn."""
    numbers: dict[str, int] = {}
    keys = [numbers.setdefault(state, len(numbers)) for leaf in group for state in leaf.states]
    return np.array(keys, np.int64)
