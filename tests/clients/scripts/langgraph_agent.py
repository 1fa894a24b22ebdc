"""LangGraph's agent that calls tools, with langchain-openai; it streams its messages."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def look_up(drawer: str) -> str:
    """What is in a drawer."""
    return f"{drawer}: 7"


model = ChatOpenAI(model="policy", streaming=True, max_retries=0, use_responses_api=sys.argv[2] == "responses")
agent = create_react_agent(model, [look_up], prompt="Look up every drawer.")
for state in agent.stream({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 50}, stream_mode="values"):
    last = state["messages"][-1]
print(last.text() if callable(last.text) else last.text)
