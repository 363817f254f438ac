"""Scripts are played a round at a time, and written down as traces."""

from dataclasses import replace

import pytest

from tasks.questions.experts import Move, Script, play, texts
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question


class Tools:
    """Answers each call by what was asked, and remembers the rounds."""

    def __init__(self, outcome="ok"):
        self.rounds = []
        self.outcome = outcome

    def __call__(self, calls):
        self.rounds.append(list(calls))
        return [Observation(self.outcome, f" {call.tool}({call.argument})\n") for call in calls]


def question(name):
    return Question(name, "toy", f"{name}?", (name,))


def fixed(argument, tool="python"):
    return Move(f"about {argument}", tool, lambda results: argument)


def handing_on(tool="search"):
    """A move that asks for all that the results so far say."""
    return Move("go on", tool, lambda results: "+".join(results))


def script(name, *moves):
    return Script(question(name), "none", moves, "Done.", lambda results: f"{name} of {results}")


def test_calls_run_in_rounds():
    tools = Tools()
    plans = [
        script("short", fixed("a")),
        script("none"),
        script("long", fixed("b", "search"), fixed("c"), fixed("d")),
        script("middle", fixed("e"), fixed("f")),
    ]
    play(plans, tools)
    assert tools.rounds == [
        [Call("python", "a"), Call("search", "b"), Call("python", "e")],
        [Call("python", "c"), Call("python", "f")],
        [Call("python", "d")],
    ]


def test_move_gets_its_own_scripts_results():
    tools = Tools()
    plans = [script(name, fixed(name), handing_on(), handing_on()) for name in ("a", "b")]
    first, second = play(plans, tools)
    assert tools.rounds[1] == [Call("search", "python(a)"), Call("search", "python(b)")]
    assert tools.rounds[2][0].argument == "python(a)+search(python(a))"
    said = ["python(b)", "search(python(b))", "search(python(b)+search(python(b)))"]
    assert texts(second.observations) == said
    assert second.answer == f"b of {said}"
    assert first.answer.startswith("a of ['python(a)',")


def test_trace_alternates_turns_and_results():
    (played,) = play([script("q", fixed("1+1"), fixed("Ada", "search"))], Tools())
    answer = "q of ['python(1+1)', 'search(Ada)']"
    assert played.trace.parts == [
        ("<think>about 1+1</think><python>1+1</python>", True),
        ("<result>python(1+1)</result>", False),
        ("<think>about Ada</think><search>Ada</search>", True),
        ("<result>search(Ada)</result>", False),
        (f"<think>Done.</think><answer>\\boxed{{{answer}}}</answer>", True),
    ]
    assert (played.answer, played.trace.question) == (answer, question("q"))
    assert talk.final_answer("".join(text for text, _ in played.trace.parts)) == answer


@pytest.mark.parametrize("tool", talk.TOOL_TAGS)
def test_turns_are_calls_that_a_rollout_reads(tool):
    (played,) = play([script("q", fixed("1 < 2", tool))], Tools())
    turns = [text for text, own in played.trace.parts if own]
    assert talk.read_turn(turns[0], "stop") == (Outcome.CALL, Call(tool, "1 < 2"))
    assert talk.read_turn(turns[1], "stop") == (Outcome.ANSWER, None)


def test_a_script_without_moves_calls_nothing_and_answers():
    tools = Tools()
    (played,) = play([script("q")], tools)
    assert tools.rounds == []
    assert played.observations == ()
    assert played.trace.parts == [
        ("<think>Done.</think><answer>\\boxed{q of []}</answer>", True),
    ]


def test_no_scripts_are_no_traces():
    tools = Tools()
    assert play([], tools) == []
    assert tools.rounds == []


def test_outcomes_and_flaws_are_kept():
    plan = replace(script("q", fixed("1/0")), flaw="wrong_digit")
    (played,) = play([plan], Tools("error"))
    assert played.observations == (Observation("error", " python(1/0)\n"),)
    assert (played.script, played.trace.flaw) == (plan, "wrong_digit")


def test_a_tool_that_answers_too_few_calls_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        play([script("a", fixed("1")), script("b", fixed("2"))], lambda calls: [])
