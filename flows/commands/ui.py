"""Show the runs of this checkout in Prefect's and MLflow's UI, until Ctrl-C (`make ui`)."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from flows import end_import_phase
from flows.host import files
from flows.host.parents import PARENT
from flows.tracking import store
from flows.workers.connection import UI_ADDRESS, ui_server
from flows.workers.server import (
    HOME,
    HOST,
    MLFLOW_PORT,
    PREFECT_PORT,
    await_answer,
    pages,
    start_prefect,
    stop,
)

# MLflow's command starts processes of its own. This shell ends all of them with the process that
# started it, even if that was killed.
GUARD = (
    'parent=$PPID; "$@" & while kill -0 $! && kill -0 $parent; do sleep 1; done 2>/dev/null; kill 0'
)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ui() -> int:
    """Start both servers and wait for Ctrl-C; return 1 where they run already."""
    end_import_phase()
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)
    HOME.mkdir(parents=True, exist_ok=True)
    with UI_ADDRESS.open("a+") as address, (HOME / "ui.log").open("ab") as log:
        if not files.lock(address):
            print(f"make ui is already running: {ui_server()}", file=sys.stderr)
            return 1
        address.truncate(0)
        started: list[subprocess.Popen[bytes]] = []
        try:
            return _serve(address, log, started)
        finally:
            _ignore_signals()
            for process in started:
                stop(process)


def _leave(*_: object) -> None:
    """Exit with status 0; signals that follow do not disturb the end of the servers."""
    _ignore_signals()
    sys.exit(0)


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _serve(address: IO[str], log: IO[bytes], started: list[subprocess.Popen[bytes]]) -> int:
    port, mlflow_port = free_port(PREFECT_PORT), free_port(MLFLOW_PORT)
    prefect, _ = start_prefect("ui", port, log)
    started.append(prefect)
    mlflow = _start_mlflow(mlflow_port, log)
    started.append(mlflow)
    await_answer(prefect, port, "/api/health", log.name)
    address.write(f"http://{HOST}:{port}/api")
    address.flush()
    print(f"Prefect  http://{HOST}:{port}")
    await_answer(mlflow, mlflow_port, "/health", log.name)
    shown = f"http://{HOST}:{mlflow_port}"
    print(f"MLflow   {shown}")
    if page := store.page_of(shown):
        print(f"runs     {page}")
    print("Ctrl-C stops both.", flush=True)
    while prefect.poll() is None and mlflow.poll() is None:
        time.sleep(0.5)
    raise RuntimeError(f"a server has ended by itself: see {log.name}")


def free_port(port: int) -> int:
    """Return ``port``, or the next one that nobody listens on."""
    with suppress(OSError), socket.create_server((HOST, port)):
        return port
    return free_port(port + 1)


def _start_mlflow(port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "ui"]
    command += ["--host", HOST, "--port", str(port), "--workers", "1"]
    origins = sorted(pages(port))
    browsers = {  # the user's values override ours
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(
            origin.removeprefix("http://") for origin in origins
        ),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
    }
    return subprocess.Popen(
        ["sh", "-c", GUARD, "guard", *command],
        env=browsers
        | os.environ
        | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        | {PARENT: str(os.getpid())}
        | {"MLFLOW_BACKEND_STORE_URI": store.store_uri()},  # others can read the command line
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def main(arguments: Sequence[str]) -> int:
    """Run ``make ui``; return the exit status, 1 where a server does not start."""
    argparse.ArgumentParser(prog="beamline ui", description=__doc__).parse_args(arguments)
    try:
        return ui()
    except RuntimeError as error:
        print(f"make ui: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
