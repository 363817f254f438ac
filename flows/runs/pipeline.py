"""Read dvc.yaml and dvc.lock: the stages of a recipe, their state, their inputs and outs.

Paths are relative to the current folder, the project's root, or to ``root``, that of another
checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flows.runs import bounded_yaml, git, local_policies
from flows.runs.cache import kept_file
from flows.runs.dvc_command import DAMAGED_LOCK_REMEDY, HERE, modified, open_repository
from flows.runs.stage_reasons import Params, reasons
from params.run_folders import RunFolders
from params.whole_file import RESOLVED, whole_file

PIPELINE = "dvc.yaml"


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml, with the settings for Prefect from its ``meta:``."""

    name: str  # "reinforce@tiny"
    pool: str | None = None  # of workers that run it, if any is up (flows/workers/dispatch)
    retries: int = 0
    retry_delay_seconds: float = 0
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Belongings:
    """The files that a stage reads and writes, by how they get to another checkout.

    Paths are relative to the checkout's root.
    """

    tracked: list[str]  # dependencies in DVC's cache
    loose: list[str]  # dependencies in neither DVC's cache nor the last commit
    cached: list[str]  # outs in DVC's cache
    small: list[str]  # outs that git keeps


# ---------------------------------------------------------------- stages and their state


def stages(recipe: str, root: Path = HERE) -> list[Stage]:
    """List the stages of a recipe in an order that respects their dependencies.

    Raises ValueError where dvc.yaml is no pipeline, has no stage for the recipe, or has an unknown
    key in ``meta:``.
    """
    with open_repository(root) as repository:
        return _stages(recipe, repository)


def _stages(recipe: str, repository: Any) -> list[Stage]:
    return [_stage(each) for each in _ordered(recipe, repository)]


def _ordered(recipe: str, repository: Any) -> list[Any]:
    """Return DVC's stages of a recipe in order; those of other recipes are not even read."""
    import networkx
    from dvc.repo.graph import build_graph

    file = Path(repository.root_dir, PIPELINE)  # DVC would take that of the current folder
    dvc_stages = repository.stage.load_glob(str(file), f"*@{recipe}")
    if not dvc_stages:
        here = file.parent == Path.cwd()
        raise ValueError(
            f"{PIPELINE if here else file} has no stage for the recipe '{recipe}': `python -m "
            f"flows.recipe {recipe} --write` adds it to params.yaml, which belongs into the commit"
        )
    # DVC's edges run from a stage to its inputs; names decide between possible orders
    graph = build_graph(dvc_stages).reverse()
    return list(networkx.lexicographical_topological_sort(graph, key=lambda s: s.addressing))


def _name(stage: Any) -> str:
    """Return a stage's name in dvc.yaml; empty for a .dvc file, which has none.

    DVC's own address puts a path before it where the stage is not in the current folder.
    """
    return getattr(stage, "name", None) or ""


def _stage(stage: Any) -> Stage:
    meta = stage.meta or {}
    known = [field.name for field in fields(Stage)][1:]
    if unknown := sorted(set(meta) - set(known)):
        raise ValueError(
            f"dvc.yaml, stage {_name(stage)}: meta has unknown keys {unknown}: remove them, or "
            f"use some of {known}"
        )
    return Stage(_name(stage), **meta)


def status(recipe: str) -> dict[str, list[str]]:
    """Return the stages of a recipe that DVC would run now, with reasons; empty if all are done.

    A stage that would run only because an earlier one writes something new is not listed.
    """
    with open_repository() as repository:
        _stages(recipe, repository)  # raises for one whose settings are not understood
        changes = changes_of(recipe, repository)
        params = _params(recipe, repository) if changes else {}
    found = {name: reasons(report, *params[name]) for name, report in changes.items()}
    for name, lines in local_policies.changed(recipe).items():
        found[name] = [*lines, *found.get(name, [])]
    return found


def _params(recipe: str, repository: Any) -> dict[str, tuple[Params, Params]]:
    """Return the parameters of each stage of a recipe by file, in dvc.lock and now."""
    from dvc.dependency import ParamsDependency

    return {
        _name(stage): (
            {dep.def_path: dep.hash_info.value or {} for dep in params},
            {dep.def_path: dep.read_params() for dep in params},
        )
        for stage in _ordered(recipe, repository)
        for params in [[dep for dep in stage.deps if isinstance(dep, ParamsDependency)]]
    }


def changes_of(recipe: str, repository: Any) -> dict[str, list[Any]]:
    """Return the stages of a recipe that DVC would run now, in order, with DVC's own reports.

    DVC's command parses dvc.lock once more for each stage that it is asked about.
    """
    with repository.lock:
        reports = [(_name(stage), stage.status()) for stage in _ordered(recipe, repository)]
    return {name: changes for name, report in reports for changes in report.values()}


def locked(root: Path = HERE) -> dict[str, Any]:
    """Return the entry of each stage in dvc.lock; stages that never ended have none.

    Raises ValueError where the file is damaged.
    """
    file = root / "dvc.lock"
    if not file.exists():
        return {}
    try:
        return (bounded_yaml.load(file.read_text(), "dvc.lock") or {}).get("stages", {})
    except (ValueError, AttributeError):
        raise ValueError(f"{file.absolute()} is damaged: {DAMAGED_LOCK_REMEDY}") from None


def recipe_paths(recipe: str) -> tuple[str, str]:
    """Return the recipe's own file, and the whole one that a recipe with a base has beside it."""
    return f"params/{recipe}.yaml", f"params/{RESOLVED}/{recipe}.yaml"


def recipe_values(stage: Mapping[str, Any], recipe: str) -> Mapping[str, Any]:
    """Return the values of the recipe in a stage's entry of dvc.lock; empty where it has none."""
    values = [stage.get("params", {}).get(path) for path in recipe_paths(recipe)]
    return next(filter(None, values), {})


def follow_file(recipe: str) -> bool:
    """Have dvc.lock name the file that the recipe is read from now; return whether it did not.

    A recipe that gets or loses its base keeps its values, so its stages do not start for it.
    """
    now = whole_file(recipe, Path("params")).as_posix()
    before = next(path for path in recipe_paths(recipe) if path != now)
    stale = [
        name
        for name, entry in locked().items()
        if name.endswith(f"@{recipe}") and before in entry.get("params", {})
    ]
    if stale:
        with modified("dvc.lock") as lock:
            for name in stale:
                params = lock["stages"][name]["params"]
                params[now] = params.pop(before)
    return bool(stale)


def digests(stage: str, root: Path = HERE) -> dict[str, str]:
    """Return the digest of each out of a stage in dvc.lock; empty before it has ended once."""
    return {out["path"]: out["md5"] for out in locked(root).get(stage, {}).get("outs", [])}


CHAMPION_STAGE = "champion"  # the one stage that a new champion changes


def already_run(recipe: str, root: Path = Path()) -> str | None:
    """Return the newest branch of a run with the same inputs as ``root``, or None.

    Commands, parameters and source files of every stage are compared, questions included. A new
    champion alone is no reason to run again.
    """
    with chdir(root):
        here = _made_of(recipe)
    for branch in git.runs(recipe):
        try:
            locked = git.locked_at(branch)
        except ValueError:
            continue  # no branch of a run
        if all(_same(made_of, locked.get(name)) for name, made_of in here.items()):
            with chdir(root):
                if local_policies.same(recipe, _records(recipe, locked)):
                    return branch
    return None


def _records(recipe: str, locked: Mapping[str, Any]) -> str:
    """Return the records of a run's stage prepare; "" where they are not in DVC's cache."""
    path = RunFolders(recipe).records("prepare").as_posix()
    outs = locked.get(f"prepare@{recipe}", {}).get("outs", [])
    with suppress(ValueError):
        return next((kept_file(o["md5"]).decode() for o in outs if o["path"] == path), "")
    return ""


def _made_of(recipe: str) -> dict[str, dict[str, Any]]:
    """Return command, parameters and digests of each stage, without what other stages make."""
    from dvc.dependency import ParamsDependency

    with open_repository() as repository:
        every = [
            stage
            for stage in repository.index.stages
            if stage.addressing.endswith(f"@{recipe}")
            and not stage.addressing.startswith(f"{CHAMPION_STAGE}@")
        ]
        out_paths = {
            out.def_path for stage in repository.index.stages if stage.deps for out in stage.outs
        }
        return {
            stage.addressing: {
                "cmd": stage.cmd,
                "params": {
                    dep.def_path: dep.read_params()
                    for dep in stage.deps
                    if isinstance(dep, ParamsDependency)
                },
                "deps": {
                    dep.def_path: dep.get_hash().value if dep.exists else None
                    for dep in stage.deps
                    if not isinstance(dep, ParamsDependency) and dep.def_path not in out_paths
                },
            }
            for stage in every
        }


def _same(made_of: dict[str, Any], locked: dict[str, Any] | None) -> bool:
    if locked is None:
        return False
    deps = {dep["path"]: dep.get("md5") for dep in locked.get("deps", [])}
    return (
        made_of["cmd"] == locked["cmd"]
        and made_of["params"] == locked.get("params", {})
        and all(deps.get(path) == digest for path, digest in made_of["deps"].items())
    )


# ---------------------------------------------------------------- stages that run elsewhere


def belongings(stage: str, root: Path = HERE) -> Belongings:
    """Return the files that a stage reads and writes, by how they can be transferred."""
    base = root.absolute()
    with open_repository(root) as repository:
        dvc_stage = next(each for each in repository.index.stages if _name(each) == stage)
        reads = sorted({_below(base, dep.fs_path) for dep in dvc_stage.deps})
        cached_paths = [_below(base, out.fs_path) for out in repository.index.outs if out.use_cache]
        writes = [(_below(base, out.fs_path), out.use_cache) for out in dvc_stage.outs]
    tracked = {path: _overlap(path, cached_paths) for path in reads}
    return Belongings(
        tracked=sorted({each for overlap in tracked.values() for each in overlap}),
        loose=[path for path in reads if not tracked[path] and not git.committed(path, root)],
        cached=[path for path, use_cache in writes if use_cache],
        small=[path for path, use_cache in writes if not use_cache],
    )


def _below(base: Path, path: str) -> str:
    return Path(path).relative_to(base).as_posix()


def _overlap(path: str, paths: list[str]) -> list[str]:
    """Return the path itself if it is in one of ``paths``, and those of them that are in it."""
    inside = [path] if any(Path(path).is_relative_to(each) for each in paths) else []
    return inside + [each for each in paths if Path(each).is_relative_to(path) and each != path]


def is_done(stage: str) -> bool:
    """Return whether DVC would skip a stage now."""
    with open_repository() as repository:
        return not repository.status(targets=[stage])


# ---------------------------------------------------------------- the commit of a run


def kept_in_git(recipe: str, root: Path) -> list[str]:
    """List what a run commits: dvc.lock, recipe, algorithms, and the outs DVC does not cache."""
    with open_repository(root) as repository:
        outs = [
            Path(out.fs_path).relative_to(root.absolute()).as_posix()
            for stage in repository.index.stages
            if _name(stage).endswith(f"@{recipe}")
            for out in stage.outs
            if not out.use_cache
        ]
    kept = [*recipe_paths(recipe), "params/algorithms.yaml", *sorted(outs)]
    return ["dvc.lock", *kept]
