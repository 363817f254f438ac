"""Trace what a run made back to its commit, by each thing on the way and what restores it.

The inputs of a run are read from its dvc.lock and from the records of its sub-steps, so a chain
needs no checkout of that run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.runs import cache
from flows.runs.first_difference import parsed_records
from flows.runs.pipeline import recipe_values
from flows.runs.provenance_links import (
    Link,
    commit_link,
    out_link,
    parameters_link,
    reproducing,
    tracked_link,
)
from flows.runs.provenance_subject import AGENTS, SHORT, Subject, folder_files
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Record

FEW = 4  # ids of questions that are shown
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
        links.insert(0, out_link(subject, "benchmark result", subject.path, subject.metric))
    elif all(link.where != subject.path for link in links):
        links.insert(0, out_link(subject, "file", subject.path))
    links[0] = replace(links[0], facts=[*subject.facts, *links[0].facts])
    return [*links, commit_link(subject), parameters_link(subject), tracked_link(subject)]


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
    named = known or stage_outs
    links = [out_link(subject, what, path) for what, path in named.items() if path in outs]
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
            command=reproducing(subject),
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
        gone = ["the records of its sub-steps are gone"]
        return [out_link(subject, "checkpoint", path, facts=gone)]
    update = _update(subject, updates)
    number, policy = update["iteration"], update["artifacts"]["policy"]
    steps = [
        record
        for record in records
        if record["iteration"] == number and record["stage"] == update["stage"]  # no validation's
    ]
    checkpoint = out_link(subject, "checkpoint", path, facts=[f"policy {policy} in the ledger"])
    if update is not _update(replace(subject, iteration=None), updates):
        facts = ["of an earlier iteration: in no out, but perhaps in the ledger"]
        checkpoint = Link("checkpoint", "", policy, _in_ledger(subject, update), facts)
    name = f"{number} of 0 to {updates[-1]['iteration']}, seed {update['seed']}"
    rows = f"with rewards and advantages: the rows with iteration = {number} in each table"
    return [
        checkpoint,
        Link("iteration", name, facts=[_described(record) for record in steps]),
        out_link(subject, "trees", trees, facts=[rows]),
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
    inside = folder_files(digest) if digest.endswith(".dir") else {}
    path = f"{folder}/train.parquet" if "train.parquet" in inside else folder
    facts = [f"{len(ids)} by id: {', '.join(shown)}{more}", f"cursor {rollouts[-1]['cursor']}"]
    return [out_link(subject, "questions", path, facts=facts)]


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
    return [out_link(subject, "champion", f"models/{subject.recipe}/champion", facts=facts)]


def _teacher(stage: str, subject: Subject) -> list[Link]:
    """Return the policy that taught the recipe's, where there is one."""
    named = _parameter(subject, stage, "teacher")
    if not named:
        return []
    if named["kind"] == "run":
        trained, commit = f"models/{named['recipe']}/trained", named["commit"]
        facts = [f"its own: beamline lineage {trained} --at {commit[:SHORT]}"]
    elif named["kind"] == "server":
        facts = [f"{named['name']} behind a server; its answers: data/{subject.recipe}/trees"]
    else:
        facts = [f"{named['name']} at revision {named['revision'] or 'none'}"]
    return [out_link(subject, "teacher", f"models/{subject.recipe}/teacher", facts=facts)]


def _brought(stage: str, subject: Subject) -> list[Link]:
    """Return the policies of other runs that the stage champion has brought."""
    return [*_champion(stage, subject), *_teacher(stage, subject)]


def _reward_model(stage: str, subject: Subject) -> list[Link]:
    """Return the reward model with its sub-steps, where the recipe has one."""
    return _of_stage(stage, subject) if _parameter(subject, stage, "reward_model") else []


STAGES: dict[str, Callable[[str, Subject], list[Link]]] = {
    "reward_model": _reward_model,
    "reinforce": _reinforce,
    "champion": _brought,
}


# ---------------------------------------------------------------- records and parameters


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
    return recipe_values(subject.state.lock.get(stage, {}), subject.recipe).get(key)
