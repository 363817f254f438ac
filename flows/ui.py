"""`make ui`: the runs of this checkout in Prefect's and MLflow's pages, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

from flows import end_import_phase
from flows.host import files
from flows.runs.dvc_command import PARENT
from flows.tracking import store
from flows.workers.connection import UI_ADDRESS, ui_server
from flows.workers.prefect_patches import HOME
from flows.workers.server import HOST, MLFLOW_PORT, PREFECT_PORT, await_answer, start_prefect, stop

# ---------------------------------------------------------------- make ui


def ui() -> int:
    """Show the runs of this project, in Prefect's UI and in MLflow's, until Ctrl-C."""
    end_import_phase()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    HOME.mkdir(parents=True, exist_ok=True)
    with UI_ADDRESS.open("a+") as address, (HOME / "ui.log").open("ab") as log:
        if not files.lock(address):
            print(f"make ui: it runs already, see {ui_server()}", file=sys.stderr)
            return 1
        address.truncate(0)
        started: list[subprocess.Popen[bytes]] = []
        try:
            return _show(address, log, started)
        except KeyboardInterrupt:
            return 0
        finally:
            for process in started:
                stop(process)


def _show(address: IO[str], log: IO[bytes], started: list[subprocess.Popen[bytes]]) -> int:
    port, mlflow_port = _free(PREFECT_PORT), _free(MLFLOW_PORT)
    prefect, _ = start_prefect("ui", port, log)
    started.append(prefect)
    mlflow = _start_mlflow(mlflow_port, log)
    started.append(mlflow)
    await_answer(prefect, port, "/api/health", log.name)
    address.write(f"http://{HOST}:{port}/api")
    address.flush()
    print(f"Prefect  http://{HOST}:{port}")
    await_answer(mlflow, mlflow_port, "/health", log.name)
    print(f"MLflow   http://{HOST}:{mlflow_port}\nCtrl-C ends both.", flush=True)
    while prefect.poll() is None and mlflow.poll() is None:
        time.sleep(0.5)
    raise RuntimeError(f"a server has ended by itself: {log.name} says why")


def _free(port: int) -> int:
    """``port``, or the next one that nobody listens on."""
    with suppress(OSError), socket.create_server((HOST, port)):
        return port
    return _free(port + 1)


def _start_mlflow(port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store.store_uri()]
    return subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        env=os.environ
        | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        | {PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def main() -> int:
    """Run ``make ui``; exit status 1 where a server does not start."""
    try:
        return ui()
    except RuntimeError as error:
        print(f"make ui: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
