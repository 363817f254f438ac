"""Sub-steps that are computed once: what each was made from, and what it made.

A sub-step, such as the rollout of iteration 3, writes into its own folder. At the end its record is
added and the folder gets its final name by one rename, so a folder with a final name is complete.
The name ends with the sub-step's key: a digest of its inputs (values, sections of the recipe,
digests of artifacts) and of the source of its module and of all project files that it imports.
After a kill, a run finds what it had finished; whatever changed has a new key.

With a mirror (flows/runs/ledger_mirror.py), finished sub-steps are sent there while the run goes
on, and sub-steps that another worker has finished are fetched instead of computed.

A ledger calls its sub-steps through ``Ledger.run_sub_step``, so that flows can show them
(flows/workers/substep_tasks.py); nothing that is shown there decides what a sub-step returns.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from tasks.ledger import explain, keys, records
from tasks.ledger.artifacts import ROOT, Artifact, Record, need, remove
from tasks.ledger.records import MARKS, RETIRED, retired
from tasks.ledger.records import read as read

DROPPERS = 8  # threads that remove files: more of them are no quicker
PROGRESS = 2.0  # seconds between two lines of a removal

Verb = TypeVar("Verb", bound=Callable[..., Any])


class SubStepResult(NamedTuple):
    """The record of a sub-step, and whether the ledger had it already."""

    record: Record
    found: bool


Work = Callable[[], SubStepResult]  # look it up, and compute it where it is missing
RunSubStep = Callable[[str, Work], Record]  # verb, sub-step -> its record


def run_unseen(verb: str, work: Work) -> Record:
    """Return the record of a sub-step, and show it nowhere."""
    return work().record


class Mirror(Protocol):
    """A second place for what the ledger has, under the same names.

    No method raises an error while the place is unreachable.
    """

    def push(self, folder: Path) -> None:
        """Have a folder sent, unless it is marked as delivered; one that is gone is removed."""

    def withdraw(self, folder: Path) -> None:
        """Have a folder, and those below it, not sent until it is pushed again: it will change."""

    def fetch(self, folder: Path) -> Record | None:
        """Copy a whole folder into ``folder``; return its record, or None if there is none."""

    def drop(self, folder: Path) -> None:
        """Remove a folder."""

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""


@dataclass(frozen=True)
class SubStep:
    """One sub-step: its recipe, stage, iteration and random seed, and the run's ledger.

    ``out`` is the folder that a verb writes its artifacts into, set while the verb runs.
    """

    recipe: str
    stage: str
    iteration: int
    seed: int
    ledger: Ledger = field(default_factory=lambda: Ledger(), compare=False, repr=False)
    out: Path = field(default=Path(), compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """Return the folder with the sub-steps of this stage."""
        return ROOT / self.recipe / self.stage

    def place(self, verb: Callable[..., Any], inputs: Any) -> Path:
        """Return the folder that ``verb`` with these inputs has once it is finished."""
        return self._place(verb, self.identities(verb, inputs))

    def identities(self, verb: Callable[..., Any], inputs: Any) -> dict[str, str]:
        """Return everything that decides the result of ``verb``: name -> identity."""
        drawn = records.drawn(self.iteration, self.seed)
        return {**keys.identities(inputs, module_of(verb)), "step": drawn}

    def _place(self, verb: Callable[..., Any], identities: Mapping[str, str]) -> Path:
        return self.folder / f"{self.iteration:04d}-{verb.__name__}-{keys.key_of(identities)}"

    def final(self) -> Path:
        """Return the path that ``out`` gets at the end of the sub-step."""
        return self.out.with_name(self.out.name.removeprefix(".").removesuffix(".partial"))

    def facts(self) -> dict[str, Any]:
        """Return the part of the step that a record has."""
        names = ("recipe", "stage", "iteration", "seed")
        return {name: getattr(self, name) for name in names}


def recorded(verb: Verb) -> Verb:
    """Turn a verb into a sub-step that is computed once.

    ``verb(step, inputs, ...)`` writes its artifacts into ``step.out`` and returns further entries
    of the record (metrics, seconds by part). ``inputs`` is a frozen dataclass with everything that
    decides the result; further arguments (tools, progress) decide nothing and are in no key. The
    sub-step returns the whole record; if it is finished already, the record is read.

    Raises PrunedError if an artifact that it must read was dropped.
    """

    @functools.wraps(verb)
    def sub_step(step: SubStep, inputs: Any, **others: Any) -> Record:
        work = functools.partial(_found_or_made, verb, step, inputs, others)
        return step.ledger.run_sub_step(verb.__name__, work)

    return sub_step  # type: ignore[return-value]


def _found_or_made(
    verb: Callable[..., Any], step: SubStep, inputs: Any, others: Mapping[str, Any]
) -> SubStepResult:
    """Return the record that the ledger has, or that of what ``verb`` makes now."""
    identities = step.identities(verb, inputs)
    folder = step._place(verb, identities)
    step.ledger.check()
    if reused_record := step.ledger.find(folder):
        return SubStepResult(reused_record, found=True)
    files = {}
    for entry in fields(inputs):
        for artifact in _artifacts_in(getattr(inputs, entry.name)):
            need(artifact)
            files[artifact.digest] = str(artifact.path)
    made_of = {"inputs": identities, "sources": keys.source_digests(module_of(verb))}
    step.ledger.explain(step, verb.__name__, made_of, files)
    partial = _empty(folder.with_name(f".{folder.name}.partial"))
    began = time.time()
    result = verb(replace(step, out=partial), inputs, **others)
    step.ledger.check()
    about = {"verb": verb.__name__, "key": keys.key_of(identities), "step": step.facts()}
    record = {**about, **made_of, "duration": time.time() - began, **result}
    return SubStepResult(step.ledger.finish(partial, folder, record), found=False)


def module_of(verb: Callable[..., Any]) -> Path:
    """Return the source file of a verb, decorated or not."""
    source = inspect.getsourcefile(inspect.unwrap(verb))
    assert source, f"{verb} has no source file"
    return Path(source)


def _artifacts_in(value: Any) -> Iterator[Artifact]:
    """Yield the artifacts in an input, those in lists, tuples and mappings included."""
    if isinstance(value, Artifact):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _artifacts_in(entry)


def _empty(folder: Path) -> Path:
    remove(folder)
    folder.mkdir(parents=True)
    return folder


class Ledger:
    """The sub-steps that one run finds and finishes, and the mirror that shares them, if any.

    ``used`` has the folders found or finished so far; ``reused`` has the names of the found ones
    by the folder of their stage. ``run_sub_step`` is how each sub-step is called; it must call it
    once and return its record. ``check`` raises an error where what runs is no longer what the keys
    of sub-steps are made from; nothing is found or kept then.
    """

    def __init__(self, mirror: Mirror | None = None) -> None:
        self.mirrors = [mirror] if mirror else []
        self.run_sub_step: RunSubStep = run_unseen
        self.check: Callable[[], None] = lambda: None
        self.used: set[Path] = set()
        self.reused: dict[Path, set[str]] = {}
        self.explained: set[Path] = set()  # folders of stages whose first new sub-step was logged
        self.beside: list[Path] = []  # folders of other stages whose whole sub-steps count, too

    def find(self, folder: Path) -> Record | None:
        """Return the whole record in ``folder``, or the mirror's; None if neither has one.

        A record that is found here is sent to the mirror if it is missing there.
        """
        record = read(folder)
        for mirror in self.mirrors:
            if record:
                mirror.push(folder)
            else:
                record = mirror.fetch(folder)
        if record:
            self.reused.setdefault(folder.parent, set()).add(folder.name)
            self.used.add(folder)
        return record or self._find_beside(folder)

    def _find_beside(self, folder: Path) -> Record | None:
        """Return the record of an equal sub-step of another stage that still has all artifacts.

        A name ends with the key, which has everything that decides the outcome.
        """
        for stage_folder in self.beside:
            other = stage_folder / folder.name
            if (record := read(other)) and not retired(other):
                return record
        return None

    def explain(
        self, step: SubStep, verb: str, made_of: Mapping[str, Any], files: Mapping[str, str]
    ) -> None:
        """Print why the first new sub-step of a stage runs, once per stage.

        ``files``: paths of its inputs by digest.
        """
        if step.folder not in self.explained:
            self.explained.add(step.folder)
            reused = self.reused.get(step.folder, set())
            at = (step.stage, step.iteration, verb)
            text = explain.report(step.folder, at, reused, made_of, files)
            print(text, end="", flush=True)

    def finish(self, partial: Path, folder: Path, record: Record) -> Record:
        """Write the record into ``partial``, rename it to ``folder``, and send it to the mirror."""
        facts = {"finished": time.time(), "host": socket.gethostname()}
        written_record = records.write(partial, folder, {**record, **facts})
        remove(folder)
        partial.rename(folder)
        self.used.add(folder)
        for mirror in self.mirrors:
            mirror.push(folder)
        self._drop_scratch(folder)
        return written_record

    # ------------------------------------------------------------ within a sub-step

    def scratch(self, step: SubStep) -> Path:
        """Return a folder that outlives a kill, for what a sub-step needs to resume.

        It has the folders that were sealed here or, through the mirror, by another worker.
        """
        path = _scratch(step.final())
        path.mkdir(parents=True, exist_ok=True)
        for mirror in self.mirrors:
            for name in mirror.names(path):
                if not (path / name).exists():
                    mirror.fetch(path / name)
        return path

    def seal(self, folder: Path) -> None:
        """Mark a folder in a scratch folder as whole, with a record that ``read`` can check.

        Send it to the mirror, and remove from the mirror those that were removed here.
        """
        records.write(folder, folder, {"verb": folder.name})
        for mirror in self.mirrors:
            mirror.push(folder)
            for name in mirror.names(folder.parent):
                if not (folder.parent / name).exists():
                    mirror.push(folder.parent / name)

    def _drop_scratch(self, folder: Path) -> None:
        if (path := _scratch(folder)).exists():
            for mirror in self.mirrors:
                mirror.drop(path)
            shutil.rmtree(path)

    # ------------------------------------------------------------ old iterations

    def retire(
        self,
        step: SubStep,
        verb: str,
        last: int,
        every: int,
        weights: Collection[str],
        spare: Collection[Artifact] = (),
        small: Collection[str] = (),
    ) -> None:
        """Drop the artifacts that ``verb`` made ``last`` or more iterations ago; records stay.

        The artifacts ``weights`` of every ``every``-th iteration stay for good; those of the
        sub-steps that made one of ``spare`` stay this time. The artifacts ``small`` always stay.
        """
        paths_spared = [Path(artifact.path) for artifact in spare]
        spared = {folder for path in paths_spared for folder in (path, *path.parents)}
        old: dict[Path, list[Path]] = {}
        for folder in step.folder.glob(f"[0-9]*-{verb}-*"):
            number = folder.name.partition("-")[0]
            if not number.isdecimal() or int(number) > step.iteration - last:
                continue
            kept_weights = weights if folder in spared or (int(number) + 1) % every == 0 else ()
            stay = {*kept_weights, *small}
            if paths := [p for p in folder.iterdir() if p.name not in MARKS and p.stem not in stay]:
                old[folder] = paths
        _in_threads(self._drop, old, f"{step.stage}: dropping what old sub-steps {verb} made")

    def _drop(self, folder: Path, paths: Sequence[Path]) -> None:
        """Remove artifacts, first here, then in the mirror; RETIRED names them before that."""
        for mirror in self.mirrors:
            mirror.withdraw(folder)
        names = retired(folder) | {path.stem for path in paths}
        partial = folder / f".{RETIRED}.partial"
        partial.write_text("\n".join(sorted(names)))
        partial.rename(folder / RETIRED)
        for path in paths:
            remove(path)
        for mirror in self.mirrors:
            mirror.push(folder)

    def revive(self, folder: Path) -> None:
        """Remove this run's sub-steps in ``folder`` with retired artifacts, so that they run again.

        Sub-steps of other runs stay.
        """
        for sub_step in [sub_step for sub_step in self.used if sub_step.parent == folder]:
            if (sub_step / RETIRED).exists():
                for mirror in self.mirrors:
                    mirror.drop(sub_step)
                shutil.rmtree(sub_step)


def _in_threads(
    drop: Callable[[Path, Sequence[Path]], None], paths: Mapping[Path, Sequence[Path]], what: str
) -> None:
    """Call ``drop`` with each folder and its paths, and print how far it is if that takes long.

    Removing thousands of files waits for the disk, one after the other: threads wait together.
    """
    if len(paths) < 2:  # each iteration's own, but for the first call after a change of ``keep``
        for folder, each in paths.items():
            drop(folder, each)
        return
    pool, printed = ThreadPoolExecutor(DROPPERS), time.monotonic()
    try:
        jobs = [pool.submit(drop, folder, each) for folder, each in paths.items()]
        for number, job in enumerate(jobs, start=1):
            job.result()
            if time.monotonic() > printed + PROGRESS:
                printed = time.monotonic()
                print(f"{what}: {number:,} of {len(jobs):,}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.scratch")


# ---------------------------------------------------------------- checkpoints of a training


def newest_checkpoint(scratch: Path) -> Path | None:
    """Return the newest whole checkpoint-<steps> in a scratch folder, or None."""
    return next((folder for folder in reversed(_checkpoints(scratch)) if read(folder)), None)


def drop_old_checkpoints(scratch: Path, last: int) -> None:
    """Remove all but the newest checkpoints, the one that is not sealed yet included."""
    for folder in _checkpoints(scratch)[:-last]:
        remove(folder)


def _checkpoints(scratch: Path) -> list[Path]:
    """Return the folders checkpoint-<steps>, the oldest first."""
    return sorted(scratch.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
