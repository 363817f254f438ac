"""The vLLM engine's row in the registry: how it opens, what it needs, whether it is installed."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks.engines.contract import Engine, EngineKind, SamplingLoad

if TYPE_CHECKING:
    from tasks.ledger.artifacts import Artifact
    from tasks.policy.resident import Learner

GIB = 2**30
RESERVE = 2 * GIB  # bytes for CUDA graphs and the activations of one prefill


def open_engine(
    actor: Learner, policy: Artifact, settings: EngineSettings, machine: Machine, rows: int
) -> Engine:
    """Return this process's vLLM with the policy, or the servers; adapters are merged."""
    if settings.addresses:
        from tasks.engines.servers.servers_engine import open_servers

        return open_servers(settings, actor, policy)
    from tasks.engines.vllm.vllm_engine import vllm_engine
    from tasks.policy import checkpoint

    folder = partial(checkpoint.whole, policy)
    return vllm_engine(settings, machine, rows, actor.model, actor.tokenizer, folder, policy.digest)


def memory(load: SamplingLoad) -> dict[str, float]:
    """Return bytes: the share of a GPU; on a CPU, weights and the space for keys and values."""
    if load.gpu is None:
        return {"vLLM": load.memory * GIB + load.weights}
    return {"vLLM's share": load.memory * load.gpu}


def installed(settings: EngineSettings) -> str | None:
    """Return how to install vLLM where it is missing; None where it is here or on servers."""
    if settings.addresses or find_spec("vllm"):
        return None
    return (
        "which is not installed here: make run takes an environment that has it, "
        "pip install 'beamline[vllm]' adds it to this one, and engine.servers names some elsewhere"
    )


VLLM = EngineKind(open=open_engine, memory=memory, installed=installed, reserve=RESERVE)
