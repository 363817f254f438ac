"""Clients of OpenAI's protocol get what plain transformers writes, or are told why not."""

import threading
from types import SimpleNamespace

import pytest
import torch
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tasks.engines.servers.token_guard import CHATS, TEXTS
from tasks.engines.transformers import openai_protocol
from tasks.engines.transformers.transformers_engine import TransformersEngine

MESSAGES = [{"role": "user", "content": "Who?"}]
POSITIONS = 256


@pytest.fixture(scope="module")
def client(policy, tokenizer):
    engine = TransformersEngine(policy, tokenizer)
    served = SimpleNamespace(name="models/tiny", lock=threading.Lock(), engine=engine)
    return TestClient(Starlette(routes=openai_protocol.routes(served)))


def chat(client, **given):
    body = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **given}
    return client.post(CHATS, json=body)


def greedily(policy, tokenizer, prompt, count):
    tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    options = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    mask = torch.ones_like(tokens)
    whole = policy.generate(tokens, attention_mask=mask, max_new_tokens=count, **options)
    return tokenizer.decode(whole[0, tokens.shape[1] :], skip_special_tokens=True)


def test_a_greedy_answer_is_that_of_plain_transformers(client, policy, tokenizer):
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = greedily(policy, tokenizer, prompt, 12)
    said = chat(client).json()
    (choice,) = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected}
    assert len(expected) > 3 and choice["finish_reason"] == "length"
    length = len(tokenizer.encode(prompt, add_special_tokens=False))
    counts = {"prompt_tokens": length, "completion_tokens": 12, "total_tokens": length + 12}
    assert (said["object"], said["usage"]) == ("chat.completion", counts)
    text = client.post(TEXTS, json={"prompt": prompt, "temperature": 0, "max_tokens": 12}).json()
    assert text["choices"][0]["text"] == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert chat(client, messages=parts).json()["choices"][0]["message"]["content"] == expected


def test_an_answer_ends_before_a_stop_and_is_drawn_by_its_seed(client):
    whole = chat(client).json()["choices"][0]["message"]["content"]
    stopped = chat(client, stop=whole[2:4]).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (whole[:2], "stop")
    drawn = [
        chat(client, temperature=1, seed=seed).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_without_a_limit_an_answer_has_the_room_that_is_left(client, tokenizer):
    said = chat(client, max_tokens=None, temperature=1).json()
    assert said["usage"]["total_tokens"] <= POSITIONS
    assert said["choices"][0]["finish_reason"] == "stop" or said["usage"]["total_tokens"] == 256
    text = client.post(TEXTS, json={"prompt": "What", "temperature": 0}).json()
    assert text["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stream": True, "n": 2}, "stream: this server does not read it; n: this server"),
        ({"tools": [{"type": "function"}]}, "tools: this server does not read it"),
        ({"top_logprobs": 3}, "top_logprobs: this server does not read it"),
        ({"temperature": 3}, "temperature 3: give a number from 0 to 2"),
        ({"max_tokens": 0}, "max_tokens 0: give a number above 0"),
        ({"stop": ["a", ""]}, "stop: write texts of one letter or more"),
        ({"messages": []}, "messages: the last one"),
        ({"messages": [{"role": "user"}]}, "not understood: KeyError('content')"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages: only content of text is read",
        ),
        ({"messages": [{"role": "user", "content": "a b " * 400}]}, "and the policy 256 positions"),
    ],
)
def test_what_is_not_read_is_refused(client, given, said):
    answer = chat(client, **given)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_neutral_values_are_no_fault_and_the_model_has_its_folder_as_a_name(client):
    neutral = {"n": 1, "stream": False, "tools": [], "logit_bias": None, "user": "me"}
    assert chat(client, **neutral).status_code == 200
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["models/tiny"]


GIVEN = {"echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 1}


def test_given_tokens_are_scored_as_by_plain_transformers(client, policy, tokenizer):
    ids = tokenizer.encode("Who wrote it?", add_special_tokens=False)
    (choice,) = client.post(TEXTS, json={**GIVEN, "prompt": ids}).json()["choices"]
    with torch.no_grad():
        logits = policy(torch.tensor([ids])).logits[0, :-1]
    expected = logits[:, : len(tokenizer)].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None and rest == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in ids]
    text = client.post(TEXTS, json={**GIVEN, "prompt": "Who wrote it?"}).json()
    assert text["choices"] == [choice]
    assert text["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "total_tokens": len(ids),
    }


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"prompt": []}, "write one text, or the ids"),
        ({"prompt": [1, 2.5]}, "2.5 is not the id of a token"),
        ({"prompt": [1, 10**6]}, "1000000 is not the id"),
        ({"prompt": [1] * (POSITIONS + 1)}, f"{POSITIONS + 1} tokens"),
        ({"prompt": [1], "max_tokens": 4}, "echo: write logprobs 0, max_tokens 0, temperature 1"),
        ({"prompt": [1], "temperature": 0.5}, "temperature 1"),
        ({"prompt": [1], "logprobs": 5}, "logprobs 0"),
        ({"prompt": [1], "top_p": 0.5}, "top_p: this server does not read it"),
    ],
)
def test_other_requests_of_scores_are_refused(client, asked, fault):
    answer = client.post(TEXTS, json={**GIVEN, **asked})
    assert answer.status_code == 400
    assert fault in answer.json()["error"]["message"]
