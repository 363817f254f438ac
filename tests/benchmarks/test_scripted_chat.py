"""The scripted server speaks the form of every agent, as the project's prompts ask for it."""

import pytest

from benchmarks.scripted_chat import Known, completion, reply
from tasks.agents import AGENTS
from tasks.agents.running import Models, run
from tasks.chat.contract import ChatReply
from tasks.trees.tree import Question
from tests.tasks.agents.scripted import Tools, task

KNOWN = [Known("Who built the tower?", "Ada"), Known("Who built the bridge?", "Bo")]
SEARCHES = {"direct": 0, "bare": 0}  # else 1


class InProcess:
    """The server's replies without the server."""

    name = "scripted"

    def ask(self, requests):
        return [self._reply(request) for request in requests]

    def _reply(self, request):
        messages = [vars(message) for message in request.messages]
        asked = {"model": "", "messages": messages, "stop": list(request.stop)}
        made = completion(asked, reply(messages, KNOWN))
        usage = made["usage"]
        text = made["choices"][0]["message"]["content"]
        return ChatReply(text, usage["prompt_tokens"], usage["completion_tokens"], "stop")


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_gets_the_answers_that_the_server_knows(name):
    tools = Tools(documents="nothing")
    questions = [Question(f"q-{n}", "toy", each.question, ()) for n, each in enumerate(KNOWN)]
    model = InProcess()
    tasks = [task(name, question, trials=2) for question in questions]
    right, wrong = run(AGENTS[name], tasks, Models(model, model), tools.session(), seed=0)
    assert (right.answer, wrong.answer) == ("Ada", "unknown")
    assert right.tool_calls == SEARCHES.get(name, 1)
    assert wrong.trials == (2 if AGENTS[name].retries else 1)
