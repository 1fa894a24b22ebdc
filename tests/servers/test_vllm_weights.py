"""Weights that a real vLLM on CPUs receives by its own weight transfer engine: bytes, logprobs, servers killed."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

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


@dataclass
class Servers:
    """One with weights packed for the CPU, vLLM's default, and one of two processes with plain ones."""

    packed: VllmProcess
    divided: VllmProcess
    lines: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model(folder / "model", 0)
    with ExitStack() as stack:
        started = Servers(
            VllmProcess(folder, model, "gloo"), VllmProcess(folder, model, "gloo", processes=2, plain=True)
        )
        for server in (started.packed, started.divided):
            stack.callback(server.kill)
            server.start()
            server.wait()
        yield started


@pytest.fixture
def engine(servers: Servers) -> Iterator[HttpEngine]:
    servers.lines.clear()
    urls = [servers.packed.url, servers.divided.url]
    built = HttpEngine(
        VllmProtocol(open_group=IdGroup), urls, SETTINGS, vocab_size=VOCABULARY, report=servers.lines.append
    )
    yield built
    built.close()


def test_both_servers_have_the_bytes_and_sample_from_them(servers: Servers, engine: HttpEngine) -> None:
    began = random_model(0)
    for version in (1, 2):
        model = random_model(version)
        weights = host_weights(model)
        assert len(weights.buckets) > 10
        requests = servers.packed.answered("/update_weights")
        engine.update_weights(version, weights)
        assert servers.packed.answered("/update_weights") == requests + 1
        check_parameters(servers.packed.checksums(), weights.tensors, 1, plain=False)
        check_parameters(servers.divided.checksums(), weights.tensors, 2, plain=True)
        pairs = sample(engine, version)
        assert {result.policy_version for _, result in pairs} == {version}
        assert largest_error(model, pairs) < LOGPROB_ERROR
        # With the first weights the error is large, so an update that did nothing would be noticed.
        assert largest_error(began, pairs) > 1
    assert servers.lines == []


def test_a_server_killed_under_an_update_returns_and_gets_all(
    servers: Servers, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.update_weights(1, host_weights(random_model(1)))
    broadcast, sent = IdGroup.broadcast, []

    def kill_first(self, buffer):
        sent.append(buffer)
        if len(sent) == 3:
            servers.packed.kill()
        broadcast(self, buffer)

    monkeypatch.setattr(IdGroup, "broadcast", kill_first)
    model = random_model(3)
    weights = host_weights(model)
    engine.update_weights(2, weights)
    # The other one gets all of them again.
    assert 3 + len(weights.buckets) <= len(sent) < 2 * len(weights.buckets)
    assert any(servers.packed.url in line and "left out" in line for line in servers.lines)
    check_parameters(servers.divided.checksums(), weights.tensors, 2, plain=True)
    assert largest_error(model, sample(engine, 2)) < LOGPROB_ERROR
    assert engine.statistics()["servers"] == 1
    servers.packed.start()
    servers.packed.wait()
    model = random_model(4)
    weights = host_weights(model)
    engine.update_weights(3, weights)
    assert engine.statistics()["servers"] == 2
    # It has left the group of one before it joined that of both.
    assert servers.divided.answered("/shutdown_weight_transfer_engine") >= 1
    check_parameters(servers.packed.checksums(), weights.tensors, 1, plain=False)
    check_parameters(servers.divided.checksums(), weights.tensors, 2, plain=True)
    assert largest_error(model, sample(engine, 3)) < LOGPROB_ERROR
