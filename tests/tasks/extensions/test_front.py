"""The front for files of own/: its names stay, and files that were written before it still load."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from params.schema.agent import Dialogue
from params.schema.prepare import EnvironmentQuestions, Expert
from tasks import scorers
from tasks.dialects import contract, open_dialect
from tasks.environments.episodes import open_worlds
from tasks.environments.own_world import environment_kind
from tasks.extensions import named
from tasks.ledger import keys
from tasks.questions import choice
from tasks.questions.contract import Lesson, Rules
from tasks.rewards import function
from tasks.rewards.scoring import score_trees
from tasks.tools.contract import Opening
from tasks.tools.own_tool import open_tool, tool_kind
from tasks.trees.tree import PROMPT, TURN, Call, Node, Observation, Question, Tree
from tests.reward_parts import listed
from tests.test_docs import files_of

FRONT = keys.PROJECT / "beamline"
WORDING = Path("params/suggestions.py")  # of errors: it decides nothing
PROMISED = {  # module -> names; add to it, and take nothing away
    "dialects": "Call Dialect DialectKind Dialogue Exchange Frozen Message Observation Outcome "
    "Question StopReason TagsDialect Tokens ToolSpec Turn encode in_tags markers quote "
    "template_clock",
    "environments": "Call Frozen Message Observation Outcome Question ToolSpec UnavailableError",
    "experts": "Call Frozen Observation Outcome Question Trace",
    "rewards": "CallResult Ending Message Node Observation Outcome PROMPT Question RESULT TURN",
    "settings": "Flag Float Frozen Integer NonNegative Positive PositiveFloat Probability",
    "tools": "Call Frozen Observation OpenTool Opening Outcome ToolKind ToolSpec text_spec "
    "text_tool UnavailableError",
}
STAGES = yaml.safe_load((keys.PROJECT / "dvc.yaml").read_text())["stages"]
QUESTION = Question("q", "toy", "?", ("7",))

# ---------------------------------------------------------------- a file of each kind

NOW = {  # kind -> its imports
    "tools": """from beamline.settings import Positive
from beamline.tools import Frozen, Observation, ToolKind, text_spec, text_tool
""",
    "environments": "from beamline.environments import Observation\n",
    "rewards": "from beamline.rewards import TURN, Ending, Outcome\n",
    "dialects": "from beamline.dialects import DialectKind, Frozen, TagsDialect\n",
    "experts": "from beamline.experts import Frozen, Trace\n",
}
BEFORE = {  # kind -> the same, before there was a front
    "tools": """from params.schema.base import Frozen, Positive
from tasks.tools.contract import ToolKind, text_spec, text_tool
from tasks.trees.tree import Observation
""",
    "environments": "from tasks.trees.tree import Observation\n",
    "rewards": """from tasks.rewards.contract import Ending
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import TURN
""",
    "dialects": """from params.schema.base import Frozen
from tasks.dialects.contract import DialectKind
from tasks.dialects.tags import TagsDialect
""",
    "experts": """from params.schema.base import Frozen
from tasks.questions.experts import Trace
""",
}
TOOLS = '''
from contextlib import contextmanager

class Repeat(Frozen):
    times: Positive = 1

@contextmanager
def _open(settings, opening):
    yield text_tool(
        text_spec("say", "Say it.", "text", "what to say"),
        lambda texts: [Observation("ok", text * settings.times) for text in texts],
    )

SAY = ToolKind(Repeat, _open)

class Shout:
    """Say it aloud."""

    class Settings(Frozen):
        sign: str = "!"

    def __init__(self, settings):
        self.sign = settings.sign

    def __call__(self, text: str) -> str:
        return text.upper() + self.sign
'''
REWARDS = """
def turns(ending: Ending) -> float:
    answered = ending.trajectory[-1].outcome == Outcome.ANSWER
    return 0.1 * answered * sum(node.kind == TURN for node in ending.trajectory)

def close(answer, accepted):
    return {"score": 0.5, "length": len(answer)}

close.graded = True
"""
EXPERTS = """
class Tutor:
    class Settings(Frozen):
        thought: str = "so"

    def __init__(self, settings):
        self.thought = settings.thought

    def write(self, questions, tools):
        first, second = questions
        end = "<think>%s</think><answer>\\\\boxed{7}</answer>" % self.thought
        return [(first, end), Trace(second, "none", [(end, True)])]
"""
ONE_CALL = """
from dataclasses import replace
from tasks.dialects.contract import Turn
from tasks.trees.tree import Call

class Settings(Frozen):
    word: str = "Well:"

class Polite(TagsDialect):
    def __init__(self, settings, tokenizer, dialogue, specs):
        super().__init__(tokenizer, dialogue, specs)
        self.word = settings.word

    def read(self, prompt, turn, text, stopped):
        read = super().read(prompt, turn, text, stopped)
        return Turn("CALL of mine", read.call, read.said)

    def call(self, turn):
        return Call("python", turn)

    def observe(self, prompt, turn, call, observation, limit):
        polite = replace(observation, text=f"{self.word} {observation.text}")
        return super().observe(prompt, turn, call, polite, limit)

DIALECT = DialectKind(Settings, Polite)
"""
DEEP = """
from params.schema.base import (
    Flag, Float, Frozen, Integer, NonNegative, Positive, PositiveFloat, Probability
)
from tasks.dialects.contract import Dialect, DialectKind, Exchange, Tokens, Turn
from tasks.dialects.tags import DIALECT, Tags, TagsDialect
from tasks.dialects.written_turns import in_tags, said
from tasks.environments.contract import FREE_TEXT, EnvironmentKind, World
from tasks.environments.frozen_lake import FrozenLake
from tasks.questions.contract import ExpertKind, ExpertSettings, Lesson, ScriptedExpert
from tasks.questions.experts import Dropped, Move, Script, Trace, play
from tasks.rewards.contract import Ending, Part, PartKind, plain
from tasks.scorers.contract import Scorer, ScorerKind
from tasks.tools.contract import Opening, OpenTool, ToolKind, text_spec, text_tool
from tasks.trees.markers import BREAK, Markers, Quoting, encode, markers, quote, quoted_tokens
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tree import PROMPT, RESULT, TURN, Call, Document, Message, Node, Observation
from tasks.trees.tree import Question, ToolSpec, sampled, step_rewards


class Lake(FrozenLake):
    fork = None
"""


def source(kind):
    """Return a file of a kind with the imports of now; a page's first file where it has imports."""
    pages = {"environments": "own-environment.md", "dialects": "own-dialect.md"}
    if kind in pages:
        return next(iter(files_of(pages[kind]).values()))
    return NOW[kind] + {"tools": TOOLS, "rewards": REWARDS, "experts": EXPERTS}[kind]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder; returns a function that writes a text to own/mine.py, and its path."""
    for module in (function, scorers):
        monkeypatch.setattr(module, "WORKERS", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        monkeypatch.delitem(sys.modules, name)

    def write(text):
        Path("own/mine.py").write_text(text)
        return "own/mine.py"

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture(params=[BEFORE, NOW], ids=["before", "now"])
def mine(request, own):
    """Write a file of a kind, with the imports of then and of now; return its path."""

    def write(kind):
        text = source(kind)
        assert NOW[kind] in text
        return own(text.replace(NOW[kind], request.param[kind]))

    return write


def test_tools(mine):
    file = mine("tools")
    for name, settings, said in [("SAY", {"times": 2}, "aa"), ("Shout", {}, "A!")]:
        chosen = tool_kind(f"{file}:{name}").settings(**settings)
        with open_tool(f"{file}:{name}", chosen, Opening(Path(), 1)) as tool:
            call = Call(tool.specs[0].name, "a", {"text": "a"})
            assert tool.run([call]) == [Observation("ok", said)]


def test_environment(mine):
    kind = environment_kind(f"{mine('environments')}:Wordle")
    (task,) = kind.tasks(kind.settings(), "train", 1, 0)
    with open_worlds(kind, kind.settings(), 1, 10.0) as worlds, worlds.session() as session:
        ((handle, first),) = session.open([task])
        (seen,) = session.act([(handle, Call("guess", '{"word": "zzzzz"}', {"word": "zzzzz"}))])
    assert (first.text, seen.text) == ("6 guesses left", "-----")


def test_reward_and_scorer(mine):
    file = mine("rewards")
    none = np.zeros(0, np.float32)
    text = "<think>a</think><answer>\\boxed{7}</answer>"
    nodes = [
        Node(parent, kind, outcome, text, np.zeros(1, np.int32), none, none)
        for parent, kind, outcome in [(-1, PROMPT, ""), (0, TURN, "answer")]
    ]
    (row,) = score_trees([Tree(QUESTION, nodes, [1])], listed({f"{file}:turns": {}}))
    assert row["reward"] == pytest.approx(0.1)
    with scorers.open_scorers([f"{file}:close"]) as opened:
        (scorer,) = opened.values()
        assert scorer.graded and scorer.compare("12", ["7"]) == {"score": 0.5, "length": 2}


def test_dialect(mine, tokenizer):
    name = f"{mine('dialects')}:DIALECT"
    settings = named.find("dialect", name).held.settings(word="Here:")
    limits = {"turn_tokens": 64, "result_tokens": 64, "response_tokens": 512, "tool_calls": 4}
    dialect = open_dialect({name: settings}, tokenizer, Dialogue(system="", **limits), [])
    assert seen_by(dialect) == "<result>Here: 7</result>"


def seen_by(dialect):
    """Return what a dialect writes for a turn of one call."""
    none = np.zeros(0, np.int32)
    exchange = contract.Exchange(none, "", (Call("python", "7"),), (Observation("ok", "7"),))
    text, _ = contract.observed(dialect, none, none, exchange, 60)
    return text


def test_dialect_that_observes_one_call(own, tokenizer):
    """As before turns had several."""
    file = own(BEFORE["dialects"] + ONE_CALL)
    settings = named.find("dialect", f"{file}:DIALECT").held.settings(word="Here:")
    limits = {"turn_tokens": 64, "result_tokens": 64, "response_tokens": 512, "tool_calls": 4}
    layout = Dialogue(system="", **limits)
    dialect = open_dialect({f"{file}:DIALECT": settings}, tokenizer, layout, [])
    assert seen_by(dialect) == "<result>Here: 7</result>"
    read = dialect.read(np.zeros(0, np.int32), np.zeros(0, np.int32), "<python>7</python>", "stop")
    assert read.calls == (Call("python", "7"),) and read.outcome == "CALL of mine"
    assert contract.calls_in(dialect, "anything") == (Call("python", "anything"),)


def test_expert(mine):
    name = f"{mine('experts')}:Tutor"
    questions = EnvironmentQuestions(source="environment", train=2, validation=1, test=1)
    settings, faults = choice.typed(Expert(kind=name), questions, [], "mine.yaml")
    rules = Rules(lambda question: [], lambda parts: "", lambda question, answer: True, 1000)
    asked = [QUESTION, Question("r", "toy", "?", ("7",))]
    write, _ = choice.find(name).open(settings, Lesson(asked, None, 0, rules))
    traces, dropped = write(None)
    assert [trace.question for trace in traces] == asked and not faults and not dropped
    assert traces[0].parts == traces[1].parts


def test_file_with_imports_of_inner_modules_loads(own):
    lake = named.find("environment", f"{own(DEEP)}:Lake").held
    assert lake.__base__.__name__ == "FrozenLake"


# ---------------------------------------------------------------- the names


def test_promised_names_are_there():
    assert set(PROMISED) == {file.stem for file in FRONT.glob("*.py")} - {"__init__"}
    for name, promised in PROMISED.items():
        module = importlib.import_module(f"beamline.{name}")
        assert set(module.__all__) == set(promised.split()), f"beamline.{name}"
        assert all(hasattr(module, each) for each in module.__all__)


def test_front_loads_without_libraries_that_take_long():
    code = (
        "import importlib, sys\n"
        "for package in ('torch', 'transformers', 'prefect', 'mlflow', 'dvc'):\n"
        "    sys.modules[package] = None\n"
        f"for name in {list(PROMISED)}:\n"
        "    importlib.import_module(f'beamline.{name}')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=FRONT.parent, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()


# ---------------------------------------------------------------- keys and stages


def test_keys_see_what_the_front_shows(own):
    seen = {path.name for path in keys.import_closure(Path(own(NOW["environments"])))}
    assert {"environments.py", "tree.py"} <= seen


@pytest.mark.parametrize("name", PROMISED)
def test_stages_need_no_dependency_on_the_front(name):
    """It decides nothing itself, and what it shows is in the rooms that stages depend on."""
    module = ast.parse((FRONT / f"{name}.py").read_text())
    statements = [type(node) for node in module.body]
    assert statements[0] is ast.Expr and statements[-1] is ast.Assign
    assert set(statements[1:-1]) == {ast.ImportFrom}
    shown = [path.relative_to(keys.PROJECT) for path in keys.import_closure(FRONT / f"{name}.py")]
    shown = [path for path in shown if path.parts[0] != "beamline" and path != WORDING]
    loading = {"experts": {"prepare"}, "rewards": {*STAGES} - {"cold_start"}}
    for stage in loading.get(name, STAGES):
        deps = STAGES[stage].get("do", {}).get("deps", [])
        if "own" in deps:
            assert [f for f in shown if not any(f.is_relative_to(dep) for dep in deps)] == []
