"""One agent on one set: scores, and what an interruption keeps."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tasks import recipes
from tasks.agents import AGENTS
from tasks.agents.contract import FULL
from tasks.agents.prompts import load
from tasks.agents.running import Models
from tasks.chat.contract import ChatReply
from tasks.environments import open_environment
from tasks.environments.contract import FREE_TEXT, OpenEnvironment
from tasks.evaluation import try_agent as verb
from tasks.evaluation.try_agent import TryInputs, try_agent
from tasks.ledger.artifacts import Artifact, output
from tasks.ledger.substeps import SubStep
from tasks.tools.browser import SPEC as BROWSER
from tasks.trees.tables import read_rows
from tasks.trees.tree import Question
from tests.tasks.agents.scripted import SEARCH, Tools, Turns

PROMPTS = {name: load(kind.prompts) for name, kind in AGENTS.items()}
RECIPE = recipes.load("smoke")
QUESTIONS = [Question(f"q-{n}", "toy", f"Question q-{n}?", (f"gold {n}",), "f1") for n in range(5)]


class Counting(Turns):
    """Refuses all requests from a round on."""

    refuses = 10**9

    def ask(self, requests):
        if len(self.rounds) >= self.refuses:
            raise RuntimeError("no server")
        return super().ask(requests)


def inputs(agent, recipe=RECIPE, **others):
    given = {
        "agent": agent,
        "model": Artifact("models/toy", "digest"),
        "condenser": Artifact("models/toy", "digest"),
        "questions": "digest",
        "prompts": PROMPTS[agent],
        "pages": "snippets",
        "page_characters": 1000,
        "trials": 1,
        "oracle": False,
        "failed_as_wrong": False,
        "acting": recipes.agent_of(recipe),
        "evaluate": recipe.evaluate,
        "corpus": None,
        "scorers": {},
    }
    return TryInputs(**{**given, **others})


def rows_of(given, model, questions=QUESTIONS, tools=None, environment=None):
    tools = tools or Tools()
    environment = environment or OpenEnvironment(
        [SEARCH, BROWSER], lambda: nullcontext(tools.session())
    )
    record = try_agent(
        SubStep("toy", f"agents/{given.agent}", 0, 0),
        given,
        questions=questions,
        models=Models(model, model),
        environment=environment,
    )
    return read_rows(Path(output(record, "results").path))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/toy").touch()


def boxed(text):
    return [f"<answer>\\boxed{{{text}}}"]


def test_answers_are_scored_by_the_scorer_of_their_question():
    script = {"q-0": boxed("gold 0"), "q-1": boxed("gold"), "q-2": boxed("brass"), "q-3": ["hm"]}
    rows = rows_of(inputs("direct"), Turns(script), QUESTIONS[:4])
    assert [row["score"] for row in rows] == [1, pytest.approx(2 / 3), 0, 0]
    assert [row["success"] for row in rows] == [True, False, False, False]
    assert [row["answer"] for row in rows] == ["gold 0", "gold", "brass", None]
    assert [row["outcome"] for row in rows] == ["answer"] * 3 + ["no_answer"]
    assert {row["scorer"] for row in rows} == {"f1"}


def test_the_last_reply_is_read_leniently_unless_it_is_an_act_or_about_another():
    questions = [Question(f"q-{n}", "toy", f"Question q-{n}?", (str(n),)) for n in range(3)]
    script = {
        "q-0": ["It is 0."],
        "q-1": ["Or 2?"],
        "q-2": ["<search>2</search>"] * 9,
    }
    rows = rows_of(inputs("bare"), Turns(script), questions)
    assert [row["success"] for row in rows] == [False] * 3
    assert [row["lenient"] for row in rows] == [True, False, False]
    assert [row["last_number"] for row in rows] == [True, False, False]
    (row,) = rows_of(inputs("reflexion"), Turns({"q-0": ["Finish[0]"] * 9}), questions[:1])
    assert (row["lenient"], row["last_number"]) == (None, None)


def test_tasks_that_were_done_before_an_interruption_are_not_done_again(monkeypatch):
    monkeypatch.setattr(verb, "AT_ONCE", 2)
    script = {f"q-{n}": boxed(f"gold {n}") for n in range(5)}
    model = Counting(script)
    model.refuses = 2
    with pytest.raises(RuntimeError, match="no server"):
        rows_of(inputs("direct"), model)
    assert len(model.rounds) == 2
    model.refuses = 10**9
    rows = rows_of(inputs("direct"), model)
    assert [len(asked) for asked in model.rounds] == [2, 2, 1]
    assert [row["question"] for row in rows] == [question.id for question in QUESTIONS]
    assert all(row["success"] for row in rows)
    assert rows_of(inputs("direct"), model) == rows
    assert len(model.rounds) == 3


class Busy(Turns):
    """Answers the second question with a fault, until it has recovered."""

    fault = "429"

    def ask(self, requests):
        replies = super().ask(requests)
        failing = [self.fault and "q-1" in one.messages[0].content for one in requests]
        return [
            ChatReply("", fault=self.fault) if fails else reply
            for reply, fails in zip(replies, failing, strict=True)
        ]


def test_tasks_that_a_busy_model_did_not_answer_are_asked_again(monkeypatch):
    monkeypatch.setattr(verb, "AT_ONCE", 2)
    model = Busy({f"q-{n}": boxed(f"gold {n}") for n in range(5)})
    with pytest.raises(RuntimeError, match=r"1 of 5 tasks have no answer of the model: 429 \(1\)"):
        rows_of(inputs("direct"), model)
    assert len(model.rounds) == 3, "the others are asked all the same"
    model.fault = ""
    rows = rows_of(inputs("direct"), model)
    assert [len(asked) for asked in model.rounds] == [2, 2, 1, 2]
    assert all(row["success"] for row in rows)


@pytest.mark.parametrize(
    ("fault", "counted"), [("429", True), ("context", False), ("400: too long", False)]
)
def test_failures_count_as_wrong_where_they_are_final_or_one_says_so(fault, counted):
    model = Busy({f"q-{n}": boxed(f"gold {n}") for n in range(5)})
    model.fault = fault
    rows = rows_of(inputs("direct", failed_as_wrong=counted), model)
    assert [row["fault"] for row in rows] == ["", fault, "", "", ""]
    assert [row["success"] for row in rows] == [True, False, True, True, True]


def test_an_oracle_decides_on_another_trial_by_the_gold_answer():
    script = ["Action: finish[brass]", "Action: finish[gold 0]"]

    class Improving(Turns):
        """Finishes rightly once it has read a lesson."""

        def _text(self, messages):
            text = messages[0].content
            return "Think." if "Say in two" in text else script["Think." in text]

    (row,) = rows_of(inputs("reflexion", trials=3, oracle=True), Improving(script), QUESTIONS[:1])
    assert (row["answer"], row["trials"], row["model_calls"]) == ("gold 0", 2, 3)


def test_pages_in_full_are_not_cut_to_the_limit_of_a_result():
    page = "word " * 100 + "END"
    tools = Tools(documents="a page (https://a.example/)", page=page)
    limit = 4 * RECIPE.dialogue.result_tokens
    assert limit < len(page) < 1000
    model = Turns(boxed("gold 0"))
    rows_of(inputs("rag", pages=FULL), model, QUESTIONS[:1], tools)
    (asked,) = model.rounds[0]
    assert page in asked.messages[0].content


def test_the_acts_of_a_world_are_described_by_their_file():
    spoken = Turns(boxed("gold 0"))
    given = inputs("tir", prompts={**PROMPTS["tir"], "acts": "open DOOR"})
    environment = OpenEnvironment([FREE_TEXT], lambda: nullcontext(Tools().session()))
    rows_of(given, spoken, QUESTIONS[:1], environment=environment)
    assert "<act>text</act>: open DOOR" in spoken.rounds[0][0].messages[0].content


def test_an_agent_acts_in_a_real_world_and_its_world_scores_it(tmp_path):
    recipe = recipes.load("tiny-lake")
    ((name, chosen),) = recipe.environment.items()
    from tasks.environments.own_world import environment_kind

    tasks = environment_kind(name).tasks(chosen, "test", 2, 0)
    with open_environment(recipe.tools, recipe.environment, 1, tmp_path) as environment:
        with environment.session() as session:
            (handle, _), *_ = session.open(tasks[:1])
            way = []
            for _ in range(30):
                (call,) = session.solve([handle])
                if call is None:
                    break
                way.append(call)
                if session.act([(handle, call)])[0].ends:
                    break
        script = [f"Thought: go\nAction: {call.tool}[{call.argument}]" for call in way]
        model = Turns(script)
        record = try_agent(
            SubStep("toy", "agents/react", 0, 0),
            inputs("react", recipe),
            questions=tasks[:1],
            models=Models(model, model),
            environment=environment,
        )
    (row,) = read_rows(Path(output(record, "results").path))
    assert (row["success"], row["outcome"], row["scorer"]) == (True, "terminated", "world")
    assert row["tool_calls"] == len(way)
