"""The OpenAI SDK's responses, every other turn streamed; what came back is sent again as it is."""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"drawer": {"type": "string"}}},
    "strict": False,
}
client = OpenAI(max_retries=0)
items = [{"role": "user", "content": [{"type": "input_text", "text": sys.argv[1]}]}]
for turn in range(20):
    body = {"model": "policy", "instructions": "Look up every drawer.", "input": items, "tools": [TOOL], "store": False}
    if turn % 2:
        with client.responses.stream(**body) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            response = stream.get_final_response()
        assert "".join(deltas) == response.output_text
    else:
        response = client.responses.create(**body)
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        print(response.output_text)
        break
    for call in calls:
        drawer = json.loads(call.arguments)["drawer"]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{drawer}: 7"})
