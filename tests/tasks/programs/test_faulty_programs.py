"""What goes wrong in a program is an outcome by name, and nothing of it is left running."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.extensions import descendants
from tasks.programs import launching, walls
from tasks.programs.contract import ResultError, result_of
from tasks.rewards.scoring import score_trees
from tasks.trees.tree import Question
from tests.reward_parts import listed
from tests.tasks.programs import conftest
from tests.tasks.programs.test_clients import answering, answers
from tests.waiting import wait_until

FAULTS = {  # program: outcome, what is said of it
    "silent": ("no_answer", None),
    "raising": ("program_failed", "no such thing"),
    "leaving": ("program_failed", "SystemExit: 3"),
    "killed": ("program_died", "signal 9"),
    "killing_its_guard": ("program_died", "signal"),
    "killing_its_host": ("program_died", "host"),
    "forking": ("answer", None),
    "returning_in_a_fork": ("answer", None),
    "flooding_output": ("answer", None),
    "flooding_result": ("program_failed", "bytes"),
    "flooding_requests": ("program_failed", "'requests' allows"),
    "flooding_messages": ("program_failed", "bytes"),
    "nested": ("program_failed", "prompt_tokens"),
    "lying_about_a_reward": ("program_failed", "nan"),
    "lying_about_parts": ("program_failed", "speed"),
    "returning_an_object": ("program_failed", "object"),
    "returning_a_huge_number": ("program_failed", "its reward is 1000"),
    "leaving_with_255": ("program_failed", "SystemExit: -1"),
    "offering_an_odd_tool": ("answer", None),
}


def endings(trees):
    leaves = [tree.nodes[leaf] for tree in trees for leaf in tree.leaves]
    return [(leaf.outcome, leaf.observation.info["program"].get("fault")) for leaf in leaves]


def left_running(folder):
    """Return the commands of processes that programs of this folder have left.

    What ends a sandbox ends all that is in it.
    """
    found, ours = [], f"{descendants.OWNER}={folder}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                if ours in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes())
    return found


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "in a sandbox"])
def test_faults_have_names(own, running, trusted):
    """All of them side by side, each in a run of its own, since each may harm its host."""
    told = {}
    for name in FAULTS:
        trees, _ = running(answering).grow(
            f"own/faulty.py:{name}", trusted=trusted, requests=20, memory_mib=512
        )
        (told[name],) = endings(trees)
    for name, (outcome, said) in FAULTS.items():
        assert told[name][0] == outcome, (name, told[name])
        assert said is None or said in told[name][1], (name, told[name])
    wait_until(lambda: not left_running(own.parent), "the end of what they have started")


@pytest.mark.parametrize("name", ["hanging", "busy"])
def test_a_program_that_hangs_is_ended(own, running, name):
    began = time.monotonic()
    trees, _ = running(answering).grow(f"own/faulty.py:{name}", leaves=2, seconds=1.0, patience=0.5)
    assert endings(trees) == [("program_timeout", "it worked for over 1 s")] * 2
    assert time.monotonic() - began < 30


def test_a_program_that_stops_what_would_end_it_is_ended(own, running, monkeypatch):
    monkeypatch.setattr(launching, "KILL_SECONDS", 1.0)
    trees, _ = running(answering).grow(
        "own/faulty.py:stopping_its_guard", seconds=0.5, patience=0.5, trusted=False
    )
    ((outcome, fault),) = endings(trees)
    assert (outcome, "the host of the programs has ended" in fault) == ("program_died", True)
    wait_until(lambda: not left_running(own.parent), "the end of what they have started")


def test_long_tasks_and_logs_of_many_episodes_do_not_wait_for_each_other(own, running, monkeypatch):
    """Orders and replies are more than their pipes hold."""
    long = Question("q0", "toy", "word " * 400, ("7",))
    monkeypatch.setattr(conftest, "question", lambda number: replace(long, id=f"q{number}"))
    trees, _ = running(answering).grow(
        "own/faulty.py:logging", questions=8, leaves=24, lanes=64, prompt_tokens=4000
    )
    assert endings(trees) == [("answer", None)] * 192


def test_requests_that_are_refused_count(own, running):
    trees, _ = running(answering).grow("own/faulty.py:asking_what_is_refused", requests=3)
    assert answers(trees) == ["3"]


def test_what_an_episode_leaves_is_gone_in_the_next(own, running):
    trees, _ = running(answering).grow(
        "own/faulty.py:leaving_a_file", questions=6, lanes=1, trusted=False
    )
    assert answers(trees) == [f"['q{number}']" for number in range(6)]


def test_a_dead_relay_ends_one_episode(own, running):
    trees, _ = running(answering).grow(
        "own/faulty.py:killing_its_relay", questions=3, lanes=1, trusted=False
    )
    assert [outcome for outcome, _ in endings(trees)] == ["program_died", "answer", "answer"]


def test_memory_has_a_limit(own, running):
    trees, _ = running(answering).grow("own/faulty.py:flooding_memory", memory_mib=256)
    ((outcome, fault),) = endings(trees)
    assert (outcome, "MemoryError" in fault) == ("program_failed", True)


def test_neighbours_of_a_faulty_episode_go_on(own, running):
    (own / "mixed.py").write_text(
        "import os, signal\nfrom own.wanderer import ask\n"
        "def run(task, endpoint):\n"
        "    ask(endpoint, task.messages)\n"
        "    if task.id == 'q1':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    ask(endpoint, [*task.messages, {'role': 'user', 'content': 'b'}])\n"
        "    return '7'\n"
    )
    trees, counts = running(answering).grow("own/mixed.py:run", questions=3)
    assert [outcome for outcome, _ in endings(trees)] == ["answer", "program_died", "answer"]
    assert counts.early_rounds == 0


def test_requests_that_cannot_be_answered_say_why(own, running):
    trees, _ = running(answering).grow("own/faulty.py:broken_requests")
    told = json.loads(answers(trees)[0])
    words = ("messages", "messages", "answered", "wizard", "only text", "last one", "messages[0]")
    assert all(word in said for word, said in zip(words, told, strict=False)), told
    assert "'prompt_tokens' allows" in told[-2]
    assert "characters" in told[-1]  # refused before it is tokenized


def test_a_sandbox_has_no_network_and_shows_nothing_else(own, running, monkeypatch):
    (own.parent / "secret.txt").write_text("secret")
    monkeypatch.setenv("SECRET_KEY", "secret")
    trees, _ = running(answering).grow("own/faulty.py:reading", trusted=False)
    told = json.loads(answers(trees)[0])
    assert told.pop("network") not in (True, "TimeoutError")
    assert told == {
        "/etc/passwd": False,
        "own/faulty.py": True,
        "secret.txt": False,
        "/tmp/.ssh": False,
        "written": False,
        "secret": None,
        "answered": True,
        "processes": True,
    }


def test_without_a_sandbox_the_remedy_is_said(own, running, monkeypatch):
    monkeypatch.setattr(walls, "unable", lambda: "there is no bwrap")
    with pytest.raises(RuntimeError, match="install bubblewrap, or set 'trusted: true'"):
        running(answering).grow("own/faulty.py:silent", trusted=False)


def test_a_file_that_cannot_be_loaded_stops_the_run(own, running):
    (own / "broken.py").write_text("import no_such_library\ndef run(task, endpoint): ...\n")
    with pytest.raises(RuntimeError, match="no_such_library"):
        running(answering).grow("own/broken.py:run")


def test_a_command_gets_its_task_and_says_its_answer_last(own, running):
    (own / "script.py").write_text(
        "import json, os, sys\nsys.path.insert(0, '.')\n"
        "from types import SimpleNamespace\nfrom own.wanderer import ask\n"
        "given = json.loads(sys.stdin.readline())\n"
        "endpoint = SimpleNamespace(**given['endpoint'])\n"
        "assert os.environ['OPENAI_API_KEY'] == endpoint.key\n"
        "assert os.environ['OPENAI_BASE_URL'] == endpoint.base_url\n"
        "print('thinking')\nask(endpoint, given['task']['messages'])\n"
        "print(json.dumps({'answer': given['task']['id'], 'reward': 1}))\n"
    )
    trees, _ = running(answering).grow(
        "command", questions=3, trusted=False, run=(walls.interpreter(""), "own/script.py")
    )
    assert answers(trees) == ["q0", "q1", "q2"]


KEPT_WARM = """
import json, os, sys, time
sys.path.insert(0, ".")
from types import SimpleNamespace
from own.wanderer import ask

served = 0
for line in sys.stdin:
    given = json.loads(line)
    served += 1
    name, task = given["id"], given["task"]["id"]
    print("a log", flush=True)
    print(json.dumps({"id": name - 1, "answer": "of another"}), flush=True)
    ask(SimpleNamespace(**given["endpoint"]), given["task"]["messages"])
    if task == "q2":
        os.kill(os.getpid(), 9)
    if task == "q4":
        time.sleep(60)
    if task == "q6":
        sys.exit()
    if task == "q8":
        print("{" + "x" * 500_000, flush=True)
        time.sleep(60)
    print(json.dumps({"id": name, "answer": f"{task} {os.getpid()} {served}"}), flush=True)
    print(json.dumps({"id": name, "answer": "once more"}), flush=True)
    if task in ("q0", "q3"):
        sys.exit()
    if task == "q9":
        sys.stdout.write("y" * 300_000)
        sys.stdout.flush()
"""


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "in a sandbox"])
def test_a_command_is_kept_for_further_episodes(own, running, trusted):
    (own / "script.py").write_text(KEPT_WARM)
    run = (walls.interpreter(""), "own/script.py")
    trees, _ = running(answering).grow(
        "command", questions=12, lanes=2, trusted=trusted, run=run, keep_warm=True, seconds=20.0
    )
    failed = {"q2": "program_died", "q4": "program_timeout", "q6": "program_failed"}
    failed["q8"] = "program_failed"
    told = {tree.question.id: tree.nodes[tree.leaves[0]] for tree in trees}
    assert {name: node.outcome for name, node in told.items() if node.outcome != "answer"} == failed
    said = [
        node.observation.info["program"]["answer"].split()
        for node in told.values()
        if node.outcome == "answer"
    ]
    assert [name for name, _, _ in said] == [name for name in told if name not in failed]
    processes = {process for _, process, _ in said}
    assert len(processes) <= 2 + len(failed) + 2
    assert max(int(count) for _, _, count in said) > 1


@pytest.mark.parametrize(
    ("printed", "answer"),
    [
        ("print(json.dumps({'answer': 'a\u2028b'}, ensure_ascii=False))", "a\u2028b"),
        ("print('log ' * 99999); print('log\\n' * 99999); print('{\"answer\": \"7\"}')", "7"),
    ],
    ids=["a separator of lines in a text", "a long log before"],
)
def test_the_last_line_of_a_command_is_its_result(printed, answer, own, running):
    (own / "script.py").write_text(f"import json, sys\nsys.stdin.readline()\n{printed}\n")
    trees, _ = running(answering).grow("command", run=(walls.interpreter(""), "own/script.py"))
    assert answers(trees) == [answer]


def test_rewards_of_a_program_count_where_the_recipe_says(own, running):
    trees, _ = running(answering).grow("own/faulty.py:rewarded")
    parts = listed(
        {"answer": {}}, {"program": {"weight": 2.0}}, {"program": {"part": "speed", "high": 0.2}}
    )
    (row,) = score_trees(trees, parts)
    assert row["parts"] == {"answer": 1.0, "program": 1.0, "program_speed": 0.2}
    assert (row["answer"], row["outcome"]) == ("7", "answer")
    failed, _ = running(answering).grow("own/faulty.py:raising")
    (row,) = score_trees(failed, listed({"program": {"missing": -1.0}}))
    assert (row["reward"], row["answer"]) == (-1.0, None)


@pytest.mark.parametrize(
    "returned",
    [[1], {"answer": "7", "score": 1}, float("inf"), 1e9, {"parts": [1]}, {"reward": "much"}],
)
def test_what_is_no_result_is_refused(returned):
    with pytest.raises(ResultError):
        result_of(returned, (-100.0, 100.0))


def test_a_killed_trainer_leaves_nothing(own, tmp_path):
    """SIGKILL of the process that rolls out, while its programs hang."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import os, signal, threading, time\n"
        "from tasks.programs.opening import open_program\n"
        "from tasks.programs.own_program import program_kind\n"
        "kind = program_kind('command')\n"
        "settings = kind.settings(run=('sleep', '4242'), trusted=sys.argv[2] == 'trusted')\n"
        "from tasks.programs.episodes import EpisodeLimits, ProgramEpisode\n"
        "from tasks.trees.tree import Question\n"
        "with open_program({'command': settings}) as program, program.lent() as (launcher, _):\n"
        "    limits = EpisodeLimits(1, 1, 1, 1)\n"
        "    episode = ProgramEpisode(Question('q', 'k', 't', ()), 0, 's', limits)\n"
        "    endpoint = {'base_url': 'u', 'key': 'k', 'model': 'm'}\n"
        "    launcher.serve(lambda e: endpoint, lambda e: print('running', flush=True), print)\n"
        "    launcher.start(episode)\n"
        "    time.sleep(1000)\n"
    )
    project = str(Path(walls.__file__).parents[2])
    for trusted in ("trusted", "sandboxed"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, project, trusted], stdout=subprocess.PIPE, text=True
        )
        assert "running\n" in iter(process.stdout.readline, "")
        until = time.monotonic() + 10
        while not left_running(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
        process.wait()
        until = time.monotonic() + 10
        while left_running(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left_running(tmp_path), trusted
