"""Beamline's additions to a worker of vLLM: exact entropies, and weight updates in place.

vLLM mixes ``PolicyWorker`` into its own worker (``worker_extension_cls``), in the process that
computes, here or on a server; methods are called by name. Only that process imports this file.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tasks.engines.vllm_options import MEASURED
from tasks.policy import token_ids
from tasks.policy.token_ids import TokenIds

TIED = "tie_word_embeddings"
HEAD = "ParallelLMHead"  # vLLM's class of a head
Named = Iterable[tuple[str, Tensor]]


class MeasuringSampler(Sampler):
    """vLLM's sampler, with the logprobs and entropies of the transformers engine.

    Logprobs are those at the sampling temperature, before top-p. A request for the logprobs of the
    ``MEASURED`` likeliest tokens gets the sampled token's, and under another token's id the entropy
    over the vocabulary V, divided by ln|V|: so both fit the answers that vLLM has. V are ``ids``,
    those that have a token: no other one is drawn.
    """

    ids: TokenIds | None = None  # None: all

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return sampled tokens [rows], and logprobs [rows, vocabulary] at the temperature."""
        if self.ids:
            leave_out(logits, self.ids)
        temperature = sampling_metadata.temperature
        tempered = logits if temperature is None else logits / temperature[:, None]
        logprobs = tempered.log_softmax(-1, dtype=torch.float32)  # vLLM changes logits in place
        sampled, _ = super().sample(logits, sampling_metadata, *rest, **options)
        return sampled, logprobs

    def gather_logprobs(
        self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> LogprobsTensors:
        """Return the ids and values [rows, 2] of the sampled token's logprob and of the entropy."""
        if num_logprobs != MEASURED:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        ids = self.ids or TokenIds(logprobs.shape[-1])
        sampled_logprobs = logprobs.gather(-1, token_ids[:, None])
        entropies = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1) / math.log(ids.count)
        other = (token_ids + 1) % ids.end  # the id of the entropy's place
        return LogprobsTensors(
            torch.stack([token_ids, other], -1).to(torch.int32),
            torch.cat([sampled_logprobs, entropies.clamp(0, 1)[:, None]], -1),
            torch.zeros_like(token_ids),  # ranks, not used
        )


def leave_out(logits: Tensor, ids: TokenIds) -> None:
    """Make ids that have no token impossible, in place. logits [rows, vocabulary]"""
    logits[:, ids.end :] = -math.inf
    if ids.holes:
        holes = torch.tensor(ids.holes, device=logits.device)
        logits.index_fill_(-1, holes, -math.inf)


def pack_heads_again(model: Any) -> None:
    """Have tied heads compute with the weights that the embeddings have now.

    A model of several kinds of input has its head in one of its parts, and Gemma 2 has none beside
    the embeddings, which vLLM packs by itself.
    """
    for part in list(model.modules()):
        head = getattr(part, "lm_head", None)
        if head is not None:
            head.weight = part.model.embed_tokens.weight
            head.quant_method.process_weights_after_loading(head)


def experts_on_a_cpu(model: torch.nn.Module) -> bool:
    """Return whether a model has experts on a CPU: of these vLLM keeps a packed copy, as it was."""
    packed = (getattr(layer, "w13_weight", None) for layer in model.modules())
    return any(weight is not None and weight.device.type == "cpu" for weight in packed)


@contextmanager
def left_as_they_were() -> Iterator[set[str]]:
    """Yield the kinds of layers whose weights stay as they were, while new ones are loaded.

    vLLM only warns of them. They are those that an architecture's code writes into by itself, such
    as the experts and the sinks of gpt-oss: vLLM has set other memory in place meanwhile.
    """
    kinds: set[str] = set()
    put_back = layerwise._place_kernel_tensors

    def noted(layer: torch.nn.Module, info: Any) -> None:
        if not info.load_numel and info.kernel_tensors[0]:  # its parameters, and then its buffers
            kinds.add(type(layer).__name__)
        put_back(layer, info)

    with patch.object(layerwise, "_place_kernel_tensors", noted):
        yield kinds


class PolicyWorker:
    """Methods that vLLM's worker gets."""

    model_runner: Any
    reload_weights: Any
    policy_version: str = ""

    def measure_entropies(self) -> None:
        """Sample with ``MeasuringSampler`` from now on. Raises RuntimeError for another sampler."""
        sampler = getattr(self.model_runner, "sampler", None)
        if type(sampler) is not Sampler and not isinstance(sampler, MeasuringSampler):
            raise RuntimeError(
                f"vLLM samples with {type(sampler).__name__}, whose entropies cannot be measured:"
                " set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        sampler.__class__ = MeasuringSampler

    def draw_from(self, told: str, version: str) -> str:
        """Draw no ids but those told of (``TokenIds.told``), from the weights ``version``.

        Return the ids that are drawn now; "" where these are not the weights.
        """
        if version != self.policy_version:
            return ""
        self.measure_entropies()
        self.model_runner.sampler.ids = token_ids.parse(told)
        return told

    def policy(self) -> str:
        """Return the version of the weights that were last loaded; "" for those of the start."""
        return self.policy_version

    def name_policy(self, version: str) -> None:
        """Note the version of weights that came by vLLM's own transfer."""
        self.measure_entropies()  # a server that has restarted does not
        self.policy_version = version

    def weight_digest(self, name: str) -> str:
        """Return the digest of a weight. Raises AttributeError for a name that is none."""
        weight = self.model_runner.get_model().get_parameter(name).detach().float().cpu()
        return hashlib.blake2b(weight.contiguous().numpy().tobytes(), digest_size=16).hexdigest()

    def load_folder(self, folder: str, version: str = "") -> None:
        """Load the weights of a policy folder. Raises FileNotFoundError if it has none."""
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no *.safetensors: is it the folder of a policy?")
        self._load((name, weight) for file in files for name, weight in load_file(file).items())
        self.policy_version = version

    def load_shared(self, packed: bytes) -> None:
        """Load weights that another process shares: pickled, name -> how to open each."""
        shared = pickle.loads(packed)
        self._load((name, rebuild(*how)) for name, (rebuild, how) in shared.items())

    def _load(self, weights: Named) -> None:
        """Load weights without a restart. A tied head is left out, and packed again.

        On a CPU vLLM keeps a packed copy of the head's weights, which loading does not change.
        Raises RuntimeError where other weights stay as they were.
        """
        model = self.model_runner.get_model()
        tied = bool(getattr(self.model_runner.model_config.hf_text_config, TIED, False))
        untied_weights = ((n, w) for n, w in weights if not (tied and n.startswith("lm_head.")))
        self.measure_entropies()  # a server that has restarted does not
        if experts_on_a_cpu(model):
            raise RuntimeError("vLLM takes no new weights of experts while it runs on a CPU")
        with left_as_they_were() as kinds:
            self.reload_weights(weights_iterator=untied_weights)  # a method of vLLM's worker
        if others := sorted(kinds - ({HEAD} if tied else set())):
            raise RuntimeError(
                f"vLLM does not take new weights of {' and '.join(others)} while it runs"
            )
        if tied:
            pack_heads_again(model)
