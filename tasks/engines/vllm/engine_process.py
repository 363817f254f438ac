"""vLLM in a process of its own, beside the trainer; tasks/engines/vllm/connection.py starts it.

Turns come in through a channel, join those that are being sampled, and go out when they have ended.
The process ends when its channel closes, so it ends with its trainer in any case.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ValidationError
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt

from tasks.engines.turns import Drawn, TurnRequest
from tasks.engines.vllm.messages import LOG, WORKER_CLASS, EngineFault, parse_output
from tasks.engines.vllm_options import sampling_options


def main(descriptor: int) -> None:
    """Serve the channel behind a descriptor until its other side is closed."""
    with suppress(EOFError, ConnectionError), Connection(descriptor) as channel:
        options = pickle.loads(channel.recv_bytes())
        arguments = EngineArgs(worker_extension_cls=WORKER_CLASS, **options)
        try:
            config = arguments.create_engine_config()
        except Exception as error:
            _send(channel, 0, _refusal(error))
            raise
        try:
            engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            engine.collective_rpc("measure_entropies")
        except Exception as error:
            refused = _is_of_the_policy(error)
            _send(channel, 0, _refusal(error) if refused else _picklable(error))
            raise
        _send(channel, 0, None)
        serve(channel, engine)


def serve(channel: Connection, engine: LLMEngine) -> None:
    """Answer calls (number, name, arguments), with steps of the engine in between."""
    pending: dict[int, list[Drawn | None]] = {}  # number of a call -> its turns, once sampled
    tried = False  # whether it has sampled a token
    while True:
        while not pending or channel.poll():
            number, name, arguments = pickle.loads(channel.recv_bytes())
            if name == "sample":
                _add_turns(channel, engine, number, arguments)
                pending[number] = [None] * len(arguments)
            else:
                _send(channel, number, _call(engine, name, arguments))
        outputs, tried = _step(channel, engine, pending, tried), True
        for output in outputs:
            if output.finished:
                number, index = map(int, output.request_id.split("/"))
                pending[number][index] = parse_output(output.outputs[0])
                if all(turn is not None for turn in pending[number]):
                    _send(channel, number, pending.pop(number))


def _add_turns(
    channel: Connection, engine: LLMEngine, number: int, turns: Sequence[TurnRequest]
) -> None:
    """Add the turns of a call; an error is sent as its answer, and ends the process."""
    try:
        for index, turn in enumerate(turns):
            prompt = TokensPrompt(prompt_token_ids=turn.tokens.tolist())
            options = SamplingParams(**sampling_options(turn))
            engine.add_request(f"{number}/{index}", prompt, options)
    except Exception as error:  # the engine keeps the turns before it, which nobody waits for
        _send(channel, number, _picklable(error))
        raise


def _step(channel: Connection, engine: LLMEngine, pending: Iterable[int], tried: bool) -> list[Any]:
    """Return the outputs of one step; an error goes to all pending calls and ends the process.

    ``tried``: a step has succeeded, so that no error says that vLLM cannot sample the policy.
    """
    try:
        return list(engine.step())
    except Exception as error:
        refused = _is_of_the_policy(error) and not tried
        fault = EngineFault(f"{type(error).__name__}: {error}")
        for number in pending:
            _send(channel, number, _refusal(error) if refused else fault)
        raise


def _call(engine: LLMEngine, name: str, arguments: Sequence[Any]) -> Any:
    """Return what a call returns, or the exception that it raises."""
    try:
        return CALLS[name](engine, *arguments)
    except Exception as error:
        return _picklable(error)


def _worker(engine: LLMEngine, method: str, *arguments: Any) -> Any:
    return engine.collective_rpc(method, args=arguments)[0]


CALLS: dict[str, Callable[..., Any]] = {
    "worker": _worker,
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(reset_running_requests=True),
    "sleep": lambda engine, level: engine.sleep(level),
    "wake_up": lambda engine: engine.wake_up(),
}


# Errors of vLLM's code for an architecture, or because it has none.
OF_A_POLICY = (
    *(LookupError, AttributeError, TypeError, NotImplementedError, AssertionError, ValueError),
)
OF_A_MACHINE = ("memory", "kv cache")  # words of errors that another policy would meet, too


def _is_of_the_policy(error: Exception) -> bool:
    """Return whether vLLM has no way to sample such a policy here."""
    words = str(error).lower()
    if any(word in words for word in OF_A_MACHINE):
        return False
    return isinstance(error, OF_A_POLICY) or "unsupported" in words or "not supported" in words


def _refusal(error: Exception) -> ValueError:
    """Return what vLLM says of a policy that it cannot sample, in one line, with the remedy."""
    details = error.errors() if isinstance(error, ValidationError) else [{"msg": str(error)}]
    kind = "" if isinstance(error, ValidationError) else f"{type(error).__name__}: "
    words = " ".join(" ".join(str(detail["msg"]) for detail in details).split())[:300]
    return ValueError(
        f"vLLM cannot sample this policy here ({kind}{words}; its output is in {LOG}): set "
        "engine.kind to transformers"
    )


def _picklable(error: Exception) -> RuntimeError:
    """Return an exception that unpickles without vLLM, with the traceback as a note."""
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    plain.add_note(traceback.format_exc())
    return plain


def _send(channel: Connection, number: int, answer: Any) -> None:
    channel.send_bytes(pickle.dumps((number, answer)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
