"""Tools of real MCP servers, by standard input and by HTTP, killed and started again."""

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from mcp_types import Tool
from pydantic import ValidationError

from tasks.environments import open_environment
from tasks.environments.contract import recording
from tasks.tools import mcp_connection, mcp_guard, mcp_settings
from tasks.tools.contract import Opening
from tasks.tools.mcp import TOOL, _spec
from tasks.tools.mcp_settings import McpTools, secrets_of, shown
from tasks.tools.recording import CALLS, REPLAYED, Origin, publish_calls
from tasks.tools.schema import with_values
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import RESULT, Call, Question
from tests.tasks.rollouts.test_hostile_worlds import play
from tests.tasks.tools import strange_mcp_server
from tests.tasks.tools.web_server import Reply, serving
from tests.waiting import LONGEST

PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": [sys.executable, PROGRAM]}
# Without the library, which a server takes more than a second to import.
QUICK = {
    "command": [
        *(sys.executable, "-I", "-S"),
        str(Path(PROGRAM).with_name("strange_mcp_server.py")),
    ]
}
HERE = Opening(Path(), 4)


def settings(servers, **others):
    return McpTools.model_validate(
        {"servers": servers, "seconds": 60.0, "characters": 100, **others}
    )


def call(tool, **values):
    return Call(tool, "", values)


@contextmanager
def refusing_service(status):
    """A service that lists its tools, and answers every call with an error of HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            refused = asked["method"] == "tools/call"
            body = b"" if refused else strange_mcp_server.answered(asked)
            told = b'{"jsonrpc": "2.0", "id": %d, "result": %b}' % (
                asked.get("id", 0),
                body or b"{}",
            )
            self.send_response(status if refused else 200 if "id" in asked else 202)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
        server.shutdown()


def answers(tool, *calls):
    return [(one.outcome, one.text) for one in tool.run(calls)]


@pytest.fixture(scope="module")
def tool():
    """The tools of one server that runs as a process."""
    os.environ["DEMO_TOKEN"] = "s3cret-of-the-server"
    with TOOL.open(settings({"demo": STDIO | {"environment": ["DEMO_TOKEN"]}}), HERE) as ready:
        yield ready


def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def services():
    """A process that has the library, from which servers at ports are forked."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, "ports"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@contextmanager
def service(services, number):
    """A server at a port; yields what ends it at once."""
    print(number, file=services.stdin, flush=True)
    process = int(services.stdout.readline())

    def end():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        assert ended(process)

    try:
        while alive(process):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", number)) == 0:
                    break
            time.sleep(0.02)
        yield end
    finally:
        end()


def alive(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text().split(") ")[1][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ended(number):
    until = time.monotonic() + LONGEST
    while alive(number) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(number)


def test_server_says_its_tools_and_answers_in_order(tool):
    specs = {spec.name: spec for spec in tool.specs}
    assert list(specs)[:3] == ["add", "process", "a_picture"]
    assert specs["add"].description == "Add two numbers."
    assert specs["add"].parameters["required"] == ["a", "b"]
    wanted = with_values(Call("add", '{"a": 40, "b": 2}'), specs["add"])
    refused = with_values(Call("add", '{"a": "forty"}'), specs["add"])
    assert refused.outcome == Outcome.BAD_ARGUMENTS
    calls = (call("slow", seconds=0.3), wanted, call("nothing"), call("a_picture"))
    assert answers(tool, *calls) == [
        (Outcome.OK, "late"),
        (Outcome.OK, "42"),
        (Outcome.NO_SUCH_TOOL, "no tool is called nothing"),
        (Outcome.OK, "a cat\n[image]"),
    ]


def test_faults_of_a_tool_are_outcomes(tool):
    assert answers(tool, call("fails"), call("long", characters=1_000_000)) == [
        (Outcome.ERROR, "Error executing tool fails"),
        (Outcome.OUTPUT_LIMIT, "x" * 100),
    ]
    half = answers(tool, call("add", a="\ud800", b=float("nan")))
    assert half[0][0] == Outcome.ERROR


def test_value_of_a_variable_is_shown_nowhere(tool):
    assert answers(tool, call("secret")) == [(Outcome.OK, "the token is [DEMO_TOKEN]")]
    asked = settings({"demo": STDIO | {"environment": ["DEMO_TOKEN"]}})
    assert "s3cret" not in asked.model_dump_json()


def test_killed_process_is_started_again(tool):
    first = int(answers(tool, call("process"))[0][1])
    os.kill(first, signal.SIGKILL)
    assert answers(tool, call("add", a=1, b=1), call("add", a=2, b=2)) == [
        (Outcome.OK, "2"),
        (Outcome.OK, "4"),
    ]
    assert int(answers(tool, call("process"))[0][1]) != first


def test_stuck_server_is_ended(monkeypatch):
    monkeypatch.setattr(mcp_connection, "PATIENCE", 0.5)
    with TOOL.open(settings({"demo": QUICK}, seconds=3.0), HERE) as tool:
        process = int(answers(tool, call("process"))[0][1])
        began = time.monotonic()
        assert answers(tool, call("stuck")) == [(Outcome.TIMEOUT, "")]
        assert 3.0 <= time.monotonic() - began < LONGEST / 2
        assert ended(process)


def test_server_ends_when_the_trainer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("DEMO_CHILD", str(tmp_path / "child"))
    server = QUICK | {"environment": ["DEMO_CHILD"]}
    script = (
        "from pathlib import Path\n"
        "from tasks.tools.mcp import TOOL\n"
        "from tasks.tools.mcp_settings import McpTools\n"
        "from tasks.tools.contract import Opening\n"
        "from tasks.trees.tree import Call\n"
        f"settings = McpTools.model_validate({settings({'demo': server}).model_dump()!r})\n"
        "with TOOL.open(settings, Opening(Path(), 4)) as tool:\n"
        "    tool.run([Call('strange', '', {'way': 'child'})])\n"
        "    print(tool.run([Call('process', '', {})])[0].text, flush=True)\n"
        "    tool.run([Call('stuck', '', {})])"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    process = int(trainer.stdout.readline())
    below = [int(each) for each in (tmp_path / "child").read_text().split()]
    assert all(map(alive, [process, *below]))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert all(map(ended, [process, *below]))


def test_outcomes_do_not_depend_on_other_calls(monkeypatch):
    """A call that ends the server, and a server that does one call after the other."""
    beside = [call("slow", seconds=0.3), call("strange", way="dies"), call("slow", seconds=0.3)]
    with TOOL.open(settings({"demo": QUICK}, seconds=20.0), HERE) as tool:
        found = [outcome for outcome, _ in answers(tool, *beside)]
    assert found == [Outcome.OK, Outcome.KILLED, Outcome.OK]
    monkeypatch.setenv("DEMO_SERIAL", "1")
    serial = QUICK | {"environment": ["DEMO_SERIAL"]}
    waiting = [call("slow", seconds=seconds) for seconds in (0.5, 0.5, 0.5, 2.0)]
    with TOOL.open(settings({"demo": serial}, seconds=1.2), HERE) as tool:
        found = [outcome for outcome, _ in answers(tool, *waiting)]
    assert found == [*[Outcome.OK] * 3, Outcome.TIMEOUT]


@pytest.mark.parametrize("status", [401, 429, 503])
def test_service_that_refuses_is_not_the_agents_doing(status):
    with refusing_service(status) as url, TOOL.open(settings({"demo": {"url": url}}), HERE) as tool:
        assert answers(tool, call("add", a=1, b=2))[0][0] == Outcome.UNAVAILABLE


def test_service_that_dies_is_unavailable_until_it_is_back(services):
    number = port()
    asked = settings({"demo": {"url": f"http://127.0.0.1:{number}/mcp"}}, seconds=5.0)
    with service(services, number) as end, TOOL.open(asked, HERE) as tool:
        assert answers(tool, call("add", a=1, b=2)) == [(Outcome.OK, "3")]
        threading.Timer(0.5, end).start()
        assert answers(tool, call("slow", seconds=4.0))[0][0] == Outcome.UNAVAILABLE
        away = answers(tool, call("add", a=1, b=2), call("process"))
        assert [outcome for outcome, _ in away] == [Outcome.UNAVAILABLE] * 2
        assert away[0][1].startswith("demo is not available: ")
        with service(services, number):
            assert answers(tool, call("add", a=1, b=2)) == [(Outcome.OK, "3")]


def test_tool_that_changed_is_named(tmp_path, monkeypatch):
    mark = tmp_path / "changed"
    monkeypatch.setenv("DEMO_CHANGES", str(mark))
    with TOOL.open(settings({"demo": QUICK | {"environment": ["DEMO_CHANGES"]}}), HERE) as tool:
        first = int(answers(tool, call("process"))[0][1])
        mark.touch()
        os.kill(first, signal.SIGKILL)
        changed, other = answers(tool, call("add", a=1, b=2), call("slow", seconds=0))
    assert changed == (Outcome.TOOLS_CHANGED, "demo came back with another tool add than before")
    assert other == (Outcome.OK, "late")


def test_names_that_two_servers_use_carry_the_servers_name():
    chosen = {"left": QUICK | {"only": ["add"]}, "right": QUICK | {"only": ["add", "process"]}}
    with TOOL.open(settings(chosen), HERE) as tool:
        assert [spec.name for spec in tool.specs] == ["left_add", "right_add", "process"]
        assert answers(tool, call("right_add", a=1, b=2)) == [(Outcome.OK, "3")]
        process = int(answers(tool, call("process"))[0][1])
    assert ended(process)  # with the block


def test_what_cannot_work_is_said_before_any_work(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    unset = {"url": "https://example.org/mcp", "headers": {"Authorization": "NO_TOKEN"}}
    faults = TOOL.faults(settings({"one": {"command": ["no-program"]}, "two": unset}), "any")
    assert faults == [
        "servers.one.command: the program 'no-program' is not found: install it, or write its path",
        "servers.two: the environment variable NO_TOKEN is not set: set it before the run",
    ]
    for wrong in ({}, STDIO | {"url": "http://x/"}, {"url": "https://me:secret@x/"}):
        with pytest.raises(ValidationError):
            settings({"one": wrong})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (QUICK | {"only": ["subtract"]}, "server demo has no tool subtract: it has add, process"),
        (
            {"command": [sys.executable, "-c", "raise SystemExit('no licence')"]},
            "server demo cannot be reached: .*no licence",
        ),
        (
            {"command": ["sleep", "60"], "start_seconds": 0.5},
            "server demo cannot be reached: no answer within 0.5 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "server demo cannot be reached: ConnectError"),
    ],
)
def test_server_that_cannot_be_used_stops_the_run(server, message):
    with pytest.raises(ValueError, match=message), TOOL.open(settings({"demo": server}), HERE):
        pass


KEY = 'pa"ss\\w\u00f6rd-0123456789'


def test_a_key_is_not_shown_as_json_writes_it(monkeypatch):
    monkeypatch.setenv("DEMO_TOKEN", f"Bearer {KEY}")
    keys = QUICK | {"environment": ["DEMO_TOKEN"]}
    with TOOL.open(settings({"demo": keys}), HERE) as tool:
        assert answers(tool, call("strange", way="keys")) == [(Outcome.OK, '{"k": "[DEMO_TOKEN]"}')]
    secrets = secrets_of(settings({"demo": keys}).servers.values())
    assert shown("\u200b".join(KEY), secrets) == "[DEMO_TOKEN]"
    listed = Tool(
        name="look", input_schema={"type": "object", "properties": {KEY: {"description": KEY}}}
    )
    told = _spec("look", listed, secrets).parameters["properties"]
    assert told == {"[DEMO_TOKEN]": {"description": "[DEMO_TOKEN]"}}


@pytest.mark.parametrize(
    ("name", "fault"),
    [("", "0 characters"), ("n" * 129, "129 characters"), ("get-s3cret/key", "holds the value")],
)
def test_a_name_that_cannot_be_told_is_a_fault(monkeypatch, name, fault):
    monkeypatch.setenv("DEMO_NAME", name)
    monkeypatch.setenv("DEMO_TOKEN", "s3cret/key")
    server = QUICK | {"environment": ["DEMO_NAME", "DEMO_TOKEN"]}
    monkeypatch.setattr(mcp_settings, "SHORTEST_SECRET", 10 if "/" in name else 1000)
    with (
        pytest.raises(ValueError, match=f"server demo has a tool whose .*{fault}") as raised,
        TOOL.open(settings({"demo": server}), HERE),
    ):
        pass
    assert name not in str(raised.value) or not name
    with TOOL.open(settings({"demo": server | {"only": ["add"]}}), HERE):
        pass


def test_names_in_a_message_are_printable(monkeypatch):
    monkeypatch.setenv("DEMO_NAME", "a\x1b[31m\u202e")
    server = QUICK | {"environment": ["DEMO_NAME"], "only": ["subtract"]}
    monkeypatch.setattr(mcp_settings, "SHORTEST_SECRET", 1000)
    with (
        pytest.raises(ValueError, match="no tool subtract") as raised,
        TOOL.open(settings({"demo": server}), HERE),
    ):
        pass
    assert str(raised.value).isprintable()


def test_a_key_that_a_server_tells_when_it_fails_is_not_shown(monkeypatch):
    monkeypatch.setenv("DEMO_TOKEN", "s3cret-of-the-server\n")
    # The end that is shown begins within the key.
    tells = "import os; raise SystemExit(f'key {os.environ[\"DEMO_TOKEN\"].strip()} ' + 'x' * 485)"
    server = {"command": [sys.executable, "-c", tells], "environment": ["DEMO_TOKEN"]}
    reason = r"it said: .*\[DEMO_TOKEN\]"
    with (
        pytest.raises(ValueError, match=reason) as raised,
        TOOL.open(settings({"x": server}), HERE),
    ):
        pass
    assert "server" not in str(raised.value).partition("it said")[2]


@pytest.mark.parametrize(
    ("tool", "fault"),
    [
        (Tool(name="look", input_schema={"type": "object", "$defs": {"a": "x" * 60_000}}), "50000"),
        (Tool(name="look", description="x" * 30_000, input_schema={"type": "object"}), "20000"),
    ],
)
def test_a_description_that_is_too_long_is_a_fault(tool, fault):
    with pytest.raises(ValueError, match=f"tool look cannot be used: .*more than {fault} char"):
        _spec("look", tool, {})


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"$ref": "#"}, "refer to themselves without an end"),
        ({"$ref": "#/nowhere"}, "it is no JSON schema: "),
        ({"$schema": "http://[bad"}, "it is no JSON schema: "),
        ({"$schema": []}, "it is no JSON schema: "),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    str(level): {"allOf": [{"$ref": f"#/$defs/{(level + 1) % 40}"}] * 2}
                    for level in range(40)
                }
                | {"39": {}},
            },
            "a check takes more than ",
        ),
    ],
)
def test_a_schema_that_cannot_be_checked_is_a_fault(more, fault):
    listed = Tool(name="look", input_schema={"type": "object", **more})
    with pytest.raises(ValueError, match=f"tool look cannot be used: .*{re.escape(fault)}"):
        _spec("look", listed, {})


def test_tools_that_have_no_room_in_a_prompt_are_a_fault(monkeypatch):
    monkeypatch.setattr(mcp_connection, "OFFERED", 300)
    reason = "server demo describes its tools in .*: choose some"
    with pytest.raises(ValueError, match=reason), TOOL.open(settings({"demo": QUICK}), HERE):
        pass
    with TOOL.open(settings({"demo": QUICK | {"only": ["add"]}}), HERE) as tool:
        assert answers(tool, call("add", a=1, b=2)) == [(Outcome.OK, "3")]


def test_a_key_in_the_description_of_a_tool_is_not_told():
    schema = {"type": "object", "properties": {"a": {"description": "s3cret key"}}}
    listed = Tool(name="look", description="s3cret", input_schema=schema)
    told = _spec("look", listed, {"s3cret": "[K]"})
    assert told.description == "[K]"
    assert told.parameters["properties"]["a"]["description"] == "[K] key"


UNREAD = (Outcome.ERROR, "demo gave an answer that cannot be read")
STRANGE = {
    "bytes": (Outcome.OK, "a\N{REPLACEMENT CHARACTER}b"),
    "unknown": (
        Outcome.OK,
        "before\n[a part of type hologram cannot be shown]\n"
        "[a part of type image cannot be shown]\n[a part cannot be shown]\nafter",
    ),
    "resource": (Outcome.OK, "held\n[resource]\n[a part of type resource cannot be shown]"),
    "number": (Outcome.OK, "[a part of type text cannot be shown]"),
    **dict.fromkeys(("shape", "empty", "error", "structured"), UNREAD),
    "errors": (Outcome.OK, "fine"),
    "flood": (Outcome.OK, "fine"),
    "fine": (Outcome.OK, "fine"),
}


def test_strange_answers_are_outcomes(capfd, caplog):
    with TOOL.open(settings({"demo": QUICK}, seconds=5.0, characters=500), HERE) as tool:
        ways = [call("strange", way=way) for way in STRANGE]
        assert dict(zip(STRANGE, answers(tool, *ways), strict=True)) == STRANGE
        # Whatever is called in this way ends the server.
        assert answers(tool, call("strange", way="dies"))[0][0] == Outcome.KILLED
    with TOOL.open(settings({"demo": QUICK}, seconds=1.0), HERE) as tool:
        dropped = [call("strange", way=way) for way in ("half", "deep", "none")]  # no messages
        assert answers(tool, *dropped) == [(Outcome.TIMEOUT, "")] * 3
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_parts_and_tools_beyond_the_bounds_are_not_read(monkeypatch):
    monkeypatch.setattr(mcp_connection, "PARTS", 2)
    with TOOL.open(settings({"demo": QUICK}, characters=500), HERE) as tool:
        unread = "[a part cannot be shown]\n" * 2
        assert answers(tool, call("strange", way="parts")) == [
            (Outcome.OK, unread + "[199999 further parts are not shown]")
        ]


def by_http(answer_to_call):
    """Return what answers as a server with one tool, whose calls are answered as given."""

    def reply(path, body):
        asked = json.loads(body or "{}")
        version = asked.get("params", {}).get("protocolVersion")
        results = {
            "initialize": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "s", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]},
        }
        head = {"Content-Type": "application/json", "Mcp-Session-Id": "s"}
        if asked.get("method") == "tools/call":
            return Reply(answer_to_call(asked["id"]), headers=head)
        if asked.get("method") in results:
            told = {"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}
            return Reply(json.dumps(told).encode(), headers=head)
        return Reply(status=202 if "method" in asked and "id" not in asked else 404)

    return reply


def test_words_of_the_library_are_not_shown():
    """A server's own words are."""
    own = '{"jsonrpc": "2.0", "id": %d, "error": {"code": -32700, "message": "no such key"}}'
    bodies = iter(["{", "7", own])

    def answer_to_call(number):
        body = next(bodies)
        return (body % number if "%d" in body else body).encode()

    with (
        serving(by_http(answer_to_call)) as server,
        TOOL.open(settings({"demo": {"url": f"{server.url}/mcp"}}), HERE) as tool,
    ):
        answered = [answers(tool, call("add"))[0] for _ in range(3)]
    assert answered == [UNREAD, UNREAD, (Outcome.ERROR, "no such key")]
    assert all(body for _, _, body in server.asked)  # no stream beside the calls is asked for


def test_a_server_that_sends_without_an_end_is_ended(monkeypatch):
    monkeypatch.setattr(mcp_connection, "MESSAGES", 500)
    with TOOL.open(settings({"demo": QUICK}, seconds=5.0, attempts=2), HERE) as tool:
        ended = (Outcome.KILLED, "demo ended: it sent more than 500 messages in 10 s")
        assert answers(tool, call("strange", way="flood")) == [ended]
        assert answers(tool, call("strange", way="fine")) == [(Outcome.OK, "fine")]


def test_standard_error_is_bounded():
    """16 MiB of it; what is kept of it is told where the server does not start."""
    writes = "import os; [os.write(2, b'e' * 2**16) for _ in range(2**8)]; raise SystemExit('end')"
    command = [sys.executable, "-I", "-S", mcp_guard.__file__, str(os.getpid())]
    told = subprocess.run(
        [*command, sys.executable, "-I", "-S", "-c", writes], stderr=subprocess.PIPE
    ).stderr
    assert len(told) == mcp_guard.ERROR_BYTES and told.endswith(b"end\n")


def test_line_without_an_end_ends_the_server():
    writes = "import os\nwhile True: os.write(1, b'x' * 2**16)"
    command = [sys.executable, "-I", "-S", mcp_guard.__file__, str(os.getpid())]
    told = subprocess.run([*command, sys.executable, "-c", writes], capture_output=True)
    assert len(told.stdout) <= mcp_guard.LINE_BYTES and b"a line of more than" in told.stderr


@pytest.mark.parametrize(
    ("pages", "reason"), [("ever", "no end"), ("same", "no end"), ("many", "more than 1000 tools")]
)
def test_list_of_tools_without_an_end_is_refused(monkeypatch, pages, reason):
    monkeypatch.setenv("DEMO_LIST", pages)
    endless = QUICK | {"environment": ["DEMO_LIST"]}
    with (
        pytest.raises(ValueError, match=f"server demo .*{reason}"),
        TOOL.open(settings({"demo": endless}), HERE),
    ):
        pass
    with TOOL.open(settings({"demo": endless | {"only": ["add"]}}), HERE) as tool:
        assert answers(tool, call("add", a=1, b=2)) == [(Outcome.OK, "3")]


def test_children_in_sessions_of_their_own_end_with_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("DEMO_CHILD", str(tmp_path / "child"))
    with TOOL.open(settings({"demo": QUICK | {"environment": ["DEMO_CHILD"]}}), HERE) as tool:
        assert answers(tool, call("strange", way="child")) == [(Outcome.OK, "fine")]
        first, second = map(int, (tmp_path / "child").read_text().split())
        assert alive(first) and alive(second)
    assert ended(first) and ended(second)


@pytest.mark.parametrize("packed", [False, True])
def test_answer_of_a_service_is_bounded(monkeypatch, packed):
    monkeypatch.setattr(mcp_connection, "ANSWER_BYTES", 10_000)
    body = zlib.compress(b"x" * 20_000) if packed else b"x" * 20_000
    kind = {"Content-Type": "application/json"} | (
        {"Content-Encoding": "deflate"} if packed else {}
    )
    with (
        serving(lambda path, asked: Reply(body, headers=kind)) as server,
        pytest.raises(ValueError, match="server demo cannot be reached: TooLongError"),
        TOOL.open(settings({"demo": {"url": f"{server.url}/mcp"}}), HERE),
    ):
        pass


def asked_and_saved(tmp_path, server):
    """Ask a server in a sub-step; return the tools, the answers, and the table of the calls."""
    tools = {"mcp": settings({"demo": server})}
    with (
        open_environment(tools, {}, 1, tmp_path) as environment,
        recording(environment, Origin("reinforce", 0), lambda: tmp_path) as recorded,
        recorded.environment.session() as session,
    ):
        seen = session.act([(0, Call("process", "{}")), (0, Call("add", '{"a": 1, "b": 2}'))])
        recorded.save_calls(tmp_path)
        return environment.specs, seen, (tmp_path / CALLS).read_bytes()


def test_replay_needs_no_server(tmp_path, monkeypatch):
    made = asked_and_saved(tmp_path, QUICK)
    publish_calls({Origin("reinforce", 0): tmp_path / CALLS}, tmp_path / "data" / CALLS)
    monkeypatch.setenv(REPLAYED, str(tmp_path / "data"))
    gone = {"command": ["no-program"]}
    assert TOOL.faults(settings({"demo": gone}), "any") == []
    assert asked_and_saved(tmp_path, gone) == made


def rolled_out(tokenizer, tmp_path, server, turns, before):
    """Roll out two questions with two paths each, whose agent says ``turns`` one after the other.

    ``before``: number of a round -> what happens before its calls. A number of its own, so that no
    two calls are equal, takes the place of N in a turn. Returns the results of each path.
    """
    before = dict(before)

    def write(context, seed):
        done = context.count("<result>")
        before.pop(done, lambda context: None)(context)
        return turns[done].replace("N", str(seed % 10**9))

    asked = settings({"demo": server}, seconds=20.0)
    questions = [Question(name, "toy", f"{name}?", ("7",)) for name in ("apples", "baskets")]
    with open_environment({"mcp": asked}, {}, 4, tmp_path) as environment:
        trees, _ = play(environment, tokenizer, write, questions, leaves=2, initial=2)
    assert not before, "a round was never reached"
    paths = [path for tree in trees for path in tree.trajectories()]
    assert [path[-1].outcome for path in paths] == [Outcome.ANSWER] * 4
    return [[(n.outcome, n.text) for n in path if n.kind == RESULT] for path in paths]


SUM, ANSWER = '<add>{"a": N, "b": 1}</add>', "<answer>\\boxed{7}</answer>"


def test_rollout_outlives_a_service_that_is_away_for_a_round(services, tokenizer, tmp_path):
    number = port()
    address = {"url": f"http://127.0.0.1:{number}/mcp"}
    with ExitStack() as stack:
        end = stack.enter_context(service(services, number))
        before = {
            1: lambda context: end(),
            2: lambda context: stack.enter_context(service(services, number)),
        }
        found = rolled_out(tokenizer, tmp_path, address, [SUM] * 4 + [ANSWER], before)
    for results in found:
        away = Outcome.UNAVAILABLE
        assert [outcome for outcome, _ in results] == [Outcome.OK, away, Outcome.OK, Outcome.OK]
        assert "demo is not available: " in results[1][1]


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_rollout_does_not_notice_a_program_that_is_killed(tokenizer, tmp_path, seconds):
    """Between two calls or during one, which is then asked again."""

    def kill(context):
        first = int(re.findall(r"<result>(\d+)</result>", context)[0])
        threading.Timer(seconds, os.kill, (first, signal.SIGKILL)).start()

    turns = [
        "<process>{}</process>",
        '<slow>{"seconds": 1}</slow>',
        "<process>{}</process>",
        ANSWER,
    ]
    found = rolled_out(tokenizer, tmp_path, QUICK, turns, {1: kill})
    for (_, first), slow, (ended, second) in found:
        assert slow == (Outcome.OK, "<result>late</result>")
        assert (ended, second != first) == (Outcome.OK, True), "another process answers"
