import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows.host import proxies

ROOT = Path(__file__).parents[3]
NOBODY = "http://127.0.0.1:9"  # no proxy listens there
NAMES = ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]
ASK = """
import asyncio, sys, urllib.request
import flows, aiohttp, httpx, httpx2, requests, websockets.proxy, websockets.uri

async def with_aiohttp(url):
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        assert answer.status == 200

for url in sys.argv[1:]:
    assert httpx.get(url).status_code == httpx2.get(url).status_code == 200
    assert requests.get(url).status_code == 200
    assert urllib.request.urlopen(url).status == 200
    asyncio.run(with_aiohttp(url))
    assert not websockets.proxy.get_proxy(websockets.uri.parse_uri(url.replace("http", "ws")))
"""


class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def port():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def environment(**changes):
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return plain | changes


def test_every_library_reaches_loopback_directly(port):
    """Each library and its children, with the proxy in every spelling."""
    urls = [f"http://{host}:{port}/" for host in ("127.0.0.1", "localhost")]
    behind = environment(**dict.fromkeys(NAMES, NOBODY), NO_PROXY="corp,[::1],10.0.0.0/8")
    asked = subprocess.run([sys.executable, "-c", ASK, *urls], env=behind, cwd=ROOT)
    assert asked.returncode == 0


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({}, ["localhost,127.0.0.1,::1"] * 2),
        ({"NO_PROXY": "corp, .lab"}, ["corp,.lab,localhost,127.0.0.1,::1"] * 2),
        ({"no_proxy": "a", "NO_PROXY": "b"}, [f"{x},localhost,127.0.0.1,::1" for x in "ab"]),
        ({"NO_PROXY": "[::1] ::1/128,localhost"}, ["::1,::1,localhost,127.0.0.1"] * 2),
        ({"NO_PROXY": "corp,*"}, ["*"] * 2),
    ],
)
def test_exceptions_keep_the_users(given, both, monkeypatch):
    for name in [*NAMES, *proxies.EXCEPTIONS]:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"All_Proxy": NOBODY, **given}.items():
        monkeypatch.setenv(name, value)
    proxies.keep_loopback_direct()
    assert [os.environ[name] for name in proxies.EXCEPTIONS] == both


def test_without_proxies_nothing_changes(monkeypatch):
    for name in [*NAMES, *proxies.EXCEPTIONS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", " ")
    proxies.keep_loopback_direct()
    assert not set(proxies.EXCEPTIONS) & set(os.environ)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("proxy:3128", "write http://proxy:3128"),
        ("http://", "no host"),
        ("http://:3128", "no host"),
        ("http://proxy:port", "no host and port"),
        ("http://proxy:99999", "no host and port"),
        ("http://[::1", "no host"),
        ("http://10.0.0.256:3128", "no host"),
        ("http://\u2603:80", "no host"),
        ("http://a..\xe9:80", "no host"),
        ("http://[v1.x]:80", "no host"),
        ("http://a b:1", "no host"),
        ("http://a\x9bb:1", r"\x9b"),
        ("ftp://proxy:1", "socks5h"),
        ("://x", "no proxy's address"),
        ("me:secret@proxy:3128", "***@proxy"),
    ],
)
def test_wrong_proxy_is_named(value, says):
    [fault] = proxies.faults({"HTTPS_PROXY": value})
    assert (
        "HTTPS_PROXY" in fault and says in fault and "secret" not in fault and "\x9b" not in fault
    )


@pytest.mark.parametrize("value", ["http://me:pw@proxy", "https://[::1]:1", "socks5h://p:1", " "])
def test_right_proxy_has_no_fault(value):
    assert proxies.faults({"all_proxy": value, "NO_PROXY": "*, a.b:8,http://c/,::1/128 d"}) == []


@pytest.mark.parametrize(
    "entry",
    [
        "fd00::/8",
        "[fd00::1]:80",
        "http://[",
        "a:b",
        "\x9b",
        "\u2603.com",
        "http://\u2603",
        "*.\xe9..com",
    ],
)
def test_unread_exception_is_named(entry):
    [fault] = proxies.faults({"no_proxy": f"localhost,{entry},corp"})
    assert "no_proxy" in fault and "leave it out" in fault


def test_program_refuses_wrong_proxy():
    asked = subprocess.run(
        [sys.executable, "-m", "flows.plan", "smoke"],
        env=environment(HTTP_PROXY="proxy:3128", NO_PROXY="fd00::/8"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 2 and "Traceback" not in asked.stderr
    assert "HTTP_PROXY" in asked.stderr and "NO_PROXY" in asked.stderr
