"""Measure what sharing a run's sub-steps costs: objects, processor time and wall time.

    python -m benchmarks.mirror .beamline/ledger/tiny

Sends every sub-step of a ledger's folder to a mirror and fetches them into an empty ledger, over a
folder and over a server on loopback that speaks S3 (moto's, a process of its own). Processor time
is that of this process, with the thread that sends. A server on loopback answers within a
millisecond or some: over a network each request takes longer, and there are as many of them. To
compare two versions of the code, call this in a checkout of each, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.runs.cache import filesystem
from flows.runs.ledger_mirror import RemoteMirror
from tasks.ledger import artifacts
from tasks.ledger.records import DELIVERED

BUCKET = "mirror"
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run a server that speaks S3, with objects in memory; yield the address of a mirror there."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.NamedTemporaryFile("r") as log:
        server = subprocess.Popen(command, stdout=log.fileno(), stderr=log.fileno())
        try:
            pattern = r"http://127\.0\.0\.1:\d+"
            while not (matched := re.search(pattern, Path(log.name).read_text())):
                time.sleep(0.05)
            Path(".dvc").mkdir(exist_ok=True)
            remote = f"['remote \"s3\"']\n    url = s3://{BUCKET}\n    endpointurl = {matched[0]}\n"
            Path(".dvc/config").write_text(remote)
            os.environ.update(KEYS)
            fs, _ = filesystem("remote://s3/ledger")()
            fs.mkdir(BUCKET)
            yield "remote://s3/ledger"
        finally:
            server.kill()
            server.wait()


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that a call takes."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}


def measure(source: Path, address: str) -> dict[str, object]:
    """Send the sub-steps of a ledger's folder, and fetch them."""
    target = artifacts.ROOT / source.name
    shutil.rmtree(artifacts.ROOT, ignore_errors=True)
    shutil.copytree(source, target)
    for mark in target.rglob(DELIVERED):
        mark.unlink()
    folders = sorted(file.parent for file in target.rglob(artifacts.RECORD))
    mirror = RemoteMirror(address, filesystem(address))
    mirror.names(artifacts.ROOT)  # connects

    def send() -> None:
        for folder in folders:
            mirror.push(folder)
        mirror.flush()

    def fetch() -> None:
        for folder in folders:
            assert mirror.fetch(folder), folder

    sent = timed(send)
    fs, root = filesystem(address)()
    fs.invalidate_cache()
    objects = len(list(fs.find(root)))
    shutil.rmtree(artifacts.ROOT)
    return {
        "sub-steps": len(folders),
        "bytes": sum(file.stat().st_size for file in source.rglob("*") if file.is_file()),
        "objects": objects,
        "send": sent,
        "fetch": timed(fetch),
    }


def main() -> None:
    """Measure both kinds of mirror and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror", description=__doc__)
    parser.add_argument("ledger", type=Path, help="the sub-steps of a recipe")
    source = parser.parse_args().ledger.absolute()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        print(json.dumps({"folder": measure(source, str(Path("store").absolute()))}), flush=True)
        with s3_server() as address:
            print(json.dumps({"S3": measure(source, address)}), flush=True)


if __name__ == "__main__":
    main()
