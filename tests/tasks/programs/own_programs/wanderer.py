"""An agent whose conversation goes on, is retried, forked, compacted, or written otherwise."""

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Compute.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in keys.items()},
                "required": list(keys),
            },
        },
    }
    for name, keys in (("python", {"code": "string"}), ("add", {"a": "integer", "b": "integer"}))
]


def ask(endpoint, messages, retry=0, **more):
    host = endpoint.base_url.partition("//")[2].partition("/")[0]
    connection = http.client.HTTPConnection(host)
    headers = {"authorization": f"Bearer {endpoint.key}", "x-stainless-retry-count": str(retry)}
    body = {"model": endpoint.model, "messages": messages, "tools": TOOLS, **more}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]


def otherwise(message, chance):
    """Return a message as another client would send it back."""
    sent = {"role": "assistant", "content": message["content"]}
    if message.get("content") and chance.random() < 0.5:
        sent["content"] = [{"type": "text", "text": message["content"]}]
    if message.get("reasoning_content") and chance.random() < 0.5:
        sent["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        sent["content"] = chance.choice([None, "", message["content"]]) or message["content"]
        sent["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": spaced(call["function"]["arguments"], chance),
                },
            }
            for call in message["tool_calls"]
        ]
    return sent


def spaced(arguments, chance):
    try:
        return json.dumps(json.loads(arguments), indent=chance.choice([None, 2]))
    except ValueError:
        return arguments


def run(task, endpoint, moves=("on", "on", "on", "retry", "fork", "compact")):
    chance = random.Random(task.id)
    messages = [{"role": "system", "content": "Be brief."}, *task.messages]
    for step in range(chance.randrange(2, 7)):
        move = chance.choice(moves)
        if move == "compact" and step:
            messages = [messages[0], {"role": "user", "content": f"So far: {step} steps."}]
        message = ask(endpoint, messages)
        if move == "retry":
            assert ask(endpoint, messages, retry=1) == message
        if move == "fork":
            aside = [{"role": "user", "content": f"Check {step}, {n}."} for n in range(2)]
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda one: ask(endpoint, [one]), aside))
        messages.append(otherwise(message, chance))
        calls = message.get("tool_calls") or []
        for call in calls:
            result = chance.choice(["7", "<|end|> is no end", "a\nb", "<result>8</result>"])
            answered = {"role": "tool", "tool_call_id": call["id"], "content": result}
            messages.append(answered)
        if not calls:
            messages.append({"role": "user", "content": f"Go on, {step}."})
    return "7"


def one_at_a_time(task, endpoint):
    return run(task, endpoint, ("on", "on", "retry", "compact"))


def once(task, endpoint):
    ask(endpoint, task.messages)
    return "7"
