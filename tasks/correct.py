"""correct: what the world's solver would have done in each state that a policy has reached.

DAgger (arXiv 1011.0686): a policy that imitates an expert's episodes alone meets, after its first
mistake, states that it has never learned from. So it acts itself, the expert says what it would
have done in each state, and the policy learns that as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from params.schema.agent import Agent
from params.schema.recipe import Recipe
from params.schema.reinforce import Rollout
from tasks.dialects import open_dialect
from tasks.dialects.contract import Dialect, Tokens
from tasks.environments.contract import OpenEnvironment, Session
from tasks.environments.record import same
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy.load_model import load_tokenizer
from tasks.questions import trace_tables
from tasks.questions.solver import GIVEN_UP, Corrections, Solver, written
from tasks.trees.tables import load_trees, read_rows, write_table
from tasks.trees.tree import TURN, Call, Node, Question, Tree, join

ROWS = 64  # episodes side by side
CORRECTED = "corrected"  # the flaw of a row: an act of the solver after acts of the policy
# How the policy acts in an episode: once, by its own probabilities.
ALONE = Rollout(
    leaves=1,
    initial=1,
    branch=0,
    marks_per_rollout=1,
    entropy_window=1,
    base_probability=0.0,
    entropy_weight=0.0,
    threshold=1.0,
    draw=False,
    temperature=1.0,
    rows=ROWS,
)
Acts = list[Call | None]  # the solver's in the state of each turn, None where it knows none


@dataclass(frozen=True)
class CorrectInputs:
    """What decides the corrections, and the traces that they are added to."""

    trees: Artifact  # of episodes of the policy, one leaf each
    traces: Artifact
    policy: Artifact  # whose tokenizer writes the solver's acts
    agent: Agent
    context: int  # most tokens of a row


def corrections_of(recipe: Recipe) -> Corrections | None:
    """Return the corrections that a recipe asks for, or None."""
    expert = recipe.prepare.expert
    return expert.corrections if isinstance(expert, Solver) else None


@substeps.recorded
def correct(step: SubStep, inputs: CorrectInputs, *, environment: OpenEnvironment) -> Record:
    """Add the solver's acts in the states of a policy's episodes; artifact ``traces``.

    A row has what the policy had seen and done up to a state, and the solver's act, which alone is
    learned. Rows of an episode have a number in the column ``episode``: they are learned from
    together, so what they share is computed once. Raises ValueError where the solver knows no act
    at all.
    """
    trees = load_trees(Path(inputs.trees.path))
    tokenizer = load_tokenizer(inputs.policy.path)
    agent = inputs.agent
    dialect = open_dialect(agent.dialect, tokenizer, agent.dialogue, environment.specs)
    before = read_rows(Path(inputs.traces.path))
    first = 1 + max((row.get("episode") or 0 for row in before), default=0)
    fresh = agent.dialogue.prompt != "growing"
    rows: list[dict[str, Any]] = []
    agreed: list[bool] = []
    for number, (tree, acts) in enumerate(
        zip(trees, solved(trees, environment, dialect), strict=True)
    ):
        for row, agrees in corrected(tree, acts, dialect, fresh=fresh):
            if len(row["tokens"]) <= inputs.context:
                rows.append({**row, "episode": first + number})
                agreed.append(agrees)
    if not rows:
        raise ValueError(
            "prepare.expert.corrections: the world's solver knows no act in any state that the "
            "policy has reached: set corrections to null, or correct the solver"
        )
    schema = trace_tables.TRACES.append(pa.field("episode", pa.int64()))
    write_table(pa.Table.from_pylist([*before, *rows], schema=schema), step.out / "traces.parquet")
    return {"metrics": {"corrections": len(rows), "agreement": sum(agreed) / len(agreed)}}


# ---------------------------------------------------------------- what the solver would have done


def solved(trees: Sequence[Tree], environment: OpenEnvironment, dialect: Dialect) -> list[Acts]:
    """Do the acts of each tree's only leaf again, and return the solver's act before each of them.

    An episode that shows something else than it has shown is left out from there.
    """
    found: list[Acts] = [[] for _ in trees]
    with environment.session() as session:
        opened = session.open([tree.question for tree in trees])
        turns = [[*_turns(tree)] for tree in trees]
        live = [
            place
            for place, (tree, (_, seen)) in enumerate(zip(trees, opened, strict=True))
            if turns[place] and _equal(tree.nodes[0], seen)
        ]
        while live:
            handles = [opened[place][0] for place in live]
            for place, act in zip(live, session.solve(handles), strict=True):
                found[place].append(act)
            live = _acted(session, [handle for handle, _ in opened], turns, found, live, dialect)
    return found


def _turns(tree: Tree) -> Iterator[Node]:
    """Yield the turns of a tree's only leaf."""
    for parts in tree.steps(tree.leaves[0]):
        if tree.nodes[parts[0]].kind == TURN:
            yield join([tree.nodes[part] for part in parts])


def _acted(
    session: Session,
    handles: Sequence[int],
    turns: Sequence[Sequence[Node]],
    found: Sequence[Acts],
    live: Sequence[int],
    dialect: Dialect,
) -> list[int]:
    """Do the newest turn of each live episode again; return the episodes that have another one."""
    moves: list[tuple[int, Call, Node]] = []
    for place in live:
        done = len(found[place])
        turn = turns[place][done - 1]
        calls = dialect.calls(turn.text)
        if done < len(turns[place]) and len(calls) == 1 and turn.observation:
            moves.append((place, calls[0], turn))
    seen = session.act([(handles[place], call) for place, call, _ in moves]) if moves else []
    return [
        place
        for (place, _, turn), observation in zip(moves, seen, strict=True)
        if turn.observation and same(turn.observation, observation) and not observation.ends
    ]


def _equal(root: Node, seen: Any) -> bool:
    return root.observation is not None and seen is not None and same(root.observation, seen)


# ---------------------------------------------------------------- rows of the table of traces


def corrected(
    tree: Tree, acts: Acts, dialect: Dialect, *, fresh: bool
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield a row for each state in which the solver knows an act, and whether it is the policy's.

    ``fresh``: each turn has a prompt of its own, and ends with the end token.
    """
    left = iter(acts)
    for context in tree.contexts(tree.leaves[0]):
        before: list[Tokens] = []
        for node in (tree.nodes[index] for index in context):
            act = next(left, None) if node.kind == TURN else None
            if act:
                turn = turn_tokens(dialect, tree.question, act, fresh=fresh)
                tokens = np.concatenate([*before, turn])
                trained = np.arange(len(tokens)) >= len(tokens) - len(turn)
                row = {
                    "question_id": tree.question.id,
                    "split": "train",
                    "kind": tree.question.kind,
                    "flaw": CORRECTED,
                    "text": written(act),
                    "tokens": tokens,
                    "trained": trained,
                }
                yield row, [*dialect.calls(node.text)] == [*dialect.calls(written(act))]
            before.append(node.tokens)


def turn_tokens(dialect: Dialect, question: Question, act: Call, *, fresh: bool) -> Tokens:
    """Return the tokens of an act as a turn of a trace; ``fresh``: with the end token."""
    parts = [(written(act), True)]
    if not fresh:
        parts += [("", False), (GIVEN_UP, True)]
    tokens, trained = dialect.trace(question, parts)[0]
    first = int(np.argmax(trained))
    end = first + int(np.argmin([*trained[first:], False]))
    return tokens[first:end]
