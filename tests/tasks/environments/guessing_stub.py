"""Speak OpenEnv's messages without it: ``guessing_stub.py <port>``. The real one: tests/openenv.

The forms of the messages are those that openenv 0.10.0 sends.
"""

import json
import sys

from guessing import Game
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

ROOM, sessions = 4, []


def error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def answered(game, message):
    try:
        if message["type"] == "reset":
            data = message["data"]
            seen, reward, done = game.reset(data.get("seed"), data.get("digits", 10))
        elif set(message["data"]) - {"metadata"} != {"guess"}:
            return error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "Field required"}])
        else:
            seen, reward, done = game.step(int(message["data"]["guess"]))
    except Exception as wrong:
        return error("EXECUTION_ERROR", str(wrong))
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


def episode(connection):
    if len(sessions) >= ROOM:
        connection.send(json.dumps(error("CAPACITY_REACHED", "Server at capacity")))
        return
    sessions.append(connection)
    game = Game()
    try:
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                break
            connection.send(json.dumps(answered(game, message)))
    except ConnectionClosed:
        pass
    finally:
        sessions.remove(connection)


with serve(episode, "127.0.0.1", int(sys.argv[1])) as server:
    server.serve_forever()
