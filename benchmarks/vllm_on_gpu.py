"""Measure vLLM's sleep, wake and new weights on a GPU, through the project's engine.

    python -m benchmarks.vllm_on_gpu                  # a small policy of random weights
    python -m benchmarks.vllm_on_gpu --device cpu     # a trial without a GPU: vLLM never sleeps

The engine samples from one policy, releases the GPU's memory to the learner, is given a second
policy and then the first one again. Samples of equal weights must be equal, tokens and
log-probabilities, also those of an engine that is started with the second policy. The memory is
what all processes of the GPU hold.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.update_on_gpu import machine_of
from params.schema.agent import EngineSettings
from params.schema.prepare import TinyPolicy
from tasks.engines import Sample, SamplingRequest
from tasks.engines.vllm.vllm_engine import VllmEngine
from tasks.ledger.artifacts import Artifact
from tasks.policy.tiny import build_policy, build_tokenizer

ROWS, PROMPT, SAMPLED = 32, 64, 128
SIZES = TinyPolicy(
    kind="tiny",
    vocabulary=448,
    hidden=1024,
    layers=8,
    heads=16,
    key_value_heads=4,
    feed_forward=4096,
    context=1024,
)


def policies(folder: Path, device: str) -> tuple[Any, list[tuple[Any, Artifact]]]:
    """Return a tokenizer and two policies of random weights, each with its saved folder."""
    tokenizer = build_tokenizer(["What is 12 times 34? print(12*34)"] * 100, SIZES)
    result = []
    for seed in range(2):
        policy_folder = folder / f"{seed}"
        model = build_policy(SIZES, tokenizer, seed).eval().to(device)
        model.save_pretrained(policy_folder)
        tokenizer.save_pretrained(policy_folder)
        result.append((model, Artifact.at(policy_folder)))
    return tokenizer, result


def give(engine: VllmEngine, tokenizer: Any, policy: tuple[Any, Artifact]) -> None:
    """Let the engine sample from a policy."""
    model, artifact = policy
    engine.set_policy(model, tokenizer, lambda: Path(artifact.path), artifact.digest)


def sample(engine: VllmEngine) -> list[Sample]:
    """Sample one turn for each of ROWS prompts."""
    prompts = np.random.default_rng(0).integers(0, engine.config.vocab_size, (ROWS, PROMPT))
    with engine.session(ROWS, PROMPT + SAMPLED, 1.0, 1.0, ()) as session:
        requests = [
            SamplingRequest(session.open(), tokens.astype(np.int32), seed, SAMPLED)
            for seed, tokens in enumerate(prompts)
        ]
        return list(session.sample(requests))


def equal(ones: list[Sample], others: list[Sample]) -> bool:
    """Return whether samples have the same tokens with the same log-probabilities."""
    return all(
        np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(ones, others, strict=True)
    )


def memory(device: str) -> int:
    """Return the MiB that are in use on the GPU."""
    if device != "cuda":
        return 0
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--memory", type=float, default=0.3, help="engine.memory of a recipe")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu shows whether this runs at all")
    machine = machine_of(device)
    settings = EngineSettings(kind="vllm", memory=arguments.memory, servers=(), lanes=1)

    def note(what: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        print(f"| {what} | {memory(device):,} | {time.perf_counter() - began:.1f} |", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        tokenizer, (first, second) = policies(Path(folder), device)
        engine, fresh = (VllmEngine(settings, machine, ROWS) for _ in range(2))
        print("| | memory on the GPU (MiB) | seconds |\n|---|---:|---:|")
        give(engine, tokenizer, first)
        before = note("started, sampled", lambda: sample(engine))
        note("sampled", lambda: sample(engine))
        note("asleep", engine.release)
        give(engine, tokenizer, second)
        with_second = note("awake with new weights, sampled", lambda: sample(engine))
        note("asleep", engine.release)
        give(engine, tokenizer, first)
        after = note("awake with the first weights, sampled", lambda: sample(engine))
        engine.close()
        give(fresh, tokenizer, second)
        of_fresh = note("another one, started with the new weights", lambda: sample(fresh))
        fresh.close()
    print(f"\nthe first weights again: {'equal' if equal(before, after) else 'OTHER'} samples")
    print(f"a fresh engine: {'equal' if equal(with_second, of_fresh) else 'OTHER'} samples")
    print(f"the two policies: {'EQUAL' if equal(before, with_second) else 'other'} samples")


if __name__ == "__main__":
    main()
