"""What of the vLLM engine needs no vLLM; tests/vllm has the rest."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.engines import SamplingRequest, turns
from tasks.engines.servers import token_guard
from tasks.engines.servers.answers import parse_choice
from tasks.engines.turns import TurnRequest
from tasks.engines.vllm import serve
from tasks.engines.vllm.connection import ROOT, shared
from tasks.engines.vllm_options import SEEDS, sampling_options
from tasks.trees.outcomes import StopReason

PIECES = ["a", "</python>", "b</python>c", "</", "python>", "<|end|>"]


def test_tokens_that_hold_a_stop_string_end_a_turn():
    assert turns.stop_tokens(PIECES, ["</python>"]) == (1, 2)
    assert turns.stop_tokens(PIECES, []) == ()


@pytest.mark.parametrize(
    ("stop", "looked_for"),
    [(["</python>"], ()), (["</python>", "</search>"], ("</python>", "</search>")), ([], ())],
)
def test_text_is_searched_if_a_stop_is_no_token(stop, looked_for):
    assert turns.stop_texts(PIECES, stop) == looked_for


def test_turn_ends_with_its_stop_string_and_all_its_numbers_with_it():
    """vLLM may have sampled on before it noticed."""
    tokens = np.array([0, 3, 4, 0, 5], np.int32)  # a</python>a<|end|>
    numbers = np.arange(5, dtype=np.float32)
    drawn = SimpleNamespace(
        pieces=lambda: PIECES,
        tokenizer=SimpleNamespace(eos_token_id=5),
        sample=lambda _: [(tokens, -numbers, numbers)],
    )
    session = turns.TurnSession(drawn, 1, 20, 1.0, 1.0, ["</python>"])
    [sample] = session.sample([SamplingRequest(session.open(), np.array([1], np.int32), 3, 9)])
    assert sample.stopped == StopReason.STOP
    assert sample.tokens.tolist() == [0, 3, 4]
    assert sample.logprobs.tolist() == [0, -1, -2]
    assert sample.entropies.tolist() == [0, 1, 2]


def turn(**changes):
    values = {
        "tokens": np.array([1, 2], np.int32),
        "seed": 2**64 - 1,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": (),
        "stop_tokens": (5, 1),
        "stop_texts": (),
    }
    return TurnRequest(**{**values, **changes})


def test_turn_options_have_own_seed_and_stops():
    options = sampling_options(turn())
    assert (
        0 <= options["seed"] < SEEDS and options["seed"] != sampling_options(turn(seed=1))["seed"]
    )
    assert options["stop_token_ids"] == [5, 1] and options["ignore_eos"]
    assert (options["stop"], options["detokenize"]) == ([], False)
    with_text = sampling_options(turn(stop_texts=("</a>",)))
    assert (with_text["stop"], with_text["detokenize"]) == (["</a>"], True)


OTHER = """
import pickle, sys, torch
found = {name: rebuild(*how) for name, (rebuild, how) in pickle.load(sys.stdin.buffer).items()}
assert found["b"].dtype == torch.bfloat16 and found["b"].shape == (5,)
print({name: weight.sum().item() for name, weight in found.items()})
"""


def test_another_process_opens_shared_weights():
    weights = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    with shared(weights) as openers:
        seen = subprocess.run(
            [sys.executable, "-c", OTHER],
            input=pickle.dumps(openers),
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    assert seen.stdout.decode().strip() == "{'a': 66.0, 'b': 5.0}"


def test_servers_answer_is_parsed():
    def entry(logprob, entropy):
        return {"logprob": logprob, "top_logprobs": [{"logprob": logprob}, {"logprob": entropy}]}

    content = [entry(-0.5, 0.25), entry(-1.5, 0.75)]
    tokens, logprobs, entropies = parse_choice(
        {"token_ids": [3, 4], "logprobs": {"content": content}}
    )
    assert tokens.tolist() == [3, 4]
    assert logprobs.tolist() == [-0.5, -1.5] and entropies.tolist() == [0.25, 0.75]


def test_a_server_starts_with_our_worker_and_flags(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("os.execve", lambda *call: started.append(call))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    serve.main([str(tmp_path), "--port", "9", "--memory", "0.5", "--context", "64"])
    [(python, words, environment)] = started
    assert python == sys.executable
    text = " ".join(words)
    assert "--worker-extension-cls tasks.engines.vllm.policy_worker.PolicyWorker" in text
    assert "--enable-scale-out" in words and "--max-model-len 64" in text
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--middleware tasks.engines.servers.token_guard.Guard" in text
    assert environment[token_guard.TOKEN] not in text


def test_a_server_without_a_policy_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        serve.main([str(tmp_path)])
    assert "is no policy" in capsys.readouterr().err
