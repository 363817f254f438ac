"""OpenAI's Agents SDK, which reads address and key from its environment."""

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

set_tracing_disabled(True)


@function_tool
def python(code: str) -> str:
    """Compute an expression."""
    return str(len(code))


async def run(task, endpoint):
    agent = Agent(name="Calculator", tools=[python], model=endpoint.model)
    try:
        return (await Runner.run(agent, task.text, max_turns=3)).final_output
    except MaxTurnsExceeded:
        return None
