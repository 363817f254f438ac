"""An agent with the OpenAI client and a calculator of its own, as its owner has written it.

``params/tiny-program.yaml`` trains it: docs/own-program.md.
"""

import ast
import json
import operator
from typing import Any

from openai import AsyncOpenAI

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
LARGEST = 10**12
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Compute an expression of whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


async def run(task: Any, endpoint: Any) -> str | None:
    """Ask the model, compute what it calls for, and return its answer."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages = list(task.messages)
    for _ in range(4):
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[CALCULATOR]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculated(json.loads(call.function.arguments).get("code", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def calculated(code: str) -> str:
    """Return the value of ``print(3 * 4)`` or ``3 * 4``, or what is wrong with it."""
    try:
        expression = ast.parse(code.strip().removeprefix("print"), mode="eval").body
        return str(value(expression))
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


def value(node: ast.AST) -> int:
    """Return the value of an expression. Raises ValueError for anything but whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found: int = node.value
    elif isinstance(node, ast.BinOp):
        found = OPERATORS[type(node.op)](value(node.left), value(node.right))
    elif isinstance(node, ast.UnaryOp):
        found = OPERATORS[type(node.op)](value(node.operand))
    else:
        raise ValueError(f"{type(node).__name__} is no arithmetic")
    if abs(found) > LARGEST:
        raise ValueError(f"{found} is too large")
    return found
