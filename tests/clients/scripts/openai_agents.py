"""OpenAI's Agents SDK on responses: a run that streams, which calls the tool; then the same agent asked once more."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def look_up(drawer: str) -> str:
    """What is in a drawer.

    Args:
        drawer: its letter.
    """
    return f"{drawer}: 7"


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_api(sys.argv[2])
    agent = Agent(name="looker", instructions="Look up every drawer.", tools=[look_up], model="policy")
    result = Runner.run_streamed(agent, sys.argv[1], max_turns=20)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
