"""vLLM in a process of its own, beside the trainer: what tasks/engines/vllm/engine.py starts.

Turns come in through a channel as they are asked for, join those under way, and go out when they
have ended. The process ends when its channel closes, so no trainer leaves one behind, however it
ends.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt

from tasks.engines.vllm.messages import WORKER, Fault, Turn, drawn


def main(descriptor: int) -> None:
    """Serve the channel behind a descriptor until its other side is gone."""
    with suppress(EOFError, ConnectionError), Connection(descriptor) as channel:
        options = pickle.loads(channel.recv_bytes())
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(worker_extension_cls=WORKER, **options))
            engine.collective_rpc("measure_entropies")
        except Exception as error:
            _send(channel, 0, _told(error))
            raise
        _send(channel, 0, None)
        serve(channel, engine)


def serve(channel: Connection, engine: LLMEngine) -> None:
    """Answer calls, each a number, a name and its arguments; one step of the engine in between."""
    waiting: dict[str, tuple[int, int]] = {}  # request -> number of its call, place in it
    answers: dict[int, list[Any]] = {}  # call -> what has ended of its turns
    while True:
        while not waiting or channel.poll():
            number, name, arguments = pickle.loads(channel.recv_bytes())
            if name == "sample":
                try:
                    names = [
                        _add(engine, f"{number}/{place}", turn)
                        for place, turn in enumerate(arguments)
                    ]
                except Exception as error:  # those before it have come in, and mean nothing
                    _send(channel, number, _told(error))
                    raise
                answers[number] = [None] * len(arguments)
                waiting |= {name: (number, place) for place, name in enumerate(names)}
            else:
                _send(channel, number, _call(engine, name, arguments))
        for output in _step(engine, channel, answers):
            if not output.finished:
                continue
            number, place = waiting.pop(output.request_id)
            answers[number][place] = drawn(output.outputs[0])
            if all(answer is not None for answer in answers[number]):
                _send(channel, number, answers.pop(number))


def _step(engine: LLMEngine, channel: Connection, pending: Iterable[int]) -> list[Any]:
    """What the engine has to say; its fault is told to all who wait, and ends the process."""
    try:
        return list(engine.step())
    except Exception as error:
        for number in pending:
            _send(channel, number, Fault(f"{type(error).__name__}: {error}"))
        raise


def _add(engine: LLMEngine, name: str, turn: Turn) -> str:
    prompt = TokensPrompt(prompt_token_ids=turn.tokens.tolist())
    engine.add_request(name, prompt, SamplingParams(**turn.options()))
    return name


def _call(engine: LLMEngine, name: str, arguments: Sequence[Any]) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return CALLS[name](engine, *arguments)
    except Exception as error:
        return _told(error)


def _worker(engine: LLMEngine, method: str, *arguments: Any) -> Any:
    return engine.collective_rpc(method, args=arguments)[0]


CALLS: dict[str, Callable[..., Any]] = {
    "worker": _worker,
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(reset_running_requests=True),
    "sleep": lambda engine, level: engine.sleep(level),
    "wake_up": lambda engine: engine.wake_up(),
}


def _told(error: Exception) -> RuntimeError:
    """An exception that every process can read."""
    found = RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note(traceback.format_exc())
    return found


def _send(channel: Connection, number: int, answer: Any) -> None:
    channel.send_bytes(pickle.dumps((number, answer)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
