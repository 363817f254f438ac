"""Worlds of an OpenEnv server; here the server is one of the tests' own.

tests/openenv runs the same tests against a server of the real package.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.environments import open_environment
from tasks.environments.episodes import open_worlds
from tasks.environments.openenv import ENVIRONMENT, OpenEnv, OpenEnvWorld
from tasks.tools.recording import REPLAYED, Origin, publish_calls
from tasks.tools.schema import with_values
from tasks.trees.outcomes import Outcome, UnavailableError
from tasks.trees.tree import Call, Question
from tests.tasks.rollouts.test_hostile_worlds import contents, play
from tests.waiting import LONGEST

GUESS = {
    "name": "guess",
    "description": "Guess the digit.",
    "parameters": {
        "type": "object",
        "properties": {"guess": {"type": "integer"}},
        "required": ["guess"],
    },
}
TASK = Question("q", "openenv", "Play.", (), data=json.dumps({"seed": 3, "row": {"digits": 8}}))


class Server:
    """A server program at a port; it can be killed and started again."""

    def __init__(self, command):
        self.command = command
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, **more):
        self.process = subprocess.Popen([*self.command, str(self.port)], env=os.environ | more)
        while self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.05)
        raise RuntimeError("the server has ended")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def command():
    """What starts a server when a port is added."""
    return [sys.executable, str(Path(__file__).with_name("guessing_stub.py"))]


@pytest.fixture(scope="module")
def server(command):
    one = Server(command).start()
    yield one
    one.kill()


@pytest.fixture
def own(command):
    """A server that a test may kill."""
    one = Server(command).start()
    yield one
    one.kill()


def world(server, **others):
    settings = {
        "url": f"http://127.0.0.1:{server.port}",
        "task": "Guess the digit.",
        "action": {},
        "tools": [GUESS],
        "text_field": "board.text",
        "actions_field": "legal",
        **others,
    }
    return OpenEnvWorld(OpenEnv.model_validate(settings))


def guess(number):
    return Call("guess", json.dumps({"guess": number}), {"guess": number})


def test_episode_follows_seed_and_row(server):
    episodes = []
    for seed in (3, 3, 4):
        one = world(server)
        first = one.start(TASK, seed)
        assert first.text.startswith("Guess a digit below 8 (")
        assert first.actions == tuple("01234567") and not first.ends
        seen = [first, *(one.act(guess(number)) for number in range(8))]
        one.close()
        last = next(number for number, each in enumerate(seen) if each.terminated)
        assert [each.reward for each in seen[: last + 1]] == [0.0] + [-0.25] * (last - 1) + [1.0]
        assert seen[last].text == "Right."
        episodes.append(seen)
    assert episodes[0] == episodes[1] != episodes[2]


def test_agent_may_act_in_free_text_and_see_json(server):
    free = {"tools": [], "action": {"text": "guess"}, "text_field": None, "actions_field": None}
    one = world(server, **free)
    assert [spec.name for spec in one.tools] == ["act"]
    one.start(TASK, 3)
    answer = one.act(with_values(Call("act", "0"), one.tools[0]))
    assert set(json.loads(answer.text)) == {"board", "legal"}
    one.close()


def test_calls_become_actions_of_other_forms(server):
    nested = {"name": "tool_name", "arguments": "arguments", "fixed": {"type": "call_tool"}}
    expected = {"type": "call_tool", "tool_name": "guess", "arguments": {"guess": 1}}
    assert world(server, action=nested)._action(guess(1)) == expected
    fixed = {"name": "tool_name", "fixed": {"level": 3}}
    forged = replace(guess(1), values={"guess": 1, "level": 0, "tool_name": "win"})
    expected = {"guess": 1, "level": 3, "tool_name": "guess"}
    assert world(server, action=fixed)._action(forged) == expected


def test_a_header_that_the_server_repeats_is_not_shown(server, monkeypatch):
    monkeypatch.setenv("TOKEN", 'secret "ä" token')
    one = world(server, headers={"Authorization": "TOKEN"})
    for said in (json.dumps({"a": 'secret "ä" token'}), b'"a secret \\"\xc3\xa4\\" token"'):
        assert "secret" not in one._without_secrets(said)
        assert "[Authorization]" in one._without_secrets(said)


def test_action_that_the_server_refuses_is_an_outcome(server):
    one = world(server)
    one.start(TASK, 3)
    wrong = one.act(Call("guess", "", {"guess_\ud800": "\ud800"}))
    assert wrong.outcome == Outcome.BAD_ARGUMENTS and "Field required" in wrong.text
    raised = one.act(guess(-1))
    assert (raised.outcome, raised.text) == (Outcome.ERROR, "the game has no such digit")
    assert one.act(guess(0)).outcome == Outcome.OK
    one.close()


def test_answer_that_is_late_or_too_long_fails_the_episode(server):
    one = world(server, seconds=3.0)
    one.start(TASK, 3)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer a step in time"):
        one.act(guess(-2))
    assert time.monotonic() - began < LONGEST / 2
    one.close()
    two = world(server)
    two.start(TASK, 3)
    with pytest.raises(ValueError, match="more than 16777216 bytes"):
        two.act(guess(-3))
    two.close()


def test_server_without_room_says_so(own):
    full = [world(own) for _ in range(4)]
    for one in full:
        one.start(TASK, 3)
    with pytest.raises(UnavailableError, match="capacity"):
        world(own, attempts=2).start(TASK, 3)
    full[0].close()
    world(own).start(TASK, 3)


def test_episode_goes_on_after_the_server_was_killed_and_started_again(own):
    one, calm = world(own), world(own)
    one.start(TASK, 3), calm.start(TASK, 3)
    expected = [calm.act(guess(number)) for number in range(4)]
    assert [one.act(guess(number)) for number in (0, 1)] == expected[:2]
    own.kill()
    own.start()
    assert [one.act(guess(number)) for number in (2, 3)] == expected[2:]


def test_server_that_stays_away_fails_the_episode_and_no_later_one(own):
    one = world(own, attempts=2)
    one.start(TASK, 3)
    own.kill()
    with pytest.raises(UnavailableError, match="cannot be reached: ConnectionRefusedError"):
        one.act(guess(0))
    one.close()
    own.start()
    assert world(own).start(TASK, 3).outcome == Outcome.OK


def test_server_that_forgets_its_seed_is_caught(own):
    one = world(own)
    one.start(TASK, 3)
    own.kill()
    own.start(FORGETS="1")
    with pytest.raises(UnavailableError, match="answered message 1 of the episode, a reset"):
        one.act(guess(0))


def test_server_is_an_environment_whose_episodes_fork_by_replay(server):
    """In a process of its own, as in a rollout."""
    settings = world(server)._settings
    with open_worlds(ENVIRONMENT, settings, 1) as worlds, worlds.session() as session:
        ((one, first),) = session.open([TASK])
        answers = [session.act([(one, guess(number))])[0] for number in (0, 7)]
        twin = session.fork(one, 1)
        assert session.act([(twin, guess(7))]) == answers[1:]
    assert first.text.startswith("Guess a digit below 8") and answers[0].outcome == Outcome.OK


def wander(context, seed):
    """An agent that guesses at random, as its seed says."""
    guessed = random.Random(seed).randrange(8)
    return f'hm {seed % 7}\n\n<guess>{{"guess": {guessed}}}</guess>'


def rolled_out(environment, folder, tokenizer, before):
    """Roll out two tasks, one after the other, with branches; return the trees.

    ``before``: number of a turn of the rollout -> what happens before it is sampled. The answers of
    the server are recorded in a folder.
    """
    turns = count()

    def write(context, seed):
        before.get(next(turns), lambda: None)()
        return wander(context, seed)

    tasks = [replace(TASK, id=name) for name in ("first", "second")]
    budget = {"leaves": 4, "initial": 2, "branch": 2, "rows": 4, "base_probability": 0.6}
    folder.mkdir(exist_ok=True)
    with environment.recorded(Origin("reinforce", 0), lambda: folder) as recorded:
        trees, _ = play(
            recorded.environment, tokenizer, write, tasks, "fresh", kind="entropy", **budget
        )
        recorded.save_calls(folder)
    return trees


def test_rollout_does_not_notice_a_server_that_is_killed_and_started_again(
    own, tokenizer, tmp_path, monkeypatch
):
    def restart():
        own.kill()
        own.start()

    asked = {"openenv": world(own)._settings}
    with open_environment({}, asked, 2, tmp_path) as environment:
        calm = rolled_out(environment, tmp_path / "calm", tokenizer, {})
        restarts = dict.fromkeys((1, 4, 5, 11), restart)
        trees = rolled_out(environment, tmp_path / "other", tokenizer, restarts)
        assert contents(trees) == contents(calm)
        assert all(len({*tree.leaves}) == 4 and tree.decisions for tree in trees)

        tables = {Origin("reinforce", 0): tmp_path / "other/calls.parquet"}
        publish_calls(tables, tmp_path / "data/calls.parquet")
        own.kill()
        monkeypatch.setenv(REPLAYED, str(tmp_path / "data"))
        assert contents(rolled_out(environment, tmp_path / "replay", tokenizer, {})) == contents(
            calm
        )


def test_rollout_outlives_a_server_that_stays_away_for_a_while(own, tokenizer, tmp_path):
    """Episodes that need it then have failed by name; those that need it later go on."""
    right = '<guess>{"guess": 1}</guess>'
    wrong, unread = right.replace("1", "0"), "<guess>one</guess>"
    turns = {"Now.": [wrong, right], "Later.": [wrong, unread, wrong, right]}
    before = {1: own.kill, 2: own.start}

    def write(context, seed):
        done = context.count("<result>")
        before.pop(done, lambda: None)()
        return next(turns[name][done] for name in turns if name in context)

    tasks = [replace(TASK, id=name, text=name) for name in turns]
    asked = {"openenv": world(own, attempts=2)._settings}
    with open_environment({}, asked, 2, tmp_path) as environment:
        trees, _ = play(environment, tokenizer, write, tasks, leaves=2, initial=2)
    now, later = ([path[-1] for path in tree.trajectories()] for tree in trees)
    assert [node.outcome for node in now] == [Outcome.WORLD_FAILED] * 2
    assert "cannot be reached" in now[0].observation.text
    assert [node.outcome for node in later] == [Outcome.TERMINATED] * 2
    assert [node.observation.reward for node in later] == [1.0, 1.0]


def test_branch_that_no_server_can_replay_has_failed(own):
    settings = world(own, attempts=2)._settings
    with open_worlds(ENVIRONMENT, settings, 1) as worlds, worlds.session() as session:
        ((one, _),) = session.open([TASK])
        session.act([(one, guess(0))])
        twin = session.fork(one, 1)
        own.kill()
        (seen,) = session.act([(twin, guess(1))])
    assert seen.outcome == Outcome.WORLD_FAILED and "cannot be reached" in seen.text


def test_settings_are_checked_before_any_work(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    good = {"url": "wss://example.org/ws", "task": "Play.", "action": {"text": "message"}}
    asked = OpenEnv.model_validate(
        good
        | {
            "headers": {"Authorization": "NO_TOKEN"},
            "tools": [GUESS | {"parameters": {"type": "objekt"}}],
        }
    )
    assert len(ENVIRONMENT.faults(asked)) == 3
    for wrong in (
        {"url": "example.org"},
        {"url": "wss://me:secret@example.org"},
        {"action": {}},
    ):
        with pytest.raises(ValidationError):
            OpenEnv.model_validate(good | wrong)


def test_tasks_are_seeds():
    settings = OpenEnv(url="ws://127.0.0.1:1", task="Play.", action={"text": "message"})
    train, again, test = (
        ENVIRONMENT.tasks(settings, split, 20, 0) for split in ("train", "train", "test")
    )
    assert train == again and train[0].text == "Play."
    assert not {one.data for one in train} & {one.data for one in test}
