"""smolagents: an agent that calls tools, and one that writes code."""

import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def look_up(drawer: str) -> str:
    """What is in a drawer.

    Args:
        drawer: its letter.
    """
    return f"{drawer}: 7"


model = OpenAIModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], tool_choice="auto"
)
kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[2]]
agent = kind(tools=[look_up], model=model, max_steps=20, stream_outputs=True, verbosity_level=0)
print(agent.run(sys.argv[1]))
