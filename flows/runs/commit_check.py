"""Look at a commit that others may have made, before anything of it is written to this disk.

A branch of a run may come from anybody who can push to a remote. What such a commit holds decides
where git and DVC write: its links, its names, the outs in ``dvc.yaml`` and ``*.dvc``, the digests
in ``dvc.lock``, the settings in ``.dvc/config``. ``check`` reads all of that from git's objects,
and refuses what leads out of the commit's worktree. It runs none of the commit's code.

What DVC's cache and remotes hold is checked where DVC reads it (flows/runs/dvc_command.py).
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.host.addresses import without_password
from flows.runs import bounded_yaml, git
from flows.runs.dvc_command import DIGEST, is_folder_entry, open_repository
from tasks.trees.words import printable

RECIPE = re.compile(r"\w(?:[\w-]|\.(?!\.)){0,99}")  # a name, in no way a path
LISTED = 20  # faults in the message
SHOWN = 80  # characters of a value in it
LARGEST = 2**24  # bytes of a file that is read here; dvc.lock of 20 recipes has 200 kB
DEEPEST = 100  # folders of a file; DVC calls itself for each, and Python ends at some 300
LARGEST_PIPELINE = 2**20  # bytes of a dvc.yaml, or of what its variables come from; ours has 10 kB
MOST_STAGES = 2000  # of a dvc.yaml, with those of foreach and matrix; a recipe has 8
LINKS = 1000  # each is read by a call of git, which takes some milliseconds
LONGEST = 4096  # bytes of a link's target, which Linux allows
LINK, SUBMODULE = "120000", "160000"  # modes of entries in a tree of git

OURS = (".git", ".dvc", ".beamline")  # where git, DVC and this program write in a worktree
RUNS = ("data", "models", "reports")  # a run writes in a folder of its own in each
READ = ("data/sources", "flows", "own", "params", "params.yaml", "tasks", *RUNS)  # none is a link
SPECIAL = {".dvcignore", ".gitattributes", ".gitignore", ".gitmodules", "dvc.lock", "dvc.yaml"}
IN_DVC = re.compile(r"\.dvc/(config|\.gitignore|plots/.+)")  # what DVC has people commit there
CONFIG = ".dvc/config"
GIT_NAMES = (".git", "git~1")  # the second is the first one's short name on Windows
CONVERTED = re.compile(r"\b(filter|working-tree-encoding)=(\S+)")  # in .gitattributes
REACHING = re.compile(r"(^|\.)(dir|site_cache_dir|out_dir|plugins_path|[a-z_]*command)$")
FETCHED = ("https://", "http://", "s3://", "gs://", "azure://")  # that dvc import-url takes


@dataclass(frozen=True)
class TreeEntry:
    """A file, link or submodule of a commit."""

    mode: str
    object: str
    size: int  # bytes; 0 of a submodule
    name: str  # the path from the commit's root


def check(commit: str, recipe: str) -> None:
    """Raise ValueError with all that would lead out of the commit's worktree; write nothing."""
    tree = _entries(commit)
    faults = [
        *_recipe_faults({recipe, git.trailer(commit, "Recipe") or recipe}),
        *_name_faults(tree),
        *_link_faults(tree, recipe),
        *_attribute_faults(tree),
        *_setting_faults(tree),
        *_dvc_file_faults(tree),
        *_lock_faults(tree),
    ]
    if not faults:  # DVC reads dvc.yaml, through whatever links there are
        faults += _pipeline_faults(commit, tree)
    if faults:
        shown = ["  " + printable(fault).replace("\n", "\\n") for fault in faults[:LISTED]]
        more = f"\n  and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise ValueError(
            f"commit {commit} is refused, and nothing of it was written: it would reach out of its "
            "worktree, or is too large or damaged. Ask who made it; a commit on top of it without "
            "the following can be used\n" + "\n".join(shown) + more
        )


def is_inside(path: str, folder: str = "") -> bool:
    """Return whether a relative path stays below the root that ``folder`` is relative to."""
    whole = posixpath.normpath(posixpath.join(folder, path))
    away = whole == ".." or whole.startswith(("../", "/"))
    return not away and "\0" not in path and not path.startswith("~")


def _entries(commit: str) -> list[TreeEntry]:
    entries = []
    for line in git.tree(commit, "--long", "--full-tree"):
        about, _, name = line.partition("\t")
        mode, kind, digest, size = about.split()
        if kind != "tree":
            entries.append(TreeEntry(mode, digest, int(size) if size.isdigit() else 0, name))
    return entries


def _text(entry: TreeEntry) -> str:
    return git.run_git("cat-file", "blob", entry.object).stdout


def _named(
    tree: Iterable[TreeEntry], *names: str, ending: str = ""
) -> Iterator[tuple[TreeEntry, str]]:
    """Yield the files with one of these names in any folder, or this ending, with their text."""
    for entry in tree:
        name = posixpath.basename(entry.name)
        if entry.mode in (LINK, SUBMODULE) or entry.size > LARGEST:
            continue  # refused elsewhere
        if name in names or (ending and name.endswith(ending)):
            yield entry, _text(entry)


# ---------------------------------------------------------------- names and links


def _recipe_faults(names: Iterable[str]) -> list[str]:
    return [
        f"the recipe is called {name!r}: a name has letters, digits, '-', '_' and '.', and begins "
        "with a letter, a digit or '_'"
        for name in sorted(names)
        if not RECIPE.fullmatch(name)
    ]


def _name_faults(tree: Iterable[TreeEntry]) -> Iterator[str]:
    for entry in tree:
        parts, name = entry.name.casefold().split("/"), entry.name
        if not name.isprintable():
            yield f"{name!r}: a name with characters that a terminal acts on"
        elif len(parts) > DEEPEST:
            yield f"{name[:SHOWN]}... lies in {len(parts) - 1} folders: at most {DEEPEST} are read"
        elif not {*parts}.isdisjoint((*GIT_NAMES, "..", ".")):
            yield f"{name}: a part of this path means something else to git or the system"
        elif entry.mode == SUBMODULE:
            yield f"{name} is a submodule, which is another repository: commit its files instead"
        elif parts[0] == ".beamline":
            yield f"{name}: .beamline has what this program keeps of a run, and is in no commit"
        elif parts[0] == ".dvc" and not IN_DVC.fullmatch(name):
            yield f"{name}: in .dvc, only DVC's {CONFIG}, .gitignore and plots are in a commit"
        elif parts[-1] in SPECIAL and not name.endswith(parts[-1]):
            yield f"{name}: where case does not count, it is {parts[-1]}, and not looked at as such"
        elif entry.size > LARGEST and _is_special(name):
            yield f"{name} has {entry.size} bytes: at most {LARGEST} are read"


def _is_special(name: str) -> bool:
    base = posixpath.basename(name).casefold()
    return base in SPECIAL or base.endswith(".dvc") or name == CONFIG


def _link_faults(tree: Sequence[TreeEntry], recipe: str) -> Iterator[str]:
    written = [*OURS, *(f"{folder}/{recipe.casefold()}" for folder in RUNS)]
    links = [entry for entry in tree if entry.mode == LINK]
    if len(links) > LINKS:
        yield f"it has {len(links)} links: at most {LINKS} are looked at"
    for entry in links[:LINKS]:
        target = _text(entry) if entry.size <= LONGEST else None
        if target is None or not _stays(target, posixpath.dirname(entry.name)):
            yield f"{entry.name} is a link that leads out of the commit, to {target!r}"
        elif _is_special(entry.name) or _is_in_the_way(entry.name.casefold(), written):
            yield f"{entry.name} is a link, to {target!r}, where a run or its restoring works"


def _stays(target: str, folder: str) -> bool:
    """Return whether a link in ``folder`` leads to a place in the tree that is not OURS.

    ".." is allowed at the beginning alone: after a name, which may be a link itself, it leads from
    where that one leads to.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    names = parts[next((i for i, part in enumerate(parts) if part != ".."), len(parts)) :]
    first = posixpath.normpath(posixpath.join(folder, target)).partition("/")[0]
    return (
        is_inside(target, folder) and ".." not in names and first.casefold() not in (*OURS, "git~1")
    )


def _is_in_the_way(link: str, written: Sequence[str]) -> bool:
    """Return whether a link is at or above what is read, or at, above or below what is written.

    Of other folders of runs, ``_out_faults`` finds those that an out is written through.
    """
    return any(_contains(link, place) for place in (*written, *READ)) or any(
        _contains(place, link) for place in written
    )


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


# ---------------------------------------------------------------- settings of git and DVC


def _attribute_faults(tree: Iterable[TreeEntry]) -> Iterator[str]:
    """Yield attributes that have git write something else than was looked at, or run a program."""
    for entry, text in _named(tree, ".gitattributes"):
        for kind, value in CONVERTED.findall(text):
            if kind != "filter":
                yield f"{entry.name} sets {kind}={value}: files would differ from those looked at"
            elif value != "lfs" and _is_configured(value):
                yield f"{entry.name} names the filter {value}, a program of your git settings"
    if any(entry.name == ".lfsconfig" for entry in tree) and _is_configured("lfs"):
        yield ".lfsconfig names the server that git-lfs of your git settings would ask"


def _is_configured(name: str) -> bool:
    pattern = rf"^filter\.{re.escape(name)}\.(smudge|process)$"
    return git.run_git("config", "--get-regexp", pattern).returncode == 0


def _setting_faults(tree: Iterable[TreeEntry]) -> Iterator[str]:
    """Yield the settings of DVC that name a folder or a command, unless they are this project's.

    No setting of the commit is used (``transfer.share``): these tell that it is not meant well.
    """
    known = next((entry for entry in tree if entry.name == CONFIG), None)
    if known is None or known.mode == LINK or known.size > LARGEST or _is_known(known):
        return
    for section, key, value in _settings(_text(known)):
        if REACHING.search(key.lower()):
            shown = without_password(value)
            yield f"{CONFIG} sets {key} = {shown!r} in [{section}], and this project does not"


def _is_known(entry: TreeEntry) -> bool:
    """Return whether the history of this checkout, or the checkout itself, has the same file."""
    here = git.run_git("hash-object", "--no-filters", CONFIG).stdout.strip()
    log = git.run_git("log", "--format=", "--raw", "--no-abbrev", "HEAD", "--", CONFIG).stdout
    return entry.object == here or entry.object in log


def _settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and value of each line of a file of settings that has them."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]").strip("' ")
        elif not line.startswith("#") and "=" in line:
            key, _, value = line.partition("=")
            yield section, key.strip("'\" "), value.strip()


# ---------------------------------------------------------------- DVC's files


def _dvc_file_faults(tree: Sequence[TreeEntry]) -> Iterator[str]:
    """Yield what is wrong with files that ``dvc add`` writes: where they restore to, and whence."""
    links = _links(tree)
    for entry, text in _named(tree, ending=".dvc"):
        try:
            content = _yaml(entry.name, text)
        except ValueError as error:
            yield str(error)
            continue
        folder = posixpath.join(posixpath.dirname(entry.name), str(content.get("wdir") or "."))
        for out in _mappings(content, "outs"):
            yield from _out_faults(entry.name, str(out.get("path")), folder, links)
            yield from _digest_faults(entry.name, out)
        for dep in _mappings(content, "deps"):
            path = str(dep.get("path"))
            remote = path.startswith(FETCHED)
            if {"repo", "db"} & dep.keys() or not (remote or _is_plain(path, folder)):
                yield f"{entry.name} imports {path!r} from elsewhere: use dvc add"


def _lock_faults(tree: Sequence[TreeEntry]) -> Iterator[str]:
    for entry, text in _named(tree, "dvc.lock"):
        yield from lock_faults(entry.name, text)


def lock_faults(name: str, text: str) -> Iterator[str]:
    """Yield what is wrong with the text of a dvc.lock, called ``name`` here."""
    try:
        stages = _yaml(name, text).get("stages") or {}
    except ValueError as error:
        yield str(error)
        return
    if not isinstance(stages, Mapping):
        yield f"{name} has no list of stages by name"
        return
    for stage, entry in stages.items():
        if not isinstance(entry, Mapping):
            yield f"{name}, {stage}: is no stage, but {str(entry)[:SHOWN]!r}"
        recipe = str(stage).rpartition("@")[2]
        if not (RECIPE.fullmatch(recipe) and str(stage).isprintable()):
            yield f"{name} has a stage called {str(stage)!r}"
        if any({"path", "md5"} - out.keys() for out in _mappings(entry, "outs")):
            yield f"{name}, {stage}: an out has no path or no digest"
        for out in [*_mappings(entry, "outs"), *_mappings(entry, "deps")]:
            yield from _digest_faults(f"{name}, {stage}", out)


def _digest_faults(where: str, out: Mapping[str, Any]) -> Iterator[str]:
    """Yield digests that are none, and the paths in a list of files that lead out of the folder."""
    md5 = out.get("md5")
    if md5 is not None and not DIGEST.fullmatch(str(md5)):
        yield f"{where}: {out.get('path')} has {str(md5)!r} for its digest"
    for file in _mappings(out, "files"):
        path = str(file.get("relpath"))
        if not _is_plain(path) or ".." in path.split("/"):
            yield f"{where}: {out.get('path')} has a file {path!r}"
        yield from _digest_faults(where, {**file, "path": path, "files": []})


def _pipeline_faults(commit: str, tree: Sequence[TreeEntry]) -> list[str]:
    """Return what is wrong with the paths of the stages in each dvc.yaml, with variables filled in.

    DVC reads the commit without a worktree. The folders are looked at that its cache has.
    """
    from dvc.exceptions import DvcException

    faults = list(_bound_faults(tree, {"dvc.yaml", "params.yaml"}))  # DVC reads both unasked
    if faults:
        return faults
    files = [each.name for each in tree if posixpath.basename(each.name) == "dvc.yaml"]
    with open_repository() as repository:
        for digest in sorted(_folders_of(tree)):
            faults += _folder_faults(digest, Path(repository.cache.local.oid_to_path(digest)))
        with repository.switch(commit):
            for name in files:
                try:
                    faults += _faults_of_pipeline(repository, name, tree)
                except DvcException as error:
                    faults.append(f"{name}: DVC cannot read it: {without_password(str(error))}")
                except (RecursionError, MemoryError):
                    faults.append(f"{name}: it, or what its variables come from, nests too deeply")
    return faults


def _faults_of_pipeline(repository: Any, name: str, tree: Sequence[TreeEntry]) -> list[str]:
    from dvc.dvcfile import load_file

    folder, links = posixpath.dirname(name), _links(tree)
    pipeline: Any = load_file(repository, f"/{name}")
    variables = list(_variables(pipeline))
    if outer := [each for each in variables if not _is_plain(each, folder)]:
        return [f"{name}: reads variables from {each!r}" for each in outer]
    if faults := list(_bound_faults(tree, {posixpath.basename(each) for each in variables})):
        return faults
    stages = sum(map(_number_of_stages, pipeline.resolver.definitions.values()))
    if stages > MOST_STAGES:
        return [f"{name} stands for {stages} stages: at most {MOST_STAGES} are read"]
    return [
        fault
        for stage, content in (pipeline.resolver.resolve()["stages"] or {}).items()
        for fault in _stage_faults(f"{name}, {stage}", content, folder, links)
    ]


def _number_of_stages(definition: Any) -> int:
    """Return how many stages DVC makes of an entry of dvc.yaml, without making them."""
    from dvc.parsing import ForeachDefinition, MatrixDefinition

    if not isinstance(definition, (ForeachDefinition, MatrixDefinition)):
        return 1
    values: Any = definition.resolved_iterable
    if isinstance(definition, ForeachDefinition):
        return len(values)
    return math.prod(len(each) for each in values.values() if isinstance(each, Sized))


def _bound_faults(tree: Iterable[TreeEntry], names: Collection[str]) -> Iterator[str]:
    """Yield the files with these names in any folder that are more than DVC should build."""
    for entry in tree:
        if posixpath.basename(entry.name) not in names or entry.mode in (LINK, SUBMODULE):
            continue
        if entry.size > LARGEST_PIPELINE:
            yield f"{entry.name} has {entry.size} bytes: at most {LARGEST_PIPELINE} are read"
        elif entry.name.endswith((".yaml", ".yml")):  # others have no aliases, and end in Python
            try:
                bounded_yaml.check(_text(entry), entry.name)
            except ValueError as error:
                yield str(error)


def _variables(pipeline: Any) -> Iterator[str]:
    """Yield the files that a dvc.yaml and its stages take variables from."""
    content = pipeline.load() or {}
    stages = [each for each in (content.get("stages") or {}).values() if isinstance(each, Mapping)]
    for entry in (content, *stages, *(each.get("do") or {} for each in stages)):
        for file in entry.get("vars") or []:
            if isinstance(file, str):  # "file.yaml:key,key"; a mapping has the values themselves
                yield file.partition(":")[0]


def _folders_of(tree: Sequence[TreeEntry]) -> set[str]:
    """Return the digests of folders in the files of DVC; the other checks have read these files."""
    texts = [text for _, text in _named(tree, "dvc.lock", ending=".dvc")]
    return {found for text in texts for found in re.findall(r"\b[0-9a-f]{32}\.dir\b", text)}


def _folder_faults(digest: str, file: Path) -> Iterator[str]:
    """Yield the files of a folder in DVC's cache that lead out of it."""
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError):  # not in this cache, or damaged: DVC says so
        return
    for entry in entries if isinstance(entries, list) else ():
        if not (isinstance(entry, dict) and is_folder_entry(entry)):
            yield f"the folder {digest} has a file that leads out of it: {str(entry)[:LONGEST]}"


def _stage_faults(
    where: str, content: Mapping[str, Any], folder: str, links: set[str]
) -> Iterator[str]:
    if not where.isprintable():
        yield f"{where!r} is a stage with characters that a terminal acts on"
    folder = posixpath.join(folder, str(content.get("wdir") or "."))
    for kind in ("outs", "metrics", "plots"):
        for path in _paths(content.get(kind)):
            yield from _out_faults(where, path, folder, links)
    for path in [*_paths(content.get("deps")), *_files_of(content.get("params"))]:
        if not _is_plain(path, folder):
            yield f"{where}: reads {path!r}, which is in no commit"


def _out_faults(where: str, path: str, folder: str, links: set[str]) -> Iterator[str]:
    """Yield why ``path`` in ``folder`` cannot be an out."""
    whole = posixpath.normpath(posixpath.join(folder, path))
    first = whole.casefold().partition("/")[0]
    if not _is_plain(path, folder) or whole == ".":
        yield f"{where}: the out {path!r} in the folder {folder!r} is not below the worktree"
    elif first in (*OURS, "git~1") or _is_special(whole):
        yield f"{where}: the out {whole} is where git, DVC or this program write"
    elif above := next((link for link in links if _contains(link, whole.casefold())), None):
        yield f"{where}: the out {whole} is written through the link {above}"


def _is_plain(path: str, folder: str = "") -> bool:
    """Return whether a path is relative, printable, of no other file system, and stays inside."""
    return "://" not in path and path.isprintable() and is_inside(path, folder)


def _links(tree: Iterable[TreeEntry]) -> set[str]:
    return {entry.name.casefold() for entry in tree if entry.mode == LINK}


def _yaml(name: str, text: str) -> Mapping[str, Any]:
    content = bounded_yaml.load(text, name)
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"{name} is no file of DVC: it has no keys")
    return content or {}


def _mappings(content: Any, key: str) -> list[Mapping[str, Any]]:
    listed = content.get(key) if isinstance(content, Mapping) else None
    return (
        [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    )


def _paths(listed: Any) -> list[str]:
    """Return the paths of a list of outs, each of which may have settings."""
    entries = listed or []
    return [str(path) for e in entries for path in (e if isinstance(e, Mapping) else [e])]


def _files_of(params: Any) -> list[str]:
    """Return the files of a stage's parameters; names alone are those of params.yaml."""
    entries = [each for each in params or [] if isinstance(each, Mapping)]
    return [str(file) for each in entries for file in each]
