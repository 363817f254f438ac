"""The batches of a training run, some of which are sampled before their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch

from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy.parallel import with_threads
from tasks.training.agents import Agents
from tasks.training.sampling import EMPTY, NONE_LEFT, PartialBatch, ScoredBatch, sample, sample_part
from tasks.training.setup import Training


class AtOnce(Executor):
    """Does work where it is submitted: nothing is sampled ahead."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **named))
        return done


@contextmanager
def sampling_thread(ahead: int) -> Iterator[Executor]:
    """Yield what samples batches in the order of submission; at the end none is begun any more."""
    thread = with_threads(torch.get_num_threads(), 1, "ahead") if ahead else AtOnce()
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def batches_of(policy: int, ahead: int, shared: bool) -> range:
    """Return the iterations whose batches the policy after so many iterations samples, in order.

    Batch i is sampled by policy i - ``ahead``, or ``shared`` by all policies from that one to
    policy i - 1; policy 0 takes the place of those before it.
    """
    first = policy + (1 if shared else ahead)
    return range(first if policy else 0, policy + ahead + 1)


class Batches:
    """The batches of a training run, up to ``ahead`` of which are sampled before their turn.

    All of them are sampled in order, one after the other, so that each begins with the questions
    that follow those of the one before. Which policy samples a batch depends on counters alone.
    Where policies share batches, a batch rests after some turns until the next policy is there.
    """

    def __init__(self, training: Training, thread: Executor) -> None:
        self.training, self.thread = training, thread
        self.waiting: dict[int, Future[ScoredBatch]] = {}  # iteration -> its batch
        self.last: Future[Any] | None = None  # what was submitted last
        self.policies: list[Artifact] = []  # that the iterations so far began with
        # Used by the thread alone: the questions consumed, and the batches that rest.
        self.consumed = 0
        self.due: dict[str, int] = {}  # with a curriculum: question -> pass that may ask it again
        self.begun: dict[int, PartialBatch] = {}
        self.surplus = NONE_LEFT  # of the iteration that has learned last

    def begin(self, iteration: int, agents: Agents) -> None:
        """Have the batches sampled whose policy an iteration begins with."""
        self.policies.append(agents.policy)
        section = self.training.recipe.reinforce
        shared = section.turns_per_policy is not None
        for batch in batches_of(iteration, section.ahead, shared):
            if batch < self.training.iterations:
                rests = shared and batch > iteration + 1
                context = copy_context()  # Prefect's: the flow run that the sub-steps belong to
                work = self._sample_part if rests else self._sample
                self.last = self.thread.submit(context.run, work, batch, agents, self.last)
                if not rests:
                    self.waiting[batch] = self.last

    def _sample(self, batch: int, agents: Agents, before: Future[Any] | None) -> ScoredBatch:
        """Sample a batch to its end."""
        step, begun = self._go_on(batch, before)
        scored = sample(self.training, step, agents, self.consumed, begun, self.due, self.surplus)
        self.consumed = scored.consumed
        self.due.update(scored.due)
        return scored

    def _sample_part(self, batch: int, agents: Agents, before: Future[Any] | None) -> None:
        """Sample a batch until it rests. Each batch takes as many questions as the others."""
        step, begun = self._go_on(batch, before)
        consumed = batch * self.training.recipe.reinforce.questions
        self.begun[batch] = sample_part(self.training, step, agents, consumed, begun)

    def _go_on(self, batch: int, before: Future[Any] | None) -> tuple[SubStep, PartialBatch]:
        """Return what a batch goes on from. Raises what the work before it has raised."""
        if before:
            before.result()
        step = replace(self.training.start, iteration=batch)
        return step, self.begun.pop(batch, EMPTY)

    def scored(self, iteration: int) -> ScoredBatch:
        """Return an iteration's batch as soon as it is there."""
        return self.waiting.pop(iteration).result()

    def samplers(self, iteration: int) -> list[Artifact]:
        """Return the policies so far that sample what the iterations from one on learn from."""
        ahead = self.training.recipe.reinforce.ahead
        before = max(ahead, self.training.algorithm.surplus == "next")  # which had what is carried
        return self.policies[max(0, iteration - before) :]

    def wait(self) -> None:
        """Return when all batches that have begun are there."""
        wait(self.waiting.values())
