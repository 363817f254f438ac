"""Machines that share a network and nothing else: namespaces of this one, which takes root."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import runs
from tests.flows.runs import stores

NETWORK = "10.213.77"  # private addresses; the machine that runs the tests is the first one
NAMES = ("learner", "servers", "successor")


@dataclass(frozen=True)
class Machine:
    """A machine with an address of its own, and a disk that only it sees."""

    namespace: str
    address: str
    disk: Path
    others: tuple[Path, ...]  # disks of the other machines

    @property
    def folder(self):
        """Its checkout of the project."""
        return self.disk / "main"

    @property
    def within(self):
        """The words before a command of this machine."""
        hide = " && ".join(f"mount -t tmpfs tmpfs {disk}" for disk in self.others)
        inside = f'ip link set lo up && {hide} && exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "sh", "-c", inside, "sh")


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    """Machines by name; what connects them ends with the tests."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.exit("these tests make network namespaces: root, and apt-get install iproute2", 1)
    root = tmp_path_factory.mktemp("machines").resolve()
    disks = {name: root / name for name in NAMES}
    for disk in disks.values():
        disk.mkdir()
    with bridge():
        made = {}
        for number, name in enumerate(NAMES, 2):
            others = tuple(disk for other, disk in disks.items() if other != name)
            made[name] = Machine(f"beamline-{name}", f"{NETWORK}.{number}", disks[name], others)
            connect(made[name], number)
        yield made


@contextmanager
def bridge():
    """Connect this machine to a network of its own; remove it, and its namespaces, at the end."""
    remove()
    ip("link", "add", "beamline", "type", "bridge")
    try:
        ip("addr", "add", f"{NETWORK}.1/24", "dev", "beamline")
        ip("link", "set", "beamline", "up")
        yield
    finally:
        remove()


def connect(machine, number):
    """Make a machine's namespace, with a cable to the network."""
    ip("netns", "add", machine.namespace)
    cable = f"beamline{number}"
    ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
    ip("link", "set", cable, "master", "beamline", "up")
    inside = ("-n", machine.namespace)
    ip(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    ip(*inside, "link", "set", "eth0", "up")


def remove():
    """Remove the network and the namespaces, also those of tests that were killed."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", f"beamline-{name}"], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "delete", "beamline"], stderr=subprocess.DEVNULL)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture(scope="session")
def store(machines):
    """DVC's settings for an S3 server that all machines reach."""
    with stores.s3_server(f"{NETWORK}.1") as endpoint:
        stores.in_bucket(endpoint, "shared")
        yield stores.remote(endpoint, "shared")


def checkout(folder, config=""):
    """A clean checkout, whose default remote is that of ``config``."""
    runs.create(folder)
    place = folder / ".dvc/config"
    place.parent.mkdir(exist_ok=True)
    place.write_text(config)
    runs.git(folder, "add", "--force", ".dvc/config")
    runs.git(folder, "commit", "--quiet", "--allow-empty", "--message", "the remote")
