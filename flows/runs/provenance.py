"""Trace a benchmark result, checkpoint, dataset or file back to the run and commit that made it.

``find`` returns the run that made what is asked for. ``chain`` returns each thing on the way back,
with its digest, its path, and the command that restores it. The inputs of a run are read from its
dvc.lock and from the records of its sub-steps, so a chain needs no checkout of that run. Digests
beside a path are DVC's, those of sub-steps the ledger's.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.host import files
from flows.host.addresses import address_without_password
from flows.runs import cache, git, pipeline
from flows.runs.first_difference import parsed_records
from flows.tracking import run as track
from flows.tracking import store
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Record

SHORT = 12  # characters of a commit in a command
WIDTH = 110  # characters of a line
FEW = 4  # ids of questions that are shown
HOME = Path(".beamline/lineage")  # restored copies
AGENTS = {"cold start": "cold_start", "trained": "trained", "champion": "champion"}
OUTS = {  # stage -> names of its outs; reinforce and champion have functions of their own
    "verdict": {"verdict": "reports/{}/verdict.json"},
    "evaluate": {"evaluation": "data/{}/evaluation.parquet"},
    "reward_model": {"reward model": "models/{}/reward_model"},
    "cold_start": {"cold start": "models/{}/cold_start"},
    "prepare": {
        "dataset": "data/{}/questions",
        "corpus": "data/{}/corpus",
        "traces": "data/{}/traces.parquet",
        "initial policy": "models/{}/initial",
    },
}
KEPT = (
    "params",
    "data/sources",
    "dvc.yaml",
    "dvc.lock",
)  # committed with the reports
FORMS = """WHAT is
  a metric  reports/<recipe>/metrics.json:success.trained.mean, or success.trained.mean alone
  a model   <recipe>@champion or another alias, <recipe>/<version>
  a file    models/<recipe>/trained or another out of a stage, a file in one, a copy elsewhere"""


@dataclass(frozen=True)
class Link:
    """One thing on the way from a result to the commit that restores it."""

    what: str  # "checkpoint"
    name: str = ""  # "success.trained.mean = 0.844"
    digest: str = ""
    where: str = ""
    facts: Sequence[str] = ()
    command: str = ""  # shell command that restores or shows it

    def __str__(self) -> str:
        lines = ["  ".join(filter(None, [self.where, self.digest])), *self.facts]
        wrapped = [row for line in lines for row in textwrap.wrap(line, WIDTH)]
        wrapped += [f"$ {self.command}"] if self.command else []
        title = f"{self.what}: {self.name}" if self.name else self.what
        return "\n".join([title, *(f"    {line}" for line in wrapped)])


@dataclass(frozen=True)
class State:
    """The content of dvc.lock at a commit, or in this checkout if ``commit`` is empty."""

    lock: Mapping[str, Any]
    commit: str = ""
    branch: str = ""

    def outs(self) -> dict[str, tuple[str, str]]:
        """Return path of each out -> its digest, and the stage that made it."""
        return {
            out["path"]: (out["md5"], stage)
            for stage, entry in self.lock.items()
            for out in entry.get("outs", [])
        }

    def recipes(self) -> list[str]:
        """List the recipes that have run."""
        return sorted({stage.rpartition("@")[2] for stage in self.lock})


@dataclass(frozen=True)
class Asked:
    """What is asked for: an out of a run, or something in it."""

    state: State
    path: str
    digest: str
    out: str  # the path itself, or the folder that it lies in
    metric: str = ""  # "success.trained.mean = 0.844"
    agent: str = "trained"  # whose metric it is
    facts: Sequence[str] = ()
    iteration: int | None = None  # None: the one that made the evaluated policy
    every: bool = False  # the ids of all questions

    @property
    def stage(self) -> str:
        """The stage that made it."""
        return self.state.outs()[self.out][1]

    @property
    def recipe(self) -> str:
        """The recipe of that stage."""
        return self.stage.rpartition("@")[2]


# ---------------------------------------------------------------- find the run


def find(what: str, revision: str | None = None, recipe: str | None = None) -> Asked:
    """Find what ``what`` names at ``revision``, by default in this checkout and the newest runs.

    Where several runs made the same from the same inputs, the oldest one is returned. Raises
    ValueError for what is not found, ConnectionError for a model whose registry is unreachable.
    """
    if model := re.fullmatch(r"([\w.-]+)(?:@([\w.-]+)|/(\d+))", what):
        return _model(what, model[1], model[2] or model[3])
    metric = re.fullmatch(r"(.+\.json):(.+)", what)
    path = Path(metric[1] if metric else what)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    states = list(_states(revision))
    asked = _lookup(path.as_posix(), metric and metric[2], states)
    if asked is None and path.exists():
        asked = _stray(path, states)
    if asked is None and "/" not in what:
        asked = _short_metric(what, states, recipe)
    if asked is None:
        outs = dict.fromkeys(out for state in states for out in state.outs())
        near = difflib.get_close_matches(path.as_posix(), outs)
        guess = f"near it: {', '.join(near)}\n" if near else ""
        none = "" if states else ": there is no dvc.lock here, and no run's branch"
        raise ValueError(f"'{what}' is nothing that a run has made{none}\n{guess}{FORMS}")
    return asked if revision else _first_made(asked)


def _states(revision: str | None) -> Iterator[State]:
    """Yield the states to search, in this order."""
    if revision:
        yield _at_commit(revision)
        return
    if here := pipeline.locked():
        commit = git.revision().commit if git.committed("dvc.lock") else ""
        same = commit and git.locked_at(commit) == here
        yield _at_commit(commit) if same else State(here)
    for branch in git.runs("*"):
        with suppress(ValueError):  # no branch of a run
            yield _at_commit(branch)


def _at_commit(revision: str) -> State:
    commit = git.resolve(revision)
    branches = git.branches_at(commit)
    branch = revision if revision in branches else next(iter(branches), "")
    return State(git.locked_at(commit), commit, branch)


def _lookup(path: str, metric: str | None, states: Sequence[State]) -> Asked | None:
    """Find a path, or a metric in that file, in the first state that has it."""
    asked = next(filter(None, (_at(path, state) for state in states)), None)
    return _measured(asked, metric) if asked and metric else asked


def _at(path: str, state: State) -> Asked | None:
    """Find a path in a state; None where it is no out and in none."""
    outs = state.outs()
    out = max((o for o in outs if Path(path).is_relative_to(o)), key=len, default="")
    digest = outs[out][0] if out else None
    if digest and path != out:
        digest = cache.kept_folder(digest).get(Path(path).relative_to(out).as_posix())
    if digest is None:
        return None
    if not state.commit and Path(path).exists() and cache.digest_of(Path(path)) != digest:
        raise ValueError(
            f"{path} is not what dvc.lock says ({digest}): it was changed after the run; "
            f"`dvc checkout {shlex.quote(path)}` brings it back, --at REV asks for another run's"
        )
    return Asked(state, path, digest, out)


def _first_made(asked: Asked) -> Asked:
    """Return the same out of the oldest run that made it from the same inputs."""
    runs = [_at_commit(branch) for branch in git.runs_with(asked.state.outs()[asked.out][0])]
    same = [run for run in runs if run.lock.get(asked.stage) == asked.state.lock[asked.stage]]
    others = ", ".join(run.branch for run in same[1:])
    facts = [f"the same in {len(same) - 1} later runs: {others}"] if others else []
    return replace(asked, state=[*same, asked.state][0], facts=facts)


def _model(what: str, model: str, which: str) -> Asked:
    tags = store.version_tags(model, which)
    if tags is None:
        raise ValueError(f"the model registry {_store()} has no '{what}'\n{FORMS}")
    commit, number = tags.get(track.COMMIT), tags["version"]
    if not commit:
        raise ValueError(
            f"version {number} of {model} was registered by hand, not by a run: its files are "
            f"DVC's {tags.get(track.DIGEST)}"
        )
    asked = _at(f"models/{model}/trained", _at_commit(commit))
    if asked is None:
        raise ValueError(f"commit {commit} has no models/{model}/trained in its dvc.lock")
    return replace(asked, facts=[f"version {number} of the model {model} in {_store()}"])


def _measured(asked: Asked, key: str) -> Asked:
    """Add the value of a metric of the file; ValueError where the file has no such metric."""
    path, text = asked.path, _text(asked.state, asked.path)
    values = track.flatten(json.loads(text))
    if key not in values:
        near = ", ".join(difflib.get_close_matches(key, values, cutoff=0.4))
        raise ValueError(f"{path} has no metric '{key}'" + (f"; near it: {near}" if near else ""))
    agent = next((a for name, a in AGENTS.items() if f".{name}." in key), "trained")
    return replace(asked, metric=f"{key} = {values[key]}", agent=agent)


def _short_metric(key: str, states: Sequence[State], recipe: str | None) -> Asked | None:
    """Find a metric without its file, in the one recipe that has it."""
    found, faults = [], []
    for name in [recipe] if recipe else sorted({r for state in states for r in state.recipes()}):
        try:
            found.append(_lookup(f"reports/{name}/metrics.json", key, states))
        except ValueError as fault:
            faults.append(str(fault))
    known = [asked for asked in found if asked]
    if len(known) > 1:
        recipes = ", ".join(asked.recipe for asked in known)
        raise ValueError(f"'{key}' is a metric of {recipes}: say which, --recipe")
    if faults and not known:
        raise ValueError("\n".join([*faults, FORMS]))
    return known[0] if known else None


def _stray(path: Path, states: Sequence[State]) -> Asked:
    """Find a file or folder that is no out by its digest, in the oldest run that has it."""
    digest = cache.digest_of(path)
    committed = [state for state in states[::-1] if state.commit]  # the oldest first
    for state in [*committed, *(state for state in states if not state.commit)]:
        for out, (made, _) in state.outs().items():
            inside = _folder(made) if made.endswith(".dir") else {}
            names = {made: out} | {md5: f"{out}/{name}" for name, md5 in inside.items()}
            if digest in names:
                return Asked(state, names[digest], digest, out)
    raise ValueError(f"{path} has the digest {digest}, which no run has made\n{FORMS}")


@functools.cache
def _folder(digest: str) -> dict[str, str]:
    try:
        return cache.kept_folder(digest)
    except ValueError:  # neither cache nor remote has it
        return {}


def restore(asked: Asked) -> Path:
    """Restore what is asked for as a copy below HOME; return its path.

    It comes from git, from DVC's cache, or from its remote. Raises ValueError where none of them
    has it with its digest.
    """
    commit = asked.state.commit
    if not commit:
        raise ValueError(f"{asked.path} is in this checkout, as far as its run is kept at all")
    target = HOME / commit[:SHORT] / asked.path
    if target.exists() and cache.digest_of(target) == asked.digest:
        return target
    files.remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(target) as partial:
        if git.committed(asked.path, at=commit):
            partial.write_text(git.content(commit, asked.path))
        else:
            cache.restore(asked.digest, partial)
        if cache.digest_of(partial) != asked.digest:
            raise ValueError(f"commit {commit} has another {asked.path} than its run has made")
    return target


# ---------------------------------------------------------------- the chain


def chain(asked: Asked) -> list[Link]:
    """Return the links from what is asked for back to the commit.

    Raises ValueError for an iteration that the run does not have.
    """
    links = [
        link
        for stage in _way(asked)
        for link in STAGES.get(stage.partition("@")[0], _of_stage)(stage, asked)
    ]
    if asked.metric:
        links.insert(0, _out(asked, "benchmark result", asked.path, asked.metric))
    elif all(link.where != asked.path for link in links):
        links.insert(0, _out(asked, "file", asked.path))
    links[0] = replace(links[0], facts=[*asked.facts, *links[0].facts])
    return [*links, _commit(asked), _parameters(asked), _tracked(asked)]


def _way(asked: Asked) -> list[str]:
    """List the stages that made it, each before its inputs' stages."""
    makers = {out: stage for out, (_, stage) in asked.state.outs().items()}
    beside = {f"models/{asked.recipe}/{agent}" for agent in AGENTS.values()}
    beside -= {f"models/{asked.recipe}/{asked.agent}"}
    seen: list[str] = []

    def visit(stage: str) -> None:
        # a metric of one agent does not depend on the others that were evaluated with it
        aside = beside if asked.metric and stage == asked.stage else ()
        for dep in asked.state.lock[stage].get("deps", []):
            maker = makers.get(dep["path"])
            if maker and maker not in seen and dep["path"] not in aside:
                visit(maker)
        seen.append(stage)

    visit(asked.stage)
    return seen[::-1]


def _of_stage(stage: str, asked: Asked) -> list[Link]:
    """Return a stage's outs with its sub-steps, and its inputs that are neither outs nor code."""
    name, outs = stage.partition("@")[0], asked.state.outs()
    own = {f"{name}: {out}": out for out, (_, maker) in outs.items() if maker == stage}
    known = {what: path.format(asked.recipe) for what, path in OUTS.get(name, {}).items()}
    links = [_out(asked, what, path) for what, path in (known or own).items() if path in outs]
    of = (name, f"{name}/{asked.agent}")  # of several agents, the one that is asked for
    facts = [_described(record) for record in _records(asked, name) if record["stage"] in of]
    links[:1] = [replace((links or [Link(name)])[0], facts=facts)]
    deps = {dep["path"]: dep.get("md5", "") for dep in asked.state.lock[stage].get("deps", [])}
    return links + [
        Link("source", "", digest, path, command=_reproducing(asked) if asked.state.commit else "")
        for path, digest in deps.items()
        if path not in outs and not _is_code(path)
    ]


def _is_code(path: str) -> bool:
    return path.endswith(".py") or Path(path).parts[0] in keys.ROOMS


def _reinforce(stage: str, asked: Asked) -> list[Link]:
    """Return the checkpoint, the iteration that made it (or is asked for), trees and questions."""
    path, trees = f"models/{asked.recipe}/trained", f"data/{asked.recipe}/trees"
    records = _records(asked, "reinforce")
    updates = [record for record in records if record["verb"] == "update"]
    if not updates:
        return [_out(asked, "checkpoint", path, facts=["the records of its sub-steps are gone"])]
    made = _update(asked, updates)
    number, policy = made["iteration"], made["artifacts"]["policy"]
    steps = [
        record
        for record in records
        if record["iteration"] == number and record["stage"] == made["stage"]  # no validation's
    ]
    checkpoint = _out(asked, "checkpoint", path, facts=[f"policy {policy} in the ledger"])
    if made is not _update(replace(asked, iteration=None), updates):
        facts = ["of an earlier iteration: in no out, but perhaps in the ledger"]
        checkpoint = Link("checkpoint", "", policy, _in_ledger(asked, made), facts)
    name = f"{number} of 0 to {updates[-1]['iteration']}, seed {made['seed']}"
    rows = f"with rewards and advantages: the rows with iteration = {number} in each table"
    return [
        checkpoint,
        Link("iteration", name, facts=[_described(record) for record in steps]),
        _out(asked, "trees", trees, facts=[rows]),
        *_questions(asked, steps),
    ]


def _update(asked: Asked, updates: Sequence[Record]) -> Record:
    """Return the update of the given iteration, or the last one whose policy was evaluated."""
    if asked.iteration is not None:
        found = [update for update in updates if update["iteration"] == asked.iteration]
        if not found:
            first, last = updates[0]["iteration"], updates[-1]["iteration"]
            raise ValueError(f"--iteration {asked.iteration}: this run has {first} to {last}")
        return found[-1]
    evaluated = [
        record["inputs"].get("policy")
        for record in _records(asked, "evaluate")
        if record["stage"] == "evaluate/trained"
    ]
    made = [update for update in updates if update.get("published")]
    made = made or [update for update in updates if update["artifacts"]["policy"] in evaluated]
    return (made or updates)[-1]


def _questions(asked: Asked, steps: Sequence[Record]) -> list[Link]:
    rollouts = [record for record in steps if "questions" in record and "cursor" in record]
    ids = [name for record in rollouts for name in record["questions"]]
    folder = f"data/{asked.recipe}/questions"
    if not ids or folder not in asked.state.outs():
        return []
    shown = ids if asked.every else ids[:FEW]
    more = f" and {len(ids) - len(shown)} more (--all)" if ids[len(shown) :] else ""
    digest = asked.state.outs()[folder][0]
    inside = _folder(digest) if digest.endswith(".dir") else {}
    path = f"{folder}/train.parquet" if "train.parquet" in inside else folder
    facts = [f"{len(ids)} by id: {', '.join(shown)}{more}", f"cursor {rollouts[-1]['cursor']}"]
    return [_out(asked, "questions", path, facts=facts)]


def _champion(stage: str, asked: Asked) -> list[Link]:
    """Return the recipe's champion if training started from it or it was compared with."""
    pinned = _parameter(asked, stage, "champion")
    begins = _parameter(asked, f"cold_start@{asked.recipe}", "start") == "champion"
    compares = asked.stage.partition("@")[0] in ("verdict", "evaluate")
    compares = compares and (asked.agent == "champion" or not asked.metric)
    if not pinned or not (begins or compares):
        return []
    facts = [f"version {pinned['version']}, of commit {pinned['commit']}"]
    facts += ["training began with it"] if begins else []
    if pinned["commit"]:
        trained = f"models/{asked.recipe}/trained"
        facts.append(f"its own: python -m flows.lineage {trained} --at {pinned['commit'][:SHORT]}")
    return [_out(asked, "champion", f"models/{asked.recipe}/champion", facts=facts)]


def _reward_model(stage: str, asked: Asked) -> list[Link]:
    """Return the reward model with its sub-steps, where the recipe has one."""
    return _of_stage(stage, asked) if _parameter(asked, stage, "reward_model") else []


STAGES: dict[str, Callable[[str, Asked], list[Link]]] = {
    "reward_model": _reward_model,
    "reinforce": _reinforce,
    "champion": _champion,
}


# ---------------------------------------------------------------- the end of a chain


def _commit(asked: Asked) -> Link:
    state, recipe = asked.state, asked.recipe
    if not state.commit:
        kept = [path for path in (*KEPT, f"reports/{recipe}") if Path(path).exists()]
        keep = f"git add {' '.join(kept)} && git commit --message 'Run of {recipe}'"
        here = git.revision()
        changed = ", with changes that are in no commit" if here.dirty else ""
        facts = [f"code: {here.commit}{changed}", "all outs are in this checkout; to keep them:"]
        return Link("commit", "not committed", facts=facts, command=keep)
    code = git.trailer(state.commit, "Code")
    facts = [f"code: {code}"] if code else []
    return Link("commit", state.branch, state.commit, facts=facts, command=_reproducing(asked))


def _reproducing(asked: Asked) -> str:
    """Return the command that restores the whole run, its inputs included."""
    state, recipe = asked.state, asked.recipe
    named = git.trailer(state.commit, "Recipe") == recipe or len(state.recipes()) == 1
    revision = shlex.quote(state.branch or state.commit[:SHORT])
    return f"python -m flows.reproduce {revision}" + ("" if named else f" --recipe {recipe}")


def _parameters(asked: Asked) -> Link:
    path, commit = f"params/{asked.recipe}.yaml", asked.state.commit
    text = _text(asked.state, path)
    command = f"git show {commit[:SHORT]}:{path}" if commit else f"cat {path}"
    changes = git.trailer(commit, "Set").splitlines() if commit else []
    digest = hashlib.md5(text.encode()).hexdigest()
    return Link("parameters", "", digest, path, [f"set: {each}" for each in changes], command)


def _tracked(asked: Asked) -> Link:
    """Return the oldest MLflow run with this out, of those that share most other outs."""
    digests = {f"dvc.{path}": digest for path, (digest, _) in asked.state.outs().items()}
    tag = f"dvc.{asked.out}"
    try:
        runs = store.runs_tagged(tag, digests[tag])
        if not runs:
            return Link("MLflow run", f"not found in {_store()}")
        run = max(runs, key=lambda tags: len(digests.items() & tags.items()))
        stages = store.runs_tagged(store.PARENT_RUN, run["id"])
    except ConnectionError as error:
        return Link("MLflow run", f"not found: {error}")
    facts = [f"{stage['name']}: {stage['id']}" for stage in stages]
    facts += [f"{len(runs) - 1} more with the same digest"] if runs[1:] else []
    describe = f"mlflow runs describe --run-id {run['id']}"
    command = f"env MLFLOW_TRACKING_URI={shlex.quote(_store())} {describe}"
    return Link("MLflow run", run["name"], run["id"], _store(), facts, command)


# ---------------------------------------------------------------- links and what they show


def _out(asked: Asked, what: str, path: str, name: str = "", facts: Sequence[str] = ()) -> Link:
    """Return the link of an out of the run, or of something in one."""
    found = asked if path == asked.path else _at(path, asked.state)
    if found is None:
        return Link(what, name or "no out of this run", "", path, facts)
    return Link(what, name, found.digest, path, facts, _restoring(asked.state, path))


def _restoring(state: State, path: str) -> str:
    """Return the command that restores an out, or a file in one; empty for what is only here.

    Not ``dvc get``: it links to the cache, and with --force it then empties the linked file.
    """
    name = shlex.quote(path)
    if state.commit:
        return f"python -m flows.lineage {name} --at {state.commit[:SHORT]} --restore"
    return f"dvc checkout {name}" if path.startswith(("data/", "models/")) else ""


def _text(state: State, path: str) -> str:
    """Return a file that git keeps of a run, or that is in this checkout."""
    if state.commit:
        return git.content(state.commit, path)
    if not Path(path).is_file():
        raise ValueError(f"{path} is gone from this checkout, and no commit has it: run again")
    return Path(path).read_text()


def _records(asked: Asked, stage: str) -> list[Record]:
    """Return the records of a stage's sub-steps; empty where neither cache nor remote has them."""
    outs, path = asked.state.outs(), f"data/{asked.recipe}/records/{stage}.jsonl"
    return _kept(outs[path][0]) if path in outs else []


@functools.cache
def _kept(digest: str) -> list[Record]:
    try:
        return parsed_records(cache.kept_file(digest).decode())
    except ValueError:
        return []


def _described(record: Record) -> str:
    """Describe a sub-step in one line."""
    path = record["stage"].partition("/")[2]
    attempt = f", attempt {record['attempt']}" if record.get("attempt") else ""
    made = ", ".join(f"{name} {digest}" for name, digest in record["artifacts"].items())
    asked = f"; {len(record['questions'])} questions" if "questions" in record else ""
    return f"{f'{path}, ' if path else ''}{record['verb']}{attempt}: {made}{asked}"


def _in_ledger(asked: Asked, record: Record) -> str:
    """Return the path of a sub-step in this checkout's ledger; empty where it is not there."""
    name = f"{record['iteration']:04d}-{record['verb']}-{record['key']}"
    place = artifacts.ROOT / asked.recipe / str(record["stage"]) / name
    return place.as_posix() if place.exists() else ""


def _parameter(asked: Asked, stage: str, key: str) -> Any:
    """Return a value of the recipe from a stage's entry in dvc.lock."""
    sections = asked.state.lock.get(stage, {}).get("params", {})
    return sections.get(f"params/{asked.recipe}.yaml", {}).get(key)


def _store() -> str:
    """Return the address of MLflow's store, relative to the current folder if it is below it."""
    return address_without_password(store.store_uri()).replace(
        f"sqlite:///{Path.cwd()}/", "sqlite:///"
    )
