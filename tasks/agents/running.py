"""Run many agents in rounds.

In a round, the requests of all agents go to their model together, and all calls and acts run side
by side. Agents go on in the order of their tasks, and each request has a seed that its task and its
number decide, so a run can be repeated as far as the model can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.agents.contract import (
    SPENT,
    AgentKind,
    CondenseRequest,
    NewTrial,
    Steps,
    Task,
    Wanted,
)
from tasks.chat.contract import ChatModel, ChatReply, ChatRequest
from tasks.environments.contract import Session
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation

NO_MORE = "no more calls are allowed: answer now"


@dataclass(frozen=True)
class Models:
    """Who is asked: the policy, and the model that condenses documents."""

    policy: ChatModel
    condenser: ChatModel


@dataclass
class AgentResult:
    """What one agent has come to, and what it took, all trials together."""

    answer: str | None = None
    said: str = ""  # the last reply of the policy; "" where that led to an act
    outcome: str = Outcome.NO_ANSWER
    fault: str = ""  # of the model, which ended the agent
    in_world: bool = False
    seen: list[Observation] = field(default_factory=list)  # in the world, in the last trial
    trials: int = 1
    tool_calls: int = 0
    tool_errors: int = 0
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class _Running:
    """An agent at work: what it wants next, and what its trial has spent."""

    task: Task
    steps: Steps
    handle: int
    ending: AgentResult
    wanted: Wanted | None = None  # None: it has ended
    calls: int = 0
    tokens: int = 0

    def send(self, value: Any) -> None:
        """Let the agent go on with what came of its wish."""
        try:
            self.wanted = self.steps.send(value)
        except StopIteration as stopped:
            self._end(stopped.value)

    def begin(self) -> None:
        """Start the agent."""
        if self._starts(self.task.first):
            self.send(None)

    def _starts(self, first: Observation | None) -> bool:
        """Return whether an episode has started; the agent ends where it has not."""
        failed = first is not None and first.ends
        if failed and first:
            self._stop(first.ending)
        return not failed

    def _stop(self, outcome: str, fault: str = "") -> None:
        self.steps.close()
        self.wanted = None
        self.ending.outcome, self.ending.fault = outcome, fault

    def _end(self, answer: str | None) -> None:
        self.wanted, self.ending.answer = None, answer
        if answer is not None:
            self.ending.outcome = Outcome.ANSWER

    def observe(self, observation: Observation, executed: bool) -> None:
        """Count an act, and let the agent go on."""
        self.calls += executed
        self.ending.said = ""
        self.ending.tool_calls += executed
        self.ending.tool_errors += executed and observation.outcome != Outcome.OK
        if self.ending.in_world and executed:
            self.ending.seen.append(observation)
        if observation.ends:
            self.ending.outcome = observation.ending if executed else observation.outcome
        self.send(observation)

    def hear(self, reply: ChatReply, from_policy: bool) -> None:
        """Count a reply, and let the agent go on, or end it where the model has failed.

        ``from_policy``: it is the policy's, and so a part of what the trial may sample.
        """
        self.ending.model_calls += 1
        self.ending.prompt_tokens += reply.prompt_tokens
        self.ending.completion_tokens += reply.completion_tokens
        self.tokens += from_policy * reply.completion_tokens
        if from_policy:
            self.ending.said = reply.text
        if reply.fault:
            self._stop(Outcome.UNAVAILABLE, reply.fault)
        else:
            self.send(reply)

    def begin_again(self, handle: int, first: Observation | None) -> None:
        """Start the next trial, with all limits as at the start."""
        self.handle, self.calls, self.tokens = handle, 0, 0
        self.ending.trials += 1
        self.ending.seen, self.ending.outcome = [], Outcome.NO_ANSWER
        if self._starts(first):
            self.send(first)


def run(
    kind: AgentKind,
    tasks: Sequence[Task],
    models: Models,
    session: Session,
    seed: int,
    advance: Callable[[int], object] = lambda finished: None,
) -> list[AgentResult]:
    """Run an agent on each task; return their endings in order.

    What the world shows at the start is added to the tasks. ``advance`` is called with the number
    of tasks finished since its last call. Raises RuntimeError where no request can succeed.
    """
    opened = session.open([task.question for task in tasks])
    running = []
    for task, (handle, first) in zip(tasks, opened, strict=True):
        whole = replace(task, first=first)
        ending = AgentResult(in_world=first is not None)
        running.append(_Running(whole, kind.steps(whole), handle, ending))
        running[-1].begin()
    left = running
    while left:
        ended = [each for each in left if each.wanted is None]
        _end(ended, session)
        advance(len(ended))
        left = [each for each in left if each.wanted is not None]
        _ask(left, ChatRequest, models.policy, seed)
        _ask(left, CondenseRequest, models.condenser, seed)
        _act(left, session)
        _begin_again(left, session)
    return [each.ending for each in running]


def _ask(live: Sequence[_Running], kind: type, model: ChatModel, seed: int) -> None:
    """Send the requests of one kind, all at once; spent trials are answered here."""
    asking = [(each, each.wanted) for each in live if isinstance(each.wanted, kind)]
    requests = [
        (each, request)
        for each, model_request in asking
        if (request := _limited(each, model_request, seed)) is not None
    ]
    replies = model.ask([request for _, request in requests]) if requests else []
    answered = {id(each): reply for (each, _), reply in zip(requests, replies, strict=True)}
    for each, _ in asking:
        if id(each) in answered:
            each.hear(answered[id(each)], from_policy=kind is ChatRequest)
        else:
            each.send(ChatReply("", finish=SPENT))


def _limited(each: _Running, model_request: Any, seed: int) -> ChatRequest | None:
    """Return a request with its seed, within what its trial may still sample; None for nothing."""
    if isinstance(model_request, CondenseRequest):
        request, left = model_request.request, model_request.request.max_tokens
    else:
        request, left = model_request, each.task.limits.response_tokens - each.tokens
    if left < 1:
        return None
    of_request = f"{seed}/{each.task.question.id}/{each.ending.model_calls}"
    digest = hashlib.blake2b(of_request.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "big") >> 1  # servers take 31 bits
    return replace(request, max_tokens=min(request.max_tokens, left), seed=number)


def _act(live: Sequence[_Running], session: Session) -> None:
    """Make all calls of a round side by side; one above the limit is not made."""
    acting = [(each, each.wanted) for each in live if isinstance(each.wanted, Call)]
    moves = [
        (each.handle, call) for each, call in acting if each.calls < each.task.limits.tool_calls
    ]
    seen = iter(session.act(moves)) if moves else iter(())
    for each, _ in acting:
        executed = each.calls < each.task.limits.tool_calls
        each.observe(next(seen) if executed else _refused(each), executed)


def _refused(each: _Running) -> Observation:
    """Return what answers a call above the limit; it ends an episode."""
    return Observation(Outcome.TOO_MANY_CALLS, NO_MORE, truncated=each.ending.in_world)


def _begin_again(live: Sequence[_Running], session: Session) -> None:
    """Begin the task anew for agents that want another trial."""
    wanting = [each for each in live if isinstance(each.wanted, NewTrial)]
    if not wanting:
        return
    for each in wanting:
        session.close(each.handle)
    opened = session.open([each.task.question for each in wanting])
    for each, (handle, first) in zip(wanting, opened, strict=True):
        each.begin_again(handle, first)


def _end(ended: Sequence[_Running], session: Session) -> None:
    """Tell worlds that their agents have stopped; their last word counts, and episodes close."""
    said = [(each.handle, each.ending.answer or "") for each in ended]
    for each, last in zip(ended, session.end(said) if said else [], strict=True):
        if last is not None and each.ending.in_world:
            each.ending.seen.append(last)
        session.close(each.handle)
