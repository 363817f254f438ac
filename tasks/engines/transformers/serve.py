"""Serve the transformers engine to runs whose recipe names this machine in ``engine.servers``.

    python -m tasks.engines.transformers.serve FOLDER --port 8000

``FOLDER`` is the policy to start with; each update is then loaded from the folder that training has
written, or sent where this machine does not see it. The server asks for a token as vLLM's does
(tasks/engines/vllm/serve.py). The turns of one request are one batch, computed from the beginning
of their contexts: what they draw depends on no other request, and nothing outlives an update.
Clients of OpenAI's protocol are answered, too (openai_protocol.py), with the token as their key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from params.given_numbers import count
from params.schema.base import Machine
from tasks.engines.contract import Sample, SamplingRequest
from tasks.engines.servers import command
from tasks.engines.servers.token_guard import GENERATE, RPC, Guard
from tasks.engines.servers.weights_check import digest_of
from tasks.engines.transformers import openai_protocol
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.policy import token_ids
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.machine import use_machine
from tasks.policy.resident import to_sample


class Served:
    """The policy that is served; one request at a time computes, or loads weights."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        """Load the policy in ``folder``. Raises OSError where it holds none."""
        self.machine, self.version, self.lock = machine, "", threading.Lock()
        self.name = str(folder)
        self.held: TransformersEngine | None = None
        self.load_folder(str(folder), "")

    @property
    def engine(self) -> TransformersEngine:
        """Return the engine. Raises RuntimeError after weights that did not load."""
        if self.held is None:
            raise RuntimeError("the last weights did not load, and the server has none")
        return self.held

    def load_folder(self, folder: str, version: str) -> None:
        """Load a policy. Raises OSError where the folder holds none."""
        with self.lock:
            self.held = None  # frees its memory before the next one is loaded
            model = to_sample(load_policy(Path(folder), self.machine), self.machine)
            self.held = TransformersEngine(model, load_tokenizer(Path(folder)))
            self.version = version

    def draw_from(self, told: str, version: str) -> str:
        """Draw no ids but those told of (``TokenIds.told``), from the weights ``version``.

        Return the ids that are drawn now; "" where these are not the weights.
        """
        with self.lock:
            if version != self.version:
                return ""
            self.engine.model.token_ids = token_ids.parse(told)
            return told

    def policy(self) -> str:
        """Return the version of the weights that were last loaded; "" for those of the start."""
        return self.version

    def weight_digest(self, name: str) -> str:
        """Return the digest of a weight. Raises AttributeError for a name that is none."""
        with self.lock:
            return digest_of(self.engine.model.get_parameter(name))

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Sample turns as one batch; return them as vLLM's server writes them."""
        contexts = [np.array(turn["token_ids"], np.int32) for turn in body["turns"]]
        limits = [turn["max_tokens"] for turn in body["turns"]]
        longest = max(len(of) + limit for of, limit in zip(contexts, limits, strict=True))
        options = body["temperature"], body["top_p"], body["stop"]
        with self.lock, self.engine.session(len(contexts), longest, *options) as session:
            requests = [
                SamplingRequest(session.open(), tokens, turn["seed"], limit)
                for turn, tokens, limit in zip(body["turns"], contexts, limits, strict=True)
            ]
            return [choice_of(sample) for sample in session.sample(requests)]


UNFIT = (KeyError, TypeError, ValueError)  # of a request that no server can answer


def choice_of(sample: Sample) -> dict[str, Any]:
    """Return a turn in the words of vLLM's server: each token with its logprob and entropy."""
    rows = zip(sample.logprobs.tolist(), sample.entropies.tolist(), strict=True)
    content = [
        {"logprob": logprob, "top_logprobs": [{"logprob": logprob}, {"logprob": entropy}]}
        for logprob, entropy in rows
    ]
    return {"token_ids": sample.tokens.tolist(), "logprobs": {"content": content}}


def app_of(served: Served) -> Starlette:
    """Return the application, without its guard."""
    methods: dict[str, Callable[..., Any]] = {
        "sample_trees": lambda: None,  # says that this is the transformers engine
        "draw_from": served.draw_from,
        "policy": served.policy,
        "weight_digest": served.weight_digest,
        "load_folder": served.load_folder,
    }

    async def generate(request: Request) -> JSONResponse:
        try:
            choices = await run_in_threadpool(served.generate, await request.json())
        except UNFIT as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
        return JSONResponse({"choices": choices})

    async def call(request: Request) -> JSONResponse:
        body = await request.json()
        if body["method"] not in methods:
            return JSONResponse({"error": f"there is no method {body['method']}"}, 404)
        result = await run_in_threadpool(methods[body["method"]], *body["args"])
        return JSONResponse({"results": [result]})

    async def done(request: Request) -> JSONResponse:
        return JSONResponse({"success": True})  # loading waits for what is sampled: see Served

    async def fail(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)

    answers = {GENERATE: generate, RPC: call}
    answers |= dict.fromkeys(("/pause", "/resume", "/reset_prefix_cache"), done)
    routes = [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]
    routes += [*openai_protocol.routes(served), Route("/health", done)]
    return Starlette(routes=routes, exception_handlers={Exception: fail})


def main(arguments: list[str] | None = None) -> None:
    """Serve the policy that the command line names, until the process is ended."""
    parser = command.parser_of("tasks.engines.transformers.serve", __doc__)
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    args, guarding = command.parse(parser, arguments)
    os.environ.update(guarding)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    machine = Machine(threads=args.threads, device=device, precision=args.precision)
    use_machine(machine)
    guarded = Guard(app_of(Served(machine, args.folder)))
    uvicorn.run(guarded, host=args.host, port=args.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
