"""Rounds, limits and worlds: what running.py decides for every agent."""

from dataclasses import replace

import pytest

from params.schema.agent import Dialogue
from tasks.agents import AGENTS
from tasks.agents.contract import Limits
from tasks.agents.running import NO_MORE, Models, run
from tasks.chat.contract import ChatReply
from tasks.environments.contract import FREE_TEXT
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation, Question
from tests.tasks.agents.scripted import QUESTION, Scripted, Tools, Turns, task, try_one

SEARCH, FINISH = "Action: search[tower]", "Action: finish[Ada]"


def of_all(script, count, tools=None, **others):
    """Run react on questions, side by side, all with the same script."""
    model = Turns(script)
    questions = [replace(QUESTION, id=f"q-{number}") for number in range(count)]
    tasks = [task("react", question, **others) for question in questions]
    endings = run(
        AGENTS["react"], tasks, Models(model, model), (tools or Tools()).session(), seed=3
    )
    return endings, model


def test_a_round_asks_all_agents_at_once_and_runs_their_calls_side_by_side():
    tools = Tools()
    endings, model = of_all([SEARCH, FINISH], 3, tools)
    assert [ending.answer for ending in endings] == ["Ada"] * 3
    assert [len(asked) for asked in model.rounds] == [3, 3]
    assert [len(calls) for calls in tools.rounds] == [1], "equal calls of a round run once"


def test_agents_that_have_ended_leave_the_rounds():
    scripts = {"q-0": [FINISH], "q-1": [SEARCH, FINISH], "q-2": [SEARCH, SEARCH, FINISH]}
    model = Turns(scripts)
    tasks = [task("react", Question(name, "toy", f"{name}?", ())) for name in scripts]
    finished = []
    run(AGENTS["react"], tasks, Models(model, model), Tools().session(), 0, finished.append)
    assert [len(asked) for asked in model.rounds] == [3, 2, 1]
    assert [count for count in finished if count] == [1, 1, 1]


def test_seeds_depend_on_the_run_the_task_and_the_number_of_the_request_alone():
    first, again = (of_all([SEARCH, FINISH], 3)[1].rounds for _ in range(2))
    seeds = [[request.seed for request in asked] for asked in first]
    assert seeds == [[request.seed for request in asked] for asked in again]
    assert len({seed for row in seeds for seed in row}) == 6
    alone = of_all([SEARCH, FINISH], 1)[1].rounds
    assert [asked[0].seed for asked in alone] == [row[0] for row in seeds]


def test_calls_above_the_limit_are_not_made():
    tools = Tools()
    limits = {"tool_calls": 1}
    ending, model = try_one("react", [SEARCH, SEARCH, FINISH], tools, limits=limits)
    assert (ending.answer, ending.tool_calls, len(tools.made)) == ("Ada", 1, 1)
    assert NO_MORE in model.contexts[-1]


def test_turns_run_out():
    ending, model = try_one("react", ["hm"] * 2, limits={"turns": 2})
    assert (ending.answer, ending.outcome, model.script) == (None, Outcome.NO_ANSWER, [])


def test_a_request_asks_for_no_more_tokens_than_the_trial_has_left():
    long = ChatReply(SEARCH, 10, 45, "stop")
    ending, model = try_one("react", [long, long], limits={"response_tokens": 90})
    assert [request.max_tokens for request in model.asked] == [50, 45]
    assert (ending.answer, ending.outcome) == (None, Outcome.NO_ANSWER)
    assert (ending.prompt_tokens, ending.completion_tokens) == (20, 90)


def test_what_is_condensed_is_not_taken_from_the_policys_tokens():
    condenser = Scripted([ChatReply("Ada built it", 10, 45, "stop")])
    script = ["<search>tower", "<answer>\\boxed{Ada}"]
    limits = {"response_tokens": 50, "turn_tokens": 50}
    ending, model = try_one("search_o1", script, condenser=condenser, limits=limits)
    assert [request.max_tokens for request in model.asked] == [50, 45]
    assert ending.completion_tokens == 55


def test_another_trial_has_all_limits_as_at_the_start():
    tools = Tools()
    script = [SEARCH, "Action: finish[Eve]", "no", "look", SEARCH, FINISH]
    limits = {"tool_calls": 1, "response_tokens": 20}
    ending, _ = try_one("reflexion", script, tools, trials=2, limits=limits)
    assert (ending.answer, ending.tool_calls, ending.trials) == ("Ada", 2, 2)


def test_limits_come_from_the_recipes_dialogue():
    dialogue = Dialogue(
        system="", turn_tokens=32, result_tokens=40, response_tokens=208, tool_calls=3
    )
    assert Limits.of(dialogue) == Limits(8, 3, 32, 208, 160)


def test_a_result_is_cut_to_its_limit():
    tools = Tools(documents="x" * 500)
    _, model = try_one("react", [SEARCH, FINISH], tools, limits={"result_characters": 100})
    assert model.asked[1].messages[-1].content == f"Observation: {'x' * 100}..."


# ---------------------------------------------------------------- worlds


class Doors:
    """A session of worlds (tasks/environments/contract.py): behind the blue door is the way out.

    A door that is opened twice ends the episode without success.
    """

    def __init__(self, most=5, first=None):
        self.most, self.first = most, first
        self.acts, self.opened, self.ended, self.closed = {}, 0, [], []

    def open(self, tasks):
        handles = range(self.opened, self.opened + len(tasks))
        self.opened += len(tasks)
        for handle in handles:
            self.acts[handle] = []
        return [(handle, self.first or Observation("ok", "two doors")) for handle in handles]

    def act(self, moves):
        return [self._act(handle, call) for handle, call in moves]

    def _act(self, handle, call):
        twice = call.argument in self.acts[handle]
        self.acts[handle].append(call.argument)
        won = call.argument == "open blue"
        seen = Observation("ok", "the way out" if won else "a wall", info={"success": won})
        return replace(seen, terminated=won, truncated=twice)

    def end(self, endings):
        self.ended += endings
        return [None for _ in endings]

    def close(self, handle):
        self.closed.append(handle)


GET_OUT = Question("w-1", "doors", "Get out.", ())


def in_doors(name, script, doors=None, **others):
    doors, model = doors or Doors(), Scripted(list(script))
    given = task(name, GET_OUT, specs=(FREE_TEXT,), **others)
    (ending,) = run(AGENTS[name], [given], Models(model, model), doors, seed=0)
    return ending, model, doors


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("direct", ["open red", "open blue\nI am out."]),
        ("react", ["Thought: red\nAction: open red", "Thought: blue\nAction: open blue"]),
        ("tir", ["red? <act>open red", "blue! <act>open blue"]),
    ],
)
def test_agents_act_until_their_world_ends(name, script):
    ending, model, doors = in_doors(name, script)
    assert doors.acts == {0: ["open red", "open blue"]}
    assert (ending.outcome, ending.seen[-1].info["success"]) == (Outcome.TERMINATED, True)
    assert "two doors" in model.contexts[0]
    assert "a wall" in model.contexts[1]
    assert doors.closed == [0]


def test_direct_writes_no_thoughts_into_its_context():
    _, model, _ = in_doors("direct", ["open red\nbecause it is near", "open blue"])
    assert "because" not in model.contexts[1]


def test_reflexion_begins_a_fresh_episode_after_a_failure():
    script = [*["Action: open red"] * 2, "Try the blue one.", "Action: open blue"]
    ending, model, doors = in_doors("reflexion", script, trials=4)
    assert doors.acts == {0: ["open red", "open red"], 1: ["open blue"]}
    assert doors.closed == [0, 1]
    assert (ending.trials, ending.tool_calls, len(ending.seen)) == (2, 3, 1)
    assert ending.outcome == Outcome.TERMINATED
    assert "Try the blue one." in model.contexts[-1]
    assert "a wall" not in model.contexts[-1]


def test_reflexion_does_not_ask_the_model_whether_an_episode_has_succeeded():
    ending, model, _ = in_doors("reflexion", ["Action: open blue"], trials=4)
    assert (ending.trials, model.script) == (1, [])


def test_acts_above_the_limit_end_an_episode():
    limits = {"tool_calls": 1}
    ending, _, doors = in_doors("react", ["Action: open red"] * 2, limits=limits)
    assert (ending.outcome, ending.tool_calls) == (Outcome.TOO_MANY_CALLS, 1)
    assert doors.acts == {0: ["open red"]}


def test_an_episode_that_does_not_start_asks_no_model():
    broken = Observation(Outcome.WORLD_FAILED, "no door", truncated=True)
    ending, model, doors = in_doors("react", [], Doors(first=broken))
    assert (ending.outcome, ending.model_calls, model.asked) == (Outcome.WORLD_FAILED, 0, [])
    assert doors.closed == [0]


def test_the_world_is_told_when_an_agent_stops():
    ending, _, doors = in_doors("react", ["Action: finish[I give up]"])
    assert doors.ended == [(0, "I give up")]
    assert ending.answer == "I give up"
