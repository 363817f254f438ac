"""The registry of engines. A new engine is a folder, a row here, and a value of ``engine.kind``.

This file runs in every process that samples, vLLM's included: ``open`` of a row imports the
engine, the row itself does not.
"""

from tasks.engines.contract import (
    Engine,
    EngineKind,
    Sample,
    SamplingLoad,
    SamplingRequest,
    SamplingSession,
)
from tasks.engines.transformers.kind import TRANSFORMERS
from tasks.engines.vllm.kind import VLLM

ENGINES: dict[str, EngineKind] = {"transformers": TRANSFORMERS, "vllm": VLLM}

__all__ = [
    "ENGINES",
    "Engine",
    "EngineKind",
    "Sample",
    "SamplingLoad",
    "SamplingRequest",
    "SamplingSession",
]
