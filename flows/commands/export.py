"""Export what a run has made, for other programs: trajectories as messages, the policy with a card.

``beamline export RECIPE`` writes below ``exports/<recipe>``:

  trajectories.jsonl  a line for each trajectory of training: its messages, the tools, its reward,
                      and where it is from; ``--split test``: evaluation.jsonl, of the evaluation
  policy/             the trained policy, with a model card (README.md)

Nothing is computed anew. Trees are read one after the other, so memory does not grow with the run.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq

from flows import end_import_phase, exit_fast
from flows.analysis import card, chat, frames, reading, trajectories
from flows.analysis.trajectories import ScoredTree
from flows.host import files
from flows.tracking.progress import Progress
from params.given_numbers import finite, from_zero
from params.run_folders import RunFolders
from tasks import recipes
from tasks.rewards.contract import was_scored
from tasks.trees.tables import load_questions
from tasks.trees.words import printable

HERE = Path()
FILES = {"train": "trajectories", "test": "evaluation"}  # split -> name of the file
OF_LEAF = (  # columns of the table of rewards (tasks/reward.py)
    *("leaf", "reward", "success", "score", "answer", "outcome", "faults", "tool_errors"),
    *("sampled_tokens", "response_tokens"),
)


def write_trajectories(name: str, args: argparse.Namespace, target: Path) -> None:
    """Write the trajectories of a recipe's run that ``args`` selects; print how many.

    Raises ValueError where the run is not there, or ``args.iterations`` are none of its.
    """
    bounds = args.iterations
    iterations = range(bounds[0], bounds[1] + 1) if bounds else None
    scored_trees = (
        trajectories.training(name, iterations, HERE)
        if args.split == "train"
        else trajectories.evaluation(name, HERE)
    )
    spoken = speaker(name, args.arguments == "object")
    told = chat.tools(spoken)
    count, progress = 0, Progress("trajectories", rows_of(name, args.split, iterations))
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(target) as partial, writer(partial, args.gzip) as out:
        for scored in scored_trees:
            for row, messages in zip(
                scored.rewards, chat.conversations(scored.tree, spoken), strict=True
            ):
                if args.min_reward is None or row["reward"] >= args.min_reward:
                    line = {"messages": messages, "tools": told, **facts(scored, row)}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                    count += 1
            progress.advance(len(scored.rewards))
    progress.close()
    print(f"{target}: {count} of {progress.done} trajectories")


def facts(scored: ScoredTree, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a trajectory is from, and how it was judged; null where it was not scored."""
    question = scored.tree.question
    question_columns = {
        "question": question.id,
        "kind": question.kind,
        "answers": list(question.answers),
    }
    judged = {column: row[column] for column in OF_LEAF}
    if not was_scored(row["breakdown"]):
        judged |= {"success": None, "score": None}
    return {**question_columns, **scored.place, **judged}


def speaker(name: str, objects: bool) -> chat.Chat:
    """Return what reads the turns of a recipe's policy."""
    from tasks.policy.load_model import load_tokenizer  # with torch: the policy's card needs none

    recipe = recipes.load(name, Path("params"))
    specs = reading.specs_of(name, HERE)
    dialect = reading.open_reader(name, HERE, specs)
    tokenizer = load_tokenizer(str(RunFolders(name).trained))
    return chat.Chat(dialect, specs, recipe.dialogue.system, tokenizer, objects)


def rows_of(name: str, split: str, iterations: Collection[int] | None) -> int:
    """Count the trajectories of a split."""
    if split == "test":
        return len(frames.answers(name))
    file = RunFolders(name).trees / "rewards.parquet"
    if not file.is_file():
        raise reading.missing(name, file)
    numbers = pq.read_table(file, columns=["iteration"])["iteration"]
    return sum(iterations is None or number in iterations for number in numbers.to_pylist())


@contextmanager
def writer(file: Path, compressed: bool) -> Iterator[TextIO]:
    """Open a new file of text. Compressed files have no time in them: equal texts stay equal."""
    with ExitStack() as stack:
        raw: Any = stack.enter_context(file.open("wb"))
        if compressed:
            raw = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        yield stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline="\n"))


def write_policy(name: str, license: str | None, target: Path) -> None:
    """Copy the trained policy to a folder, with its card. Weights are hard links where possible.

    Raises ValueError where the run is not there, or is not the one in dvc.lock.
    """
    text = card.written(name, license, _loop(name))
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(target) as partial:
        shutil.copytree(RunFolders(name).trained, partial, copy_function=linked)
        (partial / "README.md").write_text(text)
        files.remove(target)
    print(f"{target}: the trained policy and its card")


def _loop(name: str) -> str:
    """Return how the policy of a recipe is asked, with a question of its test split."""
    from flows.analysis import card_code

    recipe, file = recipes.load(name, Path("params")), RunFolders(name).split("test")
    if not file.is_file():
        return ""
    specs, questions = reading.specs_of(name, HERE), load_questions(file)
    return card_code.loop(recipe, specs, questions[0].text)


def linked(source: str, target: str) -> None:
    """Link a file of weights; copy another one, or one on another disk."""
    if source.endswith(".safetensors"):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="beamline export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--split", choices=[*FILES], default="train", help="of the trajectories")
    parser.add_argument(
        "--iterations", type=from_zero, nargs=2, metavar=("FIRST", "LAST"), help="else all"
    )
    parser.add_argument("--min-reward", type=finite, metavar="X", help="leave out those below")
    parser.add_argument(
        "--arguments",
        choices=("text", "object"),
        default="text",
        help="of calls: the text of a JSON object (OpenAI), or the object (chat templates)",
    )
    parser.add_argument("--gzip", action="store_true", help="write trajectories.jsonl.gz")
    parser.add_argument("--license", metavar="ID", help="of the policy, for the card")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="else exports/<recipe>")
    args = parser.parse_args(arguments)
    if args.iterations and args.iterations[0] > args.iterations[1]:
        parser.error("--iterations: give the first one, then the last one")
    return args


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing to export."""
    args = parsed(arguments)
    folder = args.out or Path("exports", args.recipe)
    file = f"{FILES[args.split]}.jsonl{'.gz' if args.gzip else ''}"
    try:
        if args.split == "test" and args.iterations:
            raise ValueError("--iterations chooses among trajectories of training: leave it out")
        write_policy(args.recipe, args.license, folder / "policy")
        write_trajectories(args.recipe, args, folder / file)
    except (ValueError, OSError) as error:
        print(f"export: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
