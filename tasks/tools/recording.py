"""Results of tools that are not repeatable, recorded with the trees, and taken from there again.

Within one sub-step (the rollout of a batch), equal calls of such a tool have one result, the first.
So a record is a function: tool, argument -> observation. It is kept in two places:

- ``calls.parquet`` in the sub-step's artifact, sorted, when the sub-step ends;
- ``calls.jsonl`` in its scratch folder, as the results come, so that a rollout that was killed sees
  the same results again.

A run whose environment names a folder of recorded calls (BEAMLINE_CALLS) is a replay: it asks no
such tool. A call that is not in the record is an observation UNAVAILABLE, and is counted.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.tools.contract import OpenTool
from tasks.trees.outcomes import INFRASTRUCTURE, Outcome
from tasks.trees.tables import write_table
from tasks.trees.tree import Call, Observation, ToolSpec

REPLAYED = "BEAMLINE_CALLS"  # environment variable: folder with the recorded calls of a run
CALLS = "calls.parquet"
SCRATCH = "calls.jsonl"
SPECS = "specs"  # in place of a tool's name, in the table: what a tool has told of itself
SECOND = "\n(asked once more)"  # ends the argument of a second attempt, in the table
NOT_RECORDED = "this call is not recorded, and a replay asks no server"
CALL_TABLE = pa.schema(
    {"tool": pa.string(), "argument": pa.string(), "outcome": pa.string(), "text": pa.string()}
)
PUBLISHED_TABLE = pa.schema(
    [("stage", pa.string()), ("iteration", pa.int32()), ("attempt", pa.int32()), *CALL_TABLE]
)

Results = dict[tuple[str, str], Observation]  # tool, argument -> what it answered


@dataclass(frozen=True)
class Origin:
    """The sub-step that calls were made in: "reinforce", "reward_model", "evaluate/<agent>"."""

    stage: str
    iteration: int
    attempt: int = 0  # batches of this iteration before this one


@dataclass
class Recorder:
    """The results of one sub-step so far. Any number of threads may use it.

    ``tools``: those that the sub-step calls, in place of the tools that were opened. ``missed``:
    calls of a replay that were not recorded.
    """

    results: Results
    replays: bool
    scratch: Path | None
    tools: Mapping[str, OpenTool] = field(default_factory=dict)
    missed: set[tuple[str, str]] = field(default_factory=set)
    again: bool = False  # whether tasks that the infrastructure failed are asked once more
    episodes: Counter[str] = field(default_factory=Counter)  # of each question, in a world
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, tool: OpenTool, calls: Sequence[Call]) -> list[Observation]:
        """Answer calls from the record; run those that are not in it, and record them."""
        with self.lock:
            keys = [self._key(call) for call in calls]
            new = {
                key: call for key, call in zip(keys, calls, strict=True) if key not in self.results
            }
        if new and self.replays:
            self._miss(new)
        elif new:
            answers = tool.run(list(new.values()))
            self._record(dict(zip(new, answers, strict=True)))
        return [self.results[key] for key in keys]

    def ask_again(self) -> None:
        """From now on, ask once more for results that the infrastructure failed to give."""
        self.again = True

    def _key(self, call: Call) -> tuple[str, str]:
        """Return the key of a call; a second attempt at one that failed has a key of its own."""
        tool, argument = call.tool, whole(call.argument)
        first = self.results.get((tool, argument))
        failed = first is not None and first.outcome in INFRASTRUCTURE
        return tool, argument + SECOND if self.again and failed else argument

    def _miss(self, new: Mapping[tuple[str, str], Call]) -> None:
        with self.lock:
            if not self.missed:
                tool, argument = next(iter(new))
                print(f"replay: {tool}({argument[:80]!r}) {NOT_RECORDED}", flush=True)
            self.missed |= set(new)
            for key in new:
                self.results[key] = Observation(Outcome.UNAVAILABLE, NOT_RECORDED)

    def _record(self, observations: Mapping[tuple[str, str], Observation]) -> None:
        """Add results. Where another thread was first with an equal call, its result counts."""
        with self.lock:
            fresh = {
                key: Observation(str(seen.outcome), whole(seen.text))
                for key, seen in observations.items()
                if key not in self.results
            }
            self.results.update(fresh)
            if self.scratch:
                lines = [json.dumps([*key, o.outcome, o.text]) + "\n" for key, o in fresh.items()]
                with self.scratch.open("a") as file:
                    file.write("".join(lines))

    def save_calls(self, folder: Path) -> None:
        """Write the record as ``calls.parquet`` into ``folder``: equal records give equal bytes.

        The calls of a replay that were missing are not part of it.
        """
        rows = [
            dict(zip(CALL_TABLE.names, (*key, seen.outcome, seen.text), strict=True))
            for key, seen in sorted(self.results.items(), key=lambda entry: entry[0])
            if key not in self.missed
        ]
        write_table(pa.Table.from_pylist(rows, schema=CALL_TABLE), folder / CALLS)


@contextmanager
def open_recorded(
    tools: Mapping[str, OpenTool],
    repeatable: Mapping[str, bool],
    scratch: Path | None,
    recorded: Results | None = None,
) -> Iterator[Recorder]:
    """Yield a recorder whose ``tools`` stand in for ``tools`` during one sub-step.

    ``repeatable``: for each name, whether the tool is; one that is stays as it is. ``scratch``: a
    folder that outlives a kill. ``recorded``: the results of this sub-step to replay, None where
    the tools are asked.
    """
    file = scratch / SCRATCH if scratch else None
    if recorded is not None:
        recorder = Recorder(dict(recorded), True, None)
    else:
        recorder = Recorder(_resumed(file) if file else {}, False, file)
        for name, tool in tools.items():
            recorder.results |= {} if repeatable[name] else _told(name, tool)
    recorder.tools = {
        name: tool if repeatable[name] else replace(tool, run=_recording(recorder, tool))
        for name, tool in tools.items()
    }
    yield recorder
    if recorder.missed:
        print(f"replay: {len(recorder.missed)} different calls were not recorded", flush=True)


def _told(name: str, tool: OpenTool) -> Results:
    """Return the entry of what an agent was told of a tool; none where there was nothing."""
    specs = [vars(spec) for spec in tool.specs]
    return {(SPECS, name): Observation("", whole(json.dumps(specs)))} if specs else {}


def _recording(recorder: Recorder, tool: OpenTool) -> Any:
    return lambda calls: recorder.run(tool, calls)


def _resumed(file: Path) -> Results:
    """Read what a killed sub-step has recorded, and cut off a line that it left unfinished."""
    if not file.exists():
        return {}
    content = file.read_bytes()
    good = content[: content.rfind(b"\n") + 1]
    if good != content:
        with file.open("r+b") as opened:
            opened.truncate(len(good))
    rows = [json.loads(line) for line in good.splitlines()]
    return {(tool, argument): Observation(outcome, text) for tool, argument, outcome, text in rows}


def whole(text: str) -> str:
    """Return a text that a table can hold: halves of characters become question marks."""
    return text.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------- tables of a run


def replay_folder() -> Path | None:
    """Return the folder of recorded calls that this process replays, or None."""
    folder = os.environ.get(REPLAYED)
    return Path(folder) if folder else None


def load_calls(file: Path) -> Results:
    """Read the table of one sub-step, as ``Recorder.save_calls`` wrote it."""
    return _results(pq.read_table(file).to_pylist())


def replayed_calls(origin: Origin) -> Results | None:
    """Return what this process replays for a sub-step; None where it is no replay.

    Reads every published table below the folder that BEAMLINE_CALLS names. A sub-step without rows
    has no recorded calls. Raises ValueError where the folder does not exist.
    """
    folder = replay_folder()
    if folder is None:
        return None
    if not folder.is_dir():
        raise ValueError(f"{REPLAYED} names {folder}, which is no folder: correct or unset it")
    filters = [(name, "=", value) for name, value in vars(origin).items()]
    rows = [
        row
        for file in sorted(folder.rglob(CALLS))
        for row in pq.read_table(file, filters=filters).select(CALL_TABLE.names).to_pylist()
    ]
    return _results(rows)


def replayed_specs(name: str) -> list[ToolSpec] | None:
    """Return what a tool of the recipe told of itself in the run that is replayed.

    None where this process is no replay, or nothing is recorded of the tool.
    """
    folder = replay_folder()
    filters = [("tool", "=", SPECS), ("argument", "=", name)]
    for file in sorted(folder.rglob(CALLS)) if folder else ():
        for row in pq.read_table(file, filters=filters).to_pylist():
            return [ToolSpec(**told) for told in json.loads(row["text"])]
    return None


def publish_calls(tables: Mapping[Origin, Path], file: Path) -> None:
    """Join the tables of sub-steps to one, with columns that say whose calls they are.

    ``file`` must be called ``calls.parquet``, so that a replay finds it.
    """
    rows = [
        vars(origin) | row
        for origin, table in tables.items()
        for row in pq.read_table(table).to_pylist()
    ]
    write_table(pa.Table.from_pylist(rows, schema=PUBLISHED_TABLE), file)


def _results(rows: Sequence[Mapping[str, str]]) -> Results:
    return {
        (row["tool"], row["argument"]): Observation(row["outcome"], row["text"]) for row in rows
    }
