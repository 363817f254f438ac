"""A run that is killed anywhere gives, with one more call, the digests of an unbroken run."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial

import pytest

from tests.chaos import runs
from tests.checkout import others_parent

SEED = int(os.environ.get("CHAOS_SEED", "0"))  # of the moments and the victims
COMMANDS = [runs.HERE, runs.AS_COMMIT]
VICTIMS = ["the first", "all", "any"]
SUB_STEPS = [f"{iteration:04d}-{verb}" for iteration in range(2) for verb in runs.VERBS]


def call_again(folder, expected, command=runs.HERE):
    """One more call: the digests of an unbroken run; what had ended is not done anew."""
    had = runs.records(folder)
    runs.finish(folder, command)
    assert runs.outcome(folder, command) == expected
    now = runs.records(folder)
    assert command == runs.AS_COMMIT or {place: now[place] for place in had} == had
    runs.check_sound(folder)


@pytest.mark.parametrize("sub_step", SUB_STEPS)
def test_a_kill_when_a_sub_step_has_ended(prepared, expected, folder, sub_step):
    runs.copy(prepared, folder)
    run = runs.start(folder)
    runs.wait_for(run, lambda: runs.ended(folder, sub_step))
    runs.kill(runs.below(run.pid))
    run.wait()
    call_again(folder, expected)


@pytest.mark.kills
def test_two_kills_while_a_sub_step_is_written(prepared, expected, folder):
    runs.copy(prepared, folder)
    for sub_step in ("0000-rollout", "0001-update"):
        run = runs.start(folder, held=f"reinforce/{sub_step}")
        runs.wait_for(run, partial(runs.begun, folder, sub_step))
        runs.kill(runs.below(run.pid))
        run.wait()
        assert not runs.ended(folder, sub_step)
    call_again(folder, expected)
    assert runs.finish(folder).startswith("nothing to do: smoke is up to date")


def strike(draw, victim, run, moment):
    """Kill a victim of a run at a moment, unless the run ends before; wait until it has ended."""
    with suppress(subprocess.TimeoutExpired):
        run.wait(moment)
    living = runs.below(run.pid)
    chosen = {"the first": living[:1], "all": living, "any": [draw.choice(living)]}[victim]
    print(f"after {moment:.1f} s: {victim} of {len(living)} processes, {runs.names(chosen)}")
    runs.kill(chosen)
    run.wait(runs.PATIENCE)


@pytest.mark.parametrize("number", range(20))
def test_a_kill_at_a_random_moment(bare, prepared, whole, expected, folder, number):
    """Of the first process, of all at once, or of any one; in the checkout, or of a run's commit.

    Every fifth is of a run that begins with nothing, the others of one whose data and cold start
    are there, for the sake of time. A run may live on without one of its processes: the one more
    call then has nothing to do.
    """
    draw = random.Random(f"{SEED}/{number}")
    command = COMMANDS[number % 2]
    origin, share = (bare, 1.0) if number % 5 == 0 else (prepared, 0.6)
    runs.copy(origin, folder)
    run = runs.start(folder, command)
    strike(draw, VICTIMS[number % 3], run, draw.uniform(0, share * whole[1]))
    call_again(folder, expected, command)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(runs.HERE, id="here"),
        pytest.param(runs.AS_COMMIT, id="commit", marks=pytest.mark.kills),
    ],
)
def test_kills_at_random_moments(bare, whole, expected, folder, command):
    """Of the first process, of all at once, and of any one, in a run that begins with nothing.

    Each call goes on where the one before was killed; the last one may have nothing to do.
    """
    draw = random.Random(f"{SEED}/{COMMANDS.index(command)}")
    runs.copy(bare, folder)
    for victim in VICTIMS:
        run = runs.start(folder, command)
        strike(draw, victim, run, draw.uniform(0, 0.6 * whole[1]))
    call_again(folder, expected, command)


def unbroken_copy(template, folder):
    """Train in a copy of a checkout, whose cold start is there; the copy."""
    runs.copy(template, folder)
    runs.finish(folder, runs.TRAINING)
    return folder


def kill_when(folder, happened):
    """Train until something has happened, then kill all of it at once."""
    run = runs.start(folder, runs.TRAINING, **others_parent())
    runs.wait_for(run, happened)
    runs.kill(runs.all_of(run, folder))
    run.wait()


@pytest.mark.kills
def test_a_kill_while_the_agent_acts_in_a_world(world, tmp_path, folder):
    """At a random moment between the first rollout and the last update."""
    draw = random.Random(f"{SEED}/world")
    unbroken = runs.copy(world, tmp_path / "unbroken/main")
    run = runs.start(unbroken, runs.TRAINING, **others_parent())
    runs.wait_for(run, lambda: runs.begun(unbroken, "0000-rollout"))
    began = time.monotonic()
    runs.wait_for(run, lambda: runs.ended(unbroken, "0002-update"))
    moment = draw.uniform(0, time.monotonic() - began)
    assert run.wait(runs.PATIENCE) == 0, runs.said(unbroken).read_text()

    runs.copy(world, folder)
    run = runs.start(folder, runs.TRAINING)
    runs.wait_for(run, lambda: runs.begun(folder, "0000-rollout"))
    time.sleep(moment)
    print(f"after {moment:.1f} s, {len(runs.records(folder))} sub-steps have ended")
    runs.kill(runs.below(run.pid))
    run.wait()
    call_again(folder, runs.outcome(unbroken), runs.TRAINING)


@pytest.mark.kills
def test_kills_where_policies_share_rollouts(world, tmp_path, folder):
    """In a world, whose episodes each part opens anew: after a part, the last, and an update."""
    runs.copy(world, folder)
    runs.share_rollouts(folder)
    unbroken = unbroken_copy(folder, tmp_path / "unbroken/main")
    for sub_step in ("0002-rollout_part", "0002-rollout", "0002-update"):
        kill_when(folder, partial(runs.ended, folder, sub_step))
    call_again(folder, runs.outcome(unbroken), runs.TRAINING)


@pytest.mark.kills
def test_kills_where_two_processes_learn(prepared, tmp_path, folder):
    """One of them first, which the run survives; then the whole run."""
    runs.learn_in_two_processes(runs.copy(prepared, folder))
    runs.prepare(folder, "cold_start")
    unbroken = unbroken_copy(folder, tmp_path / "unbroken/main")

    run = runs.start(folder, runs.TRAINING, held="reinforce/0000-update")
    runs.wait_for(run, lambda: len(runs.learners(run.pid)) == 2)
    runs.kill(runs.learners(run.pid)[-1:])
    runs.release(folder)
    runs.wait_for(run, lambda: runs.begun(folder, "0001-update"))
    assert "they are started again" in runs.said(folder).read_text()
    runs.kill(runs.below(run.pid))
    run.wait()
    call_again(folder, runs.outcome(unbroken), runs.TRAINING)


@pytest.mark.kills
def test_kills_while_a_reward_model_learns(bare, tmp_path, folder):
    """In its stage, after a checkpoint; in an iteration; and when it has scored the next batch."""
    runs.learn_rewards(runs.copy(bare, folder))
    runs.prepare(folder, "cold_start")
    unbroken = unbroken_copy(folder, tmp_path / "unbroken/main")
    for happened in (
        partial(runs.saved, folder, "reward_model"),
        partial(runs.begun, folder, "0000-reward_model"),
        partial(runs.ended, folder, "0001-estimate"),
    ):
        kill_when(folder, happened)
    call_again(folder, runs.outcome(unbroken), runs.TRAINING)


@pytest.mark.parametrize("kind", ["idle", "working"])
def test_killed_sandboxes_do_not_show(prepared, expected, folder, kind):
    """As the kernel may do when memory ends. The run goes on, and needs no further call."""
    draw = random.Random(f"{SEED}/{kind}")
    runs.copy(prepared, folder)
    run = runs.start(folder)
    killed, next_kill, next_look, found = 0, 0.0, 0.0, []
    while run.poll() is None:
        now = time.monotonic()
        if now > next_look:  # slower than a call
            found, next_look = runs.sandboxes(run.pid), now + 0.3
        chosen = [each for each in found if runs.is_working(each) is (kind == "working")]
        if chosen and now > next_kill:
            runs.kill(runs.below(draw.choice(chosen)))
            killed += 1
            next_kill = now + draw.uniform(2, 4)  # not the call that is asked again
        time.sleep(0.001)
    print(f"killed {killed} {kind} sandboxes")
    assert run.returncode == 0, runs.said(folder).read_text()
    assert killed >= 3
    assert runs.outcome(folder) == expected
    runs.check_sound(folder)


def test_a_termination_lets_the_run_take_its_leave(prepared, expected, folder):
    runs.copy(prepared, folder)
    run = runs.start(folder, held="reinforce/0001-rollout")
    runs.wait_for(run, lambda: runs.begun(folder, "0001-rollout"))
    run.send_signal(signal.SIGTERM)
    assert run.wait(runs.PATIENCE) != 0
    assert set(runs.tracked(folder).values()) == {"KILLED"}, "MLflow has been told"
    call_again(folder, expected)
