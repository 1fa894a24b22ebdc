"""The Anthropic SDK, every other turn streamed, with cache controls and a system prompt that is a list."""

import sys

from anthropic import Anthropic

TOOL = {"name": "look_up", "input_schema": {"type": "object", "properties": {"drawer": {"type": "string"}}}}
client = Anthropic(max_retries=0)
system = [{"type": "text", "text": "Look up every drawer.", "cache_control": {"type": "ephemeral"}}]
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(20):
    body = {"model": "policy", "max_tokens": 500, "system": system, "messages": messages}
    body |= {"tools": [TOOL | {"cache_control": {"type": "ephemeral"}}]}
    count = client.messages.count_tokens(**{name: body[name] for name in body if name != "max_tokens"}).input_tokens
    if turn % 2:
        with client.messages.stream(**body, metadata={"user_id": "me"}) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**body, tool_choice={"type": "auto"}, thinking={"type": "adaptive"})
    assert count == message.usage.input_tokens
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "7"}], "is_error": False}
        for block in message.content
        if block.type == "tool_use"
    ]
    if not results:
        print(message.content[-1].text)
        break
    messages.append({"role": "user", "content": results})
