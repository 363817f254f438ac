"""Agents without training: a file each, which holds its AGENT (contract.py)."""

from tasks.agents import bare, direct, rag, react, reflexion, search_o1, tir, web_thinker
from tasks.agents.contract import AgentKind

AGENTS: dict[str, AgentKind] = {
    "bare": bare.AGENT,
    "direct": direct.AGENT,
    "tir": tir.AGENT,
    "react": react.AGENT,
    "reflexion": reflexion.AGENT,
    "rag": rag.AGENT,
    "search_o1": search_o1.AGENT,
    "web_thinker": web_thinker.AGENT,
}
