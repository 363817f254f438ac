"""The transformers engine: sessions over a causal language model in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from params.schema.base import Machine
from tasks.engines.contract import Engine, check_room
from tasks.engines.transformers import time_steps, ways
from tasks.engines.transformers.cache import Network, RaggedCache, RaggedSession, SpareMemory
from tasks.engines.transformers.decoder import (
    Decoder,
    decoder,
    decodes,
    is_small,
    network,
    rotations,
)
from tasks.engines.transformers.drawing import Drawing
from tasks.engines.transformers.own_cache import OwnCacheSession, OwnPass
from tasks.engines.transformers.sampling_worker import (
    POOL,
    WorkerPool,
    WorkerSession,
    worker_session,
)
from tasks.policy import adapter, resident, routed_experts, token_ids
from tasks.policy.attention_terms import (
    capped_attention,
    in_window,
    refuse,
    sunk_attention,
)
from tasks.policy.lean_transformers import transformers
from tasks.policy.logits import head_of
from tasks.policy.machine import PRECISION
from tasks.policy.parallel import lanes
from tasks.trees import marks

GROUPED = "grouped"  # our attention function in transformers, which looks for "sdpa" in names


@dataclass(frozen=True)
class Packed:
    """A policy's weights, laid out, and what they were made of."""

    decoder: Decoder
    ids: token_ids.TokenIds
    weights: list[Tensor]
    versions: list[int]  # of the weights: torch counts the changes of each

    @classmethod
    def of(cls, model: Any, precision: torch.dtype) -> Packed:
        """Lay out a model's weights."""
        weights = list(model.parameters())
        versions = [weight._version for weight in weights]
        return cls(decoder(model, 1, precision), token_ids.of(model), weights, versions)

    def holds(self, model: Any) -> bool:
        """Return whether the model has these weights, unchanged."""
        now = list(model.parameters())
        return (
            len(now) == len(self.weights)
            and all(one is other for one, other in zip(now, self.weights, strict=True))
            and [weight._version for weight in now] == self.versions
            and token_ids.of(model) == self.ids
        )


def engine_of(model: Any, tokenizer: Any, machine: Machine) -> TransformersEngine:
    """Return an engine over a policy, in the precision of a machine's forward passes.

    A policy that the lean pass computes is cast there, weight by weight; of others the engine holds
    a cast copy.
    """
    whole, precision = adapter.merged(model), PRECISION[machine.precision]
    if ways.is_ragged(whole.config) and decodes(whole, precision):
        return TransformersEngine(whole, tokenizer, precision)
    return TransformersEngine(resident.to_sample(whole, machine), tokenizer)


class TransformersEngine:
    """Samples from a causal language model in this process's memory."""

    def __init__(self, model: Any, tokenizer: Any, precision: torch.dtype | None = None) -> None:
        """Sample from ``model`` in a precision; None: that of its weights.

        Another one is for models that ``decodes`` says yes to.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision or model.dtype
        self.spare = SpareMemory()
        self.packed: Packed | None = None
        self.lock = threading.Lock()  # of ``packed``

    def pieces(self) -> list[str]:
        """Return the text of each token of the vocabulary."""
        rows = self.model.config.get_text_config(decoder=True).vocab_size
        return marks.token_texts(self.tokenizer, rows)

    def drawing(
        self, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Drawing:
        """Return how a session of this policy draws its turns."""
        end = self.tokenizer.eos_token_id
        ids = token_ids.of(self.model)
        return Drawing(self.pieces(), ids, end, context, temperature, top_p, stop)

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return this engine, and for a small policy ones that sample in worker processes."""
        if not ways.abilities_of(self.model.config).cached:
            return [self]  # whose passes may keep a state in the model's modules
        small = decodes(self.model, self.precision) and is_small(self.model, self.precision)
        other: Engine = WorkerEngine(self) if small else self  # threads share packed weights
        return [self, *[other] * (lanes(self.model.device.type, most) - 1)]

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[RaggedSession | OwnCacheSession]:
        """Open a session; see ``tasks.engines.Engine``."""
        check_room(self.model.config, context)
        drawing = self.drawing(context, temperature, top_p, stop)
        opened = self._ragged if ways.is_ragged(self.model.config) else self._own_cache
        training = self.model.training
        self.model.eval()
        try:
            with opened(drawing, paths) as session:
                yield session
        finally:
            self.model.train(training)

    @contextmanager
    def _ragged(self, drawing: Drawing, paths: int) -> Iterator[RaggedSession]:
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(GROUPED)
        lean = decodes(self.model, self.precision)
        own = network(self._decoder(drawing.context)) if lean else library(self.model)
        session = RaggedSession(own, self.spare, drawing, paths)
        try:
            yield session
        finally:
            session.end_session()
            self.model.set_attn_implementation(attention)

    def _decoder(self, context: int) -> Decoder:
        """Return the weights as they are now, laid out; packed ones are kept until they change.

        Sessions in parallel share them, and so do those of the next questions.
        """
        if is_small(self.model, self.precision):
            return decoder(self.model, context, self.precision)
        with self.lock:
            if self.packed is None or not self.packed.holds(self.model):
                self.packed = None  # frees its memory before the next is made
                self.packed = Packed.of(self.model, self.precision)
            return replace(self.packed.decoder, rotations=rotations(self.model, context))

    @contextmanager
    def _own_cache(self, drawing: Drawing, paths: int) -> Iterator[OwnCacheSession]:
        config = self.model.config
        abilities = ways.abilities_of(config)
        ways.say(config.get_text_config(decoder=True).model_type, abilities)
        with time_steps.bounded(self.model):
            yield OwnCacheSession(OwnPass(self.model, abilities), drawing, paths)

    def release(self) -> None:
        """Do nothing: no GPU memory is held between sessions."""


@dataclass(frozen=True)
class WorkerEngine:
    """Samples from the policy of an engine, each session in a worker process."""

    engine: TransformersEngine
    pool: WorkerPool = POOL

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return this engine once per lane; each session takes a worker of its own."""
        return [self] * lanes("cpu", most)

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[WorkerSession]:
        """Open a session; see ``tasks.engines.Engine``."""
        engine = self.engine
        check_room(engine.model.config, context)
        drawing = engine.drawing(context, temperature, top_p, stop)
        with worker_session(self.pool, decoder(engine.model, context), drawing, paths) as opened:
            yield opened

    def release(self) -> None:
        """Do nothing: workers compute on the CPU."""


def library(model: Any) -> Network:
    """Return transformers' own forward pass, for any architecture."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    routed = routed_experts.shape_of(routed_experts.routers_of(model))

    def last_states(tokens: Tensor, last: Tensor, cache: RaggedCache) -> Tensor:
        keys = torch.arange(cache.visible, device=tokens.device)
        mask = keys <= cache.positions[:, None, :, None]  # [rows, 1, fed, visible]
        recording = routed_experts.Recording(routed) if routed else None
        with routed_experts.using(model, recording):
            output = model.base_model(
                input_ids=tokens,
                position_ids=cache.positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        if recording:
            cache.note(recording.taken())
        states: Tensor = output.last_hidden_state
        return states[torch.arange(len(tokens), device=tokens.device), last]

    return Network(
        layers=config.num_hidden_layers,
        key_value_heads=heads,
        head_size=size,
        like=model.get_input_embeddings().weight,
        last_states=last_states,
        head=head_of(model),
        experts=routed,
    )


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with fewer key-value heads than query heads, without copying keys and values.

    query [rows, heads, fed, size], key and value [rows, key-value heads, visible, size], mask
    [rows, 1, fed, visible]. The query heads that share a key-value head are treated as further
    positions. ``s_aux`` [heads]: sinks. Returns [rows, fed, heads, size], as transformers expects.
    Raises ValueError for what an architecture adds that is not computed here.
    """
    refuse(dropout, others)
    if sliding_window is not None and sliding_window < key.shape[2]:
        attention_mask = in_window(attention_mask, sliding_window)
    rows, heads, fed, size = query.shape
    shared = heads // key.shape[1]
    stacked = query.reshape(rows, key.shape[1], shared * fed, size)
    mask = attention_mask if fed == 1 else attention_mask.repeat(1, 1, shared, 1)
    if s_aux is not None:
        sinks = s_aux.view(1, -1, shared, 1).repeat_interleave(fed, 2)  # one of each stacked query
        scale = size**-0.5 if scaling is None else scaling
        mixed = sunk_attention(stacked, key, value, mask, sinks, scale)
    elif softcap:
        mixed = capped_attention(stacked, key, value, mask, softcap=softcap, scale=scaling)
    else:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            stacked, key, value, attn_mask=mask, scale=scaling
        )
    return mixed.reshape(rows, heads, fed, size).transpose(1, 2), None


transformers.AttentionInterface.register(GROUPED, grouped_attention)
