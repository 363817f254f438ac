"""Agents with the official client: plain, streaming, several answers, the newer protocol."""

import asyncio

from openai import AsyncOpenAI, BadRequestError, OpenAI
from own.wanderer import TOOLS


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages, said = list(task.messages), []
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=TOOLS, logprobs=True
        )
        (choice,) = reply.choices
        tokens = reply.usage.completion_tokens
        assert tokens == len(choice.logprobs.content), reply
        said.append(f"{choice.finish_reason} {reply.usage.prompt_tokens_details.cached_tokens > 0}")
        messages.append(choice.message.model_dump(exclude_none=True))
        called = choice.message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "7"} for c in called]
    return "; ".join(said)


async def streaming(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    ask = {"model": endpoint.model, "messages": task.messages, "tools": TOOLS}
    stream = await client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    content, name, arguments, usage = "", "", "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return f"{content}{name}{arguments} {usage.completion_tokens > 0}"


async def several(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    ask = {"model": endpoint.model, "messages": task.messages}
    reply = await client.chat.completions.create(**ask, n=3)
    other = await client.chat.completions.create(**ask)
    both = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(2)))
    texts = [choice.message.content for choice in reply.choices]
    same = both[0].id == both[1].id
    return f"{len(texts)} {other.id != reply.id} {same} {len(set(texts))}"


def responses(task, endpoint):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    ask = {"model": endpoint.model, "instructions": "Be brief.", "tools": tools, "store": False}
    items = [{"role": "user", "content": task.text}]
    for _ in range(8):
        reply = client.responses.create(input=items, **ask)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        for call in calls:
            answered = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            items.append(answered)
        if not calls:
            return reply.output_text
    return None


def refused(task, endpoint):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0)
    told = []
    for more in ({"temperature": 0.2}, {"seed": 3}, {"tool_choice": "required"}, {"nonsense": 1}):
        extra = {"extra_body": more} if "nonsense" in more else more
        try:
            client.chat.completions.create(model="policy", messages=task.messages, **extra)
        except BadRequestError as error:
            told.append(f"{error.body['message']} {error.status_code}")
    try:
        OpenAI(base_url=endpoint.base_url, api_key="bl-other", max_retries=0).models.list()
    except Exception as error:
        told.append(type(error).__name__)
    told.append(client.models.list().data[0].id)
    return " | ".join(told)


def neutral(task, endpoint):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0)
    ask = {"model": "any", "messages": task.messages, "user": "me", "max_tokens": 4}
    reply = client.chat.completions.create(
        **ask, temperature=1, top_p=1, tool_choice="auto", stop=["e"], seed=1
    )
    return f"{reply.usage.completion_tokens} {reply.choices[0].finish_reason}"
