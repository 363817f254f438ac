"""Check that each gold answer of a set goes through a box and back.

    python -m benchmarks.gold_answers WHAT...

WHAT is a file or a folder of files <set>/<split>.<suffix>, laid out as data/sources is, or a split
such as gsm8k/test, which is read from data/sources or from the hub. Each accepted form of each gold
answer is written as an agent writes its answer, read from there as a reward reads it, and scored by
the set's scorer: it must score 1. One that does not is shown with its cause, if the gate of
questions has one, since ``prepare`` then refuses or drops the record. Ends with 1 if an answer is
lost without a cause, or a record cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from params.schema.benchmarks import Benchmark, load_benchmarks
from tasks.gates.answers import answer_problem
from tasks.questions.benchmarks import Sets, locate
from tasks.questions.entries import read_entries
from tasks.questions.faults import Fault, summary
from tasks.questions.record_files import FORMATS, format_of
from tasks.scorers import open_scorers
from tasks.scorers.contract import Scorer
from tasks.trees.dialogue import final_answer
from tasks.trees.tree import Question

RESPONSE = "<think>That is it.</think><answer>The answer is \\boxed{{{}}}.</answer>"
SHOWN = 80  # characters of an answer
# Files whose records are not those of their folder's row -> keys in which they differ from it.
OTHERS: Mapping[str, Mapping[str, str | None]] = {
    "gsm8k/example_model_solutions": {
        "answer": "ground_truth",
        "answer_after": "A: ",
        "solution": None,
    }
}


@dataclass(frozen=True)
class Lost:
    """A gold answer that does not score 1; the cause is "" where the gate of questions has none."""

    question: str  # its id
    gold: str
    read: str | None  # what was read from the response
    cause: str


@dataclass(frozen=True)
class Checked:
    """The gold answers of a file: how many, which are lost, and the records that are unreadable."""

    golds: int
    lost: list[Lost]
    faults: list[Fault]

    @property
    def sound(self) -> bool:
        """Return whether all records were read, and each lost answer has a cause."""
        return not self.faults and all(each.cause for each in self.lost)


def lost_answers(question: Question, score: Scorer) -> Iterator[Lost]:
    """Yield the accepted forms of a question that do not score 1 as an agent's answer."""
    for gold in question.answers:
        read = final_answer(RESPONSE.format(gold))
        if read is None or score(read, question.answers)["score"] != 1:
            problem = answer_problem(gold)
            yield Lost(question.id, gold, read, problem.words if problem else "")


def check(file: Path, settings: Benchmark, name: str) -> Checked:
    """Check the gold answers of a file of a set. Raises ValueError where it cannot be read."""
    loaded = read_entries(file, settings, name, f"{name}-{_split(file)}", lambda question: ())
    questions = [entry.question for entry in loaded.entries]
    with open_scorers(settings.scorers) as scorers:
        lost = [
            each
            for question in questions
            for each in lost_answers(question, scorers[question.scorer].compare)
        ]
    return Checked(sum(len(each.answers) for each in questions), lost, loaded.faults)


def settings_of(file: Path, sets: Sets) -> Benchmark | None:
    """Return the row by which a file is read, which its folder names; None for no row."""
    name = file.parent.name
    if name not in sets:
        return None
    changes = OTHERS.get(f"{name}/{_split(file)}", {})
    return Benchmark.model_validate({**dict(sets[name]), **changes})


def files_below(path: Path) -> list[Path]:
    """Return the file itself, or all files below a folder that are in a format of ours."""
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.rglob("*") if each.is_file() and format_of(each) in FORMATS)


def _split(file: Path) -> str:
    return file.name.partition(".")[0]


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the arguments name, print a line for each file, and return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", nargs="+", help="a file, a folder, or a split such as gsm8k/test")
    sets = load_benchmarks()
    sound = True
    for what in parser.parse_args(arguments).what:
        try:
            for file, name, settings in _named(what, sets):
                checked = check(file, settings, name)
                sound &= checked.sound
                print(_report(file, settings, checked))
        except ValueError as error:
            sound = False
            print(error, file=sys.stderr)
    return 0 if sound else 1


def _named(what: str, sets: Sets) -> list[tuple[Path, str, Benchmark]]:
    """Return the files that an argument names, with the name and the row of their sets.

    Raises ValueError where there is none.
    """
    path, name = Path(what), what.partition("/")[0]
    if not path.exists() and name in sets:
        return [(locate(what, sets), name, sets[name])]
    files = {file: settings_of(file, sets) for file in files_below(path)}
    for file in (file for file, settings in files.items() if settings is None):
        print(f"{file}: not checked, params/benchmarks.yaml has no row '{file.parent.name}'")
    named_files = [
        (file, file.parent.name, settings) for file, settings in files.items() if settings
    ]
    if not named_files:
        raise ValueError(
            f"{what} names no file of a set: give a file or a folder, laid out as "
            f"<set>/<split>.jsonl, or <set>/<split>, with a set of {sorted(sets)}"
        )
    return named_files


def _report(file: Path, settings: Benchmark, checked: Checked) -> str:
    """Return a line with the counts of a file, and one for each lost answer."""
    scorers = ", ".join(dict.fromkeys(settings.scorers))
    back = checked.golds - len(checked.lost)
    lines = [f"{file}: {checked.golds:,} gold answers, {back:,} come back and score 1 ({scorers})"]
    for each in checked.lost:
        cause = each.cause or f"without a cause; read: {each.read!r:.{SHOWN}}"
        lines.append(f"- {each.question}: {each.gold!r:.{SHOWN}} {cause}")
    if checked.faults:
        lines.append(summary(checked.faults))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
