"""advantage: credit for every sampled token from the rewards of its group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from params.schema.algorithms import Algorithm, Gae
from params.schema.base import Machine
from params.schema.reinforce import Update
from params.schema.teacher import ServerTeacher
from tasks.chat import teacher_scores
from tasks.chat.teacher_scores import SCORES
from tasks.learning import batch
from tasks.learning.algorithm import CREDITED, assemble
from tasks.learning.credit import along, episodes_of
from tasks.learning.estimators import Floats, LeafTrajectory
from tasks.learning.estimators import critic as critics
from tasks.learning.estimators import step as steps
from tasks.learning.learner_group import HERE, Learners
from tasks.learning.packing import ByNode
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.tools.recording import replay_folder
from tasks.trees import marks
from tasks.trees.tables import load_trees, read_rows, write_table
from tasks.trees.tree import Tree, masked_leaves

TABLE = pa.schema(
    {
        "question": pa.string(),
        "leaf": pa.int32(),
        "kept": pa.bool_(),  # false: masked or dropped by the group filter; nothing learns from it
        "advantage": pa.float64(),  # mean over the leaf's sampled tokens
        "advantages": pa.list_(pa.float32()),  # of each sampled token
        "segments": pa.list_(pa.int32()),  # macro action of each sampled token
        "returns": pa.list_(pa.float32()),  # value targets of a critic; null without one
        "values": pa.list_(pa.float32()),  # its values before the update; null without one
    }
)
Parts = dict[tuple[str, int], dict[str, float]]  # (question, leaf) -> part of the reward -> value
KL_LIMIT = 10.0  # of log pi - log pi_ref at one token


@dataclass(frozen=True)
class RewardedTree:
    """A tree with the leaves that count, their rewards, and the scores of their answers.

    The others are masked: how they ended says nothing of the policy. Nodes that only they have
    stay in the tree, on no path.
    """

    tree: Tree
    leaves: list[int]  # [L] their numbers in the whole tree
    rewards: list[float]  # [L] length shaping included
    scores: list[float]  # [L] of the answers alone, whatever their length and format
    masked: list[int]  # numbers of the other leaves
    parts: list[dict[str, float]] | None = None  # [L] the rewards by part, where they are wanted

    @property
    def has_spread(self) -> bool:
        return len(set(self.scores)) > 1


@dataclass(frozen=True)
class AdvantageInputs:
    """What decides advantages: an iteration's trees and rewards, and how they are credited."""

    policy: Artifact  # that learns
    # The policies that sampled the trees, by the optimizer steps that they had taken: earlier ones,
    # if they sampled ahead.
    samplers: Mapping[int, Artifact]
    critic: Artifact | None  # beside the policy; None where the algorithm has none
    reference: Artifact | None  # the policy that a KL penalty in the reward compares with, or None
    trees: list[Artifact]
    rewards: list[Artifact]
    algorithm: Algorithm
    questions: int  # of an iteration, at most, once the group filter has dropped some
    settings: Update
    temperature: float  # of the rollout
    response_tokens: int  # the budget of a response
    machine: Machine
    step_weight: float = 0.0  # of the rewards of an environment's steps within the reward
    # tables of the rewards' parts; None where the estimator compares whole rewards
    parts: list[Artifact] | None = None
    # whose probabilities are learned: a policy's files, or a server; None: there is none
    teacher: Artifact | ServerTeacher | None = None


@substeps.recorded
def advantage(step: SubStep, inputs: AdvantageInputs, *, learners: Learners = HERE) -> Record:
    """Estimate the advantages of every leaf; artifact ``advantages``, a row a leaf.

    ``learners`` is where a critic and a reference compute.
    """
    began = time.perf_counter()
    scored = _scored(inputs.trees, inputs.rewards, inputs.algorithm.masked, inputs.parts or ())
    kept = _filtered(scored, inputs.algorithm, inputs.questions)
    acting = resident.POLICIES.load_learner(Path(inputs.policy.path), inputs.machine)
    none = [None] * len(kept)
    values = _values(kept, inputs, learners) if inputs.algorithm.critic else none
    penalties = _penalties(kept, inputs, learners) if inputs.reference else none
    vocabulary = acting.model.config.get_text_config(decoder=True).vocab_size
    texts = marks.token_texts(acting.tokenizer, vocabulary)
    lessons = _lessons(kept, inputs, learners, texts, step) if inputs.teacher else none
    groups = [
        episodes_of(
            entry.tree,
            entry.rewards,
            inputs.algorithm,
            penalty,
            value,
            inputs.step_weight,
            entry.parts,
        )
        for entry, penalty, value in zip(kept, penalties, values, strict=True)
    ]
    rows = [
        *_rows(kept, groups, inputs.algorithm, texts, inputs.response_tokens, lessons),
        *_dropped(scored, kept),
    ]
    write_table(pa.Table.from_pylist(rows, schema=TABLE), step.out / "advantages.parquet")
    key = _state_key(inputs.algorithm)
    sizes = steps.state_group_sizes(groups, key) if key else {}
    return {
        "metrics": {
            **_metrics(scored, kept, groups, penalties, rows, inputs.algorithm),
            **(_from_teacher(kept, lessons, inputs.algorithm) if inputs.teacher else {}),
        },
        "seconds": {"advantage": time.perf_counter() - began},
        "state_groups": sizes,  # a metric for each size would be too many
        "surplus": _surplus(scored, kept, inputs.algorithm),
    }


def _scored(
    trees: Sequence[Artifact],
    rewards: Sequence[Artifact],
    outcomes: Sequence[str],
    parts: Sequence[Artifact] = (),
) -> list[RewardedTree]:
    """Return all trees of an iteration with the rewards of their leaves.

    Leaves with one of the ``outcomes`` are masked. ``parts``: tables of the rewards' parts, where
    these are wanted.
    """
    of_leaves: Parts = {}
    for table in parts:
        for entry in read_rows(Path(table.path)):
            leaf = of_leaves.setdefault((entry["question"], entry["leaf"]), {})
            leaf[entry["part"]] = entry["value"]
    scored_trees: list[RewardedTree] = []
    for grown, given in zip(trees, rewards, strict=True):
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for entry in read_rows(Path(given.path)):
            rows.setdefault(entry["question"], []).append(entry)
        scored_trees += [
            _scored_tree(tree, rows[tree.question.id], outcomes, of_leaves)
            for tree in load_trees(Path(grown.path))
        ]
    return scored_trees


def _scored_tree(
    tree: Tree, rows: Sequence[Mapping[str, Any]], outcomes: Sequence[str], parts: Parts
) -> RewardedTree:
    """Return a tree with what its leaves got; a penalty on length is a part like any other."""
    masked = masked_leaves(tree, outcomes)
    counting = [leaf for leaf, left_out in enumerate(masked) if not left_out]
    return RewardedTree(
        tree.with_leaves(counting),
        counting,
        rewards=[rows[leaf]["reward"] + rows[leaf]["length_penalty"] for leaf in counting],
        scores=[rows[leaf]["score"] for leaf in counting],
        masked=[leaf for leaf, left_out in enumerate(masked) if left_out],
        parts=[
            {**parts[tree.question.id, leaf], "length_penalty": rows[leaf]["length_penalty"]}
            for leaf in counting
        ]
        if parts
        else None,
    )


def _filtered(
    scored: Sequence[RewardedTree], algorithm: Algorithm, size: int
) -> list[RewardedTree]:
    """Return all groups, or with a filter the first ``size`` whose answers' scores differ.

    DAPO (arXiv 2503.14476, equation 11). A group that differs in length or format alone says
    nothing about the task. **Chosen**: a group of which masks leave fewer than two leaves is
    dropped, too: what is left has nothing to be compared with.
    """
    groups = [entry for entry in scored if not entry.masked or len(entry.leaves) > 1]
    if algorithm.group_filter == "none":
        return groups
    return [entry for entry in groups if entry.has_spread][:size]


def _surplus(
    scored: Sequence[RewardedTree], kept: Sequence[RewardedTree], algorithm: Algorithm
) -> list[str]:
    """Return the questions whose groups the next iteration takes, as the algorithm chooses."""
    if algorithm.surplus == "wasted":
        return []
    used = {id(entry) for entry in kept}
    useful = _filtered(scored, algorithm, len(scored))
    return [entry.tree.question.id for entry in useful if id(entry) not in used]


def _values(
    kept: Sequence[RewardedTree], inputs: AdvantageInputs, learners: Learners
) -> list[ByNode]:
    """Return the critic's value of each token, by tree and node."""
    trees = [entry.tree for entry in kept]
    critic = inputs.algorithm.critic
    assert critic
    return learners.run(
        batch.values_of, inputs.policy, critic, trees, inputs.settings, inputs.machine
    )


def _penalties(
    kept: Sequence[RewardedTree], inputs: AdvantageInputs, learners: Learners
) -> list[list[Floats]]:
    """Return -coefficient * k1 of each sampled token, by tree and node.

    k1 = log pi - log pi_ref.
    """
    kl, reference = inputs.algorithm.kl, inputs.reference
    assert kl and reference
    return _times(-kl.coefficient, _log_ratios(kept, reference, inputs, learners))


def _lessons(
    kept: Sequence[RewardedTree],
    inputs: AdvantageInputs,
    learners: Learners,
    texts: Sequence[str],
    step: SubStep,
) -> list[list[Floats]]:
    """Return weight * (log teacher - log pi) of each sampled token, by tree and node.

    On-policy distillation: its expectation over what pi samples is -KL(pi || teacher). ``texts``:
    of the policy's ids. What a server says is written beside the advantages, and a replay reads it.
    """
    choice, teacher = inputs.algorithm.teacher, inputs.teacher
    assert choice and teacher
    if isinstance(teacher, Artifact):
        return _times(-choice.weight, _log_ratios(kept, teacher, inputs, learners))
    folder = replay_folder()
    known = teacher_scores.read(sorted(folder.rglob(SCORES))) if folder else {}
    trees = [entry.tree for entry in kept]
    said, table = teacher_scores.logprobs_of(teacher, trees, texts, step.recipe, known)
    write_table(table, step.out / SCORES)
    return _times(-choice.weight, _log_ratios(kept, None, inputs, learners, said))


def _times(factor: float, by_node: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    return [[factor * values for values in of_tree] for of_tree in by_node]


def _log_ratios(
    kept: Sequence[RewardedTree],
    reference: Artifact | None,
    inputs: AdvantageInputs,
    learners: Learners,
    said: Sequence[Sequence[NDArray[Any]]] = (),
) -> list[list[Floats]]:
    """Return log pi - log pi_reference of each sampled token, by tree and node.

    ``said``: log pi_reference, where it is no policy of this machine. Else both are computed here,
    at the sampling temperature and over the ids that have a token, pi with the policy that sampled
    the turn: the engine's log-probabilities differ from these by rounding, which would be a
    difference where pi = pi_reference. It is clamped to +-KL_LIMIT.
    """
    trees = [entry.tree for entry in kept]
    policies = learners.run(
        batch.logprobs_of,
        list(inputs.samplers.values()),
        reference,
        inputs.policy,
        trees,
        inputs.temperature,
        inputs.settings,
        inputs.machine,
    )
    sampling = policies[: len(inputs.samplers)]
    referring = said if reference is None else policies[-1]
    sampled_by = batch.as_sampled(trees, dict(zip(inputs.samplers, sampling, strict=True)))
    return [
        [
            np.clip(policy_logprobs - reference_logprobs, -KL_LIMIT, KL_LIMIT)
            for policy_logprobs, reference_logprobs in zip(of_sampler, of_reference, strict=True)
        ]
        for of_sampler, of_reference in zip(sampled_by, referring, strict=True)
    ]


def _rows(
    kept: Sequence[RewardedTree],
    groups: Sequence[Sequence[LeafTrajectory]],
    algorithm: Algorithm,
    texts: Sequence[str],
    response_tokens: int,
    lessons: Sequence[Sequence[Floats] | None],
) -> list[dict[str, Any]]:
    """Return a row of ``TABLE`` for each leaf that is learned from.

    ``lessons``: what a teacher adds to the advantage of each sampled token, by tree and node.
    """
    if not kept:
        return []
    credited = [
        [
            given if lesson is None else given + along(entry.tree, leaf, lesson)
            for leaf, given in enumerate(of_tree)
        ]
        for entry, lesson, of_tree in zip(
            kept, lessons, assemble(algorithm, response_tokens).estimator(groups), strict=True
        )
    ]
    targets = _targets(groups, algorithm)
    return [
        {
            "question": entry.tree.question.id,
            "leaf": entry.leaves[leaf],
            "kept": True,
            "advantage": float(np.mean(credited[i][leaf])),
            "advantages": credited[i][leaf],
            "segments": marks.segments(algorithm.marks, trajectory, texts),
            "returns": targets[i][leaf] if targets else None,
            "values": groups[i][leaf].values,
        }
        for i, entry in enumerate(kept)
        for leaf, trajectory in enumerate(entry.tree.trajectories())
    ]


def _targets(
    groups: Sequence[Sequence[LeafTrajectory]], algorithm: Algorithm
) -> list[list[Floats]] | None:
    """Return the value targets of each sampled token, by group and leaf; None without a critic."""
    if not isinstance(algorithm.estimator, Gae):
        return None
    return critics.value_targets(groups, algorithm.estimator.gamma, algorithm.estimator.lambda_)


def _dropped(scored: Sequence[RewardedTree], kept: Sequence[RewardedTree]) -> list[dict[str, Any]]:
    """Return a row for each leaf that is masked, or that the group filter has dropped."""
    learned = {id(entry) for entry in kept}
    return [
        {"question": entry.tree.question.id, "leaf": leaf, "kept": False, "advantage": 0.0}
        for entry in scored
        for leaf in sorted(entry.masked + ([] if id(entry) in learned else entry.leaves))
    ]


def _of_views(kept: Sequence[RewardedTree], by_node: Sequence[Sequence[Floats] | None]) -> Floats:
    """Return values of nodes for each leaf and sampled token, in one list. [N]"""
    views = [
        along(entry.tree, leaf, values)
        for entry, values in zip(kept, by_node, strict=True)
        for leaf in range(len(entry.rewards))
        if values
    ]
    return np.concatenate([np.zeros(0), *views])


def _from_teacher(
    kept: Sequence[RewardedTree], lessons: Sequence[Sequence[Floats] | None], algorithm: Algorithm
) -> dict[str, float]:
    """Return the mean of log pi - log teacher over sampled tokens: an estimate of their KL."""
    values = _of_views(kept, lessons)
    if not algorithm.teacher or not len(values):
        return {"kl_teacher": 0.0}
    return {"kl_teacher": float(-values.mean() / algorithm.teacher.weight)}


def _state_key(algorithm: Algorithm) -> str:
    """Return what makes two states equal; "" where steps are not credited."""
    if algorithm.marks.kind != "step":
        return ""
    key = getattr(algorithm.estimator, "key", steps.OBSERVATION)
    return key if key in steps.STATES else steps.OBSERVATION


def _metrics(
    scored: Sequence[RewardedTree],
    kept: Sequence[RewardedTree],
    groups: Sequence[Sequence[LeafTrajectory]],
    penalties: Sequence[Sequence[Floats] | None],
    rows: Sequence[Mapping[str, Any]],
    algorithm: Algorithm,
) -> dict[str, float]:
    learned = [entry for entry in rows if entry["kept"]]
    unit = "token" if algorithm.teacher else CREDITED[algorithm.estimator.kind]
    metrics = {
        **_spread(_credits(learned, groups, unit)),
        "groups_kept": len(kept) / len(scored),
        "masked_share": sum(len(entry.masked) for entry in scored) / (len(rows) or 1),
    }
    if algorithm.group_filter != "none":
        spread = sum(entry.has_spread for entry in scored)
        left = "groups_wasted" if algorithm.surplus == "wasted" else "groups_carried"
        metrics[left] = (spread - len(kept)) / len(scored)  # paid for, and not needed here
    if (key := _state_key(algorithm)) and groups:
        metrics |= steps.state_sharing(groups, key)
    if algorithm.critic and learned:
        values, targets = (
            np.concatenate([entry[name] for entry in learned]) for name in ("values", "returns")
        )
        metrics["explained_variance"] = critics.explained_variance(values, targets)
    if algorithm.kl and algorithm.kl.place == "reward" and groups:
        charges = _of_views(kept, penalties)
        metrics["kl_reference"] = float(-charges.mean() / algorithm.kl.coefficient)
    return metrics


def _credits(
    learned: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[LeafTrajectory]], unit: str
) -> Floats:
    """Return the advantage of each leaf, step or token that gets one of its own. [N]"""
    firsts = {  # where a unit's advantage stands among the leaf's tokens
        "leaf": lambda steps: [0],
        "step": lambda steps: np.unique(steps, return_index=True)[1],
        "token": lambda steps: np.arange(len(steps)),
    }[unit]
    episodes = [episode for group in groups for episode in group]
    values = [
        row["advantages"][firsts(episode.steps)]
        for row, episode in zip(learned, episodes, strict=True)
        if len(episode.steps)
    ]
    return np.concatenate([np.zeros(0), *values])


def _spread(credits_N: Floats) -> dict[str, float]:
    """Return deviation, interquartile range, share with |A| > 1 and extrema; 0 for no advantages.

    GAGPO (arXiv 2605.13217) shows such figures over training, in its figure 4.
    """
    values_N = credits_N if len(credits_N) else np.zeros(1)
    low, high = np.percentile(values_N, [25, 75])
    return {
        "advantage_spread": float(np.std(values_N)),
        "advantage_interquartile_range": float(high - low),
        "advantage_share_above_1": float(np.mean(np.abs(values_N) > 1)),
        "advantage_min": float(np.min(values_N)),
        "advantage_max": float(np.max(values_N)),
    }
