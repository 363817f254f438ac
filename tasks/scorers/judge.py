"""A model as scorer: what it is asked, what counts as its verdict, and how verdicts become a score.

The answers of a whole batch are judged at once (tasks/rewards/judging.py). Where no model can be
asked, as in the check of gold answers, answers are compared as by ``exact``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from params.schema.judge import Judge
from tasks.chat.contract import NO_TEXT, ChatModel, ChatReply, ChatRequest
from tasks.scorers import exact
from tasks.scorers.contract import ScorerKind
from tasks.trees.tree import Message, Question
from tasks.trees.words import printable

NAME = "judge"
RIGHT, WRONG, NONE = "right", "wrong", "none"  # verdicts; none: there is no verdict in the text
ANSWER_CHARACTERS = 4000  # of an answer; a longer one is wrong, and no model is asked
AT_ONCE = 500  # requests to a model, between two lines of progress
FAULT_CHARACTERS = 300  # of one fault that a server causes, in a message
MOST_FAULTS = 10  # different ones in a message
NOT_RECORDED = "not recorded"  # fault of a request that a replay does not know
NO_VERDICT = (NO_TEXT, NOT_RECORDED)  # faults of replies that count as texts without a verdict
FIELDS = ("question", "accepted", "answer")  # that a prompt has to have, each in braces
_FIELD = re.compile(rf"\{{({'|'.join(FIELDS)})\}}")
_BRACES = re.compile(r"\{(\w*)\}")
_VERDICT = re.compile(rf"Verdict: ({RIGHT}|{WRONG})")


@dataclass(frozen=True)
class Submission:
    """What is judged."""

    question: str
    accepted: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Vote:
    """What one model has said about one answer, once."""

    asked: Submission
    model: str
    vote: int  # number of the verdict among those of the model, from 0
    seed: int
    verdict: str
    reply: ChatReply


def asked_of(question: Question, answer: str) -> Submission:
    """Return what a judge is asked about an answer to a question."""
    text = "\n\n".join([*(message.content for message in question.before), question.text])
    return Submission(text, question.answers, answer)


# ---------------------------------------------------------------- prompt and verdict


def load_prompt(file: Path) -> str:
    """Return the text of a prompt. Raises ValueError with file, fault and remedy."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"judge.prompt: {file} cannot be read ({error}): correct it") from None
    named = _BRACES.findall(text)
    faults = [f"lacks {{{field}}}" for field in FIELDS if field not in named]
    faults += [
        f"has {{{field}}}, which stands for nothing" for field in named if field not in FIELDS
    ]
    if faults:
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise ValueError(f"judge.prompt: {file} {'; '.join(faults)}: write {known}")
    return text


def prompt_of(template: str, submission: Submission) -> str:
    """Return a prompt. What others wrote is quoted: each of its lines begins with "> "."""
    values = {
        "question": quoted(submission.question),
        "accepted": "\n".join(quoted(form) for form in submission.accepted),
        "answer": quoted(submission.answer),
    }
    return _FIELD.sub(lambda matched: values[matched[1]], template)


def quoted(text: str) -> str:
    """Return a text with "> " before each of its lines."""
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def verdict_in(text: str) -> str:
    """Return the verdict in the last line that is not empty; NONE where it is anything else."""
    lines = text.rstrip().splitlines()
    matched = _VERDICT.fullmatch(lines[-1].strip()) if lines else None
    return matched[1] if matched else NONE


# ---------------------------------------------------------------- asking and counting


def collect_votes(
    models: Sequence[ChatModel], settings: Judge, template: str, submissions: Iterable[Submission]
) -> list[Vote]:
    """Ask each model about each different answer, ``votes`` times; return all that they said.

    A text without a verdict is asked for again, with another seed, up to ``ask_again`` times.
    Raises RuntimeError where requests got no reply, for all at once; what was answered is kept.
    """
    short = [one for one in dict.fromkeys(submissions) if len(one.answer) <= ANSWER_CHARACTERS]
    result: list[Vote] = []
    for model in models:
        waiting = [(one, vote) for one in short for vote in range(settings.votes)]
        for attempt in range(settings.ask_again + 1):
            votes = _round(model, settings, template, waiting, attempt)
            result += votes
            waiting = [(vote.asked, vote.vote) for vote in votes if vote.verdict == NONE]
    return result


def _round(
    model: ChatModel,
    settings: Judge,
    template: str,
    waiting: Sequence[tuple[Submission, int]],
    attempt: int,
) -> list[Vote]:
    """Ask a model once for each verdict that is missing."""
    votes: list[Vote] = []
    for start in range(0, len(waiting), AT_ONCE):
        part = waiting[start : start + AT_ONCE]
        seeds = [vote * (settings.ask_again + 1) + attempt for _, vote in part]
        seeded_part = zip(part, seeds, strict=True)
        replies = model.ask(
            [request_of(template, settings, one, seed) for (one, _), seed in seeded_part]
        )
        _check_replies(model.name, replies)
        votes += [
            Vote(one, model.name, vote, seed, verdict_in(reply.text), reply)
            for (one, vote), seed, reply in zip(part, seeds, replies, strict=True)
        ]
        if len(waiting) > AT_ONCE:
            print(f"judge {model.name}: {start + len(part)} of {len(waiting)} answers", flush=True)
    return votes


def request_of(template: str, settings: Judge, submission: Submission, seed: int) -> ChatRequest:
    """Return the request of one verdict."""
    message = Message("user", prompt_of(template, submission))
    return ChatRequest((message,), settings.max_tokens, settings.temperature, seed=seed)


def _check_replies(name: str, replies: Sequence[ChatReply]) -> None:
    """Raise RuntimeError where requests have no answer; what servers say is shown safely."""
    faults = [reply.fault for reply in replies if reply.fault and reply.fault not in NO_VERDICT]
    kinds = list(dict.fromkeys(printable(fault[:FAULT_CHARACTERS]) for fault in faults))
    if faults:
        raise RuntimeError(
            f"judge {name}: {len(faults)} of {len(replies)} requests have no answer "
            f"({'; '.join(kinds[:MOST_FAULTS])}); what was answered is kept: run the command "
            "again, or raise judge.timeout_seconds or judge.retries"
        )


def breakdowns(
    votes: Iterable[Vote], submissions: Iterable[Submission], settings: Judge
) -> dict[Submission, dict[str, float]]:
    """Return the score of each answer, and what it was made from.

    "score" is 1 where more than half of all ``votes`` are right, else 0: a tie is wrong, and so is
    a verdict that is missing. "without_verdict" counts these.
    """
    last: dict[Submission, dict[tuple[str, int], str]] = defaultdict(dict)
    for vote in votes:
        last[vote.asked][vote.model, vote.vote] = vote.verdict
    most = len(settings.models) * settings.votes
    return {one: _breakdown(last.get(one, {}), most) for one in dict.fromkeys(submissions)}


def _breakdown(verdicts: Mapping[tuple[str, int], str], votes: int) -> dict[str, float]:
    given = list(verdicts.values())
    right = given.count(RIGHT)
    return {
        "score": float(2 * right > votes),
        "right": float(right),
        "votes": float(votes),
        "without_verdict": float(given.count(NONE)),
    }


SCORER = ScorerKind(exact.SCORER.compare)
