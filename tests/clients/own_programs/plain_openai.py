"""An agent with the official client, asynchronous and streaming."""

import json

from openai import AsyncOpenAI

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Compute an expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


async def run(task, endpoint):
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages = list(task.messages)
    for _ in range(3):
        message = await streamed(client, endpoint.model, messages)
        if not message["tool_calls"]:
            return message["content"]
        messages.append(message)
        for call in message["tool_calls"]:
            code = json.loads(call["function"]["arguments"])["code"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"{len(code)}"}
            messages.append(result)
    return None


async def streamed(client, model, messages):
    content, calls = "", {}
    stream = await client.chat.completions.create(
        model=model, messages=messages, tools=[PYTHON], stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or []:
            empty = {"type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(part.index, {"id": part.id, **empty})
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values())}
