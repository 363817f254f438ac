"""Start vLLM's own server, as a recipe's ``engine.servers`` expects it, on a machine with a GPU.

    python -m tasks.engines.vllm.serve FOLDER --port 8000

``FOLDER`` is the policy to start with. Each update is then loaded from the folder that training has
written, which must have the same path here: share it. The server answers only requests with its
token: that of the environment variable BEAMLINE_SERVER_TOKEN, or the one in the file
.beamline/server.token, which is made where it is missing. Give it to the runs that use the server
in the same variable. It is not encrypted on its way: keep the port in a private network.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.engines.vllm.connection import ENVIRONMENT, ROOT
from tasks.engines.vllm.engine import DEVICES
from tasks.engines.vllm.guard import NAMES, TOKEN, TOKEN_FILE, Guard, server_token
from tasks.engines.vllm.messages import WORKER_CLASS


def command(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the server's command. ``options``: arguments of vLLM by name; a bool is a flag."""
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    for name, value in options.items():
        flag = name.replace("_", "-")
        line += [f"--no-{flag}"] if value is False else [f"--{flag}"]
        line += [] if isinstance(value, bool) else [str(value)]
    return line


def environment(token: str, names: Sequence[str]) -> dict[str, str]:
    """Return the server's environment variables; the user's values override ours.

    ``token`` and ``names`` are what the guard asks for.
    """
    development = {"VLLM_SERVER_DEV_MODE": "1"}  # opens the calls that change weights
    server = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    guarded = {TOKEN: token, NAMES: ",".join(names).lower(), "PYTHONPATH": str(ROOT)}
    return ENVIRONMENT | server | development | os.environ | guarded


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by the server that the command line describes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m tasks.engines.vllm.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a policy, as transformers saves it")
    parser.add_argument("--host", default="127.0.0.1", help="address that it listens at")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--name", action="append", default=[], help="another name that runs call this machine by"
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="as engine.memory of a recipe")
    parser.add_argument("--context", type=int, help="tokens of a path, at most")
    chosen = parser.parse_args(arguments)
    if not (chosen.folder / "config.json").is_file():
        parser.error(f"{chosen.folder} is no policy: name a folder that transformers has saved")
    try:
        token = server_token()
    except (PermissionError, ValueError) as error:
        parser.error(str(error))
    given = f"in {TOKEN}" if os.environ.get(TOKEN) else f"{TOKEN}=$(cat {TOKEN_FILE.absolute()})"
    print(f"the server's token, for the runs that use it: {given}", flush=True)
    names = ["localhost", socket.gethostname(), chosen.host, *chosen.name]
    options = {
        "host": chosen.host,
        "port": chosen.port,
        "dtype": chosen.precision,
        "worker_extension_cls": WORKER_CLASS,
        "middleware": f"{Guard.__module__}.{Guard.__qualname__}",
        "generation_config": "vllm",
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enable_scale_out": True,  # opens the call with token ids
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        **({"max_model_len": chosen.context} if chosen.context else {}),
        **{k: v for k, v in DEVICES[device](chosen.memory).items() if k != "enable_sleep_mode"},
    }
    os.execve(sys.executable, command(chosen.folder, options), environment(token, names))


if __name__ == "__main__":
    main()
