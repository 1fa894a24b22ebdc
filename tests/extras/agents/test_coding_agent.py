"""The coding agent of ``examples/real_model/repairs.py``, at the gateway and in the sandbox."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from megatron_dta.extras.agents.gateway.records import leaves
from open_gateway import chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine
from tool_runs import load_script

repairs = load_script("examples/real_model/repairs.py")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_session_at_the_gateway(tmp_path: Path) -> None:
    """What the model sees after each command; a wrong edit is undone; a session is one path of its tree."""
    record = repairs.draw_record(random.Random(1))
    name, number, line = record["repair"]
    commands = ["open lib.py", "rm main.py", f"{name} {number}: return {{", f"{name} {number}: {line}"]
    tokenizer = chat_tokenizer(tmp_path / "model")

    def script(prompt: list[int], key: int) -> list[int]:
        command = commands[tokenizer.decode(prompt).count("assistant\n") - 1]
        return [*tokenizer.encode(command).tolist(), tokenizer.eos_id]

    engine = ScriptedEngine(script, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        session, key = gateway.open()
        assert repairs.agent(record, SimpleNamespace(base_url=f"{gateway.url}/v1", api_key=key)) == 1.0
    seen = [tokenizer.decode(prompt) for prompt, _ in engine.prompts]
    assert "1 def " in seen[1]
    assert "No such command." in seen[2]
    assert "got an error. Undone." in seen[3]
    assert len(seen) == len(session.calls) == 4
    assert len(leaves(session.calls)) == 1
    assert repairs._verdict.cache_info().misses == 3  # the right edit without the hidden tests, and then with them
