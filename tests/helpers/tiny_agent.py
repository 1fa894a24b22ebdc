"""An agent as a program: two calls through the environment's gateway, without any client library; few imports.

    python tiny_agent.py [post | fail | fail-hang-print]

The reward is the share of even characters in the answers: sent to the gateway, or printed as the last line of output.
``fail`` ends with status 3 for prompts that contain a 3, ``hang`` never ends for those that contain a 4.
"""

import json
import os
import socket
import sys
import time


def post(url: str, body: dict) -> dict:
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    content = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
    with socket.create_connection((name, int(port)), timeout=60) as connection, connection.makefile("rb") as reply:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status, _, rest = reply.read().partition(b"\r\n")
    assert b" 200 " in status, status + rest
    return json.loads(rest.partition(b"\r\n\r\n")[2])


def main() -> None:
    record, what = json.loads(sys.stdin.readline()), sys.argv[1]
    if "fail" in what and "3" in record["prompt"]:
        print("a reason", file=sys.stderr)
        raise SystemExit(3)
    if "hang" in what and "4" in record["prompt"]:
        # A child that outlives its parent, too.
        os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, "-c", "import time; time.sleep(600)")
        time.sleep(600)
    messages, texts = [{"role": "user", "content": record["prompt"]}], []
    for _ in range(2):
        reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
        message = reply["choices"][0]["message"]
        texts.append(message["content"])
        messages += [message, {"role": "user", "content": "again"}]
    answers = "".join(texts)
    reward = sum(ord(character) % 2 == 0 for character in answers) / max(1, len(answers))
    if "print" in what:
        print(json.dumps({"reward": reward}))
    else:
        post(os.environ["MEGATRON_DTA_SESSION_URL"] + "/reward", {"reward": reward})


if __name__ == "__main__":
    main()
