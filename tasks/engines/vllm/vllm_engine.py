"""The vLLM engine: sessions over a policy in vLLM, in a process here.

Each turn has a seed of its own, so a turn can be sampled again: after vLLM has died, it is started
again and unfinished turns are repeated.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks.engines.contract import Engine, check_room, most_positions
from tasks.engines.turns import Drawn, EngineDiedError, TurnRequest, TurnSession, stop_texts
from tasks.engines.vllm.connection import LocalVllm, free_gpu_memory
from tasks.policy import layer_kinds, token_ids
from tasks.policy.token_ids import TokenIds
from tasks.trees import marks

RESTARTS = 3  # of a vLLM that dies while it samples, before the rollout fails
GIB = 2**30


class VllmEngine:
    """Samples from a policy through vLLM. It outlives rollouts; see ``vllm_engine``."""

    def __init__(self, settings: EngineSettings, machine: Machine, rows: int) -> None:
        self.settings, self.machine, self.rows = settings, machine, rows
        self.connection: LocalVllm | None = None
        self.positions = 0  # tokens of a path for which vLLM was started
        self.texts = False  # whether it was started to find stop strings in text
        self.lock = threading.RLock()
        self.model: Any = None  # the policy, None between rollouts
        self.config: Any = None  # of the policy
        self.tokenizer: Any = None
        self.folder: Callable[[], Path] = Path
        self.ids = TokenIds(0)  # of the policy's, those that have a token
        self.digest = ""  # of the policy
        self.loaded = ""  # digest of the policy that vLLM has; "" for none

    def set_policy(
        self, model: Any, tokenizer: Any, folder: Callable[[], Path], digest: str
    ) -> None:
        """Sample from ``model`` from now on; ``folder`` returns the folder with all its weights.

        A policy of another shape ends vLLM, which was started for the last one's.
        """
        before, self.config = self.config, model.config
        if before is not None and before.to_diff_dict() != model.config.to_diff_dict():
            self.close()
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.ids, self.digest = token_ids.of(model), digest

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return this engine once for each of the recipe's lanes."""
        return [self] * max(1, min(most, self.settings.lanes))

    def pieces(self) -> list[str]:
        """Return the text of each token of the vocabulary."""
        return marks.token_texts(
            self.tokenizer, self.config.get_text_config(decoder=True).vocab_size
        )

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[TurnSession]:
        """Open a session; see ``tasks.engines.Engine``.

        More positions than before, or the first stop string that is no token, restart vLLM.
        """
        check_room(self.config, context)
        with self.lock:
            texts = bool(stop_texts(self.pieces(), stop))
            if context > self.positions or texts > self.texts:
                self.close()
                longest = max(context, self.positions)
                self.positions = positions_for(longest, most_positions(self.config))
                self.texts = self.texts or texts
            self.connect()
        yield TurnSession(self, paths, context, temperature, top_p, stop)

    def sample(self, turns: Sequence[TurnRequest]) -> list[Drawn]:
        """Sample turns; where vLLM dies, start it again and repeat them, up to RESTARTS times."""
        for _ in range(RESTARTS):
            connection = self.connect()
            try:
                return connection.sample(turns)
            except EngineDiedError as error:
                self._discard(connection, error)
        return self.connect().sample(turns)

    def release(self) -> None:
        """Release the GPU memory to the learner."""
        self.model = None
        if self.connection and self.machine.device == "cuda":
            self.loaded = ""
            try:
                self.connection.release()
            except EngineDiedError as error:
                self._discard(self.connection, error)

    def close(self) -> None:
        """End vLLM, if there is one."""
        if self.connection:
            self.connection.close()
        self.connection, self.loaded = None, ""

    def connect(self) -> LocalVllm:
        """Return a connection to a vLLM with the policy; start vLLM again if it cannot load it."""
        with self.lock:
            if self.connection and self.loaded != self.digest:
                try:
                    self.connection.load(self.model, self.folder)
                    self._mask(self.connection)
                    self.loaded = self.digest
                except (EngineDiedError, RuntimeError) as error:
                    self._discard(self.connection, error)
            if not self.connection:
                self.connection = self._start()
                self._mask(self.connection)
                self.loaded = self.digest
            return self.connection

    def _discard(self, connection: LocalVllm, error: Exception) -> None:
        """Close a connection that has failed, unless another thread has closed it."""
        with self.lock:
            if self.connection is connection:
                print(f"{error}: restarting it; unfinished turns are sampled again", flush=True)
                self.close()

    def _mask(self, connection: LocalVllm) -> None:
        """Have vLLM draw no id that the policy's tokenizer has not."""
        connection.call("worker", "draw_from", self.ids.told(), "")

    def _start(self) -> LocalVllm:
        """Start vLLM in a process here."""
        free_gpu_memory()
        return LocalVllm(self.folder(), self._options())

    def _options(self) -> dict[str, Any]:
        """Return arguments of vLLM's EngineArgs."""
        memory = self.settings.memory
        return {
            "dtype": self.machine.precision,
            "seed": 0,  # not used: each turn has its own
            "max_model_len": self.positions,
            "max_num_seqs": self.rows,
            "skip_tokenizer_init": not self.texts,
            "generation_config": "vllm",
            "load_format": "safetensors",
            "trust_remote_code": False,
            "enable_prefix_caching": caches_prefixes(
                layer_kinds.described(self.config), self.machine.device
            ),
            "disable_log_stats": True,
            **DEVICES[self.machine.device](memory),
        }


DEVICES: dict[str, Callable[[float], dict[str, Any]]] = {
    "cpu": lambda memory: {
        "kv_cache_memory_bytes": int(memory * GIB),
        "enforce_eager": True,
        # a prompt in chunks rewinds the turn's seeded generator, which vLLM cannot do on a CPU
        "enable_chunked_prefill": False,
    },
    "cuda": lambda memory: {"gpu_memory_utilization": memory, "enable_sleep_mode": True},
}
# vLLM takes a minute to start and serves the rollouts of all iterations. A rollout opens its engine
# itself, and only if its result is not in the ledger; so the engine belongs to the process.
_engines: dict[tuple[Any, ...], VllmEngine] = {}  # at most one


def caches_prefixes(config: Mapping[str, Any], device: str) -> bool:
    """Return whether vLLM can keep the prefixes of a policy with such a config.json.

    On a CPU it cannot where layers have a state from token to token: it would keep that at the ends
    of chunks of a prompt, and a prompt is not processed in chunks there (see ``DEVICES``).
    """
    kinds = layer_kinds.kinds_of(config)
    return device != "cpu" or kinds.keys() <= {*layer_kinds.FULL, *layer_kinds.WINDOWS}


def positions_for(context: int, most: int | None) -> int:
    """Return positions to start vLLM with: a power of 2, so that longer paths restart it rarely."""
    positions: int = 2 ** (context - 1).bit_length()
    return positions if most is None else min(most, positions)


def vllm_engine(
    settings: EngineSettings,
    machine: Machine,
    rows: int,
    model: Any,
    tokenizer: Any,
    folder: Callable[[], Path],
    digest: str,
) -> VllmEngine:
    """Return this process's engine, set to sample from ``model`` (see ``set_policy``).

    Other settings than before end the last engine.
    """
    key = (settings, machine, rows)
    if key not in _engines:
        close_engines()
        _engines[key] = VllmEngine(settings, machine, rows)
    _engines[key].set_policy(model, tokenizer, folder, digest)
    return _engines[key]


@atexit.register
def close_engines() -> None:
    """End this process's vLLM, if there is one."""
    while _engines:
        _engines.popitem()[1].close()
