"""The OpenAI SDK's completions, every other turn streamed: the client writes the conversation as text."""

import sys

from openai import OpenAI

client = OpenAI(max_retries=0)
text = f"<|im_start|>user\nWith look_up: {sys.argv[1]}<|im_end|>\n<|im_start|>assistant\n"
for turn in range(20):
    body = {"model": "policy", "prompt": text, "max_tokens": 200}
    if turn % 2:
        answer = "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
    else:
        answer = client.completions.create(**body).choices[0].text
    if "<tool_call>" not in answer:
        print(answer)
        break
    text += f"{answer}<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
