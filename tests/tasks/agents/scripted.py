"""A chat model that answers as a test says, and remembers what it was asked."""

from dataclasses import dataclass, field, replace
from functools import partial

from tasks.agents import AGENTS
from tasks.agents.contract import Limits, Task
from tasks.agents.prompts import load
from tasks.agents.running import Models, run
from tasks.chat.contract import ChatReply
from tasks.environments.question import Questions, answer
from tasks.tools.browser import SPEC as BROWSER
from tasks.tools.contract import OpenTool, text_spec
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Observation, Question

LIMITS = Limits(turns=6, tool_calls=3, turn_tokens=50, response_tokens=400, result_characters=200)
QUESTION = Question("q-1", "toy", "Who built the tower?", ("Ada",))
SEARCH = text_spec("search", "Search the documents.", "query", "words")


@dataclass
class Scripted:
    """Answers with these texts, or replies, one after the other."""

    script: list
    name: str = "scripted"
    asked: list = field(default_factory=list)

    def ask(self, requests):
        self.asked += requests
        return [self._reply(self.script.pop(0)) for _ in requests]

    def _reply(self, said):
        return said if isinstance(said, ChatReply) else ChatReply(said, 10, 5, "stop")

    @property
    def contexts(self):
        """What each request had in its context, as one text."""
        return ["\n".join(message.content for message in one.messages) for one in self.asked]


@dataclass
class Turns:
    """Answers each dialogue with these texts in turn, by its turn or by its question, too."""

    script: object  # texts, or question's id -> texts, where the question's text has its id
    name: str = "scripted"
    rounds: list = field(default_factory=list)

    def ask(self, requests):
        self.rounds.append(list(requests))
        return [ChatReply(self._text(request.messages), 10, 5, "stop") for request in requests]

    def _text(self, messages):
        turn = sum(message.role == "assistant" for message in messages)
        if isinstance(self.script, dict):
            found = [one for name, one in self.script.items() if name in messages[0].content]
            return found[0][turn]
        return self.script[turn]


@dataclass
class Tools:
    """A search and a browser that answer as a test says, and remember their calls."""

    documents: str = "RAW: the tower was built by Ada"
    page: str = ""  # with {url}
    outcome: str = Outcome.OK  # of a page
    rounds: list = field(default_factory=list)  # the calls that came together

    @property
    def made(self):
        return [call for calls in self.rounds for call in calls]

    @property
    def queries(self):
        return [call.argument for call in self.made if call.tool == "search"]

    def search(self, calls):
        self.rounds.append(list(calls))
        return [Observation(Outcome.OK, self.documents) for _ in calls]

    def browse(self, calls):
        self.rounds.append(list(calls))
        return [
            Observation(self.outcome, self.page.format(url=call.values["url"])) for call in calls
        ]

    def session(self):
        tools = [OpenTool([SEARCH], self.search), OpenTool([BROWSER], self.browse)]
        return Questions(partial(answer, tools))


def task(name, question=QUESTION, specs=(SEARCH,), limits=None, **others):
    """Return a task for an agent, with the project's prompts."""
    prompts = load(AGENTS[name].prompts)
    held = replace(LIMITS, **(limits or {}))
    return Task(question, list(specs), prompts, held, temperature=0.6, top_p=0.95, **others)


def try_one(name, script, tools=None, condenser=None, **others):
    """Run an agent on one task; return its ending and the model that it asked."""
    model = Scripted(list(script))
    models = Models(model, condenser or model)
    session = (tools or Tools()).session()
    (ending,) = run(AGENTS[name], [task(name, **others)], models, session, seed=0)
    return ending, model
