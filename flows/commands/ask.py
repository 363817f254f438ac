"""Talk to a trained agent in the terminal: questions of one's own, or an episode of its world.

``beamline ask RECIPE`` answers each question that is typed, with the agent's tools, turn by
turn; an empty line or Ctrl-D ends. Questions may also come from a pipe, one a line. ``--question
TEXT`` asks one. Where the recipe has a world, or with ``--task``, a task is drawn or chosen from a
split of the recipe's questions. Everything is as in the evaluation, the seeds included: a task of
the test split is answered as it was there.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows import end_import_phase, exit_fast
from flows.host.transcript import ENDINGS, Transcript
from flows.runs.without_run import policy_folder, remedy
from params.given_numbers import above_zero, from_zero
from params.run_folders import RunFolders
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.dialects import open_dialect
from tasks.dialects.contract import Dialect
from tasks.engines import ENGINES, Engine
from tasks.ledger.artifacts import Artifact
from tasks.recipes.opening import open_recipe
from tasks.rollouts.watched import WatchedEngine, watched
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_questions
from tasks.trees.tree import Question, Tree, program_said, sampled
from tasks.trees.words import printable

if TYPE_CHECKING:
    from tasks.programs.opening import OpenProgram
    from tasks.rollouts.rounds import (
        Setting,  # with torch: it waits until there is something to ask
    )

INTERRUPTED = 130  # the exit status of a shell after SIGINT
SPLITS = ("train", "validation", "test")
PROMPT = "\nyour question (an empty line ends): "
NEXT = "\nnumber of another task (an empty line ends): "


@dataclass(frozen=True)
class ReadyAgent:
    """An agent that is ready."""

    name: str  # of the recipe
    recipe: Recipe
    setting: Setting
    engine: Engine
    transcript: Transcript
    program: OpenProgram | None

    def answer(self, question: Question) -> None:
        """Let the agent answer a question, or act in an episode, and print how it ends."""
        from tasks.rollouts.rounds import grow

        self.transcript.block("question", question.text)
        asked = ([question], self.engine, self.setting, self.recipe.evaluate.top_p)
        if self.program is None:
            (tree,) = grow(*asked)
        else:
            from tasks.programs.program_rollout import grow_programs

            (tree,), _ = grow_programs(*asked, self.program, self.recipe.dialect)
        self.transcript.block(*ending(tree, self.setting.dialect))
        if question.answers:
            self.transcript.block("accepted", " or ".join(question.answers))


def ending(tree: Tree, dialect: Dialect) -> tuple[str, str]:
    """Return label and text of how a trajectory has ended: the answer, or why there is none."""
    (trajectory,) = tree.trajectories()
    turns = [turn.text for turn in sampled(trajectory)]
    outcome = trajectory[-1].outcome
    if (said := program_said(trajectory)) is not None:
        return ("end", said["fault"]) if "fault" in said else ("answer", str(said["answer"]))
    if outcome == Outcome.ANSWER and (answer := dialect.answer(turns)) is not None:
        return "answer", answer
    rewards = [turn.observation.reward for turn in sampled(trajectory) if turn.observation]
    earned = f"; rewards add up to {sum(rewards):g} in {len(rewards)} acts" if rewards else ""
    return "end", ENDINGS.get(outcome, str(outcome)) + earned


@contextmanager
def opened(name: str, recipe: Recipe, policy: Path, seed: int, heat: float) -> Iterator[ReadyAgent]:
    """Load an agent with its tools and its world; they stay ready for the length of the block.

    Raises ValueError or RuntimeError, with the remedy, for what is missing.
    """
    agent = recipes.agent_of(recipe)
    if missing := ENGINES[agent.engine.kind].installed(agent.engine):
        raise ValueError(f"params/{name}.yaml: 'engine.kind' = {agent.engine.kind!r}, {missing}")
    from tasks.policy.machine import use_machine
    from tasks.policy.resident import POLICIES
    from tasks.rollouts.rounds import Setting

    use_machine(recipe.machine)
    with open_recipe(recipe, RunFolders(name).corpus) as environment:
        actor = POLICIES.load_learner(policy, recipe.machine)
        transcript = Transcript.to_terminal(actor.tokenizer)
        sampling = ENGINES[agent.engine.kind].open(
            actor, Artifact.at(policy), agent.engine, recipe.machine, 1
        )
        setting = Setting(
            tokenizer=actor.tokenizer,
            dialogue=recipe.dialogue,
            rollout=recipe.evaluation_budget(samples=1).model_copy(
                update={"temperature": heat, "rows": 1}
            ),
            dialect=open_dialect(
                recipe.dialect, actor.tokenizer, recipe.dialogue, environment.specs
            ),
            environment=watched(environment, transcript),
            seed=f"{seed}/0",
        )
        engine = WatchedEngine(sampling, transcript)
        yield ReadyAgent(name, recipe, setting, engine, transcript, environment.program)
        sampling.release()


def task(name: str, split: str, number: int | None, seed: int) -> Question:
    """Return a task of a split by its number, or one drawn by the seed; prints which.

    Raises ValueError for a split that is not there, and a number outside it.
    """
    file = RunFolders(name).split(split)
    if not file.is_file():
        raise ValueError(f"{file} does not exist: {remedy(name)}")
    tasks = load_questions(file)
    index = random.Random(f"{seed}/ask").randrange(len(tasks)) if number is None else number
    if not 0 <= index < len(tasks):
        raise ValueError(f"--task {index}: {split} has the tasks 0 to {len(tasks) - 1}")
    print(f"task {index} of {split}, {printable(tasks[index].id)}", flush=True)
    return tasks[index]


def own_question(text: str) -> Question:
    """Return a question of one's own, which has no accepted answers."""
    readable = text.encode(errors="replace").decode().strip()  # a pipe may hold no UTF-8
    if not readable:
        raise ValueError("the question is empty: write one")
    return Question("ask", "ask", readable, ())


# ---------------------------------------------------------------- command line


def lines(prompt: str) -> Iterator[str]:
    """Yield what is typed, or piped, line by line, until an empty line, Ctrl-D or Ctrl-C."""
    while True:
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            return
        yield line


def converse(agent: ReadyAgent, args: argparse.Namespace) -> int:
    """Ask what the command line or the input says; return the exit status."""
    if args.question is not None:
        agent.answer(own_question(args.question))
        return 0
    if args.task is not None or agent.recipe.environment:
        agent.answer(task(agent.name, args.split, args.task, args.seed))
        if args.task is not None or not sys.stdin.isatty():
            return 0
        numbered = partial(task, agent.name, args.split, seed=args.seed)
        return _all(lambda line: numbered(number=_number(line)), agent, NEXT)
    return _all(own_question, agent, PROMPT)


def _number(line: str) -> int:
    """Read the number of a task. Raises ValueError for anything else."""
    if not line.strip().isdecimal():
        raise ValueError(f"{line.strip()!r} is no number of a task")
    return int(line)


def _all(question_of: Callable[[str], Question], agent: ReadyAgent, prompt: str) -> int:
    """Answer what is typed; what cannot be asked is explained. 1: something could not be."""
    status = 0
    for line in lines(prompt):
        try:
            agent.answer(question_of(line))
        except ValueError as error:
            print(f"ask: {printable(str(error))}", file=sys.stderr)
            status = 1
    return 0 if sys.stdin.isatty() else status


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="beamline ask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--policy", type=Path, metavar="FOLDER", help="else the trained one")
    parser.add_argument("--question", metavar="TEXT", help="ask this, and end")
    parser.add_argument("--task", type=from_zero, metavar="N", help="of the split, from 0")
    parser.add_argument("--split", choices=SPLITS, default="test", help="of the tasks")
    parser.add_argument("--seed", type=int, help="of the sampling; else the recipe's")
    parser.add_argument("--temperature", type=above_zero, help="else that of the evaluation")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: nothing can be asked."""
    args = parsed(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        recipe = recipes.load(args.recipe, Path("params"))
        if args.question is not None and (recipe.environment or args.task is not None):
            raise ValueError("--question asks an agent without a world; choose a task with --task")
        args.seed = recipe.seed if args.seed is None else args.seed
        heat = args.temperature or recipe.evaluate.temperature
        folder = policy_folder(args.recipe, args.policy)
        print(f"asking {folder}", flush=True)
        with opened(args.recipe, recipe, folder, args.seed, heat) as agent:
            return converse(agent, args)
    except KeyboardInterrupt:
        print(flush=True)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"ask: {printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
