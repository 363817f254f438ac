"""A run whose turns are sampled on servers: each of them dies, the run too, and others come."""

from functools import partial

import pytest

from params.schema.addresses import SERVERS
from tests.chaos import runs
from tests.checkout import others_parent
from tests.tasks.engines.servers import conftest as fleet

made, started, servers = fleet.made, fleet.started, fleet.servers


@pytest.mark.kills
def test_run_whose_servers_die_and_change_gives_an_unbroken_ones_digests(
    prepared, folder, tmp_path, servers
):
    first, second = servers
    both = {SERVERS: f"{first.address},{second.address}", fleet.token_guard.TOKEN: fleet.TOKEN}
    whole = runs.copy(prepared, tmp_path / "whole" / "main")
    runs.finish(whole, **both)
    expected = runs.outcome(whole)
    runs.copy(prepared, folder)
    run = runs.start(folder, **both)
    runs.wait_for(run, partial(runs.begun, folder, "0000-rollout"))
    first.kill()
    runs.wait_for(run, partial(runs.ended, folder, "0000-rollout"))
    runs.kill(runs.below(run.pid))
    run.wait()
    third = fleet.Process(first.policy, tmp_path)  # at an address that the run has not had
    try:
        third.wait()
        others = {SERVERS: f"{second.address},{third.address}"}
        run = runs.start(folder, **both | others | others_parent())
        runs.wait_for(run, partial(runs.begun, folder, "0001-rollout"))
        second.kill()
        assert run.wait(runs.PATIENCE) == 0
    finally:
        third.kill()
    assert runs.outcome(folder) == expected
    runs.check_sound(folder)
