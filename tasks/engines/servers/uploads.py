"""Take policies over HTTP on a machine that does not share the run's folders.

A run describes the files of a policy: names, sizes and times of change. Where this machine has the
same ones, in the run's own folder or from before, it says where; else the run sends those that are
missing, and they are kept in a folder of the server's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

POLICIES = "/beamline/policies"
FOLDER = "BEAMLINE_SERVER_POLICIES"  # environment variable of the server: where it keeps them
VERSION_HEADER = "Beamline-Policy"  # of an answer and of a file: the version of its weights
CHANGED_HEADER = "Beamline-Changed"  # of a file: its time of change, in nanoseconds
KEPT = 2  # policies: the newest one may still be loaded while the next one comes in
SPARE = 2**28  # bytes of the disk that uploads leave free
App = Callable[[Any, Any, Any], Awaitable[None]]  # of ASGI
Files = dict[str, list[int]]  # name -> size and time of change (ns)


class RefusedUploadError(Exception):
    """A file or a policy cannot be taken: the status of the answer, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class UploadApp:
    """An ASGI application before another one, which gets all requests that are for no policy."""

    def __init__(self, app: App, folder: Path) -> None:
        """Keep policies in ``folder``, which no other server may use."""
        self.app, self.folder = app, folder
        self.own = Starlette(
            routes=[
                Route(POLICIES, self._find, methods=["POST"]),
                Route(POLICIES + "/{name}", self._take, methods=["PUT"]),
            ],
            exception_handlers={RefusedUploadError: _refuse},
        )
        for partial in folder.glob("*/.*"):  # of a server that was killed
            partial.unlink()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request for policies; pass any other one on."""
        for_policies = scope["type"] == "http" and scope["path"].startswith(POLICIES)
        await (self.own if for_policies else self.app)(scope, receive, send)

    async def _find(self, request: Request) -> JSONResponse:
        """Say where the described files are, or which of them are missing."""
        described = await request.json()
        folder = self._place(described["version"])
        answer = await asyncio.to_thread(
            self._missing, Path(described["folder"]), folder, described["files"]
        )
        return JSONResponse(answer)

    def _missing(self, shared: Path, folder: Path, files: Files) -> dict[str, Any]:
        for candidate in (shared, folder):
            if files_of(candidate) == files:
                return {"folder": str(candidate), "missing": []}
        here = files_of(folder)
        if set(here) - set(files):  # of another folder of the same policy
            shutil.rmtree(folder)
            here = {}
        missing = [name for name, described in files.items() if here.get(name) != described]
        self._make_room(folder, sum(files[name][0] for name in missing))
        return {"folder": None, "missing": missing}

    def _make_room(self, folder: Path, size: int) -> None:
        """Make the folder of a policy; remove all older ones but the newest."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = [other for other in self.folder.iterdir() if other != folder]
        newest_first = sorted(others, key=lambda other: other.stat().st_mtime_ns, reverse=True)
        for old in newest_first[KEPT - 1 :]:
            shutil.rmtree(old)
        self._check_room(size)
        folder.mkdir(exist_ok=True)

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size > free - SPARE:
            raise RefusedUploadError(
                507,
                f"{self.folder} has {free / 2**30:.2f} GiB free, and the policy's files need "
                f"{size / 2**30:.2f} beside {SPARE / 2**30:.2f} to spare: free some, or share the "
                "run's folder with the server",
            )

    async def _take(self, request: Request) -> JSONResponse:
        """Take one file; it has its name once it is whole."""
        name, folder = request.path_params["name"], self._place(request.headers[VERSION_HEADER])
        length, changed = request.headers.get("content-length"), request.headers[CHANGED_HEADER]
        if name.startswith(".") or Path(name).name != name:
            raise RefusedUploadError(400, f"'{name}' is no name of a policy's file")
        if length is None:
            raise RefusedUploadError(411, f"the size of {name} is not said")
        if not folder.is_dir():
            raise RefusedUploadError(
                409, f"nothing says of which policy {name} is: describe it first"
            )
        self._check_room(int(length))
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as partial:
            try:
                async for chunk in request.stream():
                    await asyncio.to_thread(partial.write, chunk)
                partial.flush()
                os.utime(partial.name, ns=(int(changed), int(changed)))
                Path(partial.name).rename(folder / name)
            except BaseException:  # the connection was cut, or the disk is full
                Path(partial.name).unlink()
                raise
        return JSONResponse({})

    def _place(self, version: str) -> Path:
        """Return the folder here of a policy; a version may be any text."""
        return self.folder / hashlib.blake2b(version.encode(), digest_size=16).hexdigest()


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedUploadError)
    return JSONResponse({"error": str(error)}, error.status)


def files_of(folder: Path) -> Files:
    """Return name -> size and time of change of a policy's files; nothing for a missing folder."""
    files = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    stats = {file.name: file.stat() for file in files if file.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
