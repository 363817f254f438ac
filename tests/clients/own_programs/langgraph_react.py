"""LangGraph's ReAct agent over langchain-openai."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def python(code: str) -> str:
    """Compute an expression."""
    return str(len(code))


async def run(task, endpoint):
    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.key)
    agent = create_react_agent(model, [python])
    result = await agent.ainvoke({"messages": task.messages}, {"recursion_limit": 7})
    return result["messages"][-1].content
