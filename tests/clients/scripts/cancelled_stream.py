"""The OpenAI or the Anthropic SDK: a stream that is closed at its first words, and the same question again."""

import sys

body = {"model": "policy", "max_tokens": 2000, "messages": [{"role": "user", "content": sys.argv[1]}]}
if sys.argv[2] == "openai":
    from openai import OpenAI

    completions = OpenAI(max_retries=0).chat.completions
    with completions.create(**body, stream=True) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
    print(completions.create(**body).choices[0].message.content)
else:
    from anthropic import Anthropic

    messages = Anthropic(max_retries=0).messages
    with messages.stream(**body) as stream:
        next(text for text in stream.text_stream if text)
    print(messages.create(**body).content[0].text)
