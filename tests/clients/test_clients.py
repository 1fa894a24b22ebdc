"""Unmodified clients at the gateway: ten turns with tools, recorded exactly. ``bash tests/run.sh clients [NAME]``."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from client_runs import CALLS, ENVIRONMENTS, LAST, SCRIPTS, TASK, CodeTool, Story, Tool, call_text, run_client, served

from megatron_dta.extras.agents.gateway.records import leaves, session_rollouts
from open_gateway import OpenGateway
from session_checks import check_sessions, distinct_tokens, step_error

Command = Callable[[OpenGateway, Path, Path], list[str]]  # of the gateway, the environment and a working folder


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        environment: its folder in ``ENVIRONMENTS``.
        begins: calls besides those of the task, such as for titles.
        branches: why there are any; "answer": the client alters what it was answered, in every turn.
        flags, settings: of the gateway, and environment variables of the client.
    """

    environment: str
    command: Command
    tool: Tool
    begins: int = 0
    branches: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def script(environment: str, name: str, *arguments: str, **fields: Any) -> Client:
    """A client that a script of this folder uses."""

    def command(gateway: OpenGateway, folder: Path, work: Path) -> list[str]:
        return [str(folder / "bin" / "python"), str(SCRIPTS / name), TASK, *arguments]

    return Client(environment, command, **{"tool": Tool(), **fields})


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


def claude_code(gateway: OpenGateway, folder: Path, work: Path, *flags: str) -> list[str]:
    claude = [str(folder / "node_modules/.bin/claude"), "-p", TASK, "--model", "policy", *flags]
    return [*claude, "--allowedTools", "Bash", "Agent"]


def codex(gateway: OpenGateway, folder: Path, work: Path, *more: str) -> list[str]:
    provider = f'{{name="g", base_url="{gateway.url}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = [f"model_providers.gateway={provider}", "model_provider=gateway", 'web_search="disabled"', *more]
    flags = [flag for setting in settings for flag in ("-c", setting)]
    flags += ["--disable", "multi_agent", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(folder / "node_modules/.bin/codex"), "exec", "-m", "policy", *flags, TASK]


def opencode(gateway: OpenGateway, folder: Path, work: Path, **model: Any) -> list[str]:
    options = {"baseURL": gateway.url + "/v1", "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": model}}
    (work / "opencode.json").write_text(json.dumps({"provider": {"gateway": provider}}))
    return [str(folder / "node_modules/.bin/opencode"), "run", "-m", "gateway/policy", TASK]


SHELL = {"argument": "command", "value": "echo 7 #"}
OVERRIDE = {"gateway_override_sampling": True}
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
        settings={"MSWEA_CONFIGURED": "true"},
    ),
    "claude-code": Client("claude-code", claude_code, Tool("Bash", **SHELL), flags=OVERRIDE),
    "claude-code-short": Client(
        "claude-code",
        lambda *where: claude_code(*where, "--system-prompt", "Look.", "--tools", "Bash"),
        Tool("Bash", **SHELL),
        flags=OVERRIDE,
    ),
    "claude-code-compaction": Client(
        "claude-code",
        claude_code,
        Story("Bash", "command", agent="Agent", kind="general-purpose"),
        branches=("tools", "history", "history"),
        flags=OVERRIDE,
        settings={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "140000"},
    ),
    "codex": Client("codex", codex, Tool("exec_command", "cmd", "echo 7 #")),
    "codex-compaction": Client(
        "codex",
        lambda *where: codex(*where, "model_auto_compact_token_limit=60000"),
        Story("exec_command", "cmd"),
        branches=("tools", "history"),
    ),
    "opencode": Client("opencode", opencode, Tool("bash", **SHELL), begins=1, branches=("tools",)),
    "opencode-compaction": Client(
        "opencode",
        lambda *where: opencode(*where, limit={"context": 60_000, "output": 2000}),
        Story("bash", "command", agent="task", kind="general"),
        branches=("tools", "tools", "system", "history"),
    ),
}
# Small enough for a step on every call alone.
TRAINED = ("openai-agents-responses", "langgraph-chat", "pydantic-ai-anthropic", "claude-code-short")


@pytest.mark.parametrize("name", CLIENTS)
def test_calls_are_recorded_exactly(name: str, tmp_path: Path) -> None:
    """Ten turns, or a sub-agent, a context that fills and its summary."""
    client = CLIENTS[name]
    folder = ENVIRONMENTS / client.environment
    if client.environment == "openai" and not folder.exists() and importlib.util.find_spec("openai"):
        folder = Path(sys.prefix)
    if not folder.exists():
        pytest.skip(f"needs bash tests/run.sh clients {client.environment}")
    with served(tmp_path, client.tool, **client.flags) as (gateway, model):
        tokenized = note_texts(gateway)
        command = client.command(gateway, folder, tmp_path)
        session, printed = run_client(gateway, command, tmp_path, client.settings)
    assert client.tool.last != LAST or LAST in printed
    assert tuple(session.branches.values()) == client.branches
    assert len(leaves(session.calls)) == 1 + len(client.branches)
    check_sessions([session], model.engine)
    if not isinstance(client.tool, Story):
        assert len(session.calls) == client.begins + CALLS + 1
    if "answer" not in client.branches:
        # No text is tokenized, and no token stored, twice after the same prefix.
        assert max(Counter(tokenized).values()) == 1
        assert session.counts.tokenized_tokens == session.num_tokens - sum(len(call.output) for call in session.calls)
        assert isinstance(client.tool, Story) or session.num_tokens == distinct_tokens(session.calls)
    if name in TRAINED:
        assert step_error([session], model.tokenizer.vocab_size) <= 1e-12


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_cancelled_stream_stops_sampling(name: str, tmp_path: Path) -> None:
    """What was sampled of it is dropped; the same question again is no branch."""
    if not (ENVIRONMENTS / name).exists():
        pytest.skip(f"needs bash tests/run.sh clients {name}")
    client = script(name, "cancelled_stream.py", name)
    tool = CodeTool("drawers", value="drawer " * 80)
    with served(tmp_path, tool, 0.05, reasoning_parser="none") as (gateway, model):
        command = client.command(gateway, ENVIRONMENTS / name, tmp_path)
        session, printed = run_client(gateway, command, tmp_path, {})
    (call,) = session.calls
    assert printed.strip().endswith("</code>")
    assert (session.counts.abandoned_calls, session.branches) == (1, {})
    pieces = -(-len(call.output) // 24)
    assert pieces > 10
    assert pieces < model.engine.submitted < pieces + 5
    (rollout,) = session_rollouts(session, 1.0)
    assert np.array_equal(rollout.token_ids[rollout.loss_mask], call.output)


def note_texts(gateway: OpenGateway) -> list[tuple[bytes, str]]:
    """What is tokenized from now on, with the ids before it."""
    prompts, texts = gateway.gateway.prompts, []
    encode = prompts._encode

    def noted(known: np.ndarray, text: str) -> object:
        texts.extend([(known.tobytes(), text)] if text else [])
        return encode(known, text)

    prompts._encode = noted
    return texts
