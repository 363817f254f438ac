"""Keep, restore and check files and folders by their DVC digest, in DVC's cache or its remote."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.host.addresses import address_without_password, without_password
from flows.runs import dvc_settings, git
from flows.runs.dvc_command import DIGEST, open_repository

CONNECT = 30  # seconds until a connection by SSH fails, where the remote sets no timeout


# ---------------------------------------------------------------- remotes


def default_store() -> str | None:
    """Return the ledger mirror's address in DVC's default remote; None without a remote.

    Raises ValueError for settings of DVC that are wrong.
    """
    remote = dvc_settings.load()["core"].get("remote")
    return f"remote://{remote}/ledger" if remote else None


def filesystem(address: str) -> Callable[[], tuple[Any, str]]:
    """Return a function that connects to ``address``: a fsspec filesystem, and the folder in it.

    ``address``: a folder, or what ``dvc remote add`` takes, ``remote://<name>/<path>`` included;
    credentials are those of DVC's remote. Raises ValueError for an address that DVC does not know.
    """
    from dvc.exceptions import DvcException
    from dvc.fs import get_cloud_fs, known_implementations

    settings_of_dvc = dvc_settings.load()
    scheme, mark, _ = address.partition("://")
    url = address if mark else str(Path(address).expanduser().absolute())
    try:
        if mark and scheme not in (*known_implementations, "remote"):
            raise ImportError(f"no kind of store is called '{scheme}'")
        kind, settings, path = get_cloud_fs(settings_of_dvc, url=url)
    except (DvcException, ImportError) as error:
        raise ValueError(
            without_password(f"the store {address} cannot be used: {error}; ")
            + "correct BEAMLINE_STORE or DVC's default remote, or install DVC's extra for it"
        ) from None
    if kind.protocol == "ssh":
        settings.setdefault("timeout", CONNECT)

    def connect() -> tuple[Any, str]:
        dvc_filesystem = kind(**settings)
        return dvc_filesystem.fs, path

    return connect


# ---------------------------------------------------------------- files by digest


def fetch(digest: str) -> None:
    """Bring a file or folder into DVC's cache by its digest. Raises ValueError as ``restore``."""
    with open_repository() as repository:
        infos = [_hash_info(digest)]
        if digest.endswith(".dir"):
            infos += [info for _, info in _listed(repository, digest)]
        _need(repository, infos)


def restore(digest: str, target: Path) -> None:
    """Copy a file or folder to ``target`` by its digest, from DVC's cache or else from the remote.

    digest: DVC's, such as "eb26…89.dir". Raises ValueError where neither has all of it.
    """
    with open_repository() as repository:
        cache = repository.cache.local
        folder = digest.endswith(".dir")
        listed = _listed(repository, digest) if folder else [((), _hash_info(digest))]
        _need(repository, [info for _, info in listed])
        for parts, info in listed:
            _copy(Path(cache.oid_to_path(info.value)), target.joinpath(*parts), info.value)


def _hash_info(digest: str) -> Any:
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no digest of DVC: 32 of 0-9 and a-f, and .dir of a folder")
    from dvc_data.hashfile.hash_info import HashInfo

    return HashInfo("md5", digest)


def _listed(repository: Any, digest: str) -> list[tuple[tuple[str, ...], Any]]:
    """List the files of a folder by its digest: parts of the path, and DVC's hash info."""
    from dvc_data.hashfile import load

    folder_info = _hash_info(digest)
    _need(repository, [folder_info])
    folder: Any = load(repository.cache.local, folder_info)
    return [(parts, info) for parts, _, info in folder]


def kept_folder(digest: str) -> dict[str, str]:
    """List the files of a cached folder by its digest: path in the folder -> digest.

    Raises ValueError as ``restore``.
    """
    with open_repository() as repository:
        return {"/".join(parts): info.value for parts, info in _listed(repository, digest)}


def kept_file(digest: str) -> bytes:
    """Return the content of a cached file by its digest. Raises ValueError as ``restore``."""
    with open_repository() as repository:
        _need(repository, [_hash_info(digest)])
        return Path(repository.cache.local.oid_to_path(digest)).read_bytes()


def keep(folder: Path) -> str:
    """Copy a folder into DVC's cache; return its digest, which ``restore`` takes."""
    from dvc_data.hashfile.build import build
    from dvc_data.hashfile.transfer import transfer
    from dvc_objects.fs.local import LocalFileSystem

    with open_repository() as repository:
        cache = repository.cache.local
        staging, _, tree = build(cache, str(folder.absolute()), LocalFileSystem(), "md5")
        transfer(staging, cache, {tree.hash_info}, shallow=False)
        return str(tree.hash_info.value)


def digest_of(path: Path) -> str:
    """Return DVC's digest of a file or a folder as it is now."""
    from dvc_data.hashfile.build import build
    from dvc_objects.fs.local import LocalFileSystem

    with open_repository() as repository:
        absolute_path, cache = str(path.absolute()), repository.cache.local
        _, _, hash_file = build(cache, absolute_path, LocalFileSystem(), "md5", dry_run=True)
        return str(hash_file.hash_info.value)


def _need(repository: Any, infos: list[Any]) -> None:
    """Fetch what DVC's cache lacks from the remote; ValueError where that lacks it too."""
    from dvc.config import NoRemoteError

    def missing() -> list[Any]:
        return [info for info in infos if not repository.cache.local.exists(info.value)]

    logging.getLogger("dvc.data_cloud").setLevel(logging.ERROR)  # the error below is enough
    if lacking := missing():
        with suppress(NoRemoteError):
            repository.cloud.pull(lacking)
    if lacking := missing():
        more = f" and {len(lacking) - 1} more of its {len(infos)} files" if lacking[1:] else ""
        raise ValueError(
            f"DVC's cache lacks {lacking[0].value}{more}, and {_remote(repository.config)}: bring "
            "the cache of the machine that made it, or `dvc push` there to a shared remote"
        )


def _remote(config: Mapping[str, Any]) -> str:
    """Say which remote could not help."""
    name = config["core"].get("remote")
    if name:
        url = address_without_password(str(config["remote"].get(name, {}).get("url")))
        return f"so does its remote {name} ({url})"
    return "no remote is set" if name is None else "its remote is switched off in this worktree"


def _copy(source: Path, target: Path, digest: str) -> None:
    """Copy a file of the cache; ValueError where its content does not have this digest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        content_digest = hashlib.file_digest(stream, "md5").hexdigest()
    if content_digest != digest:
        raise ValueError(f"{source} is damaged: remove it, and `dvc fetch` brings it back")


def with_digest(file: str, digest: str, commit: str) -> bytes | None:
    """Return a file's content at the time when it had this digest, or None.

    Searches the history up to ``commit``, then DVC's cache.
    """
    if content := git.with_digest(file, digest, commit):
        return content
    if not DIGEST.fullmatch(digest):
        return None
    with open_repository() as repository:
        cached = Path(repository.cache.local.oid_to_path(digest))
    return cached.read_bytes() if cached.is_file() else None


def open_objects() -> dict[Path, bool]:
    """Return the writable files of this checkout's own cache, and whether each is intact.

    DVC links outs to its cache and removes the write permission of both; an edit in place of such a
    file would change the cache. Intact: the content still has the digest that the file is named
    after.
    """
    with open_repository() as repository:
        cache = Path(repository.cache.local_cache_dir)
    if not cache.resolve().is_relative_to(Path.cwd()):
        return {}
    files = sorted(cache.glob("files/md5/[0-9a-f][0-9a-f]/*"))
    return {file: _is_intact(file) for file in files if _is_object(file) and _is_writable(file)}


def close_object(file: Path) -> None:
    """Remove the write permission of a cached file; delete the file if it was changed."""
    if _is_intact(file):
        file.chmod(0o444)
    else:
        file.unlink()


def _is_object(file: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{30}(\.dir)?", file.name) is not None


def _is_writable(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o222)


def _is_intact(file: Path) -> bool:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "md5").hexdigest()
    return digest == file.parent.name + file.stem


def edited_outs() -> list[str]:
    """List outs that stages edit in place (``persist: true``) although DVC links them."""
    with open_repository() as repository:
        if not set(repository.config["cache"].get("type", [])) & {"hardlink", "symlink"}:
            return []
        return sorted({str(out) for out in repository.index.outs if out.persist})


def copy_outs() -> None:
    """Set this checkout's DVC to clone or copy outs instead of linking them."""
    edited = edited_outs()
    with open_repository() as repository, repository.config.edit("local") as local:
        local.setdefault("cache", {})["type"] = ["reflink", "copy"]
    linked = [out for out in edited if Path(out).exists()]
    with open_repository() as repository:
        repository.checkout(targets=linked, relink=True, force=True)
