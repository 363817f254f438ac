"""vLLM's own server, as a recipe's ``engine.server`` expects it, on the machine with the GPU.

    python -m tasks.engines.vllm.serve FOLDER --port 8000

``FOLDER`` holds a policy to begin with; each update is then loaded from the folder that training
has written, which must be the same path there: share it. Whoever reaches the port can use it and
have it load files: keep it in a network of your own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.engines.vllm.connection import ENVIRONMENT, ROOT
from tasks.engines.vllm.engine import DEVICES
from tasks.engines.vllm.messages import WORKER


def command(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """What starts the server. ``options``: arguments of vLLM by name; True and False are flags."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    for name, value in options.items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}"]
        words += [] if isinstance(value, bool) else [str(value)]
    return words


def environment() -> dict[str, str]:
    """Variables that the server needs; the user's own go first."""
    development = {"VLLM_SERVER_DEV_MODE": "1"}  # opens the calls that change weights
    server = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return ENVIRONMENT | server | development | os.environ | {"PYTHONPATH": str(ROOT)}


def main(words: list[str] | None = None) -> None:
    """Become the server that the command line asks for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m tasks.engines.vllm.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a policy, as transformers saves it")
    parser.add_argument("--host", default="127.0.0.1", help="whose connections it takes")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--memory", type=float, default=0.9, help="as engine.memory of a recipe")
    parser.add_argument("--context", type=int, help="tokens of a path; the policy's own")
    chosen = parser.parse_args(words)
    if not (chosen.folder / "config.json").is_file():
        parser.error(f"{chosen.folder} holds no policy: name a folder that transformers has saved")
    options = {
        "host": chosen.host,
        "port": chosen.port,
        "dtype": chosen.precision,
        "worker_extension_cls": WORKER,
        "generation_config": "vllm",
        "enable_scale_out": True,  # opens the call that takes and gives tokens
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "disable_uvicorn_access_log": True,
        **({"max_model_len": chosen.context} if chosen.context else {}),
        **{k: v for k, v in DEVICES[device](chosen.memory).items() if k != "enable_sleep_mode"},
    }
    os.execve(sys.executable, command(chosen.folder, options), environment())


if __name__ == "__main__":
    main()
