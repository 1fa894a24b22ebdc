"""Runs unmodified clients, each in an environment of its own, against a gateway whose engine is scripted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

# The folder of environments that ``tests/run.sh clients`` makes.
ENVIRONMENTS = Path(os.environ.get("DTA_CLIENTS", "/nonexistent"))
SCRIPTS = Path(__file__).parent / "scripts"
TASK = "What is in the drawers?"
CALLS, LAST = 9, "There is a 7 in all of them."
SECONDS = 300


@dataclass(frozen=True)
class Tool:
    """The tool that the model calls: its name and an argument; ``last`` is the last answer."""

    name: str = "look_up"
    argument: str = "drawer"
    value: str = "abc"
    last: str = LAST

    def answer(self, turn: int) -> str:
        """The model's answer in a turn, counted from 0: calls in several spellings, with text or thoughts."""
        if turn >= CALLS:
            return self.last
        calls = [f'"{self.argument}": "{self.value} {turn}"', f'"{self.argument}":"{self.value} again"']
        written = [f'<tool_call>\n{{"name": "{self.name}", "arguments": {{{call}}}}}\n</tool_call>' for call in calls]
        before = {2: "Next.\n", 4: "<think>\nso far so good\n</think>\n\n", 6: "<think>\n\n</think>\n\nMore. \n\n"}
        return before.get(turn, "") + (written[1] if turn == 3 else "\n".join(written[: 2 if turn == 5 else 1]))


@dataclass(frozen=True)
class CodeTool(Tool):
    """The model writes Python that calls the tool, up to a stop string."""

    def answer(self, turn: int) -> str:
        code = f'final_answer("{LAST}")' if turn >= CALLS else f'print({self.name}("{self.value} {turn}"))'
        return f"Thought: turn {turn}\n<code>\n{code}\n</code>"


class ScriptedModel:
    """Answers by the number of the assistant's turns in the prompt; without tools, as for titles, with two words."""

    def __init__(self, folder: Path, tool: Tool) -> None:
        self.tokenizer = chat_tokenizer(folder)
        self._tool = tool
        self._turn, self._offer = (
            np.array(self.tokenizer.encode(text), np.int32).tobytes() for text in ("<|im_start|>assistant\n", tool.name)
        )
        self._answer = lru_cache(self.answer)
        self.engine = ScriptedEngine(
            lambda prompt, key: self._answer(np.array(prompt, np.int32).tobytes()), self.tokenizer.vocab_size
        )

    def answer(self, prompt: bytes) -> list[int]:
        """Each of the model's answers ends with the end of sequence."""
        text = self._tool.answer(prompt.count(self._turn) - 1) if self._offer in prompt else "Some title"
        return [*self.tokenizer.encode(text).tolist(), self.tokenizer.eos_id]


@contextmanager
def served(folder: Path, tool: Tool, **flags: Any) -> Iterator[tuple[OpenGateway, ScriptedModel]]:
    """A gateway with the scripted model."""
    model = ScriptedModel(folder / "model", tool)
    flags = {"reasoning_parser": "think", "gateway_piece_tokens": 24, **flags}
    limits = (200, 200_000)
    with open_gateway(model.engine, model.tokenizer, folder / "model", max_tokens=limits, **flags) as gateway:
        yield gateway, model


def run_client(gateway: OpenGateway, command: Sequence[str], folder: Path) -> tuple[Any, str]:
    """Run a command with the gateway in its environment; the session and what the command has printed."""
    session, key = gateway.open()
    home = folder / "home"
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": gateway.url + "/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": key,
        "MSWEA_CONFIGURED": "true",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return session, done.stdout
