"""Places for a mirror, and a way to look into them that they have in common: a folder, and S3."""

import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import fsspec

KEYS = {"key": "worker", "secret": "secret"}


class Store:
    """What a mirror has, on a filesystem of fsspec."""

    def __init__(self, fs, root):
        self.fs, self.root = fs, str(root)

    def paths(self, pattern):
        """Return the paths that a pattern has, relative to the store, sorted."""
        self.fs.invalidate_cache()
        found = self.fs.glob(f"{self.root}/{pattern}")
        return sorted(path.partition(f"{self.root}/")[2].rstrip("/") for path in found)

    def entry(self, iteration=0, verb="verb"):
        """Return the path of the only folder of an iteration."""
        (found,) = self.paths(f"toy/reinforce/{iteration:04d}-{verb}-*")
        return found

    def names(self, path):
        """Return the names of the objects of a folder, sorted."""
        return [name.rpartition("/")[2] for name in self.paths(f"{path}/*")]

    @contextmanager
    def opened(self, path):
        """Yield a folder with the objects of ``path``, which become what is then in it."""
        there = f"{self.root}/{path}"
        with tempfile.TemporaryDirectory() as folder:
            for name in self.names(path):
                self.fs.get_file(f"{there}/{name}", f"{folder}/{name}")
            yield Path(folder)
            self.fs.rm(there, recursive=True)
            self.fs.makedirs(there, exist_ok=True)
            for file in Path(folder).iterdir():
                self.fs.put_file(str(file), f"{there}/{file.name}")


def in_folder(root):
    return Store(fsspec.filesystem("file"), root)


def in_bucket(endpoint, bucket):
    """Make a bucket on an S3 server; the store in its folder ``ledger``."""
    options = {"use_listings_cache": False, "skip_instance_cache": True}
    fs = fsspec.filesystem("s3", endpoint_url=endpoint, **KEYS, **options)
    fs.mkdir(bucket)
    return Store(fs, f"{bucket}/ledger")


def remote(endpoint, bucket):
    """Return DVC's settings for a bucket as its default remote, ``far``."""
    return (
        f"[core]\n    remote = far\n['remote \"far\"']\n    url = s3://{bucket}\n"
        f"    endpointurl = {endpoint}\n"
        f"    access_key_id = {KEYS['key']}\n    secret_access_key = {KEYS['secret']}\n"
    )


@contextmanager
def s3_server(host="127.0.0.1"):
    """Run a server that speaks S3, with its objects in memory; yield its address."""
    command = [sys.executable, "-m", "moto.server", "--host", host, "--port", "0"]
    with tempfile.NamedTemporaryFile("r") as log:
        server = subprocess.Popen(command, stdout=log.fileno(), stderr=log.fileno())
        try:
            while not (found := re.search(rf"http://{host}:\d+", Path(log.name).read_text())):
                assert server.poll() is None, Path(log.name).read_text()
                time.sleep(0.05)
            yield found[0]
        finally:
            server.kill()
            server.wait()
