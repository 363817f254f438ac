"""The expert for worlds: what it writes, how often it errs, and what it drops."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tasks.environments import frozen_lake
from tasks.environments.contract import OpenEnvironment
from tasks.environments.frozen_lake import MOVE, FrozenLake
from tasks.gates.traces import trace_fault
from tasks.questions import choice, solver
from tasks.questions.contract import Lesson
from tasks.questions.solver import GIVEN_UP, Solver, choices
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation
from tests.tasks.environments.test_frozen_lake import settings

TASKS = frozen_lake.tasks(settings(), "train", 300, 7)


class Here:
    """A session whose worlds are objects of this process."""

    def __init__(self, world=lambda: FrozenLake(settings())):
        self.world, self.open_worlds = world, {}

    def open(self, tasks):
        handles = [len(self.open_worlds) + number for number in range(len(tasks))]
        self.open_worlds |= {handle: self.world() for handle in handles}
        return [(h, self.open_worlds[h].start(t, 0)) for h, t in zip(handles, tasks, strict=True)]

    def act(self, moves):
        return [self.open_worlds[handle].act(call) for handle, call in moves]

    def solve(self, handles):
        return [self.open_worlds[handle].solve() for handle in handles]

    def close(self, handle):
        self.open_worlds[handle] = None


def expert(traces=300, wrong_act=0.0, give_up=0.0):
    return Solver(kind="solver", traces=traces, wrong_act=wrong_act, give_up=give_up)


def written(chosen, world=None, seed=7):
    session = Here(world) if world else Here()
    lesson = Lesson(TASKS, None, seed, None)
    write, faults = solver.write(chosen, lesson)
    assert faults == []
    made = write(OpenEnvironment([MOVE], lambda: nullcontext(session)))
    assert not any(session.open_worlds.values()), "every episode is released"
    return made


def replayed(trace):
    """The last observation of a trace's acts; what it says was seen is checked on the way."""
    lake = FrozenLake(settings())
    seen = [lake.start(trace.question, 0)]
    seen += [lake.act(call) for call in trace.acts]
    assert list(trace.seen) == seen[: len(trace.seen)]
    observed = [text for text, own in trace.parts if not own]
    assert observed == [each.text for each in seen[1 : len(observed) + 1]]
    return seen[-1]


def test_a_right_expert_reaches_every_goal():
    traces, dropped = written(expert())
    assert dropped == [] and [trace.question for trace in traces] == TASKS
    for trace in traces:
        assert replayed(trace).info["success"] and trace.flaw == "none"
        assert trace_fault(trace.parts, ["move"], world=True) == ""
        assert [text for text, own in trace.parts if own] == [
            f"<move>{call.argument}</move>" for call in trace.acts
        ]


def test_it_errs_at_its_rate_and_says_so():
    traces, _ = written(expert(wrong_act=0.3))
    acts = sum(len(trace.acts) for trace in traces)
    others = 0
    for trace in traces:
        lake = FrozenLake(settings())
        lake.start(trace.question, 0)
        differing = 0
        for call in trace.acts:
            differing += call != lake.solve()
            lake.act(call)
        others += differing
        assert trace.flaw == "wrong_act" or not differing
    # of the random acts, about a third are the solver's own by chance
    assert 0.15 < others / acts < 0.28
    share = Counter(trace.flaw for trace in traces)
    assert share["wrong_act"] > share["none"] > 0
    assert 0.2 < sum(replayed(trace).info["success"] for trace in traces) / len(traces) < 0.9


def test_it_gives_up_at_its_rate():
    traces, _ = written(expert(give_up=0.25))
    given_up = [trace for trace in traces if trace.flaw == "give_up"]
    assert 50 < len(given_up) < 100
    for trace in given_up:
        assert trace.parts[-1] == (GIVEN_UP, True) and not replayed(trace).ends
        assert len(trace.seen) == len(trace.acts) + 1
        assert trace_fault(trace.parts, ["move"], world=True) == ""


def test_equal_seeds_give_equal_traces():
    chosen = expert(traces=60, wrong_act=0.2, give_up=0.1)
    assert written(chosen) == written(chosen)
    assert written(chosen) != written(chosen, seed=8)
    assert [t.question.id for t in written(chosen)[0]] == [q.id for q in TASKS[:60]]


class Faulty(FrozenLake):
    """A world that fails, or that its solver cannot solve, now and then."""

    def __init__(self, how):
        super().__init__(settings())
        self.how = how

    def start(self, task, seed):
        self.odd = int(task.id[-1]) % 2 == 0
        first = super().start(task, seed)
        failed = replace(first, outcome=Outcome.WORLD_FAILED, text="no start", truncated=True)
        return failed if self.odd and self.how == "start" else first

    def act(self, call):
        seen = super().act(call)
        dead = replace(seen, outcome=Outcome.WORLD_TIMEOUT, text="late", truncated=True)
        return dead if self.odd and self.how == "act" else seen

    def solve(self):
        return None if self.odd and self.how == "solve" and self.taken == 2 else super().solve()


@pytest.mark.parametrize(
    ("how", "reason", "detail"),
    [
        ("start", "world_failed", "no start"),
        ("act", "world_timeout", "late"),
        ("solve", "unsolved", "no act is known after 2 acts"),
    ],
)
def test_an_episode_that_fails_gives_no_trace(how, reason, detail):
    traces, dropped = written(expert(traces=40), lambda: Faulty(how))
    assert len(traces) == len(dropped) == 20
    assert {(each.reason, each.detail) for each in dropped} == {(reason, detail)}
    assert all(int(each.question_id[-1]) % 2 == 0 for each in dropped)


def test_a_random_act_is_one_that_the_world_allows():
    up = Call("move", "up")
    listed = Observation("ok", "", actions=("left", "down"))
    assert [call.argument for call in choices(up, listed, [MOVE])] == ["left", "down"]
    hidden = Observation("ok", "")
    assert len(choices(up, hidden, [MOVE])) == 4
    free = replace(MOVE, parameters={**MOVE.parameters, "properties": {"x": {"type": "string"}}})
    with pytest.raises(ValueError, match="set wrong_act to 0"):
        choices(up, hidden, [free])


def test_it_is_found_by_its_name():
    kind = choice.find("solver")
    assert kind is solver.EXPERT and kind.sources == ("environment",)
