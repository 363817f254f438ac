"""Score trajectories: what each part of a recipe's reward gives to each leaf of the trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from params.schema.reinforce import RewardPart
from tasks.dialects.contract import calls_in
from tasks.dialects.tags import TagsReader
from tasks.extensions.checks import number_fault, within
from tasks.rewards.contract import NOT_ASKED, Ending, Part, was_scored
from tasks.rewards.judging import Breakdowns, OpenJudge
from tasks.rewards.reward_parts import FORMAT, open_parts
from tasks.scorers import MOST_TIMEOUTS, lenient, open_scorers, scorer_fault
from tasks.scorers import judge as judge_scorer
from tasks.scorers.contract import ScorerKind
from tasks.scorers.maths import OVER_BUDGET, WORKERS
from tasks.scorers.maths_worker import TIMEOUT
from tasks.trees.dialogue import RESULT_TAGS, boxed
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import (
    TURN,
    Call,
    Node,
    Observation,
    Question,
    Tree,
    acts,
    program_said,
    response_tokens,
    sampled,
)

TAGS = TagsReader()  # of the usual tools
HIDDEN = {"score": 0.0, NOT_ASKED: 1.0}
WORLD = "world"  # in place of a scorer, where a world's observations are the score

Breakdown = dict[str | None, dict[str, float]]  # by answer
Estimates = Mapping[tuple[str, int], float]  # by question and leaf


class Reader(Protocol):
    """What scoring asks of a dialect (tasks/dialects/contract.py)."""

    def answer(self, turns: Sequence[str]) -> str | None:
        """Return the final answer in the texts of an agent's turns, or None."""

    def faults(self, turns: Sequence[str], outcome: str) -> list[str]:
        """Return the names of what is wrong with the form of a response; [] for nothing."""

    def calls(self, turn: str) -> tuple[Call, ...]:
        """Return the tool calls in the text of a turn."""


def score_trees(
    trees: Sequence[Tree],
    parts: Sequence[RewardPart],
    most_timeouts: int = MOST_TIMEOUTS,
    reader: Reader = TAGS,
    judge: OpenJudge | None = None,
    estimates: Estimates | None = None,
    hidden: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return a row of tasks/reward.py's table for each leaf, without the length penalty.

    A row has the reward's ``parts``, too: their values by label, which add up to the reward. No
    tree changes the scores of another. Equal answers of a tree are compared once. After
    ``most_timeouts`` different answers of a tree, in the order of its leaves, with which the
    mathematics verifier ran out of processor time, further ones that only it could compare score 0,
    as "over_budget". A tree of one leaf, as in an evaluation, has no budget. Which answers run out
    of time depends on the speed of the processor. ``judge`` is asked about all answers to questions
    that name it as their scorer, at once. ``estimates`` are the reward model's. Answers to the
    ``hidden`` questions, by id, and their episodes are not scored: their breakdown is HIDDEN.

    Raises ValueError with question and leaf: for a scorer that is unknown, for a user's scorer or
    part that fails or exceeds its range, for a world's score that is none, and for a question that
    names the judge where there is none; RuntimeError where the judge cannot be asked.
    """
    _check_scorers(trees)
    shown = [tree for tree in trees if tree.question.id not in hidden]
    names = {tree.question.scorer for tree in shown if not tree.of_world}
    strict = any(part.name == FORMAT for part in parts)
    judged = _judged(shown, reader, judge)
    with open_scorers(sorted(names)) as scorers, open_parts(parts) as opened:
        compare = partial(_compared, scorers, most_timeouts, judged)
        read = partial(
            _endings,
            compare=compare,
            reader=reader,
            format_counts=strict,
            estimates=estimates or {},
            hidden=hidden,
        )
        with _threads(WORKERS) as threads:
            endings = [ending for tree in threads.map(read, trees) for ending in tree]
        texts = {name for name, kind in scorers.items() if kind.lenient}
        values = {label: _finite(label, part, endings) for label, part in opened.items()}
    rows = [
        _row(
            ending,
            {label: given[index] for label, given in values.items()},
            lenient_scores(ending, texts, reader),
        )
        for index, ending in enumerate(endings)
    ]
    _print_slow(rows, most_timeouts)
    return rows


@contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Keep threads; after an error, what waits for them is not begun."""
    threads = ThreadPoolExecutor(workers)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _check_scorers(trees: Sequence[Tree]) -> None:
    """Raise ValueError for the first question whose scorer cannot be used."""
    question_of_scorer = {
        t.question.scorer: t.question.id for t in reversed(trees) if not t.of_world
    }
    for name, question in question_of_scorer.items():
        if fault := scorer_fault(name):
            raise ValueError(f"question {question}: {fault}")


# ---------------------------------------------------------------- reading


def _endings(
    tree: Tree,
    compare: Callable[[Question, Sequence[str | None]], Breakdown],
    reader: Reader,
    format_counts: bool,
    estimates: Estimates,
    hidden: Collection[str],
) -> list[Ending]:
    """Return the endings of a tree, in leaf order, with the breakdowns of their scores."""
    world, trajectories = tree.of_world, list(tree.trajectories())
    turns = _turns(trajectories)
    answers = [
        None if world else _answer(reader, trajectory, texts)
        for trajectory, texts in zip(trajectories, turns, strict=True)
    ]
    if tree.question.id in hidden:
        breakdowns = [HIDDEN] * len(answers)
    elif world:
        breakdowns = [_episode(tree, leaf, each) for leaf, each in enumerate(trajectories)]
    else:
        compared = compare(tree.question, answers)
        breakdowns = [compared[answer] for answer in answers]
    return [
        Ending(
            question=tree.question,
            leaf=leaf,
            trajectory=trajectory,
            text="".join(texts),
            answer=answer,
            faults=tuple(reader.faults(texts, trajectory[-1].outcome)),
            breakdown=breakdown,
            tools=_tools(trajectory, reader),
            world=world,
            format_counts=format_counts,
            estimate=estimates.get((tree.question.id, leaf)),
        )
        for leaf, (trajectory, texts, answer, breakdown) in enumerate(
            zip(trajectories, turns, answers, breakdowns, strict=True)
        )
    ]


def _turns(trajectories: Sequence[Sequence[Node]]) -> list[list[str]]:
    """Return the texts of the agent's turns in each trajectory."""
    return [[_storable(turn.text) for turn in sampled(each)] for each in trajectories]


def _answer(reader: Reader, trajectory: Sequence[Node], texts: Sequence[str]) -> str | None:
    """Return the final answer of a trajectory: what its program has returned, or what it says.

    Policies learn to put answers into a box, which a program passes on: what is inside counts.
    """
    said = program_said(trajectory)
    if said is None:
        return reader.answer(texts)
    answer = said.get("answer")
    return (boxed(answer) or answer) if answer else None


def _judged(trees: Sequence[Tree], reader: Reader, judge: OpenJudge | None) -> Breakdowns:
    """Ask the judge about all answers to questions that name it; {} where there are none."""
    submissions = [
        judge_scorer.asked_of(tree.question, answer)
        for tree in trees
        if tree.question.scorer == judge_scorer.NAME and not tree.of_world
        for trajectory in tree.trajectories()
        for texts in _turns([trajectory])
        if (answer := _answer(reader, trajectory, texts)) is not None
    ]
    if submissions and judge is None:
        raise ValueError(
            f"{len(submissions)} answers are to be scored by a judge, and there is none here"
        )
    return judge.judge(submissions) if submissions and judge else {}


def _compared(
    scorers: Mapping[str, ScorerKind],
    most: int,
    judged: Breakdowns,
    question: Question,
    answers: Sequence[str | None],
) -> Breakdown:
    """Return the breakdown of each different answer; empty where there is none."""
    if question.scorer == judge_scorer.NAME:
        return {
            answer: {} if answer is None else dict(judged[judge_scorer.asked_of(question, answer)])
            for answer in answers
        }
    compare = scorers[question.scorer].limited(most)
    try:
        return {
            answer: {} if answer is None else dict(compare(answer, question.answers))
            for answer in dict.fromkeys(answers)
        }
    except ValueError as error:
        raise ValueError(f"question {question.id}: {error}") from error


def _episode(tree: Tree, leaf: int, trajectory: Sequence[Node]) -> dict[str, float]:
    """Return the breakdown of an episode: its score."""
    seen = [turn.observation for turn in sampled(trajectory) if turn.observation]
    try:
        return {"score": episode_score(seen)}
    except ValueError as error:
        raise ValueError(f"question {tree.question.id}, leaf {leaf}: {error}") from None


def episode_score(seen: Sequence[Observation]) -> float:
    """Return the score of an episode, in [0, 1], from what answered its acts.

    It is "score" or "success" in the last observation's ``info``; without either, 1 where the world
    ended the episode and the rewards of its steps add up to more than 0. Without acts it is 0.
    Raises ValueError for a score that is none.
    """
    if not seen:
        return 0.0
    info = seen[-1].info
    given = next((info[name] for name in ("score", "success") if name in info), None)
    if given is None:
        earned = math.fsum(observation.reward for observation in seen)
        return float(seen[-1].terminated and earned > 0)
    if fault := number_fault(given, 0, 1):
        raise ValueError(
            f"the score in the info of the world's last observation {fault}: give a number "
            "between 0 and 1"
        )
    return within(float(given), 0.0, 1.0)


def _tools(trajectory: Sequence[Node], reader: Reader) -> frozenset[str]:
    """Return the tools of which a call worked."""
    results = [result for turn in sampled(trajectory) for result in turn.results]
    earlier = (  # trees of earlier releases do not name the tool
        call.tool
        for turn, result in pairwise(trajectory)
        if not turn.results and result.kind != TURN and result.outcome == Outcome.OK
        for call in calls_in(reader, turn.text)
    )
    return frozenset([*(each.tool for each in results if each.outcome == Outcome.OK), *earlier])


def _storable(text: str) -> str:
    """Return the text without lone surrogates, which Parquet cannot store."""
    return text.encode(errors="replace").decode()


# ---------------------------------------------------------------- rewards


def _finite(label: str, part: Part, endings: Sequence[Ending]) -> list[float]:
    """Return the values of a part. Raises ValueError for one that is no finite number."""
    values = part(endings)
    for ending, value in zip(endings, values, strict=True):
        if fault := number_fault(value):
            where = f"question {ending.question.id}, leaf {ending.leaf}"
            raise ValueError(f"{where}: the part {label} of the reward {fault}")
    return values


def _row(
    ending: Ending, values: Mapping[str, float], whatever_form: Mapping[str, bool | None]
) -> dict[str, Any]:
    return {
        "question": ending.question.id,
        "kind": ending.question.kind,
        "leaf": ending.leaf,
        "scorer": WORLD if ending.world else ending.question.scorer,
        **score(ending, values),
        **whatever_form,
        "parts": dict(values),
    }


def score(ending: Ending, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the reward of one trajectory, and what it was made from.

    Only the agent's own turns are read: what a tool result quotes can neither earn nor break
    anything. In a world, only its observations are: nothing that the agent writes earns anything.
    """
    trajectory = ending.trajectory
    executed = acts(trajectory)
    return {
        "reward": math.fsum(values.values()),
        "score": ending.score,
        "breakdown": ending.breakdown,
        "success": ending.success,
        "answer": ending.answer,
        "faults": list(ending.faults),
        "sound": ending.sound,
        "outcome": trajectory[-1].outcome,
        "tool_calls": len(executed),
        "tool_errors": sum(outcome != Outcome.OK for outcome in executed),
        "response_tokens": response_tokens(trajectory),
        "sampled_tokens": sum(len(node.tokens) for node in sampled(trajectory)),
    }


def lenient_scores(
    ending: Ending, scorers: Collection[str], reader: Reader
) -> dict[str, bool | None]:
    """Return whether the answer stands anywhere in the last turn, and as its last number.

    Calls and results do not count, the form does not either, and what the scorer calls right is
    right. None where that means nothing: for scorers that are not among these, in a world, and for
    answers that are not scored.
    """
    turns = sampled(ending.trajectory)
    if ending.world or ending.question.scorer not in scorers or not was_scored(ending.breakdown):
        return dict.fromkeys(lenient.COLUMNS)
    said = _words_of_turn(turns[-1], reader) if turns else ""
    return lenient.scores(said, ending.question.answers, ending.score == 1)


def _words_of_turn(turn: Node, reader: Reader) -> str:
    """Return a turn without its calls, and without the result that it has begun to forge.

    A turn that is an answer makes none.
    """
    text = _storable(turn.text).partition(RESULT_TAGS[0])[0]
    for call in calls_in(reader, text) if turn.outcome != Outcome.ANSWER else ():
        text = text.replace(call.argument, " ") if call.argument else text
    return text


def _print_slow(rows: Sequence[Mapping[str, Any]], most_timeouts: int) -> None:
    """Say how many answers the mathematics verifier could not compare in its time."""
    slow = {(row["question"], row["answer"]) for row in rows if TIMEOUT in row["breakdown"]}
    if slow:
        skipped = sum(OVER_BUDGET in row["breakdown"] for row in rows)
        print(
            f"reward: different answers on which the mathematics verifier ran out of processor "
            f"time: {len(slow)}; rollouts that were not compared, as {most_timeouts} such answers "
            f"to their question came before: {skipped}; all of these score 0",
            flush=True,
        )
