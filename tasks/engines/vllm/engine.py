"""The vLLM engine: sessions over a policy in vLLM, in a process here or on a server.

A session keeps no state of its paths: whole contexts go in, and vLLM's prefix cache finds the part
that it has computed, so a branch costs only its new tokens. Each turn has a seed of its own, so a
turn can be sampled again: after vLLM has died, it is started again and unfinished turns are
repeated.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from params.schema.agent import Engine as Settings
from params.schema.base import Machine
from tasks.engines.contract import Engine, Request, Sample, check_room
from tasks.engines.vllm.connection import (
    Connection,
    EngineDiedError,
    LocalVllm,
    free_gpu_memory,
)
from tasks.engines.vllm.fleet import Fleet
from tasks.engines.vllm.messages import Drawn, Turn
from tasks.trees import marks
from tasks.trees.markers import any_of
from tasks.trees.outcomes import StopReason

RESTARTS = 3  # of a vLLM that dies while it samples, before the rollout fails
GIB = 2**30


class VllmEngine:
    """Samples from a policy through vLLM. It outlives rollouts; see ``vllm_engine``."""

    def __init__(self, settings: Settings, machine: Machine, rows: int) -> None:
        self.settings, self.machine, self.rows = settings, machine, rows
        self.connection: Connection | None = None
        self.positions = 0  # tokens of a path for which vLLM was started
        self.texts = False  # whether it was started to find stop strings in text
        self.lock = threading.RLock()
        self.model: Any = None  # the policy, None between rollouts
        self.config: Any = None  # of the policy
        self.tokenizer: Any = None
        self.folder: Callable[[], Path] = Path
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
        self.digest = digest

    def replicas(self, most: int) -> Sequence[Engine]:
        """Return this engine once for each of the recipe's lanes."""
        return [self] * max(1, min(most, self.settings.lanes))

    def pieces(self) -> list[str]:
        """Return the text of each token of the vocabulary."""
        return marks.token_texts(self.tokenizer, self.config.vocab_size)

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[VllmSession]:
        """Open a session; see ``tasks.engines.Engine``.

        More positions than before, or the first stop string that is no token, restart vLLM.
        """
        check_room(self.config, context)
        with self.lock:
            texts = bool(stop_texts(self.pieces(), stop))
            if context > self.positions or texts > self.texts:
                if not self.settings.servers:
                    self.close()
                longest = max(context, self.positions)
                self.positions = positions_for(longest, self.config.max_position_embeddings)
                self.texts = self.texts or texts
            self.connect()
        yield VllmSession(self, paths, context, temperature, top_p, stop)

    def sample(self, turns: Sequence[Turn]) -> list[Drawn]:
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
        """Close the connection, if there is one; a vLLM in a process here ends."""
        if self.connection:
            self.connection.close()
        self.connection, self.loaded = None, ""

    def connect(self) -> Connection:
        """Return a connection to a vLLM with the policy; start vLLM again if it cannot load it."""
        with self.lock:
            if self.connection and self.loaded != self.digest:
                try:
                    self.connection.load(self.model, self.folder, self.digest)
                    self.loaded = self.digest
                except (EngineDiedError, RuntimeError) as error:
                    self._discard(self.connection, error)
            if not self.connection:
                self.connection = self._start()
                self.loaded = self.digest
            return self.connection

    def _discard(self, connection: Connection, error: Exception) -> None:
        """Close a connection that has failed, unless another thread has closed it."""
        with self.lock:
            if self.connection is connection:
                print(f"{error}: restarting it; unfinished turns are sampled again", flush=True)
                self.close()

    def _start(self) -> Connection:
        """Connect to the servers, or start vLLM in a process here."""
        if self.settings.servers:
            fleet = Fleet(self.settings.servers)
            fleet.load(self.model, self.folder, self.digest)
            return fleet
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
            "enable_prefix_caching": True,
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


def positions_for(context: int, most: int) -> int:
    """Return positions to start vLLM with: a power of 2, so that longer paths restart it rarely."""
    return min(most, 2 ** (context - 1).bit_length())


def vllm_engine(
    settings: Settings,
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


class VllmSession:
    """The paths of one batch of dialogues. See ``tasks.engines.Session``."""

    def __init__(
        self,
        engine: VllmEngine,
        paths: int,
        context: int,
        temperature: float,
        top_p: float,
        stop: Sequence[str],
    ) -> None:
        self.engine, self.paths, self.context = engine, paths, context
        self.temperature, self.top_p = temperature, top_p
        self.pieces, self.end = engine.pieces(), engine.tokenizer.eos_token_id
        self.stop = re.compile("|".join(map(re.escape, stop))) if stop else None
        self.stop_tokens = stop_tokens(self.pieces, stop)
        self.stop_texts = stop_texts(self.pieces, stop)
        self.open_handles: set[int] = set()
        self.trees: dict[int, bytes] = {}  # handle -> digest of the prompt that its path began with
        self.handles = 0

    def open(self) -> int:
        if len(self.open_handles) == self.paths:
            raise RuntimeError(f"all {self.paths} paths of this session are in use")
        self.handles += 1
        self.open_handles.add(self.handles)
        return self.handles

    def fork(self, handle: int) -> int:
        branch = self.open()
        if handle in self.trees:
            self.trees[branch] = self.trees[handle]
        return branch

    def close(self, handle: int) -> None:
        self.open_handles.remove(handle)
        self.trees.pop(handle, None)

    def sample(self, requests: Sequence[Request]) -> list[Sample]:
        if not requests:
            return []
        longest = max(len(request.tokens) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ValueError(f"a turn may reach {longest} tokens, the session has {self.context}")
        turns = [self._turn(request) for request in requests]
        return [self._sample(*drawn) for drawn in self.engine.sample(turns)]

    def _turn(self, request: Request) -> Turn:
        if request.handle not in self.trees:  # its first turn: the tokens are the prompt
            own = hashlib.blake2b(request.tokens.tobytes(), digest_size=16).digest()
            self.trees[request.handle] = own
        return Turn(
            request.tokens,
            request.seed,
            request.max_tokens,
            self.temperature,
            self.top_p,
            (self.end, *self.stop_tokens),
            self.stop_texts,
            self.trees[request.handle],
        )

    def _sample(self, tokens: Any, logprobs: Any, entropies: Any) -> Sample:
        """Cut the turn at its end, which vLLM may notice some tokens later; add why it stopped."""
        stopped = StopReason.LENGTH
        if tokens[-1] == self.end:
            stopped = StopReason.END
        if self.stop and len(
            ends := marks.completed(self.stop, [self.pieces[token] for token in tokens])
        ):
            tokens, stopped = tokens[: ends[0] + 1], StopReason.STOP
        return Sample(tokens, logprobs[: len(tokens)], entropies[: len(tokens)], stopped)


def stop_tokens(pieces: Sequence[str], stop: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens whose text contains a whole stop string."""
    whole = any_of(stop)
    return tuple(token for token, piece in enumerate(pieces) if whole.search(piece))


def stop_texts(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings that vLLM has to find in text: none if each is one token.

    Making text costs vLLM more than half of its speed for a small policy. A policy that spells such
    a tag letter by letter is still cut there, but only after its turn has ended in another way.
    """
    return () if all(text in pieces for text in stop) else tuple(stop)
