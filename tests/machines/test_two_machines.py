"""A run whose policy learns on one machine and samples on another; both of them fail once."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from tasks.engines.servers.token_guard import TOKEN
from tests.chaos import runs
from tests.checkout import call, environment
from tests.machines.conftest import checkout

PORTS = (8001, 8002)
SECRET = {TOKEN: "token of the tests of machines"}


class Fleet:
    """Servers of the transformers engine on a machine."""

    def __init__(self, machine):
        self.machine, self.running = machine, {}

    @property
    def addresses(self):
        return {"BEAMLINE_SERVERS": ",".join(map(self.address, PORTS)), **SECRET}

    def address(self, port):
        return f"http://{self.machine.address}:{port}"

    def start(self, port):
        """Start a server with the policy that a run starts with."""
        serve = (sys.executable, "-m", "tasks.engines.transformers.serve", "models/smoke/initial")
        words = ("--host", self.machine.address, "--port", str(port), "--precision", "float32")
        with (self.machine.disk / f"{port}.log").open("ab") as log:
            self.running[port] = subprocess.Popen(
                [*self.machine.within, *serve, *words, "--threads", "1"],
                cwd=self.machine.folder,
                env=environment(**SECRET, OMP_NUM_THREADS="1"),
                start_new_session=True,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, port):
        """Wait until a server that has been started answers."""
        deadline = time.monotonic() + 120
        while not self.answers(port):
            assert time.monotonic() < deadline, (self.machine.disk / f"{port}.log").read_text()
            time.sleep(0.2)

    def answers(self, port):
        headers = {"Authorization": f"Bearer {SECRET[TOKEN]}"}
        try:
            return httpx.get(f"{self.address(port)}/health", headers=headers).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, port):
        os.killpg(self.running[port].pid, signal.SIGKILL)
        self.running.pop(port).wait()


@contextmanager
def serving(machine):
    """Two servers on a machine, which has made the first policy by itself."""
    made = call(machine.folder, *machine.within, sys.executable, "-m", "flows.prepare", "smoke")
    assert made.returncode == 0, made.stdout
    fleet = Fleet(machine)
    try:
        for port in PORTS:
            fleet.start(port)
        for port in PORTS:
            fleet.wait_for(port)
        yield fleet
    finally:
        for port in list(fleet.running):
            fleet.kill(port)


@pytest.fixture(scope="module")
def fleet(machines):
    machine = machines["servers"]
    checkout(machine.folder)
    with serving(machine) as found:
        yield found


def test_a_run_on_two_machines_outlives_both(machines, store, fleet):
    unbroken, learner, successor = (
        machines["learner"].disk / "unbroken",
        machines["learner"].folder,
        machines["successor"].folder,
    )
    checkout(unbroken)
    for folder in (learner, successor):
        checkout(folder, store)
    variables = fleet.addresses | {"OMP_NUM_THREADS": "1"}
    runs.finish(unbroken, within=machines["learner"].within, **variables)
    expected = runs.outcome(unbroken)

    run = runs.start(learner, within=machines["learner"].within, **variables)
    runs.wait_for(run, lambda: runs.begun(learner, "0000-rollout"))
    fleet.kill(PORTS[0])
    runs.wait_for(run, lambda: runs.ended(learner, "0000-rollout"))
    fleet.start(PORTS[0])
    runs.wait_for(run, lambda: runs.begun(learner, "0001-update"))
    runs.kill(runs.below(run.pid))
    run.wait()
    fleet.wait_for(PORTS[0])
    said = runs.said(learner).read_text()
    assert f"{fleet.address(PORTS[0])}" in said and "are sampled again" in said
    assert list(fleet.machine.folder.glob(".beamline/policies/8001/*")), "policies were sent"

    runs.finish(successor, within=machines["successor"].within, **variables)
    assert runs.outcome(successor) == expected
    before, after = runs.records(learner), runs.records(successor)
    taken = {place for place in before if before[place] == after.get(place)}
    assert any("0000-rollout" in place for place in taken), "the store had what had ended"
