"""Pass forests through a model: log-probabilities of tokens, and values of a critic. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from params.schema.base import Machine
from params.schema.reinforce import Update
from tasks.learning import shares
from tasks.learning.attention import (
    APART,
    PAIRS,
    TOKENS,
    attending,
    form_of,
    over_forests,
    remember,
    together,
)
from tasks.learning.packing import (
    Batch,
    ByNode,
    Cost,
    Credited,
    Floats,
    Forest,
    forests,
    lay_out,
    padded,
    row_batches,
    slots_of,
    to_nodes,
)
from tasks.policy import layer_kinds, routed_experts, sharding, token_ids, world
from tasks.policy.lean_transformers import transformers
from tasks.policy.logits import backbone_of, head_of
from tasks.policy.machine import LARGE, in_precision
from tasks.policy.parallel import lanes, side_by_side
from tasks.policy.resident import Learner, ValueModel
from tasks.policy.routed_experts import Replay

# Most logits (tokens x vocabulary) that exist at one time, by device. On a GPU each part must be
# large enough to be worth its pass over the gradient of the head.
LOGITS_AT_ONCE = {"cpu": 2**26, "cuda": 2**28}
LOGIT_ROWS = 64  # whose sums of exponentials are computed at once


# Which experts of a mixture a forest's tokens are sent to: those that what sampled them has chosen.
# For other weights than the sampler's, that would be the choice of another policy's routers: a
# reference policy and a critic of its own choose for themselves.
ExpertsOf = Callable[[Forest], Replay | None]
RECORDED: ExpertsOf = attrgetter("experts")
OWN_CHOICE: ExpertsOf = lambda forest: None  # noqa: E731
NO_VALUES: Floats = np.zeros(0, np.float32)  # of a node that was not sampled


def states(
    backbone: Any, forest: Forest, slots: Tensor | None = None, experts: Replay | None = None
) -> Tensor:
    """Return the hidden states of slots; None: of those that predict the sampled tokens. [P, H]

    A backbone that does not attend over forests computes their rows. ``experts``: those of a
    mixture that each slot is sent to; None: the backbone's routers choose.
    """
    indices = forest.predicting if slots is None else slots
    if not over_forests(backbone):
        return _states_in_rows(backbone, forest, indices, experts)
    remember(forest)
    with routed_experts.using(backbone, experts):
        output = backbone(
            input_ids=forest.tokens, position_ids=forest.positions, use_cache=False, forest=forest
        )
    return output.last_hidden_state[0].index_select(0, indices)


def _states_in_rows(backbone: Any, forest: Forest, slots: Tensor, experts: Replay | None) -> Tensor:
    """Return the hidden states of slots [P, H], each from the last row that has it.

    A slot has the same value in all of its rows, and the gradient of a loss by the weights is the
    same as from rows apart. Rows are padded on the right, which no earlier token of a causal model
    sees; padding repeats a row's last token.
    """
    device, used = forest.tokens.device, 0
    places: Any = np.zeros(forest.tokens.shape[1], np.int64)  # slot -> index in the batches
    computed = []
    for batch in row_batches(forest.layout, together()):
        slots_of_rows, mask = padded(batch)
        last = np.array([row[-1] for row in batch])[:, None]
        places[slots_of_rows[mask]] = used + np.flatnonzero(mask.ravel())
        used += mask.size
        taken = torch.from_numpy(np.where(mask, slots_of_rows, last)).to(device)
        chosen = None
        if experts:
            of_rows = torch.from_numpy(np.where(mask, slots_of_rows, -1)).to(device)
            chosen = experts.at(of_rows.flatten())
        with routed_experts.using(backbone, chosen):
            output = backbone(input_ids=forest.tokens[0][taken], use_cache=False)
        computed.append(output.last_hidden_state.flatten(0, 1))
    indices = torch.from_numpy(places).to(device)[slots]
    return torch.cat(computed).index_select(0, indices)


def token_logprobs(
    model: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [P] of tokens, and with ``entropy`` entropies [P] over ln|V|.

    V are the ids that have a token, ``states_PH`` hidden states, ``targets_P`` the tokens. At most
    ``LOGITS_AT_ONCE`` logits exist at one time; where that takes several parts, each is computed
    again in the backward pass instead of being kept. So memory grows with the sum of tokens and
    vocabulary, not with their product.
    """
    head = head_of(model)
    rows = model.get_output_embeddings().weight.shape[0]
    vocabulary = token_ids.of(model).count if entropy else 0
    part = max(1, LOGITS_AT_ONCE[states_PH.device.type] // rows)
    if len(targets_P) <= part:
        return _logprobs(head, states_PH, targets_P, temperature, vocabulary)
    parts = [
        checkpoint(_logprobs, head, some, target, temperature, vocabulary, use_reentrant=False)
        for some, target in zip(states_PH.split(part), targets_P.split(part), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _logprobs(
    head: Any, states_PH: Tensor, targets_P: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [P] and entropies [P], over ln of a vocabulary, of one part.

    ``vocabulary``: how many ids can be drawn; 0: no entropies are wanted.
    """
    logits = head(states_PH).float()
    if not vocabulary:
        picked: Tensor = _Picked.apply(logits, targets_P, temperature)
        return picked, None
    every = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = every.gather(-1, targets_P[:, None])[:, 0]
    return logprobs, -(every.exp() * every).sum(-1) / math.log(vocabulary)


class _Picked(torch.autograd.Function):
    """Log-probabilities [P] of tokens from logits [P, V], which it takes over as its memory.

    Logits become log-probabilities, and in the backward pass, of which there is one, their own
    gradient. torch refuses the backward pass of a head that would still need its logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        every = logits.detach()
        if temperature != 1.0:
            every.div_(temperature)
        for rows in every.split(LOGIT_ROWS):
            rows.sub_(rows.logsumexp(-1, keepdim=True))
        ctx.save_for_backward(every, targets[:, None])
        ctx.temperature, ctx.passed = temperature, False
        return every.gather(-1, targets[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.passed:
            raise RuntimeError("these log-probabilities have had their one backward pass")
        ctx.passed, (every, targets) = True, ctx.saved_tensors
        scale = (gradient / ctx.temperature)[:, None]
        every.exp_().mul_(-scale)
        return every.scatter_(-1, targets, every.gather(-1, targets) + scale), None, None


def forest_logprobs(
    model: Any,
    forest: Forest,
    temperature: float,
    machine: Machine,
    experts: Replay | None = None,
) -> Tensor:
    """Return the log-probabilities [P] of the sampled tokens of a forest under ``model``.

    ``experts`` as in ``states``.
    """

    def passes() -> Tensor:
        with in_precision(machine):
            hidden = states(backbone_of(model), forest, experts=experts)
            return token_logprobs(model, hidden, forest.targets, temperature)[0]

    return sharding.run(model, passes)


def node_logprobs(
    model: Any,
    trees: Sequence[Credited],
    temperature: float,
    settings: Update,
    machine: Machine,
    experts_of: ExpertsOf = RECORDED,
) -> list[ByNode]:
    """Return log-probabilities of the sampled tokens under ``model``: tree -> node -> tokens.

    ``experts_of``: which experts of a mixture a forest's tokens are sent to.
    """

    def compute(forest: Forest) -> Tensor:
        return forest_logprobs(model, forest, temperature, machine, experts_of(forest))

    return _by_node(model, trees, compute, settings, machine)


def node_values(
    learner: Learner, trees: Sequence[Credited], settings: Update, machine: Machine
) -> list[ByNode]:
    """Return the critic's value before each sampled token: tree -> node -> tokens."""
    critic = learner.critic
    assert critic, "an algorithm with a critic comes first"
    model = critic.backbone or learner.model

    def passes(forest: Forest) -> Tensor:
        with in_precision(machine):
            experts = None if critic.backbone else forest.experts
            return states(backbone_of(model), forest, experts=experts)

    def compute(forest: Forest) -> Tensor:
        return values(critic, sharding.run(model, partial(passes, forest)))

    result = _by_node(model, trees, compute, settings, machine)
    sharding.release(critic.head)
    return result


def values(critic: ValueModel, states_PH: Tensor) -> Tensor:
    """Return V(s) [P] from hidden states, in float32: bf16 is too coarse for returns."""
    return critic.head(states_PH.float())[:, 0]


def _by_node(
    model: Any,
    trees: Sequence[Credited],
    compute: Callable[[Forest], Tensor],
    settings: Update,
    machine: Machine,
) -> list[ByNode]:
    """Compute [P] for each forest without gradients; return tree -> node -> its values."""
    batch = [(tree, range(len(tree.tree.leaves))) for tree in trees]
    form = form_of(model, machine.device)
    indices = {id(tree): index for index, tree in enumerate(trees)}
    by_node: dict[tuple[int, int], Floats] = {}  # index of a tree and its node -> values
    training = model.training
    model.eval()

    @torch.no_grad()  # applies to the current thread, so each lane enters it
    def lane(pieces: Iterable[Forest]) -> None:
        for forest in pieces:
            computed = compute(forest)
            if not forest.spare:
                for tree, node, numbers in to_nodes(forest, computed[forest.entries]):
                    by_node[indices[id(tree)], node] = numbers

    with attending(model, form):
        cost = training_cost(model, form)
        side_by_side(lane, forests_of_lanes(batch, settings.micro_batch_tokens, cost, machine))
    sharding.release(model)
    model.train(training)
    for others in world.gathered(by_node):
        by_node.update(others)
    return [
        [by_node.get((index, node), NO_VALUES) for node in range(len(tree.tree.nodes))]
        for index, tree in enumerate(trees)
    ]


def training_cost(model: Any, form: str) -> Cost:
    """Return the costs of training ``model`` in a form."""
    weights = sum(weight.numel() for weight in model.parameters())
    config = model.config.get_text_config(decoder=True)
    pair = 2 * config.hidden_size * config.num_hidden_layers
    return Cost(weights, pair, PAIRS[form], TOKENS[form], APART[form])


def price_of_rows(model: Any, trees: Sequence[Credited]) -> str:
    """Return a line on what a model computes that learns from trees as rows; "" for any other."""
    kind, reason = layer_kinds.learner_form(layer_kinds.described(model.config))
    if kind == layer_kinds.TREES:
        return ""
    layout = lay_out([(tree, range(len(tree.credits))) for tree in trees])
    rows = sum(layout.row_lengths())
    unique = max(1, slots_of(layout))
    return (
        f"the policy's layers have no form on trees ({reason}): it is trained as rows, which "
        f"computes {rows:,} tokens instead of {unique:,}, {rows / unique:.1f} times as many"
    )


def forests_of_lanes(
    batch: Batch, tokens: int, cost: Cost, machine: Machine
) -> list[Iterator[Forest]]:
    """Divide the trees of a batch among lanes, at least one; return lane -> forests of its trees.

    Forests are laid out lazily, so that a lane has only one in memory. Where processes learn
    together, each has one lane with its share of the trees. A large policy has one lane with all
    threads, which divide its products as well: each lane has gradients of its own.
    """
    pairs = [(tree, leaves) for tree, leaves in batch if len(leaves)]
    if world.size() > 1:
        return [shares.forests_in_step(pairs, tokens, cost, machine.device)]
    most = len(pairs) if cost.token <= LARGE else 1
    parts = shares.divided(pairs, lanes(machine.device, most), cost)
    return [forests(part, tokens, cost, machine.device) for part in parts]


@contextmanager
def recomputing(model: Any, recompute: bool) -> Iterator[None]:
    """Let layers keep only their inputs, and compute the rest again in the backward pass.

    This is activation checkpointing (arXiv 1604.06174, section 4.1) with one segment a layer. The
    model is restored after. Raises ValueError for an architecture that does not support it.
    """
    if not recompute:
        yield
        return
    layers: list[Any] = [
        part
        for part in model.modules()
        if isinstance(part, transformers.modeling_layers.GradientCheckpointingLayer)
    ]
    if not (model.supports_gradient_checkpointing and layers):
        raise ValueError(
            f"reinforce.update.recompute is true, and {type(model).__name__} does not support "
            "gradient checkpointing: set it to false, or use another policy"
        )
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": routed_experts.recomputing}
    )
    model.disable_input_require_grads()  # only reentrant checkpointing needs them
    modes = [layer.training for layer in layers]
    for layer in layers:
        # It recomputes in this mode only, and must not drop anything out in it. What is around the
        # layers is not in it, or it would leave some of them out.
        layer.training = True
        recompute_in = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = partial(_evaluating, layer, recompute_in)
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def _evaluating(
    layer: Any, recompute_in: Callable[..., Any], forward: Callable[..., Any], *inputs: Any
) -> Any:
    """Return a layer's outputs, computed as in evaluation, now and in the backward pass."""

    def computed(*given: Any) -> Any:
        layer.training = False
        try:
            return forward(*given)
        finally:
            layer.training = True

    return recompute_in(computed, *inputs)
