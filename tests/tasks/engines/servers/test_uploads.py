"""Policies that are sent: only what is missing, whole or not at all, and no more than two stay."""

import os
import shutil
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tasks.engines.servers import token_guard, uploads
from tasks.engines.servers.client import EngineServer
from tests.sampling_server import listening
from tests.tasks.engines.servers.conftest import TOKEN
from tests.waiting import wait_until

GIB = 2**30


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The server's own folder of policies."""
    monkeypatch.setenv(uploads.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setenv(token_guard.TOKEN, TOKEN)
    monkeypatch.setenv(token_guard.NAMES, "localhost")
    return tmp_path / "kept"


@pytest.fixture
def port(kept):
    async def rest(request):
        return JSONResponse({"rest": request.url.path})

    with listening(token_guard.Guard(Starlette(routes=[Route("/rest", rest)]))) as port:
        yield port


@pytest.fixture
def server(port):
    return EngineServer(f"http://127.0.0.1:{port}", "transformers")


@pytest.fixture
def put(server, monkeypatch):
    """Names of the files that are sent; the server is told a folder that it does not have."""
    names, asked = [], server._asked

    def watched(method, path, body, headers, seconds=None):
        if method == "PUT":
            names.append(path.rpartition("/")[2])
        else:
            body = body.replace(b'"folder": "/', b'"folder": "/elsewhere/')
        return asked(method, path, body, headers, seconds)

    monkeypatch.setattr(server, "_asked", watched)
    return names


@pytest.fixture
def policy(tmp_path):
    """A function that writes a policy's folder."""

    def written(name, size=3 * uploads.SPARE // 2**8):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'"{name}"')
        (tmp_path / name / "model.safetensors").write_bytes(os.urandom(size))
        return tmp_path / name

    return written


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_only_what_is_missing_is_sent(server, policy, put, kept):
    folder = policy("a")
    assert server._place(folder, "version").startswith(str(kept))
    assert sorted(put) == ["config.json", "model.safetensors"]
    [own] = kept.iterdir()
    assert contents(own) == contents(folder)
    assert server._place(folder, "version") == str(own) and len(put) == 2, "it has them all"
    (folder / "config.json").write_text('"b"')
    assert server._place(folder, "version") == str(own)
    assert put[2:] == ["config.json"] and contents(own) == contents(folder)


def test_a_folder_that_the_server_sees_is_not_copied(server, policy, kept):
    folder = policy("a")
    assert server._place(folder, "version") == str(folder)
    assert not kept.exists()


def test_the_newest_two_policies_stay(server, policy, put, kept):
    places = [server._place(policy(name, 10), name) for name in "abc"]
    assert {str(own) for own in kept.iterdir()} == set(places[1:])


def test_a_full_disk_is_refused_before_anything_is_sent(server, policy, put, kept, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(GIB, GIB, 0))
    with pytest.raises(RuntimeError, match=r"507 .*0.00 GiB free.*share the run's folder"):
        server._place(policy("a"), "version")
    assert put == []


def test_a_connection_that_is_cut_leaves_no_file(server, port, policy, put, kept):
    folder = policy("a")
    described = {"folder": "/", "files": uploads.files_of(folder), "version": "version"}
    server._post(uploads.POLICIES, described)
    head = (
        f"PUT {uploads.POLICIES}/model.safetensors HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {TOKEN}",
        f"{uploads.VERSION_HEADER}: version",
        f"{uploads.CHANGED_HEADER}: 1",
        "Content-Length: 1000000",
    )
    [own] = kept.iterdir()
    with socket.create_connection(("127.0.0.1", port)) as cut:
        cut.sendall("\r\n".join((*head, "", "half")).encode())
        wait_until(lambda: list(own.iterdir()))
    wait_until(lambda: not list(own.iterdir()))
    server._place(folder, "version")
    assert contents(own) == contents(folder)


@pytest.mark.parametrize("name", ["..", ".hidden", "..%2Fout", "%2Fetc%2Fpasswd"])
def test_a_file_lands_in_its_policys_folder_alone(server, policy, put, kept, name):
    folder = policy("a", 10)
    server._place(folder, "version")
    headers = {uploads.VERSION_HEADER: "version", uploads.CHANGED_HEADER: "1"}
    with pytest.raises(RuntimeError, match=r": 40[04] "):
        server._asked("PUT", f"{uploads.POLICIES}/{name}", b"harm", headers)
    [own] = kept.iterdir()
    assert contents(own) == contents(folder)
    assert {place.name for place in kept.parent.iterdir()} == {"a", "kept"}
