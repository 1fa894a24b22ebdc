"""The OpenAI SDK's chat completions, every other turn streamed."""

import json
import sys

from openai import OpenAI

FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"drawer": {"type": "string"}}}}
client = OpenAI(max_retries=0)
messages = [
    {"role": "developer", "content": [{"type": "text", "text": "Look up "}, {"type": "text", "text": "every drawer."}]},
    {"role": "user", "content": sys.argv[1]},
]
for turn in range(20):
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    body |= {"parallel_tool_calls": True, "user": "me", "metadata": {"a": "b"}, "store": False}
    if turn % 2:
        with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**body).choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls:
        drawer = json.loads(call.function.arguments)["drawer"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{drawer}: 7"})
