"""The guard before a real HTTP server, and the client that has to pass it."""

import http.client
import http.server
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from tasks.engines.servers import token_guard, uploads
from tasks.engines.servers.client import JSON, EngineServer
from tasks.engines.vllm import serve
from tasks.engines.vllm.connection import ROOT
from tests.sampling_server import listening

TOKEN = "a token that the server knows"
CALLS = (
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/start_profile",
    "/health",
    "/pause",
    "/resume",
    "/update_weights",
    "/inference/v1/generate",
)


@contextmanager
def serving(served):
    """Serve vLLM's calls behind the guard; ``served`` gets those that come through."""

    async def answer(request):
        served.append(request.url.path)
        policy = json.loads(await request.body() or "{}").get("args", [""])[:1]
        return JSONResponse({"success": True, "results": policy})

    async def talk(websocket):
        served.append("websocket")
        await websocket.accept()

    routes = [Route(path, answer, methods=["GET", "POST", "OPTIONS"]) for path in CALLS]
    app = token_guard.Guard(Starlette(routes=[*routes, WebSocketRoute("/talk", talk)]))
    with listening(app) as port:
        yield port


@pytest.fixture
def served(monkeypatch, tmp_path):
    monkeypatch.setenv(uploads.FOLDER, str(tmp_path / "policies"))
    monkeypatch.setenv(token_guard.TOKEN, TOKEN)
    monkeypatch.setenv(token_guard.NAMES, "localhost,gpu-2")
    return []


@pytest.fixture
def port(served):
    with serving(served) as port:
        yield port


def ask(port, path="/collective_rpc", method="POST", **headers):
    """Send a request and return its status."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked.putrequest(method, path, skip_host=True)
    for name, value in headers.items():
        for each in value if isinstance(value, list) else [value]:
            asked.putheader(name.replace("_", "-"), each)
    asked.endheaders()
    return asked.getresponse().status


KNOWN = {"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("host", ["gpu-2:8000", "GPU-2", "localhost", "10.0.0.7:8000", "[::1]:80"])
def test_request_with_the_token_is_served(port, served, host):
    assert ask(port, **KNOWN | {"Host": host}) == 200
    assert served == ["/collective_rpc"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1"},
        KNOWN | {"Authorization": "Bearer another token"},
        KNOWN | {"Authorization": "Bearer "},
        KNOWN | {"Authorization": f"Basic {TOKEN}"},
        KNOWN | {"Authorization": ["Bearer another", f"Bearer {TOKEN}"]},
        KNOWN | {"Host": "page.example.org"},
        KNOWN | {"Host": "gpu-2.example.org:8000"},
        KNOWN | {"Host": ["page.example.org", "gpu-2"]},
    ],
    ids=["none", "wrong", "empty", "scheme", "two", "host", "longer host", "two hosts"],
)
def test_other_request_reaches_nothing(port, served, headers):
    paths = (*CALLS, uploads.POLICIES, f"{uploads.POLICIES}/config.json")
    refused = {ask(port, path, method, **headers) for path in paths for method in METHODS}
    assert refused <= {400, 401}  # uvicorn itself refuses two hosts
    assert served == []


METHODS = ("POST", "GET", "PUT", "OPTIONS")
UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}


def test_websocket_needs_the_token(port, served):
    upgrade = UPGRADE | {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    assert ask(port, "/talk", "GET", Host="127.0.0.1", **upgrade) == 403
    assert served == []
    assert ask(port, "/talk", "GET", **KNOWN, **upgrade) == 101
    assert served == ["websocket"]


def test_run_gives_its_token(port, served, monkeypatch):
    server = EngineServer(f"http://127.0.0.1:{port}", "vllm")
    server.load(Path("folder"), "version")
    rpc = "/collective_rpc"
    assert served == [rpc, "/pause", rpc, "/reset_prefix_cache", "/resume"]
    for token in ("another token", ""):
        monkeypatch.setenv(token_guard.TOKEN, token)
        with pytest.raises(ValueError, match=f"refuses this run: set {token_guard.TOKEN}"):
            EngineServer(f"http://127.0.0.1:{port}", "vllm").load(Path("folder"), "version")


def test_a_server_below_a_path_is_asked_there():
    """As behind a proxy that leads to several ones."""
    asked = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        server = EngineServer(f"http://127.0.0.1:{proxy.server_address[1]}/gpu1/", "vllm")
        server._post("/resume")
        proxy.shutdown()
    assert asked == ["/gpu1/resume"]


def test_password_in_the_recipe_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="git and MLflow keep") as caught:
        EngineServer("http://worker:s3cr3t@127.0.0.1:9", "vllm")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "version"),
    [
        (("/collective_rpc", {"method": "load_folder", "args": ["folder", "new"]}), "new"),
        (("/collective_rpc", {"method": "load_folder", "args": ["folder"]}), ""),
        (("/collective_rpc", {"method": "name_policy", "args": ["new"]}), "new"),
        (("/collective_rpc", {"method": "reload_weights"}), ""),
        (("/collective_rpc", {"method": "policy"}), "old"),
        (("/update_weights", {}), ""),
        (("/reset_prefix_cache", {}), "old"),
        (("/inference/v1/generate", {}), "old"),
    ],
)
def test_answers_name_the_version_of_the_weights(port, call, version):
    server = EngineServer(f"http://127.0.0.1:{port}", "vllm")
    server.load(Path("folder"), "old")
    assert server._asked("POST", call[0], json.dumps(call[1]).encode(), JSON)[1] == version
    assert server._asked("POST", token_guard.GENERATE, b"{}", JSON)[1] == version


def test_guard_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(token_guard.TOKEN, raising=False)
    with pytest.raises(KeyError):
        token_guard.Guard(Starlette())


def test_server_keeps_a_token_that_only_its_user_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(token_guard.TOKEN, raising=False)
    token = token_guard.server_token()
    assert len(token) >= 32
    assert token_guard.server_token() == token
    assert [oct(file.stat().st_mode & 0o777) for file in Path(".beamline").iterdir()] == ["0o600"]
    token_guard.TOKEN_FILE.chmod(0o644)
    with pytest.raises(PermissionError, match="others may read"):
        token_guard.server_token()
    monkeypatch.setenv(token_guard.TOKEN, TOKEN)
    assert token_guard.server_token() == TOKEN


@pytest.mark.parametrize("token", ["", " \n", "fifteen letters"])
def test_short_token_is_refused_where_it_is_read_and_where_it_is_used(
    tmp_path, monkeypatch, capsys, token
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(token_guard.NAMES, "localhost")
    monkeypatch.setenv(token_guard.TOKEN, token)
    with pytest.raises(ValueError, match=f"{token_guard.TOKEN} has .* needs 16"):
        token_guard.Guard(Starlette())
    (tmp_path / "config.json").write_text("{}")
    token_guard.TOKEN_FILE.parent.mkdir()
    token_guard.TOKEN_FILE.touch(mode=0o600)
    token_guard.TOKEN_FILE.write_text(token)
    place = token_guard.TOKEN if token.strip() else token_guard.TOKEN_FILE
    with pytest.raises(SystemExit) as refused:
        serve.main([str(tmp_path)])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert f"the token in {place} has {len(token.strip())} characters" in said
    monkeypatch.delenv(token_guard.TOKEN)
    with pytest.raises(ValueError, match=f"{token_guard.TOKEN_FILE} has"):
        token_guard.server_token()


def test_serve_prints_where_the_token_is_and_not_the_token(tmp_path, monkeypatch):
    monkeypatch.delenv(token_guard.TOKEN, raising=False)
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "tasks.engines.vllm.serve", str(tmp_path), "--host", "::"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    token = (tmp_path / token_guard.TOKEN_FILE).read_text()
    assert f"{token_guard.TOKEN}=$(cat {tmp_path / token_guard.TOKEN_FILE})" in ran.stdout
    assert token not in ran.stdout + ran.stderr
