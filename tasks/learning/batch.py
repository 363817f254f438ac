"""What learner processes do for the verbs: passes over trees, an update, and its checkpoint.

Each function here may run in this process or in several that learn together
(tasks/learning/learner_group.py); then all of them call it with equal arguments, and get the
results of all. Torch only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from params.schema import algorithms
from params.schema.algorithms import Algorithm
from params.schema.base import Machine
from params.schema.reinforce import Lora, Update
from tasks.learning import learner, passes, token_values
from tasks.learning.algorithm import assemble
from tasks.learning.credit import weights
from tasks.learning.packing import ByNode, Credit, Credited, uncredited
from tasks.ledger.artifacts import Artifact
from tasks.policy import adapter, checkpoint, resident, sharding
from tasks.trees.tables import load_trees, read_rows
from tasks.trees.tree import TURN, Node, Tree


@dataclass(frozen=True)
class UpdateInputs:
    """What decides an update: the policy, an iteration's credited trees, and how it learns.

    ``critic`` and the state of the ``optimizer`` lie beside ``policy``, from where they are read.
    """

    policy: Artifact
    policy_steps: int  # optimizer steps that the policy has taken
    # The policies that sampled the trees, by the steps that they had taken: earlier ones, if they
    # sampled ahead.
    samplers: Mapping[int, Artifact]
    optimizer: Artifact | None  # None before the first update
    critic: Artifact | None  # None where the algorithm has none, and before the first update
    reference: Artifact | None  # the policy that a KL penalty in the loss compares with, or None
    trees: list[Artifact]
    advantages: Artifact
    algorithm: Algorithm
    settings: Update
    temperature: float  # of the rollout
    response_tokens: int  # the budget of a response
    machine: Machine
    lora: Lora | None  # the first update freezes the policy, and makes an adapter of it


@dataclass(frozen=True)
class Updated:
    """What an update reports: metrics, a table of its tokens, and the questions it learned from.

    ``price``: a line on what training as rows costs, where the policy has no form on trees.
    """

    metrics: dict[str, float]
    tokens: pa.Table
    questions: list[str]
    price: str


# ---------------------------------------------------------------- passes without a gradient


def logprobs_of(
    samplers: Sequence[Artifact],
    reference: Artifact | None,
    learning: Artifact,
    trees: Sequence[Tree],
    temperature: float,
    settings: Update,
    machine: Machine,
) -> list[list[ByNode]]:
    """Return log-probabilities of the sampled tokens: policy -> tree -> node -> tokens.

    The last one is the reference, if there is one. ``learning`` is the policy that learns, which
    may contain the others.
    """
    acting = _loaded(learning, machine)
    batch = [uncredited(tree) for tree in trees]
    every = [(policy, passes.RECORDED) for policy in samplers]
    if reference:
        every.append((reference, _experts_of(reference, samplers)))
    return [
        _logprobs(batch, acting, policy, temperature, settings, machine, experts_of)
        for policy, experts_of in every
    ]


def _experts_of(policy: Artifact, samplers: Collection[Artifact]) -> passes.ExpertsOf:
    """Return whose choice of experts a policy is computed with: one that has sampled, its own.

    So a reference that is the policy itself, as in a first iteration, differs from it by nothing.
    """
    return passes.RECORDED if policy in samplers else passes.OWN_CHOICE


def values_of(
    policy: Artifact,
    critic: algorithms.Critic,
    trees: Sequence[Tree],
    settings: Update,
    machine: Machine,
) -> list[ByNode]:
    """Return the critic's value before each sampled token: tree -> node -> tokens."""
    acting = _loaded(policy, machine, critic)
    return passes.node_values(acting, [uncredited(tree) for tree in trees], settings, machine)


def _loaded(
    policy: Artifact, machine: Machine, critic: algorithms.Critic | None = None
) -> resident.Learner:
    """Return the policy that learns, with its critic if one is given."""
    acting = resident.POLICIES.load_learner(Path(policy.path), machine)
    if critic:
        checkpoint.prepare_critic(acting, critic, machine)
    checkpoint.shard(acting)
    return acting


def _logprobs(
    batch: Sequence[Credited],
    acting: resident.Learner,
    policy: Artifact,
    temperature: float,
    settings: Update,
    machine: Machine,
    experts_of: passes.ExpertsOf,
) -> list[ByNode]:
    with resident.POLICIES.reference_of(Path(policy.path), acting, machine) as model:
        return passes.node_logprobs(model, batch, temperature, settings, machine, experts_of)


def as_sampled(trees: Sequence[Tree], known: Mapping[int, Sequence[ByNode]]) -> list[ByNode]:
    """Return each node's values by the policy that sampled it: tree -> node -> tokens.

    ``known``: the values by each of the policies, by the optimizer steps that it had taken. A
    single policy has sampled all. Raises ValueError for a turn of another policy.
    """
    if len(known) == 1:
        (values,) = known.values()
        return list(values)
    some = next(iter(known))  # nodes that no policy has sampled are empty in all of them
    return [
        [
            known[_sampler(tree, node, known) if node.kind == TURN else some][tree_index][index]
            for index, node in enumerate(tree.nodes)
        ]
        for tree_index, tree in enumerate(trees)
    ]


def _sampler(tree: Tree, turn: Node, known: Collection[int]) -> int:
    if turn.policy_steps not in known:
        raise ValueError(
            f"the tree of question {tree.question.id} has a turn of the policy after "
            f"{turn.policy_steps} optimizer steps, and its samplers had taken {sorted(known)}: run "
            "`make clean` to sample it anew"
        )
    return turn.policy_steps


def staleness(trees: Sequence[Tree], policy_steps: int) -> dict[str, float]:
    """Return mean and maximum, over sampled tokens, of the optimizer steps since they were sampled.

    A token that trajectories share counts once. ``policy_steps``: those of the policy that learns.
    """
    turns = [node for tree in trees for node in tree.nodes if node.kind == TURN]
    ages = np.array([policy_steps - turn.policy_steps for turn in turns], np.float64)
    tokens = np.array([len(turn.tokens) for turn in turns])
    if not tokens.sum():
        return {"staleness": 0.0, "staleness_highest": 0.0}
    mean, highest = np.average(ages, weights=tokens), ages[tokens > 0].max()
    return {"staleness": float(mean), "staleness_highest": float(highest)}


# ---------------------------------------------------------------- an update


def update(inputs: UpdateInputs, seed: int, draws: tuple[int, int]) -> Updated:
    """Update the policy, which stays in memory until ``save``.

    ``seed`` decides a new adapter, ``draws`` the order of the trees.
    """
    learning = _learner(inputs, seed)
    batch = _batch(learning, inputs)
    loss = assemble(inputs.algorithm, inputs.response_tokens).loss
    seen: token_values.Seen = {}
    metrics = learner.optimize(
        learning, batch, loss, inputs.settings, inputs.temperature, inputs.machine, draws, seen
    )
    resident.drop_gradients(learning)
    trees = [credited.tree for credited in batch]
    metrics |= staleness(trees, inputs.policy_steps)
    price = passes.price_of_rows(learning.model, batch)
    return Updated(metrics, token_values.table(seen), [tree.question.id for tree in trees], price)


def save(
    inputs: UpdateInputs, seed: int, draws: tuple[int, int], folder: Path, final: Path
) -> None:
    """Write the policy that was updated below ``folder``, which will be renamed to ``final``.

    A process that was started since the update repeats it.
    """
    if resident.POLICIES.learner is None or not resident.POLICIES.learner.changed:
        update(inputs, seed, draws)
    learning = resident.POLICIES.learner
    assert learning
    checkpoint.save(learning, folder)
    resident.POLICIES.keep(learning, final / checkpoint.POLICY)


def _learner(inputs: UpdateInputs, seed: int) -> resident.Learner:
    """Return the policy with its critic, adapter and optimizer, as the last update left them."""
    policies, folder = resident.POLICIES, Path(inputs.policy.path)
    learning = policies.load_learner(folder, inputs.machine)
    if inputs.lora and sharding.is_sharded(learning.model) and not adapter.attached(learning.model):
        policies.learner = None  # only whole layers get an adapter: load it again
        learning = policies.load_learner(folder, inputs.machine)
    checkpoint.prepare_critic(learning, inputs.algorithm.critic, inputs.machine)
    checkpoint.prepare_adapter(learning, inputs.lora, inputs.policy, seed)
    checkpoint.shard(learning)
    checkpoint.prepare_optimizer(learning, inputs.settings)
    return learning


def _batch(learning: resident.Learner, inputs: UpdateInputs) -> list[Credited]:
    """Return the credited trees with what the loss needs of other policies than the learning one.

    These are the log-probabilities of the reference and, for trees that were sampled ahead, of the
    policies that sampled them: the ratio and its clip range hold, turn by turn, against those.
    """

    def known(policy: Artifact, experts_of: passes.ExpertsOf) -> list[ByNode]:
        settings = inputs.temperature, inputs.settings, inputs.machine
        return _logprobs(batch, learning, policy, *settings, experts_of)

    batch = _credited(inputs.trees, inputs.advantages, inputs.algorithm)
    if inputs.reference:
        reference = _experts_of(inputs.reference, inputs.samplers.values())
        pairs = zip(batch, known(inputs.reference, reference), strict=True)
        batch = [replace(tree, reference_logprobs=logprobs) for tree, logprobs in pairs]
    if set(inputs.samplers.values()) != {inputs.policy}:
        sampled = {
            steps: known(policy, passes.RECORDED) for steps, policy in inputs.samplers.items()
        }
        trees = [credited.tree for credited in batch]
        pairs = zip(batch, as_sampled(trees, sampled), strict=True)
        batch = [replace(tree, old_logprobs=logprobs) for tree, logprobs in pairs]
    return batch


def _credited(
    trees: Sequence[Artifact], advantages: Artifact, algorithm: Algorithm
) -> list[Credited]:
    """Return the trees that are learned from, with the leaves that are, and their credit."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in sorted(read_rows(Path(advantages.path)), key=lambda entry: entry["leaf"]):
        if entry["kept"]:
            entries.setdefault(entry["question"], []).append(entry)
    return [
        _credited_tree(tree, entries[tree.question.id], algorithm)
        for artifact in trees
        for tree in load_trees(Path(artifact.path))
        if tree.question.id in entries
    ]


def _credited_tree(
    whole: Tree, entries: Sequence[Mapping[str, Any]], algorithm: Algorithm
) -> Credited:
    """Return a tree with the leaves that have an entry, and their credit."""
    tree = whole.with_leaves([entry["leaf"] for entry in entries])
    credits = map(_credit, entries, weights(tree, algorithm))
    return Credited(tree, list(credits))


def _credit(entry: Mapping[str, Any], weight: float) -> Credit:
    def floats(name: str) -> Any:
        return None if entry[name] is None else np.array(entry[name], np.float32)

    return Credit(
        advantages=floats("advantages"),
        segments=np.array(entry["segments"], np.int64),
        returns=floats("returns"),
        values=floats("values"),
        weight=weight,
    )
