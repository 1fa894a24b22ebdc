"""Unmodified clients at the gateway: ten turns with tools, recorded exactly. ``bash tests/run.sh clients [NAME]``."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from client_runs import CALLS, ENVIRONMENTS, LAST, SCRIPTS, TASK, CodeTool, Tool, run_client, served

from megatron_dta.extras.agents.gateway.records import leaves
from open_gateway import OpenGateway
from session_checks import check_sessions, distinct_tokens, gradient_error

Command = Callable[[OpenGateway, Path, Path], list[str]]  # of the gateway, the environment and a working folder


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        environment: its folder in ``ENVIRONMENTS``.
        begins: calls besides those of the task, such as for titles.
        branches: why there are any; "answer": the client alters what it was answered, in every turn.
    """

    environment: str
    command: Command
    tool: Tool
    begins: int = 0
    branches: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)


def script(environment: str, name: str, *arguments: str, **fields: Any) -> Client:
    """A client that a script of this folder uses."""

    def command(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
        return [str(folder / "bin" / "python"), str(SCRIPTS / name), TASK, *arguments]

    return Client(environment, command, **{"tool": Tool(), **fields})


def call_text(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def mini_swe_agent(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
    settings = ["-c", "mini.yaml", "-c", "model.cost_tracking=ignore_errors"]
    return [
        str(folder / "bin/mini"),
        "-m",
        "openai/policy",
        "-t",
        TASK,
        "-y",
        "--exit-immediately",
        "-l",
        "0",
        *settings,
    ]


def claude_code(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
    return [str(folder / "node_modules/.bin/claude"), "-p", TASK, "--model", "policy", "--allowedTools", "Bash"]


def codex(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
    provider = f'{{name="g", base_url="{gateway.url}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = [f"model_providers.gateway={provider}", "model_provider=gateway", 'web_search="disabled"']
    flags = [flag for setting in settings for flag in ("-c", setting)]
    flags += ["--disable", "multi_agent", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(folder / "node_modules/.bin/codex"), "exec", "-m", "policy", *flags, TASK]


def opencode(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
    options = {"baseURL": gateway.url + "/v1", "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {}}}
    (work / "opencode.json").write_text(json.dumps({"provider": {"gateway": provider}}))
    return [str(folder / "node_modules/.bin/opencode"), "run", "-m", "gateway/policy", TASK]


SHELL = {"argument": "command", "value": "echo 7 #"}
CLIENTS = {
    "openai-chat": script("openai", "openai_chat.py"),
    "openai-responses": script("openai", "openai_responses.py"),
    "openai-completions": script("openai", "openai_completions.py"),
    "anthropic": script("anthropic", "anthropic_messages.py"),
    "openai-agents-chat": script("openai-agents", "openai_agents.py", "chat_completions"),
    "openai-agents-responses": script("openai-agents", "openai_agents.py", "responses"),
    "pydantic-ai-chat": script("pydantic-ai", "pydantic_ai_agent.py", "openai-chat"),
    "pydantic-ai-responses": script("pydantic-ai", "pydantic_ai_agent.py", "openai-responses"),
    "pydantic-ai-anthropic": script("pydantic-ai", "pydantic_ai_agent.py", "anthropic"),
    "langgraph-chat": script("langgraph", "langgraph_agent.py", "chat"),
    "langgraph-responses": script("langgraph", "langgraph_agent.py", "responses"),
    # It writes the calls of its history as text.
    "smolagents-tools": script(
        "smolagents",
        "smolagents_agent.py",
        "tools",
        tool=Tool(last=call_text("final_answer", answer=LAST)),
        branches=("answer",) * CALLS,
    ),
    "smolagents-code": script("smolagents", "smolagents_agent.py", "code", tool=CodeTool()),
    "mini-swe-agent": Client(
        "mini-swe-agent",
        mini_swe_agent,
        Tool("bash", last=call_text("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), **SHELL),
    ),
    "claude-code": Client("claude-code", claude_code, Tool("Bash", **SHELL), flags={"gateway_override_sampling": True}),
    "codex": Client("codex", codex, Tool("exec_command", "cmd", "echo 7 #")),
    "opencode": Client("opencode", opencode, Tool("bash", **SHELL), begins=1, branches=("tools",)),
}
# Of three interfaces; small enough for a step on every call alone.
TRAINED = ("openai-responses", "langgraph-chat", "pydantic-ai-anthropic")


@pytest.mark.parametrize("name", CLIENTS)
def test_ten_turns_are_recorded_exactly(name: str, tmp_path: Path) -> None:
    client = CLIENTS[name]
    folder = ENVIRONMENTS / client.environment
    if client.environment == "openai" and not folder.exists() and importlib.util.find_spec("openai"):
        folder = Path(sys.prefix)
    if not folder.exists():
        pytest.skip(f"needs bash tests/run.sh clients {client.environment}")
    with served(tmp_path, client.tool, **client.flags) as (gateway, model):
        session, printed = run_client(gateway, client.command(gateway, folder, tmp_path), tmp_path)
    assert client.tool.last != LAST or LAST in printed
    assert len(session.calls) == client.begins + CALLS + 1
    assert tuple(session.branches.values()) == client.branches
    assert len(leaves(session.calls)) == 1 + len(client.branches)
    check_sessions([session], model.engine)
    if "answer" not in client.branches:
        # No token is stored, or made by the tokenizer, twice after the same prefix.
        assert session.num_tokens == distinct_tokens(session.calls)
        assert session.counts.tokenized_tokens == session.num_tokens - sum(len(call.output) for call in session.calls)
    if name in TRAINED:
        assert gradient_error([session], model.tokenizer.vocab_size) <= 1e-12
