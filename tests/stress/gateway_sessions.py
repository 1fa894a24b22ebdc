"""Scripted agents at the gateway: turns, tools, retries, compactions, sub-agents, choices; then one training step.

    python tests/stress/gateway_sessions.py [--sessions 64] [--calls 10000] [--seed 0] [--output RESULT.json]

Every session is a client of its own over HTTP. The answers are scripted, with reasoning and with tool calls that are
spelled unlike the template's. Checked, over all sessions:

    tokenized twice   no piece of text (from one special token to the next) whose whole prefix was tokenized or sampled
                      before in its session reaches the tokenizer
    as sampled        the prompts that the engine saw, and the trained tokens of the rollouts, are the sampled ids
    trained once      every sampled token is trained by exactly one rollout
    gradients         the step on the sessions' trees against Megatron's stock model on every call alone, float64

Status 0 if all of it holds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import shared  # noqa: F401 (before the helpers)
import numpy as np
import torch

from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.extras.parity.references import run_stock
from megatron_dta.extras.parity.tree_run import run_tree
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt, PromptBuilder
from megatron_dta.extras.agents.gateway.records import SessionSizes, session_rollouts
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.core.tree import build_prefix_tree
from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SPECIAL = re.compile(rb"<\|im_start\|>|<\|im_end\|>")
MOST_CHARACTERS = 900


def answer_text(key: int) -> str:
    """The scripted answer of a key: text, reasoning, or calls of a tool in three spellings."""
    random = np.random.default_rng(key)
    words = " ".join(f"w{value}" for value in random.integers(50, size=int(random.integers(1, 6))))
    thought = f"<think>\nso {words}\n</think>\n\n" if random.random() < 0.3 else ""
    kind = int(random.integers(5))
    if kind == 0:
        return thought + f'<tool_call>{{"name":"add","arguments":{{"a":{key % 9},"b":2}}}}</tool_call>'
    if kind == 1:
        return thought + f'{words}\n<tool_call>\n{{"name": "add", "arguments": {{"a": {key % 7}}}}}\n</tool_call>'
    return thought + words


class Audit:
    """Watches which pieces of text the tokenizer gets, with their whole prefixes, session by session."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.known: set[tuple[str, bytes]] = set()
        self.twice = self.pieces = 0
        self._chat, self._remember, self._repeated = builder.chat, builder.remember, builder._repeated
        builder.chat, builder.remember = self.chat, self.remember

    def chat(self, session: Session, messages: Any, tools: Any) -> GatewayPrompt:
        """As ``PromptBuilder.chat``."""
        prompt = self._chat(session, messages, tools)
        for end, digest in prefixes(prompt.content):
            if end > prompt.known_bytes:
                self.pieces += 1
                self.twice += (session.session_id, digest) in self.known
                self.known.add((session.session_id, digest))
        return prompt

    def remember(self, session: Session, prompt: GatewayPrompt, call: Any, text: str, answer: Any) -> None:
        """As ``PromptBuilder.remember``; the answer is known from now on, as written and as the template repeats it."""
        self._remember(session, prompt, call, text, answer)
        texts = [prompt.content + text.encode() + b"<|im_end|>"]
        repeated = self._repeated(prompt, call, text, answer)
        if repeated is not None:
            texts.append(repeated[0].encode())
        for whole in texts:
            self.known.update((session.session_id, digest) for _, digest in prefixes(whole))


def prefixes(content: bytes) -> list[tuple[int, bytes]]:
    """(end, digest) of each prefix that ends at a special token, or at the end of the text."""
    state, begin, found = blake2b(digest_size=16), 0, []
    for end in [*(match.end() for match in SPECIAL.finditer(content)), len(content)]:
        state.update(content[begin:end])
        begin = end
        found.append((end, state.copy().digest()))
    return found


class ScriptedAgent(threading.Thread):
    """One session's client."""

    def __init__(self, gateway: OpenGateway, number: int, calls: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.session, key = gateway.open(f"group {number % 8}", number)
        self._random, self._left, self.kinds = np.random.default_rng([seed, number]), calls, Counter()
        host = gateway.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=120)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._system = {"role": "system", "content": f"system {number}: be short"}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            messages = self._begin("task")
            while self._left > 0:
                messages = self._step(messages)
        except BaseException as error:
            self.error = error

    def _begin(self, what: str) -> list[dict]:
        return [self._system, {"role": "user", "content": f"{what} {self._random.integers(10**6)}"}]

    def _step(self, messages: list[dict]) -> list[dict]:
        draw = self._random.random()
        if sum(len(str(message.get("content"))) for message in messages) > MOST_CHARACTERS or draw < 0.04:
            self.kinds["compaction"] += 1
            return self._begin("summary")
        if draw < 0.12:
            self.kinds["retry"] += 1
            self._ask(messages)
        if 0.12 < draw < 0.2:
            return [*messages, *self._sub_agent()]
        reply = self._ask(messages, 2 if draw > 0.95 else 1)
        if reply.get("tool_calls"):
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": str(self._random.integers(100))}
                for call in reply["tool_calls"]
            ]
            return [*messages, reply, *results]
        return [*messages, reply, {"role": "user", "content": f"next {self._random.integers(10**6)}"}]

    def _sub_agent(self) -> list[dict]:
        self.kinds["sub-agent"] += 1
        own = [
            {"role": "system", "content": "a sub-agent"},
            {"role": "user", "content": f"{self._random.integers(10**6)}"},
        ]
        for _ in range(int(self._random.integers(1, 4))):
            own += [self._ask(own), {"role": "user", "content": f"more {self._random.integers(10**6)}"}]
        return [{"role": "user", "content": f"the sub-agent says {self._random.integers(10**6)}"}]

    def _ask(self, messages: list[dict], choices: int = 1) -> dict:
        self._left -= choices
        body = {"model": "m", "messages": messages, "tools": TOOLS, "n": choices}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        reply = self._connection.getresponse()
        found = json.loads(reply.read())
        assert reply.status == 200, found
        return found["choices"][-1]["message"]


def check_sessions(sessions: list[Session], engine: ScriptedEngine) -> dict[str, int]:
    """The ids of calls and rollouts against what the engine saw and gave."""
    seen = Counter((tuple(prompt), key) for prompt, key in engine.prompts)
    assert max(seen.values()) == 1
    prompts = Counter(prompt for prompt, _ in seen)
    sampled = trained = 0
    for session in sessions:
        rollouts = session_rollouts(session, 1.0)
        for call in session.calls:
            prompts[tuple(call.token_ids(call.prompt_length).tolist())] -= 1
            sampled += len(call.output)
        owned = [rollout.token_ids[rollout.loss_mask].tolist() for rollout in rollouts]
        trained += sum(map(len, owned))
        by_call = [tuple(call.output.tolist()) for call in session.calls]
        found = [
            tuple(rollout.token_ids[begin:end].tolist())
            for rollout in rollouts
            for begin, end in np.flatnonzero(np.diff(rollout.loss_mask, prepend=0, append=0)).reshape(-1, 2)
        ]
        assert Counter(by_call) == Counter(found), "an answer is not trained exactly once"
    assert not any(prompts.values()), "the engine saw other prompts than the trees have"
    assert sampled == trained
    return {"sampled_tokens": sampled, "trained_tokens": trained}


def samples_of(sessions: list[Session], alone: bool) -> list[TrainingSample]:
    """Training samples with an advantage for each session: of the trees' paths, or of every call alone."""
    samples = []
    for session in sessions:
        advantage = np.random.default_rng(session.number).normal()
        rows = []
        for call in session.calls if alone else []:
            rows.append((call.token_ids(), np.arange(call.length) >= call.prompt_length))
        for rollout in [] if alone else session_rollouts(session, 1.0):
            rows.append((rollout.token_ids, rollout.loss_mask))
        samples += [TrainingSample(ids, mask, advantages=np.full(len(ids), advantage)) for ids, mask in rows]
    return samples


def gradient_error(sessions: list[Session], vocab_size: int) -> dict[str, float]:
    """The step on trees against every call alone on the stock model."""
    initialize_parallel(1, ParallelConfig())
    model = ModelConfig(1, 16, 2, max_position_embeddings=4096, vocab_size=vocab_size, params_dtype=torch.float64)
    weights = {
        k: v.clone() for k, v in build_stock_model(model, torch.device("cpu")).state_dict().items() if v is not None
    }
    objective = make_objective(ObjectiveConfig())
    paths, calls = samples_of(sessions, False), samples_of(sessions, True)
    began = time.perf_counter()
    ours, result = run_tree(model, weights, paths, objective, TreeConfig(tree_segment_tokens=2048))
    middle = time.perf_counter()
    stock = run_stock(model, weights, calls, objective)
    ended = time.perf_counter()
    assert ours.gradients.keys() == stock.gradients.keys()
    errors = [float((ours.gradients[name] - stock.gradients[name]).abs().max()) for name in stock.gradients]
    largest = max(float(value.abs().max()) for value in stock.gradients.values())
    return {
        "gradient_error": max(errors),
        "largest_gradient": largest,
        "loss_error": abs(ours.loss - stock.loss),
        "tree_tokens": int(result.computed_tokens),
        "tree_seconds": middle - began,
        "calls_alone_seconds": ended - middle,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = chat_tokenizer(Path(folder) / "model")
        engine = ScriptedEngine(
            lambda prompt, key: [*tokenizer.encode(answer_text(key)).tolist(), tokenizer.eos_id], tokenizer.vocab_size
        )
        flags = {"gateway_max_calls": 10**6, "gateway_piece_tokens": 64}
        with open_gateway(engine, tokenizer, Path(folder) / "model", **flags) as gateway:
            audit = Audit(gateway.gateway.prompts)
            each = -(-arguments.calls // arguments.sessions)
            agents = [ScriptedAgent(gateway, i, each, arguments.seed) for i in range(arguments.sessions)]
            began = time.perf_counter()
            for agent in agents:
                agent.start()
            for agent in agents:
                agent.join()
            seconds = time.perf_counter() - began
    for agent in agents:
        if agent.error is not None:
            raise agent.error
    sessions = [agent.session for agent in agents]
    sizes = [SessionSizes.of(session) for session in sessions]
    rows = [call.token_ids() for session in sessions for call in session.calls]
    found: dict[str, Any] = {
        "sessions": len(sessions),
        **dict(sum((agent.kinds for agent in agents), Counter())),
        **{name: sum(getattr(size, name) for size in sizes) for name in vars(sizes[0])},
        "unique_tokens": build_prefix_tree(rows).num_tokens,
        "tokenized_pieces": audit.pieces,
        "tokenized_twice": audit.twice,
        "serving_seconds": seconds,
        **check_sessions(sessions, engine),
        **gradient_error(sessions, tokenizer.vocab_size),
    }
    found = {name: round(value, 3) if name.endswith("seconds") else value for name, value in found.items()}
    print(json.dumps(found, indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    is_right = found["tokenized_twice"] == 0 and found["gradient_error"] <= 1e-12 and found["calls"] >= arguments.calls
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
