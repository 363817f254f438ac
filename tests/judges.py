"""What tests of the judge share: settings, and a scripted judge that knows what is right."""

import re

from params.schema.judge import Judge
from tests.chat_server import said

TEMPLATE = "Q:\n{question}\nA:\n{accepted}\nGiven:\n{answer}\nEnd with Verdict: right or wrong."


def settings(*servers, names=("small",), **changes):
    """Settings of a judge over servers, one a model."""
    models = [
        {"kind": "endpoint", "url": server.url, "name": name, "key_variable": None}
        for server, name in zip(servers, names, strict=True)
    ]
    values = {
        "models": models,
        "prompt": "prompts/judge.txt",
        "votes": 1,
        "temperature": 0.6,
        "max_tokens": 50,
        "ask_again": 1,
        "own_policy": False,
        "concurrency": 4,
        "timeout_seconds": 5.0,
        "retries": 2,
        "budget": {"calls": None, "tokens": None},
    }
    return Judge.model_validate(values | changes)


def given_in(asked):
    """Return the accepted forms and the answer in a prompt of TEMPLATE."""
    prompt = asked["messages"][0]["content"]
    parts = re.fullmatch(r"Q:\n(.*)\nA:\n(.*)\nGiven:\n(.*)\nEnd.*", prompt, re.DOTALL).groups()
    return [[line.removeprefix("> ") for line in part.splitlines()] for part in parts[1:]]


def honest(asked, number):
    """A judge that compares texts."""
    accepted, (answer, *_) = given_in(asked)
    return said(f"compared\nVerdict: {'right' if answer in accepted else 'wrong'}")
