"""Measure sampling at 32 rows: the transformers engine beside transformers' own ``generate``.

    python -m benchmarks.sampling_speed               families of all kinds of layers
    python -m benchmarks.sampling_speed lfm2 qwen3    these alone
    python -m benchmarks.sampling_speed --policy models/smollm/initial      a policy in a folder

Random policies (hidden size 256, six layers, a vocabulary of 4,096), 8 prompts of which each is
sampled 4 times, at most 128 new tokens: ``equal`` has prompts of 200 tokens and turns of 128,
``ragged`` prompts of 120 to 280 and turns of 16 to 128. ``generate`` gets prompts padded on the
left, and each row's limit as a stopping criterion, so both sides sample as many tokens. It is not
asked for log-probabilities and entropies, which the engine reports. Seconds are of processor time
with one thread (``--wall`` and ``--threads`` for others), the median of the repetitions, which take
turns.

A policy in a folder rolls out ``--questions`` x ``--leaves`` dialogues: a system prompt of 150
tokens that all share, a question of 30, a turn of 30 to 60 tokens, a result of 10 to 25, a turn of
40 to 60, in float32 and bfloat16. ``generate`` gets the whole response of each as one turn. Also
printed: how far the engine's log-probabilities are from those of the learner's pass.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from params.schema.base import Machine
from tasks.engines.contract import Sample, SamplingRequest
from tasks.engines.transformers.transformers_engine import TransformersEngine, engine_of
from tasks.policy import resident, token_ids
from tasks.policy.lean_transformers import transformers
from tasks.policy.load_model import load_policy
from tasks.policy.machine import PRECISION, in_precision
from tasks.policy.parallel import side_by_side

CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
PROMPTS, EACH, NEW = 8, 4, 128
VOCABULARY, PAD, END = 4096, 0, 1  # no turn may end by chance: END is never drawn
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32},
    **{"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"max_position_embeddings": 1024, "pad_token_id": PAD, "eos_token_id": END},
}
EXPERTS = {
    **{"num_local_experts": 8, "n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "moe_shared_expert_intermediate_size": 128,
}
MAMBA = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2},
    "chunk_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **{"layer_types": [*["linear_attention"] * 3, "full_attention"] + ["linear_attention"] * 2},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "conv_L_cache": 3},
    "nemotron_h": {
        **EXPERTS,
        **MAMBA,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"],
    },
    "gpt_oss": {
        **EXPERTS,
        **{"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3},
    },
}
FAMILIES |= {
    "falcon_h1": {
        **{"mamba_d_state": 32, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512},
        "mamba_chunk_size": 64,
    },
    "jamba": {
        **EXPERTS,
        **{"mamba_d_state": 16, "mamba_dt_rank": 16, "attn_layer_period": 3},
        "attn_layer_offset": 2,
    },
    "minimax": {
        **EXPERTS,
        **{"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
        "block_size": 64,
    },
    "deepseek_v3": {
        **EXPERTS,
        **{"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16, "head_dim": 16},
        **{"qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 8},
    },
}
NO_SDPA = ("gpt_oss", "mamba", "falcon_mamba")


@dataclass(frozen=True)
class Work:
    """What both sides sample."""

    prompts: list[NDArray[np.int32]]
    limits: NDArray[np.int64]  # [prompts * EACH] new tokens


@dataclass(frozen=True)
class Tokenizer:
    """As much of one as the engine asks for."""

    eos_token_id: int = END


def works() -> dict[str, Work]:
    """Return the two kinds of work."""
    random = np.random.default_rng(0)

    def prompts(lengths: Sequence[int]) -> list[NDArray[np.int32]]:
        return [random.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths]

    spread = [int(length) for length in np.linspace(120, 280, PROMPTS)]
    ragged = random.permutation(np.linspace(16, NEW, PROMPTS * EACH).astype(np.int64))
    return {
        "equal": Work(prompts([200] * PROMPTS), np.full(PROMPTS * EACH, NEW)),
        "ragged": Work(prompts(spread), ragged),
    }


def policy(family: str) -> Any:
    """Return a random policy of a family, which never ends a turn."""
    torch.manual_seed(0)
    config = CONFIGS[family](**{**SIZES, **FAMILIES.get(family, EXPERTS)})
    attention = "eager" if family in NO_SDPA else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.get_output_embeddings().register_forward_hook(_without_end)
    return model.eval()


def _without_end(_: Any, __: Any, logits: Tensor) -> Tensor:
    logits[..., : END + 1] = -1e4
    return logits


def random_engine(model: Any) -> TransformersEngine:
    """Return the engine, with a text for each token of the vocabulary."""

    class Engine(TransformersEngine):
        def pieces(self) -> list[str]:
            return [chr(0x4E00 + index) for index in range(VOCABULARY)]

    return Engine(model, Tokenizer())


def ours(engine: TransformersEngine, work: Work) -> int:
    """Sample by the engine; return the number of sampled tokens."""
    paths, context = len(work.limits), max(map(len, work.prompts)) + NEW
    with engine.session(paths, context, 1.0, 1.0, []) as session:
        requests = [
            SamplingRequest(session.open(), work.prompts[i // EACH], i, int(limit))
            for i, limit in enumerate(work.limits)
        ]
        return sum(len(sample.tokens) for sample in session.sample(requests))


class Limits(transformers.StoppingCriteria):
    """Stops each row at its own number of tokens."""

    def __init__(self, prompt: int, limits: NDArray[np.int64]) -> None:
        self.ends = prompt + torch.from_numpy(limits)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.ends


@torch.inference_mode()
def generated(model: Any, work: Work, each: int = EACH) -> int:
    """Sample each prompt so many times by ``generate``; return the number of sampled tokens."""
    longest = max(map(len, work.prompts))
    tokens = torch.full((len(work.prompts), longest), PAD)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(work.prompts):
        tokens[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    model.generate(
        tokens,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        num_return_sequences=each,
        max_new_tokens=int(work.limits.max()),
        stopping_criteria=transformers.StoppingCriteriaList([Limits(longest, work.limits)]),
    )
    return int(work.limits.sum())


def rates(
    sides: Sequence[Callable[[], int]], repetitions: int, clock: Callable[[], float]
) -> list[float]:
    """Return the tokens a second of each side: medians, after one call that is not counted."""
    found: list[list[float]] = [[] for _ in sides]
    for repetition in range(repetitions + 1):
        for side, rate in zip(sides, found, strict=True):
            began = clock()
            tokens = side()
            if repetition:
                rate.append(tokens / (clock() - began))
    return [statistics.median(rate) for rate in found]


# ---------------------------------------------------------------- a policy in a folder

SHARED, QUESTION, RESULT, FIRST, SECOND = 150, 30, (10, 26), (30, 61), (40, 61)


class NoText(TransformersEngine):
    """Samples turns that end at their limits alone."""

    def pieces(self) -> list[str]:
        """Return a text for each row of the vocabulary."""
        return ["x"] * int(self.model.config.vocab_size)


@dataclass(frozen=True)
class Dialogues:
    """Dialogues of two turns with a result between them."""

    contexts: list[NDArray[np.int32]]
    limits: NDArray[np.int64]  # [dialogues, 2]
    results: list[NDArray[np.int32]]

    @classmethod
    def drawn(cls, vocabulary: int, questions: int, leaves: int) -> Dialogues:
        """Draw dialogues of random tokens."""
        random = np.random.default_rng(0)

        def tokens(count: int) -> NDArray[np.int32]:
            return random.integers(vocabulary // 50, vocabulary, count).astype(np.int32)

        system = tokens(SHARED)
        prompts = [np.concatenate([system, tokens(QUESTION)]) for _ in range(questions)]
        count = questions * leaves
        limits = np.stack([random.integers(*span, count) for span in (FIRST, SECOND)], 1)
        results = [tokens(length) for length in random.integers(*RESULT, count)]
        return cls([prompts[i // leaves] for i in range(count)], limits, results)


def rolled_out(engine: TransformersEngine, work: Dialogues) -> list[tuple[Any, Sample]]:
    """Sample all dialogues in the engine's lanes; return contexts and turns."""
    distinct = len({context.tobytes() for context in work.contexts})
    lanes = engine.replicas(distinct)
    leaves = len(work.contexts) // distinct

    def lane(number: int) -> list[tuple[Any, Sample]]:
        mine = [i for i in range(len(work.contexts)) if i // leaves % len(lanes) == number]
        contexts, turns = [work.contexts[i] for i in mine], []
        with lanes[number].session(len(mine), 400, 1.0, 1.0, []) as session:
            handles = [session.open() for _ in mine]
            for turn in range(2):
                requests = [
                    SamplingRequest(handle, tokens, 2 * i + turn, int(work.limits[i, turn]))
                    for i, handle, tokens in zip(mine, handles, contexts, strict=True)
                ]
                samples = session.sample(requests)
                turns += list(zip(contexts, samples, strict=True))
                contexts = [
                    np.concatenate([tokens, sample.tokens, work.results[i]])
                    for i, tokens, sample in zip(mine, contexts, samples, strict=True)
                ]
        return turns

    return [turn for turns in side_by_side(lane, range(len(lanes))) for turn in turns]


def sampled(engine: TransformersEngine, work: Dialogues) -> int:
    """Roll out; return the number of sampled tokens."""
    return sum(len(sample.tokens) for _, sample in rolled_out(engine, work))


def apart(model: Any, turns: Sequence[tuple[Any, Sample]], machine: Machine) -> NDArray[Any]:
    """Return sampled log-probabilities minus those of the learner's precision, of all tokens."""
    found = []
    for context, sample in turns:
        whole = torch.from_numpy(np.concatenate([context, sample.tokens]).astype(np.int64))
        with torch.no_grad(), in_precision(machine):
            logits = model(whole[None]).logits[0, len(context) - 1 : -1]
        own = token_ids.of(model).only(logits.double()).log_softmax(-1).numpy()
        found.append(sample.logprobs - own[np.arange(len(sample.tokens)), sample.tokens])
    return np.concatenate(found)


def of_folder(options: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Measure the policy in a folder in both precisions."""
    header = ("precision", "engine (tokens/s)", "`generate` (tokens/s)", "ratio")
    print(f"| {' | '.join(header)} | mean, largest difference from the learner |")
    print("|---|---:|---:|---:|---:|")
    for precision in PRECISION:
        fields = {"device": "cpu", "threads": options.threads, "precision": precision}
        machine = Machine.model_validate(fields)
        model = load_policy(Path(options.policy), machine).eval()
        work = Dialogues.drawn(model.config.vocab_size, options.questions, options.leaves)
        made = engine_of(model, Tokenizer(-1), machine)
        engine = NoText(made.model, made.tokenizer, made.precision)
        peer = resident.to_sample(model, machine)
        peer.generation_config.eos_token_id = None
        peer.generation_config.pad_token_id = PAD
        plain = Work(work.contexts[:: options.leaves], work.limits.sum(1))
        sides = [partial(sampled, engine, work), partial(generated, peer, plain, options.leaves)]
        engines, peers = rates(sides, options.repetitions, clock)
        found = np.abs(apart(model, rolled_out(engine, work)[:8], machine))
        cells = (precision, f"{engines:,.0f}", f"{peers:,.0f}", f"{engines / peers:.2f}")
        print(f"| {' | '.join(cells)} | {found.mean():.1e}, {found.max():.1e} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure families and print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_speed")
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="seconds of a clock on the wall")
    parser.add_argument("--policy", help="a folder: measure the policy in it")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--leaves", type=int, default=8)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("tasks").setLevel(logging.ERROR)
    clock = time.perf_counter if options.wall else time.process_time
    if options.policy:
        of_folder(options, clock)
        return
    print("| family | lengths | engine (tokens/s) | `generate` (tokens/s) | ratio |")
    print("|---|---|---:|---:|---:|")
    for family in options.families:
        model = policy(family)
        engine = random_engine(model)
        for name, work in works().items():
            sides = [partial(ours, engine, work), partial(generated, model, work)]
            engines, peers = rates(sides, options.repetitions, clock)
            cells = (f"`{family}`", name, f"{engines:,.0f}", f"{peers:,.0f}")
            print(f"| {' | '.join(cells)} | {engines / peers:.2f} |", flush=True)


if __name__ == "__main__":
    main()
