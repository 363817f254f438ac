"""A teacher behind a server: what it answers is checked, and what it cannot answer is named."""

import json

import numpy as np
import pytest

from params.schema.teacher import ServerTeacher
from tasks.chat import FOLDER, attempts, teacher_scores
from tests.chat_server import Response, open_chat_server, refused

TEXTS = ["a", " b", "c", "\ufffd", "<|end|>"]
IDS = [0, 1, 2, 3, 4]
GIVEN = {"tokens": ["a", "b", "c", "\ufffd", ""], "token_logprobs": [None, -1.0, -2, -0.5, 0]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_WAIT", 0.01)
    monkeypatch.setenv(FOLDER, str(tmp_path))


def answered(**changes):
    usage = {"prompt_tokens": 5, "completion_tokens": 0}
    choice = {"index": 0, "text": "", "logprobs": {**GIVEN, **changes}}
    return Response(body=json.dumps({"choices": [choice], "usage": usage}))


def check(response, **settings):
    def script(asked, number):
        given = {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 1}
        assert given.items() <= asked.items()
        return response

    with open_chat_server(script) as server:
        teacher = ServerTeacher(kind="server", url=server.url, name="big", retries=1, **settings)
        teacher_scores.check(teacher, IDS, TEXTS, "mine")
        return server


def test_spaces_and_parts_of_characters_may_be_written_in_other_ways():
    assert len(check(answered()).requests) == 1


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (answered(tokens=["a", "x", "c", "d", "e"]), "token 1 is 'x' to .* big and ' b' to"),
        (answered(tokens=["a"]), "log-probabilities of 1 tokens"),
        (answered(token_logprobs=None), r"returned no log-prob.* as vLLM's, with room"),
        (answered(token_logprobs=[None, -1.0, 2, 0, 0]), "what is no log-probability"),
        (answered(token_logprobs=[None, -1.0, True, 0, 0]), "what is no log-probability"),
        (answered(token_logprobs=[None, -1.0, float("nan"), 0, 0]), "what is no log-prob"),
        (refused(404), "no model 'big'"),
        (refused(400), r"a context of 5 tokens \(400: .*no: 400"),
    ],
)
def test_a_server_that_cannot_teach_is_named(response, fault):
    with pytest.raises(RuntimeError, match=fault):
        check(response)


def test_its_tokens_count_on_an_account_of_the_recipe():
    for _ in range(2):
        check(answered(), budget={"tokens": 12})
    with pytest.raises(RuntimeError, match=r"teacher\.budget\.tokens"):
        check(answered(), budget={"tokens": 12})


def test_an_error_leaves_no_other_context_waiting():
    texts = [chr(97 + i) for i in range(20)]
    contexts = {str(i): np.array([i, i], np.int32) for i in range(20)}
    with open_chat_server(lambda asked, number: refused(403)) as server:
        teacher = ServerTeacher(kind="server", url=server.url, name="big", concurrency=2)
        with pytest.raises(RuntimeError, match="403"):
            teacher_scores.ask(teacher, contexts, texts, "mine")
        assert len(server.requests) <= 4
