"""What the commands of servers share: the words of the command line, and the guard's settings."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from params.given_numbers import port
from tasks.engines.servers.token_guard import NAMES, TOKEN, TOKEN_FILE, server_token
from tasks.engines.servers.uploads import FOLDER

POLICIES = Path(".beamline/policies")  # what was sent to the servers of this folder, by their port


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a server's command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a policy, as transformers saves it")
    parser.add_argument("--host", default="127.0.0.1", help="address that it listens at")
    parser.add_argument("--port", type=port, default=8000)
    parser.add_argument(
        "--name", action="append", default=[], help="another name that runs call this machine by"
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the arguments, and the guard's environment variables; print where the token is.

    Ends the program where the folder has no policy, or the token is none.
    """
    args = parser.parse_args(arguments)
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} is no policy: name a folder that transformers has saved")
    try:
        token = server_token()
    except (PermissionError, ValueError) as error:
        parser.error(str(error))
    given = f"in {TOKEN}" if os.environ.get(TOKEN) else f"{TOKEN}=$(cat {TOKEN_FILE.absolute()})"
    print(f"the server's token, for the runs that use it: {given}", flush=True)
    names = ["localhost", socket.gethostname(), args.host, *args.name]
    return args, {
        TOKEN: token,
        NAMES: ",".join(names).lower(),
        FOLDER: str((POLICIES / str(args.port)).absolute()),
    }
