"""Experts by name and by path: their settings, what does not fit, and a user's own."""

import sys

import pytest

from params.schema.prepare import ComputationQuestions, EnvironmentQuestions, Expert
from tasks.extensions import named
from tasks.questions import choice
from tasks.questions.computation import ComputationExpert
from tasks.questions.contract import ExpertKind, Lesson, Rules
from tasks.questions.experts import Dropped
from tasks.trees.tree import Question

SUMS = ComputationQuestions(
    source="computation",
    train=30,
    validation=3,
    test=6,
    largest_operand=99,
    largest_arithmetic_operand=79,
    largest_test_operand=99,
)
LEVELS = EnvironmentQuestions(source="environment", train=30, validation=3, test=6)
RATES = {"wrong_operator": 0.1, "wrong_digit": 0.0, "wrong_answer": 0.0, "missing_call": 0.0}
ASKED = [Question(f"q{n}", "toy", f"What is {n}?", (str(n),)) for n in range(3)]
RULES = Rules(lambda question: [], lambda parts: "bad" * ("bad" in parts[0][0]), None, 1000)

TUTOR = """
from params.schema.base import Frozen

class Tutor:
    class Settings(Frozen):
        prefix: str

    def __init__(self, settings):
        self.prefix = settings.prefix

    def write(self, questions, tools):
        box = "<answer>\\\\boxed{%s}</answer>"
        return [(question, self.prefix + box % question.answers[0]) for question in questions]

class Plain:
    def write(self, questions, tools):
        return [(questions[0], "<python>1</python><result>1</result><answer>x</answer>")]

class Careless:
    def write(self, questions, tools):
        return [(questions[0], "bad"), (questions[1], "good")]

class Raises:
    def write(self, questions, tools):
        return 1 / 0

class NoPair:
    def write(self, questions, tools):
        return ["text"]

class NoWrite:
    pass

class Narrow:
    def write(self, questions):
        return []

class Wide:
    def __init__(self, settings):
        pass
    def write(self, questions, tools):
        return []

class Unset:
    Settings = dict
    def __init__(self, settings):
        pass
    def write(self, questions, tools):
        return []
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with own/tutor.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/tutor.py").write_text(TUTOR)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


def typed(questions=SUMS, tools=("python",), **keys):
    return choice.typed(Expert(**keys), questions, tools, "mine.yaml")


def faults(**given):
    _, found = typed(**given)
    assert all(line.startswith("mine.yaml: ") for line in found)
    return [line.removeprefix("mine.yaml: ") for line in found]


def written(name, **keys):
    kind = choice.find(f"own/tutor.py:{name}")
    settings, found = typed(kind=f"own/tutor.py:{name}", **keys)
    assert found == []
    write, of_files = kind.open(settings, Lesson(ASKED, None, 0, RULES))
    assert of_files == []
    return write(None)


def test_every_expert_of_the_room_is_found():
    names = named.names("expert")
    assert names == ["calculator", "computation", "encyclopedia", "sampled", "solver", "written"]
    assert all(isinstance(choice.find(name), ExpertKind) for name in names)


def test_settings_are_those_that_the_file_declares():
    settings, found = typed(kind="computation", traces=30, **RATES)
    assert found == [] and type(settings) is ComputationExpert
    assert settings.model_dump() == {"kind": "computation", "traces": 30, **RATES}
    assert choice.typed(None, SUMS, ["python"], "mine.yaml") == (None, [])


def test_all_faults_come_at_once():
    lines = faults(kind="computation", tools=("search",), traces=0, speed=3, questions=LEVELS)
    for words in (
        "'prepare.expert.traces' = 0",
        "unknown key 'prepare.expert.speed'",
        "missing key 'prepare.expert.wrong_digit'",
        "source is environment and expert.kind is computation, which cannot answer them: set "
        "expert.kind to sampled or solver",
        "calls python: add tools.python",
    ):
        assert any(words in line for line in lines), words


def test_an_unknown_expert_is_refused_with_those_that_are_known():
    (line,) = faults(kind="oracle")
    assert "'prepare.expert.kind' = 'oracle'" in line and "calculator, computation" in line


def test_no_more_traces_than_questions():
    (line,) = faults(kind="computation", traces=31, **RATES)
    assert "expert.traces 31 exceeds questions.train 30" in line


def test_a_users_expert_writes_responses(own):
    traces, dropped = written("Tutor", prefix="<think>easy</think>")
    assert dropped == [] and [trace.question for trace in traces] == ASKED
    assert traces[2].parts == [("<think>easy</think><answer>\\boxed{2}</answer>", True)]
    (trace,), _ = written("Plain")
    assert [text for text, own in trace.parts if not own] == ["<result>1</result>"]


def test_a_users_settings_are_checked_with_their_keys(own):
    (line,) = faults(kind="own/tutor.py:Tutor", prefix=3)
    assert "'prepare.expert.prefix' = 3" in line
    (line,) = faults(kind="own/tutor.py:Plain", prefix="a")
    assert "unknown key 'prepare.expert.prefix'" in line


def test_what_is_no_trace_is_dropped_with_its_reason(own):
    traces, dropped = written("Careless")
    assert [trace.question.id for trace in traces] == ["q1"]
    assert dropped == [Dropped("q0", "no_trace", "bad")]


@pytest.mark.parametrize(
    ("name", "said"),
    [("Raises", "ZeroDivisionError"), ("NoPair", "returns as its trace 0 'text': return pairs")],
)
def test_an_error_of_a_users_expert_names_its_file(own, name, said):
    with pytest.raises(ValueError, match=rf"own/tutor\.py:{name} .*{said}"):
        written(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoWrite", "no class with a method write"),
        ("Narrow", "cannot be called as write(self, questions, tools)"),
        ("Wide", "cannot be called as __init__"),
        ("Unset", "its Settings are no section"),
        ("Missing", "holds no 'Missing'"),
    ],
)
def test_what_is_no_expert_is_refused_before_any_work(own, name, said):
    (line,) = faults(kind=f"own/tutor.py:{name}")
    assert f"'prepare.expert.kind' = 'own/tutor.py:{name}'" in line and said in line
