"""A trained policy is served at the address that its program knows."""

import asyncio
import queue
import threading

import openai
import pytest

from params.schema.agent import Dialogue
from tasks.dialects.tags import Tags
from tasks.programs import serving
from tasks.programs.asking import FixedSampling
from tasks.programs.contract import ProgramSettings
from tests.scripted_engine import ScriptedEngine
from tests.tasks.programs.own_programs.wanderer import TOOLS
from tests.tasks.programs.test_token_exactness import in_tags


@pytest.fixture(scope="module")
def served(tokenizer):
    """The port of a server that speaks the dialect of tags, with the key "key", and its engine."""
    engine, ports = ScriptedEngine(tokenizer, in_tags), queue.Queue()
    dialogue = Dialogue(
        system="", turn_tokens=40, result_tokens=40, response_tokens=40, tool_calls=1
    )
    sampling = FixedSampling(0.6, 0.95, 40, ())
    settings = ProgramSettings(prompt_tokens=3000)
    words = (engine, tokenizer, dialogue, sampling, settings, {"tags": Tags()}, "key")
    serve = threading.Thread(
        target=serving.serve, args=(*words, ("127.0.0.1", 0), ports.put), daemon=True
    )
    serve.start()
    return ports.get(timeout=60), engine


async def converse(client, number):
    """Return how many turns of a conversation went on from what was sampled before."""
    messages, known = [{"role": "user", "content": f"Task {number}"}], 0
    for _ in range(4):
        reply = await client.chat.completions.create(model="a", messages=messages, tools=TOOLS)
        known += reply.usage.prompt_tokens_details.cached_tokens > 0
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        called = message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in called]
        if not called:
            messages.append({"role": "user", "content": "And now?"})
    return known


def test_conversations_go_on_side_by_side(served):
    port, engine = served

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key") as one:
            return await asyncio.gather(*(converse(one, number) for number in range(12)))

    assert asyncio.run(all_of_them()) == [3] * 12
    assert max(engine.batches) > 1


def test_another_key_is_refused(served):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served[0]}/v1", api_key="other")
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
