"""Programs that hang, die, flood, fork, ask with other keys, or return what is no result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from own.wanderer import ask


def silent(task, endpoint):
    return None


def hanging(task, endpoint):
    ask(endpoint, task.messages)
    time.sleep(1000)


def busy(task, endpoint):
    while True:
        pass


def raising(task, endpoint):
    ask(endpoint, task.messages)
    raise KeyError("no such thing")


def leaving(task, endpoint):
    sys.exit(3)


def killed(task, endpoint):
    ask(endpoint, task.messages)
    os.kill(os.getpid(), signal.SIGKILL)


def killing_its_guard(task, endpoint):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def killing_its_host(task, endpoint):
    ask(endpoint, task.messages)
    guard = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(1000)


def forking(task, endpoint):
    ask(endpoint, task.messages)
    for _ in range(3):
        subprocess.Popen(["sleep", "4242"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    return "7"


def returning_in_a_fork(task, endpoint):
    os.fork()
    return "7"


def flooding_output(task, endpoint):
    for _ in range(2000):
        print("x" * 10_000)
    ask(endpoint, task.messages)
    return "7"


def flooding_result(task, endpoint):
    return "x" * 2**21


def flooding_requests(task, endpoint):
    for _ in range(1000):
        ask(endpoint, task.messages)


def flooding_messages(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "a"}] * 1_000_000)


def flooding_memory(task, endpoint):
    held = bytearray()
    while True:
        held += bytearray(2**24)


def nested(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "[" * 50_000}])
    return "[" * 50_000


def lying_about_a_reward(task, endpoint):
    return {"answer": "7", "reward": float("nan")}


def lying_about_parts(task, endpoint):
    return {"reward": 1, "parts": {"speed": "fast"}}


def returning_an_object(task, endpoint):
    return object()


def broken_requests(task, endpoint):
    """Ask what cannot be answered, and go on."""
    told = []
    for messages in (
        None,
        [],
        [{"role": "user"}],
        [{"role": "wizard", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
        [{"role": "assistant", "content": "a"}],
        [7],
        [{"role": "user", "content": "a", "tool_calls": 7}],
        [{"role": "user", "content": "a b " * 4000}],
        [{"role": "user", "content": "a b " * 500_000}],
    ):
        try:
            ask(endpoint, messages)
            told.append("answered")
        except RuntimeError as error:
            told.append(str(error))
    return json.dumps(told)


def rewarded(task, endpoint):
    return {"answer": "7", "reward": 0.5, "parts": {"speed": 0.25}}


def reading(task, endpoint):
    """Say what a program in a sandbox can reach."""
    import socket

    told = {}
    for name in ("/etc/passwd", "own/faulty.py", "secret.txt", "/tmp/.ssh"):
        told[name] = Path(name).exists()
    try:
        Path("own/new.py").write_text("")
        told["written"] = True
    except OSError:
        told["written"] = False
    Path("/tmp/mine").write_text("mine")
    try:
        socket.create_connection((os.environ.get("ELSEWHERE", "10.0.0.1"), 80), timeout=2)
        told["network"] = True
    except OSError as error:
        told["network"] = type(error).__name__
    told["secret"] = os.environ.get("SECRET_KEY")
    told["answered"] = bool(ask(endpoint, task.messages))
    told["processes"] = len([p for p in Path("/proc").iterdir() if p.name.isdigit()]) < 20
    return json.dumps(told)


def returning_a_huge_number(task, endpoint):
    return 10**400


def leaving_with_255(task, endpoint):
    raise SystemExit(-1)


def offering_an_odd_tool(task, endpoint):
    """In JSON Schema, true is the schema of anything."""
    parameters = {"type": "object", "properties": {"x": True}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    ask(endpoint, task.messages, tools=[tool])
    return "7"


def stopping_its_guard(task, endpoint):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


def asking_what_is_refused(task, endpoint):
    """Ask too much again and again; say how often it was refused for its length."""
    told = []
    for number in range(6):
        try:
            ask(endpoint, [{"role": "user", "content": f"{number} " + "a b " * 4000}])
        except RuntimeError as error:
            told.append("prompt_tokens" in str(error))
    return str(sum(told))


def leaving_a_file(task, endpoint):
    """Fill a quarter of the sandbox's /tmp, and say what is there."""
    ask(endpoint, task.messages)
    Path("/tmp/of", task.id).mkdir(parents=True)
    Path("/tmp/of", task.id, "large").write_bytes(bytes(60 * 2**20))
    return str(sorted(each.name for each in Path("/tmp/of").iterdir()))


def killing_its_relay(task, endpoint):
    """Kill the other child of the host, in the first episode."""
    ask(endpoint, task.messages)
    if task.id == "q0":
        guard = os.getppid()
        processes = sorted(int(each.name) for each in Path("/proc").glob("[0-9]*"))
        others = [each for each in processes if each != guard and parent(each) == parent(guard)]
        os.kill(others[0], signal.SIGKILL)
        time.sleep(1000)
    return "7"


def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def logging(task, endpoint):
    ask(endpoint, task.messages)
    print("log " * 1000)
    return "7"
