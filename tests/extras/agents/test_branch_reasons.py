"""Why calls begin branches, as the gateway counts it."""

from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from test_gateway_calls import post

from megatron_dta.extras.agents.gateway.branches import REASONS
from megatron_dta.training.monitor.console import branch_line
from open_gateway import chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine
from session_checks import check_sessions, step_error

SYSTEM = {"role": "system", "content": "be kind"}
ASK = {"role": "user", "content": "go"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_branches_are_counted_with_their_reasons(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    thought = "<think>\nhm\n</think>\n\nyes it is"
    engine = ScriptedEngine(lambda prompt, key: [*tokenizer.encode(thought), tokenizer.eos_id], tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model", reasoning_parser="think") as gateway:
        session, key = gateway.open()

        def ask(*messages: dict, **fields: object) -> dict:
            body = {"messages": list(messages), **fields}
            return post(gateway.url + "/v1/chat/completions", key, body)["choices"][0]["message"]

        def reason() -> str | None:
            return session.branches.get(len(session.calls) - 1)

        answer = ask(SYSTEM, ASK)
        assert reason() is None
        ask(SYSTEM, ASK, answer, {"role": "tool", "content": "t"})
        assert reason() is None  # the template keeps the reasoning before answers of tools
        ask(SYSTEM, ASK)
        assert reason() == "again"
        ask(SYSTEM, ASK, answer, {"role": "tool", "content": "other"})
        assert reason() == "history"
        ask(SYSTEM, ASK, answer, {"role": "user", "content": "and now"})
        assert reason() == "template"
        ask(SYSTEM, ASK, answer | {"content": "yes"}, {"role": "tool", "content": "t"})
        assert reason() == "answer"
        ask({"role": "system", "content": "be quick"}, ASK)
        assert reason() == "system"
        ask(SYSTEM, ASK, tools=[TOOL])
        assert reason() == "tools"
        cut = ask(SYSTEM, {"role": "user", "content": "stop"}, stop="it")
        assert (cut["content"], reason()) == ("yes ", "history")
        ask(SYSTEM, {"role": "user", "content": "stop"}, cut | {"content": "yes it"}, {"role": "tool", "content": "t"})
        assert reason() is None
        ask(SYSTEM, {"role": "user", "content": "stop"}, cut, {"role": "tool", "content": "t"})
        assert reason() == "stop"
        post(gateway.url + "/v1/completions", key, {"prompt": "other text"})
        assert reason() == "text"
        assert set(session.branches.values()) == set(REASONS)
        closed = post(gateway.url + "/v1/session/close", key, {})
        assert closed["branches"] == {"history": 2} | {name: 1 for name in REASONS if name != "history"}
    check_sessions([session], engine)
    assert step_error([session], tokenizer.vocab_size) <= 1e-12


def test_the_line_of_the_log() -> None:
    record = {"iteration": 1, "branches_again": 0.0, "branches_system": 3.0, "branches_history": 1.0}
    assert branch_line(record) == "branches of sessions: 3 system, 1 history (docs/agents.md)"
    assert branch_line({"iteration": 1, "branches_again": 0.0}) is None
