"""A panel: the fixed tasks that an evaluation asks, in a fixed order, with a digest of all of it.

A panel's file is JSON: ``split`` and ``source`` of its tasks, ``tasks`` (for each its id, its kind,
the seed of its episode where it has one, and the digest of its whole content), and ``digest``, that
of the other three. A digest is the SHA-256 of JSON in UTF-8 with sorted keys and without spaces;
the content of a task is its fields as a Question, without empty ones. Equal digests mean the same
tasks in the same order, whoever asks them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.trees.tree import Question

SHORT = 12  # characters of a digest in tables
FORM = {"split": str, "source": str, "tasks": list, "digest": str}  # keys of a file
TASK = {"id": str, "kind": str, "digest": str}  # keys of a task; "seed" where it has one
METADATA = b"panel"  # key in the metadata of a table of answers; the value is a summary

Task = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """Tasks in the order in which they are asked."""

    split: str
    source: str  # of the split's questions, such as "computation"
    tasks: tuple[Task, ...]

    @property
    def digest(self) -> str:
        """Return the digest of the panel. Hexadecimal, 64 letters."""
        return _digest({"split": self.split, "source": self.source, "tasks": self.tasks})

    def part(self, first: int, size: int) -> Panel:
        """Return a slice, with a digest of its own: at most ``size`` tasks from ``first`` on."""
        return Panel(self.split, self.source, self.tasks[first : first + size])


def panel_of(questions: Sequence[Question], split: str, source: str, seed: int) -> Panel:
    """Return the panel of all questions of a split, in an order that the seed decides."""
    order = list(questions)
    random.Random(f"{seed}/pass 0").shuffle(order)
    return in_order(order, split, source)


def in_order(questions: Sequence[Question], split: str, source: str) -> Panel:
    """Return the panel of questions in the order that they have."""
    return Panel(split, source, tuple(_task(question) for question in questions))


def _task(question: Question) -> Task:
    data = json.loads(question.data) if question.data else {}
    seed = {"seed": data["seed"]} if "seed" in data else {}
    content = {name: value for name, value in asdict(question).items() if value}
    return {"id": question.id, "kind": question.kind, **seed, "digest": _digest(content)}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def summary(whole: Panel, first: int, size: int) -> dict[str, Any]:
    """Return what results say of the slice that was asked: its digest, and what it is a part of."""
    part = whole.part(first, size)
    return {
        "digest": part.digest,
        "split": part.split,
        "source": part.source,
        "tasks": len(part.tasks),
        "first": first,
        "of": {"digest": whole.digest, "tasks": len(whole.tasks)},
    }


def sentence(summary: Mapping[str, Any]) -> str:
    """Return a line for tables: "Panel 1f2e3d4c5b6a: 90 tasks of the split test (computation)"."""
    whole, first, count = summary["of"], summary["first"], summary["tasks"]
    line = (
        f"Panel {summary['digest'][:SHORT]}: {count:,} tasks of the split {summary['split']} "
        f"({summary['source']})"
    )
    if count == whole["tasks"]:
        return line
    places = f"{first + 1:,} to {first + count:,} of the {whole['tasks']:,}"
    return f"{line}, {places} of the panel {whole['digest'][:SHORT]}"


def of_answers(file: Path) -> dict[str, Any] | None:
    """Return the summary of the panel that a table of answers names, or None."""
    said = (pq.read_schema(file).metadata or {}).get(METADATA)
    return dict(json.loads(said)) if said else None


# ---------------------------------------------------------------- files


def save(panel: Panel, file: Path) -> None:
    """Write a panel, a task a line."""
    head = {"split": panel.split, "source": panel.source, "digest": panel.digest}
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    tasks = ",\n".join(f"  {json.dumps(task, ensure_ascii=False)}" for task in panel.tasks)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{text},\n "tasks": [\n{tasks}\n ]\n}}\n', encoding="utf-8")


def load(file: Path) -> Panel:
    """Read a panel. Raises ValueError with all faults of the file, one line each."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is no panel: {error}: take the file data/<recipe>/panels/test.json of a run"
        ) from None
    if faults := _form_faults(values, FORM, "") or _task_faults(values["tasks"]):
        raise ValueError("\n".join(f"{file}: {fault}" for fault in faults))
    panel = Panel(values["split"], values["source"], tuple(values["tasks"]))
    if panel.digest != values["digest"]:
        raise ValueError(
            f"{file}: 'digest' is {values['digest']}, and that of its content is {panel.digest}: "
            "it was changed after it was written; take the file of the run again"
        )
    return panel


def _form_faults(values: Any, form: Mapping[str, type], where: str) -> list[str]:
    if not isinstance(values, dict):
        return [f"{where}{values!r:.60} is no JSON object"]
    return [
        f"{where}'{key}' is {values.get(key)!r:.60}: write a {kind.__name__}"
        for key, kind in form.items()
        if not isinstance(values.get(key), kind)
    ]


def _task_faults(tasks: Sequence[Any]) -> list[str]:
    """Return what is wrong with the tasks: their form, none at all, and ids that come twice."""
    faults = [
        fault
        for number, task in enumerate(tasks)
        for fault in _form_faults(task, TASK, f"task {number}: ")
    ]
    if faults or not tasks:
        return faults or ["'tasks' is empty: a panel has one at least"]
    twice = [name for name, count in Counter(task["id"] for task in tasks).items() if count > 1]
    return [f"the id {name} comes twice: remove one of the tasks" for name in twice]


# ---------------------------------------------------------------- the questions of a panel


def questions_of(panel: Panel, questions: Sequence[Question], where: str) -> list[Question]:
    """Return the questions of a panel in its order.

    ``questions`` are those of a split. Raises ValueError, which begins with ``where``, with all
    tasks that the split lacks or has with another content.
    """
    known = {question.id: question for question in questions}
    lacking = [task["id"] for task in panel.tasks if task["id"] not in known]
    pairs = [(task, known[task["id"]]) for task in panel.tasks if task["id"] in known]
    changed = [question.id for task, question in pairs if dict(task) != _task(question)]
    faults = [
        f"{len(names)} {words} {', '.join(names)}"
        for words, names in (
            ("missing here:", lacking),
            ("of another content here:", changed),
        )
        if names
    ]
    if faults:
        raise ValueError(
            f"{where}, panel {panel.digest[:SHORT]}: {'; '.join(faults)}. Make the same questions "
            "(prepare.questions, and the seed where they are generated), or name another panel"
        )
    return [question for _, question in pairs]
