"""A judge over ``transformers serve``, with a small model that was trained to give one verdict."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tasks.chat import FOLDER
from tasks.rewards import judging
from tasks.scorers.judge import Submission
from tests.judges import settings

pytestmark = pytest.mark.kills
PROMPT = "{question} {accepted} {answer}"
SAID = "They agree.\nVerdict: right"
ASKED = [Submission(f"What is {n}?", (str(n),), str(n)) for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny):
    """A folder with a policy that ends every answer with the verdict "right"."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tasks.policy.tiny import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer([SAID], tiny)
    # not Qwen2, whose texts the server would parse by the tokens of Qwen's own chat template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    policy = LlamaForCausalLM(config)
    chat = [{"role": "user", "content": "> What is 3? > 3 > 3"}]
    chat.append({"role": "assistant", "content": SAID})
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    row = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        policy(row, labels=row).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("model")
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def served(model, port):
    """Serve a model on loopback; yields the process once it answers."""
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        until_healthy(server, port)
        yield server
    finally:
        server.kill()
        server.wait()


def until_healthy(server, port):
    while True:
        assert server.poll() is None, "the server has ended"
        try:
            return urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (URLError, OSError):
            time.sleep(0.2)


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_server_is_killed_and_started_again(model, free_port, tmp_path, monkeypatch):
    """The judge waits for the server, and every answer gets the verdict of the model."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    class There:
        url = f"http://127.0.0.1:{free_port}/v1"

    chosen = settings(
        There, names=[str(model)], temperature=0.1, concurrency=1, retries=9, timeout_seconds=60.0
    )
    found = []

    def judge():
        with judging.open_judge(chosen, PROMPT, "toy") as opened:
            found.append((opened.judge(ASKED), opened.models[0].usage, opened.votes))

    asking = threading.Thread(target=judge)
    with served(model, free_port) as server:
        asking.start()
        while len(list((tmp_path / "answers").rglob("*.json"))) < 2:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    with served(model, free_port):
        asking.join()
    [(breakdowns, usage, votes)] = found
    assert [one["score"] for one in breakdowns.values()] == [1] * len(ASKED)
    assert all(vote.reply.text.endswith("Verdict: right") for vote in votes)
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
