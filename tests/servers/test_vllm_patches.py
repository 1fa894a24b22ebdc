"""Changed values only, to a real vLLM through its sparse weight transfer engine, on CPUs, with its own checksums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch

import vllm_process
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.vllm import VllmProtocol
from vllm_cases import (
    LOGPROB_ERROR,
    SETTINGS,
    VOCABULARY,
    check_parameters,
    host_weights,
    largest_error,
    random_model,
    sample,
    write_model,
)
from vllm_process import VllmProcess
from weight_receiver import IdGroup

pytestmark = pytest.mark.skipif(vllm_process.PYTHON is None, reason=vllm_process.WHY_SKIPPED)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmProcess]]:
    """One of one process and one of two."""
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model(folder / "model", 0)
    with ExitStack() as stack:
        found = [VllmProcess(folder, model, "sparse_gloo", processes, plain=True) for processes in (1, 2)]
        for server in found:
            stack.callback(server.kill)
            server.start()
            server.wait()
        yield found


class Sent:
    """An engine that sends changes, and what it has sent.

    Attributes:
        counts: by server, the values of the last update.
        lines: what it reported.
    """

    def __init__(self, servers: list[VllmProcess], stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers, self.lines, self.counts = servers, [], {}
        protocol = VllmProtocol(open_group=IdGroup)
        protocol.changes_only, protocol.check_interval = True, 1
        urls = [server.url for server in servers]
        self.engine = HttpEngine(protocol, urls, SETTINGS, vocab_size=VOCABULARY, report=self.lines.append)
        stack.callback(self.engine.close)
        receive = VllmProtocol.receive_patches

        async def count(protocol, server, patches):
            self.counts[server.url] = self.counts.get(server.url, 0) + sum(each.indices.numel() for each in patches)
            await receive(protocol, server, patches)

        monkeypatch.setattr(VllmProtocol, "receive_patches", count)

    def update(self, version: int, model: torch.nn.Module) -> None:
        """Send a model, and check that both servers have and use it."""
        self.counts.clear()
        weights = host_weights(model)
        self.engine.update_weights(version, weights)
        for processes, server in enumerate(self.servers, 1):
            check_parameters(server.checksums(), weights.tensors, processes, plain=True)
        assert largest_error(model, sample(self.engine, version)) < LOGPROB_ERROR
        # The engine may not rely on memory that is used again.
        for bucket in weights.buckets:
            bucket.buffer.fill_(255)


def changed(model: torch.nn.Module, generator: torch.Generator) -> tuple[torch.nn.Module, int]:
    """The same but for an eighth of the values of every second tensor, and how many these are."""
    found, count = deepcopy(model), 0
    with torch.no_grad():
        for values in list(found.parameters())[::2]:
            flat = values.view(-1)
            places = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 8]
            flat[places] = flat[places] / 2 - 0.3
            count += len(places)
    return found, count


@pytest.fixture
def sent(servers: list[VllmProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    with ExitStack() as stack:
        yield Sent(servers, stack, monkeypatch)


def test_changed_values_make_the_whole_model(sent: Sent) -> None:
    generator = torch.Generator().manual_seed(5)
    model = random_model(1)
    every = sum(values.numel() for values in model.parameters())
    sent.update(1, model)
    assert set(sent.counts.values()) == {every}
    one, two = sent.servers
    assert sorted(sent.lines) == sorted(
        [f"19 of 19 parameters of {one.url} can be compared", f"38 of 38 parameters of {two.url} can be compared"]
    )
    for version in (2, 3):
        model, count = changed(model, generator)
        sent.update(version, model)
        assert set(sent.counts.values()) == {count}
        assert count < every / 8
    # A server that has lost its weights, without being started again.
    one.ask("/weight_checker", {"action": "reset"})
    model, _ = changed(model, generator)
    with pytest.raises(AssertionError):
        sent.update(4, model)
    assert f"{one.url} is left out: 19 of its parameters differ from what was sent" in sent.lines[2]
    sent.update(5, model)
    assert set(sent.counts.values()) == {every}


def test_a_restarted_server_gets_all_values(sent: Sent) -> None:
    model = random_model(6)
    sent.update(1, model)
    two = sent.servers[1]
    two.kill()
    two.start()
    two.wait()
    model, _ = changed(model, torch.Generator().manual_seed(7))
    sent.update(2, model)
    assert set(sent.counts.values()) == {sum(values.numel() for values in model.parameters())}
    model, count = changed(model, torch.Generator().manual_seed(8))
    sent.update(3, model)
    assert set(sent.counts.values()) == {count}
