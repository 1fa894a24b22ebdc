"""Engines on local servers that sample from one table, and the checks that every result must pass."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import HttpSettings
from megatron_dta.extras.servers.protocol import RoutingShape
from megatron_dta.extras.servers.sglang import SglangProtocol
from megatron_dta.extras.servers.vllm import VllmProtocol
from megatron_dta.extras.servers.weights.groups import GroupOpener
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, GenerationResult
from megatron_dta.sampling.params import SamplingParams
from rollout_server_forms import log_softmax
from rollout_servers import SERVERS, RolloutServer

VOCABULARY, EOS = 23, 5
PROTOCOLS = {"vllm": VllmProtocol, "sglang": SglangProtocol}
QUICK = HttpSettings(timeout_s=5, connect_timeout_s=2, attempts=4, backoff_s=0.01, backoff_limit_s=0.05)
PARAMS = SamplingParams(max_response_tokens=16, eos_id=EOS, seed=7)
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


class Setup:
    """Servers of a kind with one table, and engines on them."""

    def __init__(self, stack: ExitStack, kind: str, rng: np.random.Generator) -> None:
        self._stack, self.kind, self.rng = stack, kind, rng
        self.table = rng.normal(size=(VOCABULARY, VOCABULARY))
        self.servers: list[RolloutServer] = []
        self.lines: list[str] = []

    def add_servers(self, count: int, **options: object) -> None:
        for _ in range(count):
            self.servers.append(self._stack.enter_context(SERVERS[self.kind](self.table, **options)))

    def restart(self, index: int, **options: object) -> None:
        """Start a server that has died again, on its port and with the weights that it began with."""
        old = self.servers[index]
        port = int(old.url.rsplit(":", 1)[1])
        self.servers[index] = self._stack.enter_context(type(old)(old.table, port=port, **options))

    def engine(
        self,
        settings: HttpSettings = QUICK,
        routing: RoutingShape | None = None,
        open_group: GroupOpener | None = None,
        **options: object,
    ) -> HttpEngine:
        urls = [server.url for server in self.servers]
        protocol = PROTOCOLS[self.kind](routing, open_group)
        engine = HttpEngine(protocol, urls, settings, vocab_size=VOCABULARY, report=self.lines.append, **options)
        self._stack.callback(engine.close)
        return engine

    def started(self, step: int = 0) -> HttpEngine:
        """An engine on the servers that samples with ``PARAMS``."""
        engine = self.engine()
        engine.start(PARAMS, step)
        return engine

    def check(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
        """Every result is one of its request, by the table."""
        for request, result in zip(requests, results, strict=True):
            check_result(self, request, result)

    def requests(self, count: int, most: int = 16, prompts: int = 3) -> list[GenerationRequest]:
        contexts = [self.rng.integers(0, VOCABULARY, self.rng.integers(1, 9)).astype(np.int32) for _ in range(prompts)]
        return [
            GenerationRequest(10 + i, contexts[i % prompts], int(self.rng.integers(1, most + 1)), key=100 + i)
            for i in range(count)
        ]

    @property
    def generate_path(self) -> str:
        return self.servers[0].generate_path

    def fault(self, server: int, *faults: object, path: str | None = None) -> None:
        self.servers[server].faults.setdefault(path or self.generate_path, []).extend(faults)


def check_result(setup: Setup, request: GenerationRequest, result, temperature: float = 1.0) -> None:
    """Lengths, ends, and every logprob against the table."""
    tokens = result.token_ids
    assert result.request_id == request.request_id
    assert tokens.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert 1 <= len(tokens) <= request.max_tokens
    ends = np.flatnonzero(tokens == EOS)
    if result.finish_reason is FinishReason.STOP:
        assert ends.tolist() == [len(tokens) - 1]
    else:
        assert ends.size == 0
        assert len(tokens) == request.max_tokens
    previous = np.concatenate([request.token_ids[-1:], tokens[:-1]])
    expected = [log_softmax(setup.table[a] / temperature)[b] for a, b in zip(previous, tokens, strict=True)]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-6)


def write_checkpoint(folder: Path, seed: int) -> np.ndarray:
    """A folder that the servers can load; returns the table they make of it."""
    folder.mkdir()
    embedding = torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(seed)) / 4
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return embedding.double().numpy() @ embedding.double().numpy().T * 20
