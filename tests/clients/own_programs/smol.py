"""A ToolCallingAgent of smolagents."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def python(code: str) -> str:
    """Compute an expression.

    Args:
        code: the expression.
    """
    return str(len(code))


def run(task, endpoint):
    model = OpenAIServerModel(
        model_id=endpoint.model, api_base=endpoint.base_url, api_key=endpoint.key
    )
    agent = ToolCallingAgent(tools=[python], model=model, max_steps=2, verbosity_level=0)
    return str(agent.run(task.text))
