"""Runs unmodified clients, each in an environment of its own, against a gateway whose engine is scripted."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.sampling.prompts.continuation import whole_text
from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

# The folder of environments that ``tests/run.sh clients`` makes.
ENVIRONMENTS = Path(os.environ.get("DTA_CLIENTS", "/nonexistent"))
SCRIPTS = Path(__file__).parent / "scripts"
TASK = "What is in the drawers?"
CALLS, LAST = 9, "There is a 7 in all of them."
SECONDS = 300
TURN = "<|im_start|>assistant\n"
SUBTASK, SUMMARY = "Look into drawer b.", "SUMMARY: a 7 in each"


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


@dataclass(frozen=True)
class Story(Tool):
    """The model starts a sub-agent, reads until it is asked for a summary, and ends after it.

    Attributes:
        agent, kind: the tool that starts sub-agents, and what it is to start.
    """

    agent: str = ""
    kind: str = ""

    def of_text(self, text: str) -> str:
        """The answer to a prompt."""
        turns, begin = text.count(TURN) - 1, text.partition(TURN)[0]
        if SUMMARY in text:
            return self.last
        if "summary" in text.split("<|im_start|>user")[-1] and "<|im_start|>tool\n" not in text.split("user\n")[-1]:
            return SUMMARY
        if SUBTASK in begin:
            return "a 7" if turns else call_text(self.name, **{self.argument: "echo 7"})
        if self.agent and not turns:
            return call_text(self.agent, description="look", prompt=SUBTASK, subagent_type=self.kind)
        return call_text(self.name, **{self.argument: f"seq {turns}000 {turns}999"})


def call_text(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedModel:
    """Answers by the number of the assistant's turns in the prompt; without tools, as for titles, with two words."""

    def __init__(self, folder: Path, tool: Tool, seconds: float) -> None:
        self.tokenizer = chat_tokenizer(folder)
        self._tool = tool
        self._turn, self._offer = (
            np.array(self.tokenizer.encode(text), np.int32).tobytes() for text in (TURN, tool.name)
        )
        self._answer = lru_cache(self.answer)
        self.engine = ScriptedEngine(
            lambda prompt, key: self._answer(np.array(prompt, np.int32).tobytes()), self.tokenizer.vocab_size, seconds
        )

    def answer(self, prompt: bytes) -> list[int]:
        """Each of the model's answers ends with the end of sequence."""
        if isinstance(self._tool, Story):
            text = self._tool.of_text(whole_text(self.tokenizer, np.frombuffer(prompt, np.int32)))
        else:
            text = self._tool.answer(prompt.count(self._turn) - 1) if self._offer in prompt else "Some title"
        return [*self.tokenizer.encode(text).tolist(), self.tokenizer.eos_id]


@contextmanager
def served(folder: Path, tool: Tool, seconds: float = 0.0, **flags: Any) -> Iterator[tuple[OpenGateway, ScriptedModel]]:
    """A gateway with the scripted model, which takes ``seconds`` for a piece of an answer."""
    model = ScriptedModel(folder / "model", tool, seconds)
    flags = {"reasoning_parser": "think", "gateway_piece_tokens": 24, **flags}
    limits = (2000, 200_000)
    with open_gateway(model.engine, model.tokenizer, folder / "model", max_tokens=limits, **flags) as gateway:
        yield gateway, model


def run_client(gateway: OpenGateway, command: Sequence[str], folder: Path, settings: dict[str, str]) -> tuple[Any, str]:
    """Run a command with the gateway and ``settings`` in its environment; the session and what it has printed."""
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
        **settings,
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return session, done.stdout
