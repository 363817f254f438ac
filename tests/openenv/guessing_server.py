"""The game of tests/tasks/environments/guessing.py as a real OpenEnv server, at a port."""

import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks/environments"))
from guessing import Game


class Guess(Action):
    guess: int


class Seen(Observation):
    board: dict
    legal: list[int]


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.game = Game()

    def reset(self, seed=None, episode_id=None, digits=10, **others):
        return self._observed(*self.game.reset(seed, digits))

    def step(self, action, timeout_s=None, **others):
        return self._observed(*self.game.step(action.guess))

    def _observed(self, seen, reward, done):
        return Seen(**seen, reward=reward, done=done)

    @property
    def state(self):
        return State(step_count=self.game.tries)


app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
