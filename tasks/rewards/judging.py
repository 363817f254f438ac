"""Judge the answers of a batch: which ones, by which models, and the table of what they said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from params.run_folders import RunFolders
from params.schema.chat import ChatEndpoint
from params.schema.judge import Judge, JudgePolicy
from params.schema.prepare import PretrainedPolicy
from params.schema.recipe import Recipe, named_sets
from tasks.chat import open_chat
from tasks.chat.cached import digest_of
from tasks.chat.contract import ChatModel, ChatReply, ChatRequest
from tasks.ledger.artifacts import Artifact
from tasks.scorers import judge as scorer
from tasks.scorers.judge import Submission, Vote
from tasks.tools.recording import replay_folder, whole
from tasks.tools.web_client import key_faults
from tasks.trees.tables import write_table
from tasks.trees.tree import Question

VERDICTS = "verdicts.parquet"
PLACE = "judge"  # the section of the recipe, for messages
KNOWLEDGE = "f1"  # what the papers grade knowledge sets with
TABLE = pa.schema(
    {
        "question": pa.string(),  # its text
        "accepted": pa.list_(pa.string()),
        "answer": pa.string(),
        "judge": pa.string(),  # name of the model
        "vote": pa.int32(),
        "seed": pa.int32(),
        "verdict": pa.string(),  # right, wrong or none
        "text": pa.string(),  # what the model said
        "prompt_tokens": pa.int32(),
        "completion_tokens": pa.int32(),
        "request": pa.string(),  # digest of the model's name and the request
    }
)

Breakdowns = Mapping[Submission, Mapping[str, float]]
OpenPolicy = Callable[[Path], AbstractContextManager[ChatModel]]  # of the folder of a policy


@dataclass
class OpenJudge:
    """Models that are ready to judge. ``votes`` are what they have said so far."""

    settings: Judge
    template: str
    models: Sequence[ChatModel]
    votes: list[Vote]

    def judge(self, submissions: Sequence[Submission]) -> Breakdowns:
        """Return the breakdown of each answer's score (tasks/scorers/judge.py)."""
        new = scorer.collect_votes(self.models, self.settings, self.template, submissions)
        self.votes += new
        breakdowns = scorer.breakdowns(new, submissions, self.settings)
        missing = sum(one["without_verdict"] > 0 for one in breakdowns.values())
        if missing:
            print(
                f"judge: {missing} of {len(breakdowns)} answers lack a verdict, "
                "which counts as wrong"
            )
        return breakdowns

    def save(self, folder: Path) -> None:
        """Write what was said as ``verdicts.parquet``: equal votes give equal bytes."""
        recorded = [vote for vote in self.votes if vote.reply.fault != scorer.NOT_RECORDED]
        rows = [_row(vote, self.settings, self.template) for vote in recorded]
        rows.sort(key=lambda row: (row["judge"], row["request"]))
        write_table(pa.Table.from_pylist(rows, schema=TABLE), folder / VERDICTS)


@contextmanager
def open_judge(
    settings: Judge, template: str, recipe: str, open_policy: OpenPolicy | None = None
) -> Iterator[OpenJudge]:
    """Keep the models of a recipe's judge ready; ``open_policy`` opens those of this machine.

    A replay (BEAMLINE_CALLS) asks no model: answers are those of the recorded verdicts. Raises
    ValueError where a key is not set, and where nothing opens policies that judge.
    """
    if folder := replay_folder():
        replies = load_replies(sorted(folder.rglob(VERDICTS)))
        recorded = [RecordedModel(model.name, replies) for model in settings.models]
        yield OpenJudge(settings, template, recorded, [])
        return
    servers = [model for model in settings.models if isinstance(model, ChatEndpoint)]
    policies = [model for model in settings.models if isinstance(model, JudgePolicy)]
    with ExitStack() as stack:
        opened: list[ChatModel] = []
        if servers:
            opened += stack.enter_context(open_chat(servers, settings, PLACE, f"{recipe}-judge"))
        for policy in policies:
            if open_policy is None:
                raise ValueError(f"judge.models names the policy {policy.name}, which is not open")
            opened.append(stack.enter_context(open_policy(Path(policy.name))))
        models = {model.name: model for model in opened}
        yield OpenJudge(settings, template, [models[one.name] for one in settings.models], [])


@dataclass(frozen=True)
class RecordedModel:
    """A chat model that only repeats what was recorded."""

    name: str
    replies: Mapping[str, ChatReply]  # by digest of the request

    def ask(self, requests: Sequence[ChatRequest]) -> list[ChatReply]:
        """Return the recorded answers; one that is not recorded has the fault "not recorded"."""
        replies = [self.replies.get(digest_of(self.name, request)) for request in requests]
        if missing := replies.count(None):
            print(f"replay: {missing} verdicts of {self.name} are not recorded", flush=True)
        return [reply or ChatReply("", fault=scorer.NOT_RECORDED) for reply in replies]


def load_replies(files: Iterable[Path]) -> dict[str, ChatReply]:
    """Return what models said, by digest of the request, from tables of verdicts."""
    return {
        row["request"]: ChatReply(row["text"], row["prompt_tokens"], row["completion_tokens"])
        for file in files
        for row in pq.read_table(file).to_pylist()
    }


def publish_verdicts(tables: Iterable[Path], file: Path) -> None:
    """Join tables of verdicts that exist to one, without repeated rows; none: no file."""
    verdict_tables = [pq.read_table(table) for table in tables if table.exists()]
    file.unlink(missing_ok=True)
    if verdict_tables:
        rows = {row["request"]: row for table in verdict_tables for row in table.to_pylist()}
        ordered = sorted(rows.values(), key=lambda row: (row["judge"], row["request"]))
        write_table(pa.Table.from_pylist(ordered, schema=TABLE), file)


def _row(vote: Vote, settings: Judge, template: str) -> dict[str, object]:
    request = scorer.request_of(template, settings, vote.asked, vote.seed)
    return {
        "question": whole(vote.asked.question),
        "accepted": [whole(form) for form in vote.asked.accepted],
        "answer": whole(vote.asked.answer),
        "judge": vote.model,
        "vote": vote.vote,
        "seed": vote.seed,
        "verdict": vote.verdict,
        "text": whole(vote.reply.text),
        "prompt_tokens": vote.reply.prompt_tokens,
        "completion_tokens": vote.reply.completion_tokens,
        "request": digest_of(vote.model, request),
    }


# ---------------------------------------------------------------- which questions


def as_in_papers(question: Question, of_sets: Mapping[str, str]) -> Question:
    """Return the question with the scorer of the papers' protocol (ARPO 4.4, GPG 5.3).

    ``of_sets``: set -> what the papers grade it with, where they have it. All else is judged by a
    model, but for what token F1 scores.
    """
    default_scorer = KNOWLEDGE if question.scorer == KNOWLEDGE else scorer.NAME
    return replace(question, scorer=of_sets.get(question.kind, default_scorer))


def asked_in_training(recipe: Recipe, folder: Path) -> bool:
    """Return whether a set of the recipe names the judge as its scorer."""
    return any(scorer.NAME in row.scorers for row in named_sets(recipe, folder).values())


def inputs(recipe: Recipe, folder: Path, evaluation: bool) -> dict[str, Any]:
    """Return what a reward's inputs say of the judge (RewardInputs).

    The evaluation follows ``evaluate.protocol``; training rewards are those of the sets' scorers.
    """
    papers = evaluation and recipe.evaluate.protocol == "papers"
    if recipe.judge is None or not (papers or asked_in_training(recipe, folder)):
        return {}
    rows = named_sets(recipe, folder)
    of_sets = {name: row.papers_scorer for name, row in rows.items() if row.papers_scorer}
    policies = [one.name for one in recipe.judge.models if isinstance(one, JudgePolicy)]
    return {
        "judge": recipe.judge,
        "prompt": scorer.load_prompt(folder / recipe.judge.prompt),
        "papers": of_sets if papers else None,
        "judges": tuple(Artifact.at(Path(name)) for name in policies),
        "sampling": (recipe.engine, recipe.machine, recipe.dialogue) if policies else (),
    }


# ---------------------------------------------------------------- faults of recipes


def faults(recipe: Recipe, name: str, folder: Path) -> list[str]:
    """Return why a recipe's judge cannot be asked, a line a fault. ``name``: the recipe's."""
    in_training = asked_in_training(recipe, folder)
    if recipe.judge is None:
        lacking = (
            f"a set has the scorer '{scorer.NAME}', and 'judge' is null: write the section judge "
            "(docs/own-reward.md#a-judge), or give the set another scorer"
        )
        return [lacking] if in_training else []
    result = [*_own_policies(recipe, recipe.judge, name)]
    try:
        scorer.load_prompt(folder / recipe.judge.prompt)
    except ValueError as error:
        result.append(str(error))
    if in_training or recipe.evaluate.protocol == "papers":
        for index, model in enumerate(recipe.judge.models):
            if isinstance(model, ChatEndpoint):
                result += key_faults(f"judge.models.{index}", model.key_variable)
            elif not Path(model.name, "config.json").is_file():
                result.append(
                    f"judge.models.{index}.name = {model.name} holds no policy (no config.json): "
                    "name the folder of one that is there"
                )
    return result


def _own_policies(recipe: Recipe, judge: Judge, name: str) -> list[str]:
    """Return a line for each judge that is the policy of the recipe, unless it may be one."""
    first, own_folder = recipe.prepare.policy, RunFolders(name).models
    start = first.name if isinstance(first, PretrainedPolicy) else None
    return [
        f"judge.models.{index}.name is {model.name}, the recipe's own policy, which would grade "
        "itself: name another model, or set judge.own_policy to true"
        for index, model in enumerate(judge.models)
        if not judge.own_policy
        and (model.name == start or Path(model.name).resolve().is_relative_to(own_folder.resolve()))
    ]
