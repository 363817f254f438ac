"""The transformers engine's row in the registry: how it opens and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks.engines.contract import Engine, EngineKind, SamplingLoad

if TYPE_CHECKING:
    from tasks.engines.transformers import serve  # noqa: F401 for the ledger's keys alone
    from tasks.ledger.artifacts import Artifact
    from tasks.policy.resident import Learner

LOGIT = 2 * 4  # bytes of a logit and its exponential in a decoding step, in float32


def open_engine(
    actor: Learner, policy: Artifact, settings: EngineSettings, machine: Machine, rows: int
) -> Engine:
    """Return an engine over the model in memory, or the servers."""
    if settings.addresses:
        from tasks.engines.servers.servers_engine import open_servers

        return open_servers(settings, actor, policy)
    from tasks.engines.transformers.transformers_engine import engine_of

    return engine_of(actor.model, actor.tokenizer, machine)


def memory(load: SamplingLoad) -> dict[str, float]:
    """Return bytes by part: a cast of the learner's weights, and what is kept of every path.

    On a CPU weights in float32 are packed, unless they are too large (decoder.py).
    """
    from tasks.engines.transformers.decoder import MOST_COPIED

    cast = {"sampling's cast": load.cast} if load.cast else {}
    packs = not load.cast and load.gpu is None and load.weights <= MOST_COPIED
    return {
        **cast,
        **({"weights packed to sample": load.weights} if packs else {}),
        "keys and values": load.rows * load.keys_values,
        **({"states": load.rows * load.states} if load.states else {}),
        "logits of a step": load.rows * load.vocabulary * LOGIT,
    }


def installed(settings: EngineSettings) -> None:
    """Return None: the engine is a part of every installation."""


TRANSFORMERS = EngineKind(open=open_engine, memory=memory, installed=installed)
