"""The vLLM engine: sessions over a policy that vLLM holds, here in a process or on a server.

A session keeps nothing of its paths: whole contexts go in, and vLLM's prefix caching finds what it
has computed of them, so a branch costs what it adds. Each turn has a seed of its own, so what has
been asked for can be asked for again: an engine that has died is built anew, and goes on.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
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
    RemoteVllm,
    give_back,
)
from tasks.engines.vllm.messages import Drawn, Turn
from tasks.trees import marks
from tasks.trees.dialogue import STOP_STRINGS
from tasks.trees.outcomes import StopReason

REBUILDS = 3  # of an engine that dies, before a turn is given up
GIB = 2**30


class VllmEngine:
    """Samples a policy through vLLM. One lives as long as its process; see ``vllm_engine``."""

    def __init__(self, settings: Settings, machine: Machine, rows: int) -> None:
        self.settings, self.machine, self.rows = settings, machine, rows
        self.way: Connection | None = None
        self.positions = 0  # that the process has room for in a path
        self.lock = threading.RLock()
        self.model: Any = None  # while it is sampled
        self.config: Any = None  # the model's
        self.tokenizer: Any = None
        self.folder: Callable[[], Path] = Path
        self.taken = ""  # what vLLM holds now

    def hold(self, model: Any, tokenizer: Any, folder: Callable[[], Path], digest: str) -> None:
        """From now on sample from ``model``, which lies whole in what ``folder`` returns.

        One of another shape has no place in a process that was started for this one.
        """
        before, self.config = self.config, model.config
        if before is not None and before.to_diff_dict() != model.config.to_diff_dict():
            self.close()
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.digest = digest

    def replicas(self, most: int) -> Sequence[Engine]:
        """See ``tasks.engines.Engine.replicas``: as many as the recipe has lanes."""
        return [self] * max(1, min(most, self.settings.lanes))

    def pieces(self) -> list[str]:
        """The text of each token on its own."""
        return marks.token_texts(self.tokenizer, self.config.vocab_size)

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[VllmSession]:
        """See ``tasks.engines.Engine.session``."""
        check_room(self.config, context)
        with self.lock:
            if context > self.positions:
                if not self.settings.server:
                    self.close()
                self.positions = room(context, self.config.max_position_embeddings)
            self._living()
        yield VllmSession(self, paths, context, temperature, top_p, stop)

    def sample(self, turns: Sequence[Turn]) -> list[Drawn]:
        """Sample turns; an engine that dies over them is built anew and asked again."""
        for _ in range(REBUILDS):
            way = self._living()
            try:
                return way.sample(turns)
            except EngineDiedError as error:
                self._bury(way, error)
        return self._living().sample(turns)

    def release(self) -> None:
        """Leave the GPU to the learner."""
        self.model = None
        if self.way and self.machine.device == "cuda":
            self.taken = ""
            try:
                self.way.release()
            except EngineDiedError as error:
                self._bury(self.way, error)

    def close(self) -> None:
        """End the process, if there is one."""
        if self.way:
            self.way.close()
        self.way, self.taken = None, ""

    def _living(self) -> Connection:
        """vLLM with the policy at hand. A process that cannot take it in place is built anew."""
        with self.lock:
            if self.way and self.taken != self.digest:
                try:
                    self.way.take(self.model, self.folder)
                    self.taken = self.digest
                except (EngineDiedError, RuntimeError) as error:
                    self._bury(self.way, error)
            if not self.way:
                self.way = self._start()
                self.taken = self.digest
            return self.way

    def _bury(self, way: Connection, error: Exception) -> None:
        """Give up a way that does not work any more, unless another thread has done so."""
        with self.lock:
            if self.way is way:
                print(
                    f"{error}: it is built anew, and what it was sampling is sampled again",
                    flush=True,
                )
                self.close()

    def _start(self) -> Connection:
        if self.settings.server:
            return self._connect(self.settings.server)
        give_back()
        return LocalVllm(self.folder(), self._options())

    def _connect(self, address: str) -> RemoteVllm:
        """The server, once it answers."""
        patience = time.monotonic() + RETURN
        while True:
            try:
                server = RemoteVllm(address)
                server.take(self.model, self.folder)
                return server
            except EngineDiedError as error:
                if time.monotonic() > patience:
                    raise
                print(f"{error}; trying again", flush=True)
                time.sleep(PAUSE)

    def _options(self) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        memory = self.settings.memory
        return {
            "dtype": self.machine.precision,
            "seed": 0,  # of nothing: each turn has its own
            "max_model_len": self.positions,
            "max_num_seqs": self.rows,
            "skip_tokenizer_init": not stop_texts(self.pieces(), STOP_STRINGS),
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **DEVICES[self.machine.device](memory),
        }


RETURN, PAUSE = 600.0, 5.0  # seconds that a server has to come back, and between two looks
DEVICES: dict[str, Callable[[float], dict[str, Any]]] = {
    "cpu": lambda memory: {
        "kv_cache_memory_bytes": int(memory * GIB),
        "enforce_eager": True,
        # a prompt in parts turns a seeded generator back, which one on a CPU cannot do
        "enable_chunked_prefill": False,
    },
    "cuda": lambda memory: {"gpu_memory_utilization": memory, "enable_sleep_mode": True},
}
_engines: dict[tuple[Any, ...], VllmEngine] = {}  # at most one


def room(context: int, most: int) -> int:
    """Positions to start with, for paths of ``context``: in steps, since more means a new start."""
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
    """The engine of this process, which samples from ``model`` from now on (``hold``)."""
    key = (settings, machine, rows)
    if key not in _engines:
        close_engines()
        _engines[key] = VllmEngine(settings, machine, rows)
    _engines[key].hold(model, tokenizer, folder, digest)
    return _engines[key]


@atexit.register
def close_engines() -> None:
    """End vLLM's process, where this one has one."""
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
        self.handles = 0

    def open(self) -> int:
        if len(self.open_handles) == self.paths:
            raise RuntimeError(f"all {self.paths} paths of this session are in use")
        self.handles += 1
        self.open_handles.add(self.handles)
        return self.handles

    def fork(self, handle: int) -> int:
        return self.open()

    def close(self, handle: int) -> None:
        self.open_handles.remove(handle)

    def sample(self, requests: Sequence[Request]) -> list[Sample]:
        if not requests:
            return []
        longest = max(len(request.tokens) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ValueError(f"a turn may reach {longest} tokens, the session has {self.context}")
        turns = [self._turn(request) for request in requests]
        return [self._sample(*drawn) for drawn in self.engine.sample(turns)]

    def _turn(self, request: Request) -> Turn:
        return Turn(
            request.tokens,
            request.seed,
            request.max_tokens,
            self.temperature,
            self.top_p,
            (self.end, *self.stop_tokens),
            self.stop_texts,
        )

    def _sample(self, tokens: Any, logprobs: Any, entropies: Any) -> Sample:
        """Cut where the turn is over, which vLLM may notice some tokens later, and say why."""
        stopped = StopReason.LENGTH
        if tokens[-1] == self.end:
            stopped = StopReason.END
        if self.stop and len(
            ends := marks.completed(self.stop, [self.pieces[token] for token in tokens])
        ):
            tokens, stopped = tokens[: ends[0] + 1], StopReason.STOP
        return Sample(tokens, logprobs[: len(tokens)], entropies[: len(tokens)], stopped)


def stop_tokens(pieces: Sequence[str], stop: Sequence[str]) -> tuple[int, ...]:
    """The tokens that contain a stop string whole."""
    return tuple(token for token, piece in enumerate(pieces) if any(text in piece for text in stop))


def stop_texts(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings that vLLM has to look for in its text: none where each is a token of its own.

    Text costs vLLM more than half of its speed for a small policy. A policy that spells such a tag
    letter by letter is still cut there, but only when its turn has ended otherwise.
    """
    return () if all(text in pieces for text in stop) else tuple(stop)
