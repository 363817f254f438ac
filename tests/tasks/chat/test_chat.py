"""Chat models over a scripted server: retries, time-outs, the cache, and the budget."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from params.schema.chat import ChatBudget, ChatEndpoint, ChatLimits
from tasks.chat import FOLDER, attempts, endpoint, open_chat
from tasks.chat.contract import ChatRequest
from tasks.trees.tree import Message
from tests.chat_server import Response, open_chat_server, refused, said

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_WAIT", 0.01)
    monkeypatch.setenv(FOLDER, str(tmp_path / "chat"))
    return tmp_path / "chat"


def limits(retries=2, seconds=30.0, concurrency=4, calls=None, tokens=None):
    return ChatLimits(
        concurrency=concurrency,
        timeout_seconds=seconds,
        retries=retries,
        budget=ChatBudget(calls=calls, tokens=tokens),
    )


def at(server, name="small", key_variable=None):
    return ChatEndpoint(kind="endpoint", url=server.url, name=name, key_variable=key_variable)


def request(text, **others):
    chosen = {"max_tokens": 20, "temperature": 0.5, **others}
    return ChatRequest((Message("user", text),), **chosen)


def ask(server, texts, place="judge", **settings):
    with open_chat([at(server)], limits(**settings), place, "a") as [model]:
        return model.ask([request(text) for text in texts])


def echo(asked, number):
    return said(f"re: {asked['messages'][-1]['content']}")


def test_replies_in_order_with_the_fields_of_the_request():
    texts = [str(number) for number in range(20)]
    with open_chat_server(lambda asked, n: replace(echo(asked, n), after=0.03)) as server:
        with open_chat([at(server)], limits(concurrency=4), "judge", "a") as [model]:
            replies = model.ask([request(text, seed=7, stop=("!",), top_p=0.9) for text in texts])
        assert [reply.text for reply in replies] == [f"re: {text}" for text in texts]
        assert server.side_by_side == 4
        sent = server.requests[0]
    given = {"model": "small", "seed": 7, "stop": ["!"], "top_p": 0.9, "temperature": 0.5}
    assert given.items() <= sent.items()
    assert sent["max_tokens"] == 20
    assert (replies[0].prompt_tokens, replies[0].completion_tokens) == (10, 5)


FAULTS = {
    "408": refused(408),
    "409": refused(409),
    "429": refused(429),
    "503": refused(503),
    "timeout": said("late", after=5.0),
    "connection lost": said("half", dropped=True),
    "malformed": Response(body="{not json"),
    "a page": Response(body="<html>", headers={"Content-Type": "text/html"}),
    "no choices": Response(body='{"id": "1"}'),
    "no text": said(None),
    "empty": said(""),
    "error": Response(body='{"error": {"message": "busy"}, "choices": [{"message": {}}]}'),
    "deep": Response(body="[" * 1990),
    "deep within": Response(body='{"choices": ' + "[" * 1980),
    "an answer of more than 2000 bytes": said("x" * 2000),
    "a packed answer": said("small", headers={"Content-Encoding": "gzip"}),
}
NAMED = dict.fromkeys(("a page", "no choices", "error", "deep", "deep within"), "malformed")
NAMED |= dict.fromkeys(("no text", "empty"), "no text")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_retried_as_often_as_set(fault, monkeypatch):
    monkeypatch.setattr(attempts, "ANSWER_BYTES", 2000)

    def script(asked, number):
        return FAULTS[fault] if number < 2 else echo(asked, number)

    named = NAMED.get(fault, fault)
    seconds = 2.0 if fault == "timeout" else 30.0  # a good answer comes in time on a busy machine
    with open_chat_server(script) as server:
        (reply,) = ask(server, ["a"], retries=2, seconds=seconds)
        assert (reply.text, len(server.requests)) == ("re: a", 3)
    with open_chat_server(script) as server:
        (reply,) = ask(server, ["b"], retries=1, seconds=seconds)
        assert reply.fault.startswith(named)
        assert (reply.text, len(server.requests)) == ("", 2)


@pytest.mark.parametrize("charset", ["bz2", "zlib", "hex", "rot13", "undefined", "idna", "x" * 999])
@pytest.mark.parametrize("status", [200, 400])
def test_charset_of_a_server_is_not_taken(charset, status):
    kind = {"Content-Type": f"application/json; charset={charset}"}
    good = said("fine", headers=kind)
    script = replace(good, status=status)
    with open_chat_server(lambda asked, n: script) as server:
        (reply,) = ask(server, ["a"], retries=0)
    assert reply.text == "fine" if status == 200 else reply.fault.startswith("400: ")


def test_what_a_server_says_is_one_printable_line():
    body = json.dumps({"error": {"message": "no \x1b[31m \u202e\njudge: all is well"}})
    script = Response(400, body=body)
    with open_chat_server(lambda asked, n: script) as server:
        (reply,) = ask(server, ["a"])
    assert reply.fault.startswith("400: ") and reply.fault.isprintable()


@pytest.mark.parametrize("location", ["http://[bad", "http://a:99999999/"])
def test_redirect_to_no_address_names_the_server(location):
    script = Response(302, headers={"Location": location})
    with open_chat_server(lambda asked, n: script) as server:
        with pytest.raises(RuntimeError) as raised:
            ask(server, [location], retries=0)
        assert server.url in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.parametrize("usage", [-1, 10**18, True, "12", float("nan"), 1.5, None, [1]])
def test_cost_that_cannot_be_counts_as_reserved(folder, usage):
    body = said("fine").body.replace('s": 10', f's": {json.dumps(usage)}')
    with open_chat_server(lambda asked, n: Response(body=body)) as server:
        (reply,) = ask(server, ["a"])
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("fine", 0, 0)
    (account,) = (folder / "spent").iterdir()
    counts = {json.loads(line)["tokens"] for line in account.read_text().splitlines()}
    assert counts == {endpoint.most_tokens(request("a"))}


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_is_named_and_not_followed(status):
    with open_chat_server(echo) as other, open_chat_server(echo) as server:
        server.script = lambda asked, n: Response(status, headers={"Location": f"{other.url}/x"})
        with pytest.raises(RuntimeError) as raised:
            ask(server, ["a"])
        assert server.url in str(raised.value) and f"{other.url}/x" in str(raised.value)
        assert (len(server.requests), len(other.requests)) == (1, 0)


def test_trickling_answer_is_a_timeout():
    with open_chat_server(echo) as server:
        server.serve = slowly_served
        (reply,) = ask(server, ["a"], retries=0, seconds=0.3)
    assert reply.fault == "timeout"


def slowly_served(handler):
    handler.rfile.read(int(handler.headers["Content-Length"]))
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while True:  # until the client closes the connection
        handler.wfile.write(b" ")
        time.sleep(0.05)


def test_waits_as_long_as_the_server_asks():
    """A number of seconds, or a date, which has whole seconds: at least one from now."""

    def date(now):
        return formatdate(now + 2, usegmt=True), int(now + 2)

    for asks in (lambda now: ("0.4", now + 0.4), date):
        earliest = []

        def script(asked, number, earliest=earliest, asks=asks):
            now = time.time()
            if number:
                assert now >= earliest[0]
                return echo(asked, number)
            text, moment = asks(now)
            earliest.append(moment)
            return refused(429, headers={"Retry-After": text})

        with open_chat_server(script) as server:
            (reply,) = ask(server, [f"a{asks is date}"], retries=1)
        assert not reply.fault and len(earliest) == 1


def test_longer_wait_than_allowed_ends_the_attempts():
    script = [refused(429, headers={"Retry-After": "3600"})]
    with open_chat_server(lambda asked, n: script[0]) as server:
        (reply,) = ask(server, ["a"], retries=5)
        assert (reply.fault, len(server.requests)) == ("429", 1)


def test_server_that_restarts(folder):
    """Requests that meet no server are asked again when it is back."""
    with open_chat_server(echo) as server:
        port = int(server.url.split(":")[2].split("/")[0])
    attempts.FIRST_WAIT = 0.1  # set back by the fixture
    found = []
    there = ChatEndpoint(kind="endpoint", url=server.url, name="small", key_variable=None)
    with open_chat([there], limits(retries=6), "judge", "a") as [model]:
        thread = threading.Thread(target=lambda: found.extend(model.ask([request("a")])))
        thread.start()
        time.sleep(0.2)
        with open_chat_server(echo, port):
            thread.join()
    assert [reply.text for reply in found] == ["re: a"]


def test_error_that_no_request_survives(monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-secret")
    quota = Response(429, json.dumps({"error": {"message": "", "code": "insufficient_quota"}}))
    cases = {"A_KEY": refused(401), "no model 'small'": refused(404), "credit": quota}
    for word, response in cases.items():
        with open_chat_server(lambda asked, n, response=response: response) as server:
            place = at(server, key_variable="A_KEY")
            with (
                open_chat([place], limits(), "judge", "a") as [model],
                pytest.raises(RuntimeError, match=word) as caught,
            ):
                model.ask([request("a"), request("b")])
            assert "sk-secret" not in str(caught.value)
            assert server.keys[0] == "Bearer sk-secret"
    with pytest.raises(RuntimeError, match=r"no connection to .* start the server"):
        ask(server, ["c"], retries=1)
    monkeypatch.delenv("A_KEY")
    with (
        pytest.raises(ValueError, match=r"judge.key_variable.*A_KEY"),
        open_chat([place], limits(), "judge", "a"),
    ):
        pass


def test_error_keeps_answers_under_way():
    def script(asked, number):
        return refused(401, after=0.1) if asked["seed"] else said("x", after=0.3)

    with open_chat_server(script) as server:
        with open_chat([at(server)], limits(), "judge", "a") as [model]:
            with pytest.raises(RuntimeError, match="401"):
                model.ask([request("a", seed=1), request("b"), request("c")])
            assert len(server.requests) == 3
            model.ask([request("b"), request("c")])
        assert len(server.requests) == 3


def test_bad_request_is_not_repeated():
    with open_chat_server(lambda asked, n: refused(400)) as server:
        (reply,) = ask(server, ["a"])
        assert (reply.fault[:3], len(server.requests)) == ("400", 1)


def test_equal_requests_are_asked_once():
    with open_chat_server(lambda asked, n: said("x", after=0.1)) as server:
        replies = ask(server, ["a"] * 5 + ["b"])
        assert [reply.text for reply in replies] == ["x"] * 6
        assert len(server.requests) == 2
        ask(server, ["b", "a"])  # opened again
        assert len(server.requests) == 2


def test_each_field_asks_anew():
    fields = [{}, {"seed": 1}, {"temperature": 0.0}, {"stop": ("x",)}, {"max_tokens": 3}]
    with open_chat_server(echo) as server:
        models = [at(server), at(server, name="other")]
        with open_chat(models, limits(), "judge", "a") as opened:
            for model in opened:
                model.ask([request("a", **each) for each in fields])
        assert len(server.requests) == 10


def test_failed_request_is_asked_again():
    with open_chat_server(lambda asked, n: refused(500)) as server:
        ask(server, ["a"], retries=0)
        server.script = echo
        assert ask(server, ["a"], retries=0)[0].text == "re: a"


def test_damaged_answer_is_asked_again(folder):
    with open_chat_server(echo) as server:
        ask(server, ["a"])
        (file,) = (folder / "answers").rglob("*.json")
        file.write_text(file.read_text()[:40])
        assert ask(server, ["a"])[0].text == "re: a"
        assert len(server.requests) == 2


# ---------------------------------------------------------------- budget


def test_calls_end_before_the_budget_is_exceeded():
    with open_chat_server(echo) as server:
        with pytest.raises(RuntimeError, match=r"judge\.budget\.calls = 3"):
            ask(server, [str(number) for number in range(10)], calls=3)
        assert len(server.requests) == 3
        with pytest.raises(RuntimeError, match=r"judge\.budget\.calls = 3"):
            ask(server, ["new"], calls=3)  # after a restart
        answered = [asked["messages"][0]["content"] for asked in server.answered]
        assert [reply.text for reply in ask(server, answered, calls=3)] == [
            f"re: {text}" for text in answered
        ]
        assert len(server.requests) == 3


def test_tokens_end_before_the_budget_is_exceeded():
    """Reservations that are larger than the cost wait for open calls, and do not end the run."""
    cost, most = 15, endpoint.most_tokens(request("0"))
    with open_chat_server(lambda asked, n: said("x", after=0.02)) as server:
        with pytest.raises(RuntimeError, match=r"judge\.budget\.tokens = 200"):
            ask(server, [str(number) for number in range(30)], tokens=200)
        sent = len(server.requests)
    assert sent * cost <= 200
    assert sent * cost + most > 200  # as many as fit


def test_refused_attempt_is_free_and_lost_one_counts():
    with open_chat_server(lambda asked, n: refused(503)) as server:
        ask(server, ["a"], retries=3, calls=1)
        server.script = echo
        ask(server, ["a"], calls=1)
    with open_chat_server(lambda asked, n: said("late", after=5.0)) as server:
        with pytest.raises(RuntimeError, match="calls = 3"):
            ask(server, ["b"], retries=3, seconds=1.0, calls=3)
        assert len(server.requests) == 2


ASKER = """
import sys
from tests.tasks.chat.test_chat import limits, request
from params.schema.chat import ChatEndpoint
from tasks.chat import open_chat
there = ChatEndpoint(kind="endpoint", url=sys.argv[1], name="small", key_variable=None)
with open_chat([there], limits(concurrency=2), "judge", "a") as [model]:
    model.ask([request(str(number)) for number in range(12)])
"""


def test_killed_asker_repeats_no_answered_call(folder):
    """Kill the asking process in the middle: what it had received is not asked again."""
    with open_chat_server(lambda asked, n: said("x", after=0.1)) as server:
        asker = subprocess.Popen([sys.executable, "-c", ASKER, server.url], cwd=ROOT)
        while len(list((folder / "answers").rglob("*.json"))) < 4:
            assert asker.poll() is None
            time.sleep(0.01)
        os.kill(asker.pid, signal.SIGKILL)
        asker.wait()
        before = len(server.requests)
        kept = {asked_in(file) for file in (folder / "answers").rglob("*.json")}
        assert all(reply.text == "x" for reply in ask(server, map(str, range(12))))
        again = {asked["messages"][0]["content"] for asked in server.requests[before:]}
    assert len(kept) >= 4
    assert not kept & again
    assert kept | again == {str(number) for number in range(12)}
    lines = (folder / "spent" / "a.jsonl").read_text().splitlines()
    calls = {entry["call"]: entry["calls"] for entry in map(json.loads, lines)}
    assert 0 <= sum(calls.values()) - len(server.requests) <= 2  # killed before they were sent


def asked_in(file):
    return json.loads(file.read_text())["request"]["messages"][0]["content"]
