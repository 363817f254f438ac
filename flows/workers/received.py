"""Check what another machine sends before any of it is written here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

SERVERS = ("http://", "https://")


def check_paths(paths: Iterable[str], allowed: Collection[str], root: Path) -> None:
    """Raise ValueError for paths that are not ``allowed``, or lead through a link.

    ``allowed``: files and folders, relative to ``root``; what is in an allowed folder is, too.
    """
    refused = sorted(path for path in paths if not _is_allowed(path, allowed, root))
    if refused:
        raise ValueError(
            f"these files were sent and may not be written to {root.absolute()}: "
            f"{', '.join(map(repr, refused))}; allowed are {', '.join(sorted(allowed))}, not links"
        )


def _is_allowed(path: str, allowed: Collection[str], root: Path) -> bool:
    name = PurePosixPath(path)
    inside = any(name.is_relative_to(each) for each in allowed) and ".." not in name.parts
    return inside and (root / name).resolve() == root.resolve() / name


def check_environment(environment: Mapping[str, str], allowed: Collection[str]) -> None:
    """Raise ValueError for a variable that is not ``allowed``, or a store that is no server.

    The address of another kind of store is a file of this machine, which would be written to.
    """
    if refused := sorted(set(environment) - set(allowed)):
        raise ValueError(
            f"'environment' sets {', '.join(refused)}: a worker takes {', '.join(allowed)}"
        )
    address = environment.get("MLFLOW_TRACKING_URI", SERVERS[0])
    if not address.startswith(SERVERS):
        raise ValueError(
            f"'environment.MLFLOW_TRACKING_URI' = {address!r}: a worker takes the address of a "
            f"server, which begins with {' or '.join(SERVERS)}"
        )
