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
class Subject:
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


def find(what: str, revision: str | None = None, recipe: str | None = None) -> Subject:
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
    subject = _lookup(path.as_posix(), metric and metric[2], states)
    if subject is None and path.exists():
        subject = _stray(path, states)
    if subject is None and "/" not in what:
        subject = _short_metric(what, states, recipe)
    if subject is None:
        outs = dict.fromkeys(out for state in states for out in state.outs())
        near = difflib.get_close_matches(path.as_posix(), outs)
        guess = f"near it: {', '.join(near)}\n" if near else ""
        none = "" if states else ": there is no dvc.lock here, and no run's branch"
        raise ValueError(f"'{what}' is nothing that a run has made{none}\n{guess}{FORMS}")
    return subject if revision else _first_made(subject)


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


def _lookup(path: str, metric: str | None, states: Sequence[State]) -> Subject | None:
    """Find a path, or a metric in that file, in the first state that has it."""
    subject = next(filter(None, (_at(path, state) for state in states)), None)
    return _measured(subject, metric) if subject and metric else subject


def _at(path: str, state: State) -> Subject | None:
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
    return Subject(state, path, digest, out)


def _first_made(subject: Subject) -> Subject:
    """Return the same out of the oldest run that made it from the same inputs."""
    runs = [_at_commit(branch) for branch in git.runs_with(subject.state.outs()[subject.out][0])]
    same = [run for run in runs if run.lock.get(subject.stage) == subject.state.lock[subject.stage]]
    others = ", ".join(run.branch for run in same[1:])
    facts = [f"the same in {len(same) - 1} later runs: {others}"] if others else []
    return replace(subject, state=[*same, subject.state][0], facts=facts)


def _model(what: str, model: str, which: str) -> Subject:
    tags = store.version_tags(model, which)
    if tags is None:
        raise ValueError(f"the model registry {_store()} has no '{what}'\n{FORMS}")
    commit, number = tags.get(track.COMMIT), tags["version"]
    if not commit:
        raise ValueError(
            f"version {number} of {model} was registered by hand, not by a run: its files are "
            f"DVC's {tags.get(track.DIGEST)}"
        )
    subject = _at(f"models/{model}/trained", _at_commit(commit))
    if subject is None:
        raise ValueError(f"commit {commit} has no models/{model}/trained in its dvc.lock")
    return replace(subject, facts=[f"version {number} of the model {model} in {_store()}"])


def _measured(subject: Subject, key: str) -> Subject:
    """Add the value of a metric of the file; ValueError where the file has no such metric."""
    path, text = subject.path, _text(subject.state, subject.path)
    values = track.flatten(json.loads(text))
    if key not in values:
        near = ", ".join(difflib.get_close_matches(key, values, cutoff=0.4))
        raise ValueError(f"{path} has no metric '{key}'" + (f"; near it: {near}" if near else ""))
    agent = next((a for name, a in AGENTS.items() if f".{name}." in key), "trained")
    return replace(subject, metric=f"{key} = {values[key]}", agent=agent)


def _short_metric(key: str, states: Sequence[State], recipe: str | None) -> Subject | None:
    """Find a metric without its file, in the one recipe that has it."""
    subjects, faults = [], []
    for name in [recipe] if recipe else sorted({r for state in states for r in state.recipes()}):
        try:
            subjects.append(_lookup(f"reports/{name}/metrics.json", key, states))
        except ValueError as fault:
            faults.append(str(fault))
    known = [subject for subject in subjects if subject]
    if len(known) > 1:
        recipes = ", ".join(subject.recipe for subject in known)
        raise ValueError(f"'{key}' is a metric of {recipes}: say which, --recipe")
    if faults and not known:
        raise ValueError("\n".join([*faults, FORMS]))
    return known[0] if known else None


def _stray(path: Path, states: Sequence[State]) -> Subject:
    """Find a file or folder that is no out by its digest, in the oldest run that has it."""
    digest = cache.digest_of(path)
    committed = [state for state in states[::-1] if state.commit]  # the oldest first
    for state in [*committed, *(state for state in states if not state.commit)]:
        for out, (out_digest, _) in state.outs().items():
            inside = _folder(out_digest) if out_digest.endswith(".dir") else {}
            names = {out_digest: out} | {md5: f"{out}/{name}" for name, md5 in inside.items()}
            if digest in names:
                return Subject(state, names[digest], digest, out)
    raise ValueError(f"{path} has the digest {digest}, which no run has made\n{FORMS}")


@functools.cache
def _folder(digest: str) -> dict[str, str]:
    try:
        return cache.kept_folder(digest)
    except ValueError:  # neither cache nor remote has it
        return {}


def restore(subject: Subject) -> Path:
    """Restore what is asked for as a copy below HOME; return its path.

    It comes from git, from DVC's cache, or from its remote. Raises ValueError where none of them
    has it with its digest.
    """
    commit = subject.state.commit
    if not commit:
        raise ValueError(f"{subject.path} is in this checkout, as far as its run is kept at all")
    target = HOME / commit[:SHORT] / subject.path
    if target.exists() and cache.digest_of(target) == subject.digest:
        return target
    files.remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(target) as partial:
        if git.committed(subject.path, at=commit):
            partial.write_text(git.content(commit, subject.path))
        else:
            cache.restore(subject.digest, partial)
        if cache.digest_of(partial) != subject.digest:
            raise ValueError(f"commit {commit} has another {subject.path} than its run has made")
    return target


# ---------------------------------------------------------------- the chain


def chain(subject: Subject) -> list[Link]:
    """Return the links from what is asked for back to the commit.

    Raises ValueError for an iteration that the run does not have.
    """
    links = [
        link
        for stage in _way(subject)
        for link in STAGES.get(stage.partition("@")[0], _of_stage)(stage, subject)
    ]
    if subject.metric:
        links.insert(0, _out(subject, "benchmark result", subject.path, subject.metric))
    elif all(link.where != subject.path for link in links):
        links.insert(0, _out(subject, "file", subject.path))
    links[0] = replace(links[0], facts=[*subject.facts, *links[0].facts])
    return [*links, _commit(subject), _parameters(subject), _tracked(subject)]


def _way(subject: Subject) -> list[str]:
    """List the stages that made it, each before its inputs' stages."""
    makers = {out: stage for out, (_, stage) in subject.state.outs().items()}
    beside = {f"models/{subject.recipe}/{agent}" for agent in AGENTS.values()}
    beside -= {f"models/{subject.recipe}/{subject.agent}"}
    seen: list[str] = []

    def visit(stage: str) -> None:
        # a metric of one agent does not depend on the others that were evaluated with it
        aside = beside if subject.metric and stage == subject.stage else ()
        for dep in subject.state.lock[stage].get("deps", []):
            maker = makers.get(dep["path"])
            if maker and maker not in seen and dep["path"] not in aside:
                visit(maker)
        seen.append(stage)

    visit(subject.stage)
    return seen[::-1]


def _of_stage(stage: str, subject: Subject) -> list[Link]:
    """Return a stage's outs with its sub-steps, and its inputs that are neither outs nor code."""
    name, outs = stage.partition("@")[0], subject.state.outs()
    stage_outs = {f"{name}: {out}": out for out, (_, maker) in outs.items() if maker == stage}
    known = {what: path.format(subject.recipe) for what, path in OUTS.get(name, {}).items()}
    links = [
        _out(subject, what, path) for what, path in (known or stage_outs).items() if path in outs
    ]
    of = (name, f"{name}/{subject.agent}")  # of several agents, the one that is asked for
    facts = [_described(record) for record in _records(subject, name) if record["stage"] in of]
    links[:1] = [replace((links or [Link(name)])[0], facts=facts)]
    deps = {dep["path"]: dep.get("md5", "") for dep in subject.state.lock[stage].get("deps", [])}
    return links + [
        Link(
            "source",
            "",
            digest,
            path,
            command=_reproducing(subject) if subject.state.commit else "",
        )
        for path, digest in deps.items()
        if path not in outs and not _is_code(path)
    ]


def _is_code(path: str) -> bool:
    return path.endswith(".py") or Path(path).parts[0] in keys.ROOMS


def _reinforce(stage: str, subject: Subject) -> list[Link]:
    """Return the checkpoint, the iteration that made it (or is asked for), trees and questions."""
    path, trees = f"models/{subject.recipe}/trained", f"data/{subject.recipe}/trees"
    records = _records(subject, "reinforce")
    updates = [record for record in records if record["verb"] == "update"]
    if not updates:
        return [_out(subject, "checkpoint", path, facts=["the records of its sub-steps are gone"])]
    update = _update(subject, updates)
    number, policy = update["iteration"], update["artifacts"]["policy"]
    steps = [
        record
        for record in records
        if record["iteration"] == number and record["stage"] == update["stage"]  # no validation's
    ]
    checkpoint = _out(subject, "checkpoint", path, facts=[f"policy {policy} in the ledger"])
    if update is not _update(replace(subject, iteration=None), updates):
        facts = ["of an earlier iteration: in no out, but perhaps in the ledger"]
        checkpoint = Link("checkpoint", "", policy, _in_ledger(subject, update), facts)
    name = f"{number} of 0 to {updates[-1]['iteration']}, seed {update['seed']}"
    rows = f"with rewards and advantages: the rows with iteration = {number} in each table"
    return [
        checkpoint,
        Link("iteration", name, facts=[_described(record) for record in steps]),
        _out(subject, "trees", trees, facts=[rows]),
        *_questions(subject, steps),
    ]


def _update(subject: Subject, updates: Sequence[Record]) -> Record:
    """Return the update of the given iteration, or the last one whose policy was evaluated."""
    if subject.iteration is not None:
        matches = [update for update in updates if update["iteration"] == subject.iteration]
        if not matches:
            first, last = updates[0]["iteration"], updates[-1]["iteration"]
            raise ValueError(f"--iteration {subject.iteration}: this run has {first} to {last}")
        return matches[-1]
    evaluated = [
        record["inputs"].get("policy")
        for record in _records(subject, "evaluate")
        if record["stage"] == "evaluate/trained"
    ]
    candidates = [update for update in updates if update.get("published")]
    candidates = candidates or [
        update for update in updates if update["artifacts"]["policy"] in evaluated
    ]
    return (candidates or updates)[-1]


def _questions(subject: Subject, steps: Sequence[Record]) -> list[Link]:
    rollouts = [record for record in steps if "questions" in record and "cursor" in record]
    ids = [name for record in rollouts for name in record["questions"]]
    folder = f"data/{subject.recipe}/questions"
    if not ids or folder not in subject.state.outs():
        return []
    shown = ids if subject.every else ids[:FEW]
    more = f" and {len(ids) - len(shown)} more (--all)" if ids[len(shown) :] else ""
    digest = subject.state.outs()[folder][0]
    inside = _folder(digest) if digest.endswith(".dir") else {}
    path = f"{folder}/train.parquet" if "train.parquet" in inside else folder
    facts = [f"{len(ids)} by id: {', '.join(shown)}{more}", f"cursor {rollouts[-1]['cursor']}"]
    return [_out(subject, "questions", path, facts=facts)]


def _champion(stage: str, subject: Subject) -> list[Link]:
    """Return the recipe's champion if training started from it or it was compared with."""
    pinned = _parameter(subject, stage, "champion")
    begins = _parameter(subject, f"cold_start@{subject.recipe}", "start") == "champion"
    compares = subject.stage.partition("@")[0] in ("verdict", "evaluate")
    compares = compares and (subject.agent == "champion" or not subject.metric)
    if not pinned or not (begins or compares):
        return []
    facts = [f"version {pinned['version']}, of commit {pinned['commit']}"]
    facts += ["training began with it"] if begins else []
    if pinned["commit"]:
        trained = f"models/{subject.recipe}/trained"
        facts.append(f"its own: beamline lineage {trained} --at {pinned['commit'][:SHORT]}")
    return [_out(subject, "champion", f"models/{subject.recipe}/champion", facts=facts)]


def _reward_model(stage: str, subject: Subject) -> list[Link]:
    """Return the reward model with its sub-steps, where the recipe has one."""
    return _of_stage(stage, subject) if _parameter(subject, stage, "reward_model") else []


STAGES: dict[str, Callable[[str, Subject], list[Link]]] = {
    "reward_model": _reward_model,
    "reinforce": _reinforce,
    "champion": _champion,
}


# ---------------------------------------------------------------- the end of a chain


def _commit(subject: Subject) -> Link:
    state, recipe = subject.state, subject.recipe
    if not state.commit:
        paths = [path for path in (*KEPT, f"reports/{recipe}") if Path(path).exists()]
        keep = f"git add {' '.join(paths)} && git commit --message 'Run of {recipe}'"
        here = git.revision()
        changed = ", with changes that are in no commit" if here.dirty else ""
        facts = [f"code: {here.commit}{changed}", "all outs are in this checkout; to keep them:"]
        return Link("commit", "not committed", facts=facts, command=keep)
    code = git.trailer(state.commit, "Code")
    facts = [f"code: {code}"] if code else []
    return Link("commit", state.branch, state.commit, facts=facts, command=_reproducing(subject))


def _reproducing(subject: Subject) -> str:
    """Return the command that restores the whole run, its inputs included."""
    state, recipe = subject.state, subject.recipe
    named = git.trailer(state.commit, "Recipe") == recipe or len(state.recipes()) == 1
    revision = shlex.quote(state.branch or state.commit[:SHORT])
    return f"beamline reproduce {revision}" + ("" if named else f" --recipe {recipe}")


def _parameters(subject: Subject) -> Link:
    path, commit = f"params/{subject.recipe}.yaml", subject.state.commit
    text = _text(subject.state, path)
    command = f"git show {commit[:SHORT]}:{path}" if commit else f"cat {path}"
    changes = git.trailer(commit, "Set").splitlines() if commit else []
    digest = hashlib.md5(text.encode()).hexdigest()
    return Link("parameters", "", digest, path, [f"set: {each}" for each in changes], command)


def _tracked(subject: Subject) -> Link:
    """Return the oldest MLflow run with this out, of those that share most other outs."""
    digests = {f"dvc.{path}": digest for path, (digest, _) in subject.state.outs().items()}
    tag = f"dvc.{subject.out}"
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


def _out(subject: Subject, what: str, path: str, name: str = "", facts: Sequence[str] = ()) -> Link:
    """Return the link of an out of the run, or of something in one."""
    out = subject if path == subject.path else _at(path, subject.state)
    if out is None:
        return Link(what, name or "no out of this run", "", path, facts)
    return Link(what, name, out.digest, path, facts, _restoring(subject.state, path))


def _restoring(state: State, path: str) -> str:
    """Return the command that restores an out, or a file in one; empty for what is only here.

    Not ``dvc get``: it links to the cache, and with --force it then empties the linked file.
    """
    name = shlex.quote(path)
    if state.commit:
        return f"beamline lineage {name} --at {state.commit[:SHORT]} --restore"
    return f"dvc checkout {name}" if path.startswith(("data/", "models/")) else ""


def _text(state: State, path: str) -> str:
    """Return a file that git keeps of a run, or that is in this checkout."""
    if state.commit:
        return git.content(state.commit, path)
    if not Path(path).is_file():
        raise ValueError(f"{path} is gone from this checkout, and no commit has it: run again")
    return Path(path).read_text()


def _records(subject: Subject, stage: str) -> list[Record]:
    """Return the records of a stage's sub-steps; empty where neither cache nor remote has them."""
    outs, path = subject.state.outs(), f"data/{subject.recipe}/records/{stage}.jsonl"
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
    digests = ", ".join(f"{name} {digest}" for name, digest in record["artifacts"].items())
    questions = f"; {len(record['questions'])} questions" if "questions" in record else ""
    return f"{f'{path}, ' if path else ''}{record['verb']}{attempt}: {digests}{questions}"


def _in_ledger(subject: Subject, record: Record) -> str:
    """Return the path of a sub-step in this checkout's ledger; empty where it is not there."""
    name = f"{record['iteration']:04d}-{record['verb']}-{record['key']}"
    folder = artifacts.ROOT / subject.recipe / str(record["stage"]) / name
    return folder.as_posix() if folder.exists() else ""


def _parameter(subject: Subject, stage: str, key: str) -> Any:
    """Return a value of the recipe from a stage's entry in dvc.lock."""
    sections = subject.state.lock.get(stage, {}).get("params", {})
    return sections.get(f"params/{subject.recipe}.yaml", {}).get(key)


def _store() -> str:
    """Return the address of MLflow's store, relative to the current folder if it is below it."""
    return address_without_password(store.store_uri()).replace(
        f"sqlite:///{Path.cwd()}/", "sqlite:///"
    )
