"""The walls of the Python tool: what a sandbox shows, and the command that starts one.

Two backends build a sandbox, bubblewrap and util-linux's unshare; ``none`` starts a worker without
one. Both show the same: the folders of programs and libraries that Python needs, read-only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.tools import python_worker
from tasks.tools.system_calls import system_call_filter

PROGRAMS = {"bubblewrap": "bwrap", "unshare": "unshare"}  # in the order that "auto" tries them
SOURCE = Path(python_worker.__file__)  # imported, so that the ledger's keys see its edits
PROJECT = Path(__file__).resolve().parents[2]
# In the command line of a sandbox: names its checkout without the path (flows/host/processes.py).
OWNER = hashlib.blake2b(str(PROJECT).encode(), digest_size=8).hexdigest()
UNUSED_USERS = range(4_000_000_000, 4_200_000_000)  # no account has these ids
DEVICES = ("null", "full", "random", "urandom")  # not zero, which can be mapped as memory
# Folders of a prefix such as /usr that are shown, if it has them: programs, libraries, headers and
# time zones, and none where people keep data.
SHOWN = ("bin", "include", "lib", "lib32", "lib64", "libexec", "libx32", "sbin", "share/zoneinfo")
# Environment variables with a folder that is covered where it lies in a shown one.
PRIVATE_VARIABLES = (
    "BEAMLINE_DATA",
    "BEAMLINE_STORE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "PREFECT_HOME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
)

Entry = tuple[str, str, str]  # kind, source, target


def command(settings: dict[str, Any], backend: str) -> list[str]:
    """Return the command line of a worker with the limits ``settings``.

    Raises RuntimeError where private files lie among the programs that the sandbox must show.
    """
    root = [] if backend == "none" else root_entries()
    config = settings | {
        "namespaces": backend != "none",
        "root": root,
        "owner": OWNER,
        "filter": "" if backend == "none" else system_call_filter().hex(),
    }
    # The base interpreter's real path: a shim may not start inside. UTF-8 in any locale, no site,
    # no working directory on the import path, no byte code written.
    python = [str(_interpreter()), "-X", "utf8", "-S", "-P", "-B"]
    python += ["-c", SOURCE.read_text(), json.dumps(config)]
    outside: dict[str, Callable[[list[Entry]], list[str]]] = {
        "bubblewrap": _bubblewrap,
        "unshare": _unshare,
        "none": lambda root: [],
    }
    return outside[backend](root) + python


def greeting(backend: str) -> bytes:
    """Return what a new worker reads first: whether it builds its root, and the code's user.

    Where the tool runs as root, the code gets a user that nobody has, another in each worker: the
    kernel counts some resources by user.
    """
    user = UNUSED_USERS.start + int.from_bytes(os.urandom(4)) % len(UNUSED_USERS)
    return python_worker.GREETING.pack(backend == "unshare", user if is_real_root() else -1)


def is_real_root() -> bool:
    """Return whether this is root of the machine, not of a user namespace (rootless container)."""
    everyone = ["0", "0", str(2**32 - 1)]
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == everyone


def _interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


# ---------------------------------------------------------------- what is shown


def root_entries() -> list[Entry]:
    """Return the entries of a sandbox's root, in the order of mounting.

    Raises RuntimeError where private files lie among the programs that it must show.
    """
    prefix = Path(sys.base_prefix).resolve()
    prefixes = [Path("/usr"), Path("/usr/local")] + ([prefix] if prefix != Path("/usr") else [])
    folders = [each / name for each in dict.fromkeys(prefixes) for name in SHOWN]
    shown = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    entries: list[Entry] = [("bind", str(folder), str(folder)) for folder in shown]
    links = [folder for folder in folders if folder.is_symlink()]
    for path in (Path("/bin"), *sorted(Path("/").glob("lib*")), *links):
        kind = "symlink" if path.is_symlink() else "bind"
        entries.append((kind, str(path.readlink()) if kind == "symlink" else str(path), str(path)))
    bound = [Path(target) for kind, _, target in entries if kind == "bind"]
    entries += [("cover", "", str(folder)) for folder in _covered(bound)]
    entries += [("directory", "", "/proc"), ("directory", "", "/tmp")]
    entries += [("device", f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
    return [*entries, ("symlink", "/proc/self/fd", "/dev/fd"), ("symlink", "/tmp", "/dev/shm")]


def _covered(bound: list[Path]) -> list[Path]:
    """Return the private folders that lie in a folder of ``bound``, the outermost of each.

    Raises RuntimeError where one of them holds what the interpreter needs.
    """
    inside = sorted({p for p in private_folders() if any(p.is_relative_to(b) for b in bound)})
    names = ("stdlib", "platstdlib")
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    base |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    needed = [_interpreter(), *(Path(sysconfig.get_path(n, vars=base)).resolve() for n in names)]
    for folder in inside:
        if held := [path for path in needed if path.is_relative_to(folder)]:
            raise RuntimeError(
                f"the sandbox must show {held[0]} to run Python, and {folder} around it holds "
                "private files (the checkout, its git folder, or a home): move one of them, for "
                "example the checkout into a folder of its own"
            )
    return [p for p in inside if not any(p != q and p.is_relative_to(q) for q in inside)]


def private_folders() -> list[Path]:
    """Return the folders that no code may read: checkout, git folder, home, caches and stores."""
    folders = [PROJECT, Path.cwd(), Path("~").expanduser(), *_git_folders()]
    folders += [Path(os.environ[name]) for name in PRIVATE_VARIABLES if os.environ.get(name)]
    return [folder.resolve() for folder in folders if folder.is_dir()]


@functools.cache
def _git_folders() -> list[Path]:
    """Return the git folder of the checkout, and the one that worktrees share."""
    entry = PROJECT / ".git"
    if not entry.is_file():
        return [entry]
    folder = PROJECT / entry.read_text().partition("gitdir:")[2].strip()
    common = folder / "commondir"
    shared = folder / common.read_text().strip() if common.is_file() else folder
    return [folder, shared, shared.parent]  # the last has the first checkout's files


# ---------------------------------------------------------------- the command lines


def _bubblewrap(root: list[Entry]) -> list[str]:
    """Return the command that starts a program in bubblewrap, without the program."""
    options = {"bind": "--ro-bind", "device": "--dev-bind", "symlink": "--symlink"}
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--hostname", "sandbox"]
    command += ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    for parent in _parents(root):  # bubblewrap's own would be closed to other users
        command += ["--dir", parent]
    for kind, source, target in root:
        if kind == "directory":
            command += ["--dir", target]
        elif kind == "cover":
            command += ["--tmpfs", target, "--remount-ro", target]
        else:
            command += [options[kind], source, target]
    if is_real_root():  # no --proc: bubblewrap would cover parts of it, which forbids a nested one
        for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--proc", "/proc"]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def _parents(root: list[Entry]) -> list[str]:
    """Return every folder above an entry, outermost first."""
    folders = {str(folder) for _, _, target in root for folder in Path(target).parents}
    return sorted(folders - {"/"})


def _unshare(root: list[Entry]) -> list[str]:
    """Return the command that starts a program in unshare; the worker builds the root itself."""
    command = [shutil.which("unshare") or "unshare", "--net", "--pid", "--fork", "--kill-child"]
    command += ["--mount", "--ipc", "--uts"]
    return command if is_real_root() else [*command, "--user", "--map-root-user"]
