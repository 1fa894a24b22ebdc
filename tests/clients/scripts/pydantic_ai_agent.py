"""pydantic-ai, with streams, on chat completions, responses or Anthropic's interface."""

import asyncio
import sys
from collections.abc import AsyncIterable

from pydantic_ai import Agent

agent = Agent(sys.argv[2] + ":policy", instructions="Look up every drawer.")


@agent.tool_plain
def look_up(drawer: str) -> str:
    """What is in a drawer."""
    return f"{drawer}: 7"


async def watch(_: object, events: AsyncIterable[object]) -> None:
    async for _ in events:
        pass


async def main() -> None:
    result = await agent.run(sys.argv[1], event_stream_handler=watch)
    print(result.output)


asyncio.run(main())
