"""Start vLLM's own server, as a recipe's ``engine.servers`` expects it, on a machine with a GPU.

    python -m tasks.engines.vllm.serve FOLDER --port 8000

``FOLDER`` is the policy to start with. Each update is then loaded from the folder that training has
written, or sent where this machine does not see that folder. The server answers only requests with
its token: that of the environment variable BEAMLINE_SERVER_TOKEN, or the one in the file
.beamline/server.token, which is made where it is missing. Give it to the runs that use the server
in the same variable. It is not encrypted on its way: keep the port in a private network.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from params.given_numbers import count, share
from tasks.engines.servers.command import parse, parser_of
from tasks.engines.servers.token_guard import Guard
from tasks.engines.vllm.connection import ENVIRONMENT, ROOT
from tasks.engines.vllm.messages import WORKER_CLASS
from tasks.engines.vllm.vllm_engine import DEVICES, caches_prefixes
from tasks.policy import layer_kinds


def command(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the server's command. ``options``: arguments of vLLM by name; a bool is a flag."""
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    for name, value in options.items():
        flag = name.replace("_", "-")
        line += [f"--no-{flag}"] if value is False else [f"--{flag}"]
        line += [] if isinstance(value, bool) else [str(value)]
    return line


def environment(guarding: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment variables; the user's values override ours.

    ``guarding``: those of the guard.
    """
    development = {"VLLM_SERVER_DEV_MODE": "1"}  # opens the calls that change weights
    server = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    here = {**guarding, "PYTHONPATH": str(ROOT)}
    return ENVIRONMENT | server | development | os.environ | here


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by the server that the command line describes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = parser_of("tasks.engines.vllm.serve", __doc__)
    parser.add_argument("--memory", type=share, default=0.9, help="as engine.memory of a recipe")
    parser.add_argument("--context", type=count, help="tokens of a path, at most")
    parser.add_argument(
        "--transfer", choices=["nccl"], help="how weights come, if not as files: see docs/gpu.md"
    )
    args, guarding = parse(parser, arguments)
    config = layer_kinds.read(str(args.folder), None) or {}
    transfer = {"weight_transfer_config": json.dumps({"backend": args.transfer})}
    options = {
        "host": args.host,
        "port": args.port,
        "dtype": args.precision,
        "worker_extension_cls": WORKER_CLASS,
        "middleware": f"{Guard.__module__}.{Guard.__qualname__}",
        "generation_config": "vllm",
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enable_scale_out": True,  # opens the call with token ids
        "enable_prefix_caching": caches_prefixes(config, device),
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        **(transfer if args.transfer else {}),
        **({"max_model_len": args.context} if args.context else {}),
        **{k: v for k, v in DEVICES[device](args.memory).items() if k != "enable_sleep_mode"},
    }
    os.execve(sys.executable, command(args.folder, options), environment(guarding))


if __name__ == "__main__":
    main()
