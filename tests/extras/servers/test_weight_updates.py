"""Weight updates of servers, by folder and through a process group: bytes, calls, servers that fail, restart or lag."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from forked import Program
from http_engine_cases import KINDS, PARAMS, QUICK, VOCABULARY, Setup, check_result, write_checkpoint
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.extras.servers.weights.groups import StoreGroup
from megatron_dta.sampling.host_weights import HostWeights, empty_weights
from megatron_dta.sampling.interface import generate
from rollout_server_forms import log_softmax
from rollout_servers import RolloutServer
from weight_receiver import OPENERS, FileBuffer

UPDATE_CALLS = {
    "vllm": ["/health", "/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"],
    "sglang": [
        "/server_info",
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
    ],
}


@KINDS
def test_another_engine_goes_on_with_what_was_sampled(setup: Setup, tmp_path: Path) -> None:
    """As a run does that was killed: begun responses keep their tokens, logprobs and versions."""
    setup.add_servers(1, processes=1)
    setup.servers[0].token_delay_s = 0.05
    tables = {version: write_checkpoint(tmp_path / str(version), version) for version in (1, 2)}
    settings = replace(QUICK, timeout_s=60, continues=True)
    first, requests = setup.engine(settings), [replace(short, max_tokens=16) for short in setup.requests(6)]
    first.update_weights(1, tmp_path / "1")
    first.start(PARAMS, 0)
    first.submit(requests)
    while setup.servers[0].running < 6:
        time.sleep(0.01)
    time.sleep(0.2)
    first.update_weights(2, tmp_path / "2")
    end = time.monotonic() + 60
    while not (begun := first.sampled_so_far()) and time.monotonic() < end:
        time.sleep(0.01)
    first.close()
    assert begun
    setup.servers[0].token_delay_s = 0.0
    second = setup.engine(settings)
    second.update_weights(2, tmp_path / "2")
    second.start(PARAMS, 0)
    second.submit(requests, begun)
    results = {}
    while len(results) < 6:
        results |= {result.request_id: result for result in second.poll()}
    for request in requests:
        result, kept = results[request.request_id], begun.get(request.request_id, SampledTokens())
        assert np.array_equal(result.token_ids[: len(kept)], kept.token_ids)
        assert np.array_equal(result.logprobs[: len(kept)], kept.logprobs)
        assert np.array_equal(result.token_versions, [*kept.versions, *[2] * (len(result.token_ids) - len(kept))])
        assert (kept.versions == 1).all()
        assert len(kept) < len(result.token_ids) <= 16
        before = np.concatenate([request.token_ids[-1:], result.token_ids[:-1]])
        for a, b, version, logprob in zip(
            before, result.token_ids, result.token_versions, result.logprobs, strict=True
        ):
            assert abs(log_softmax(tables[version][a])[b] - logprob) < 1e-5


@KINDS
def test_weights_are_updated_on_every_server_between_phases(setup: Setup, tmp_path: Path) -> None:
    setup.add_servers(2, delay_s=0.01)
    engine = setup.engine()
    for version in (3, 4):
        setup.table = write_checkpoint(tmp_path / f"v{version}", version)
        seen = [len(server.calls) for server in setup.servers]
        engine.update_weights(version, tmp_path / f"v{version}")
        for server, calls in zip(setup.servers, seen, strict=True):
            assert server.calls[calls:] == UPDATE_CALLS[setup.kind]
            assert server.folders[-1] == str(tmp_path / f"v{version}")
        engine.start(PARAMS, version)
        requests = setup.requests(20)
        for request, result in zip(requests, generate(engine, requests), strict=True):
            check_result(setup, request, result)
            assert result.policy_version == version
    assert not any(server.violations for server in setup.servers)
    assert engine.statistics()["weight_updates"] == 2
    engine.submit(setup.requests(4))
    with pytest.raises(ValueError, match="4 requests are running"):
        engine.update_weights(5, tmp_path / "v4")
    with pytest.raises(ValueError, match="4 requests are running"):
        engine.start(PARAMS, 9)


@KINDS
def test_a_server_with_other_weights_is_left_out(setup: Setup, tmp_path: Path) -> None:
    """It was restarted, or another trainer has updated it: its tokens would be of other weights than they say."""
    setup.add_servers(2)
    engine = setup.engine()
    setup.table = write_checkpoint(tmp_path / "v1", 1)
    engine.update_weights(1, tmp_path / "v1")
    setup.servers[0].label = "default"
    setup.servers[0].table = np.random.default_rng(0).normal(size=setup.table.shape)
    engine.start(PARAMS, 0)
    requests = setup.requests(20)
    setup.check(requests, generate(engine, requests))
    assert "samples with the weights default" in setup.lines[0]
    # The last one may come back from a fault of its health, since it can show what it has.
    setup.fault(1, "drop", None)
    setup.fault(1, 503, None, path="/health" if setup.kind == "vllm" else "/server_info")
    assert len(generate(engine, requests)) == 20
    assert engine.statistics()["servers"] == 1


def test_vllm_without_weight_versions_or_development_mode(tmp_path: Path) -> None:
    rng = seed_all(3)
    with ExitStack() as stack:
        setup = Setup(stack, "vllm", rng)
        setup.add_servers(1)
        setup.servers[0].labels = False
        engine = setup.engine()
        setup.table = write_checkpoint(tmp_path / "v1", 1)
        engine.update_weights(1, tmp_path / "v1")
        engine.start(PARAMS, 0)
        requests = setup.requests(10)
        setup.check(requests, generate(engine, requests))
        setup.fault(0, 404, path="/pause")
        with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(2, tmp_path / "v1")


SHAPES = {
    "model.embed_tokens.weight": ((VOCABULARY, 4), torch.float32),
    "a": ((3, 5), torch.bfloat16),
    "b": ((7,), torch.bfloat16),
    "c": ((2, 2), torch.float32),
    "large": ((11, 13), torch.bfloat16),
    "d": ((1,), torch.bfloat16),
}


def weights_of(seed: int, bucket_bytes: int = 40) -> HostWeights:
    weights = empty_weights(SHAPES, bucket_bytes)
    generator = torch.Generator().manual_seed(seed)
    for values in weights.tensors.values():
        values.copy_(torch.randn(values.shape, generator=generator) / 4)
    return weights


def check_loaded(server: RolloutServer, weights: HostWeights) -> None:
    assert server.loaded[-1].keys() == weights.tensors.keys()
    for name, values in weights.tensors.items():
        loaded = server.loaded[-1][name]
        assert loaded.dtype == values.dtype
        assert torch.equal(loaded.view(torch.uint8), values.contiguous().view(torch.uint8)), name


def sample(setup: Setup, engine: HttpEngine, version: int, weights: HostWeights, iteration: int = 0) -> None:
    embedding = weights.tensors["model.embed_tokens.weight"].double().numpy()
    setup.table = embedding @ embedding.T * 20
    engine.start(PARAMS, iteration)
    requests = setup.requests(12)
    for request, result in zip(requests, generate(engine, requests), strict=True):
        check_result(setup, request, result)
        assert result.policy_version == version


CALLS = {
    "vllm": [
        "/pause", "/start_weight_update", *["/update_weights"] * 4, "/finish_weight_update", "/reset_prefix_cache",
        "/update_weight_version", "/resume",
    ],
    "ipc": [
        "/pause", "/start_weight_update", *["/update_weights"] * 5, "/finish_weight_update", "/reset_prefix_cache",
        "/update_weight_version", "/resume",
    ],
    "sglang": [
        "/pause_generation", "/begin_weight_update", *["/update_weights_from_distributed"] * 5, "/end_weight_update",
        "/flush_cache", "/update_weight_version", "/continue_generation",
    ],
}  # fmt: skip
RECEIVE = {"vllm": "/update_weights", "sglang": "/update_weights_from_distributed"}


@KINDS
def test_servers_of_several_processes_receive_the_bytes(setup: Setup) -> None:
    setup.add_servers(1, processes=2, delay_s=0.01)
    setup.add_servers(1)
    engine = setup.engine(open_group=OPENERS[setup.kind])
    for version in (3, 4):
        weights = weights_of(version)
        seen = [len(server.calls) for server in setup.servers]
        engine.update_weights(version, weights)
        for server, calls in zip(setup.servers, seen, strict=True):
            check_loaded(server, weights)
            assert server.calls[calls:][-len(CALLS[setup.kind]) :] == CALLS[setup.kind]
        sample(setup, engine, version, weights)
    # The group of the first update served the second, too.
    assert [server.receiver.groups for server in setup.servers] == [1, 1]
    assert not any(server.violations for server in setup.servers)


def test_servers_on_the_trainers_gpu_copy_out_of_its_buffer() -> None:
    with ExitStack() as stack:
        setup = Setup(stack, "vllm", seed_all(5))
        setup.add_servers(2)
        engine = setup.engine(open_group=FileBuffer)
        for version in (3, 4):
            weights = weights_of(version)
            engine.update_weights(version, weights)
            for server in setup.servers:
                check_loaded(server, weights)
                assert server.calls[-len(CALLS["ipc"]) :] == CALLS["ipc"]
            sample(setup, engine, version, weights)
        assert [server.receiver.groups for server in setup.servers] == [1, 1]
        # One dies in the middle and returns; the other gets the whole update again.
        setup.fault(0, None, None, "die", path=RECEIVE["vllm"])
        weights = weights_of(5)
        engine.update_weights(5, weights)
        check_loaded(setup.servers[1], weights)
        setup.restart(0)
        engine.update_weights(6, weights_of(6))
        for server in setup.servers:
            check_loaded(server, weights_of(6))
        assert not any(server.violations for server in setup.servers)


@KINDS
def test_a_server_that_dies_under_an_update_is_left_out_and_returns(setup: Setup) -> None:
    setup.add_servers(3)
    engine = setup.engine(open_group=OPENERS[setup.kind])
    engine.update_weights(1, weights_of(1))
    setup.fault(1, None, None, "die", path=RECEIVE[setup.kind])
    weights = weights_of(2)
    engine.update_weights(2, weights)
    for server in (0, 2):
        check_loaded(setup.servers[server], weights)
    assert setup.servers[1].url in setup.lines[0]
    sample(setup, engine, 2, weights)
    assert engine.statistics()["servers"] == 2
    # It starts again with other weights, and gets all with the next update, as do the others.
    setup.restart(1)
    weights = weights_of(3)
    engine.update_weights(3, weights)
    for server in setup.servers:
        check_loaded(server, weights)
    sample(setup, engine, 3, weights, 1)
    assert engine.statistics()["servers"] == 3


@KINDS
def test_servers_that_refuse_or_hang(setup: Setup) -> None:
    setup.add_servers(2)
    engine = setup.engine(replace(QUICK, timeout_s=1.0), open_group=OPENERS[setup.kind])
    setup.fault(0, "hang", path=RECEIVE[setup.kind])
    weights = weights_of(1)
    engine.update_weights(1, weights)
    check_loaded(setup.servers[1], weights)
    assert engine.statistics()["servers"] == 1
    assert setup.servers[0].url in setup.lines[0]
    for server in range(2):
        setup.fault(server, *[500] * 9, path=CALLS[setup.kind][1])
    with pytest.raises(ServerError, match="no rollout server could take the new weights"):
        engine.update_weights(2, weights)


def test_the_group_is_the_one_of_torch_distributed(tmp_path) -> None:
    """SGLang's processes join with torch.distributed's rendezvous; stores and prefixes must be the same."""
    group = StoreGroup(2, "http://127.0.0.1:9", 120)
    program = """
import sys, torch
from datetime import timedelta
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=0, world_size=1)
name, address = sys.argv[1], sys.argv[2]
store, rank, size = next(dist.rendezvous(f"tcp://{address}", 1, 2, timeout=timedelta(seconds=120)))
store = dist.PrefixStore(name, store)
group, _ = c10d._new_process_group_helper(size, rank, [], dist.Backend("gloo"), store, group_name=name,
                                          timeout=timedelta(seconds=120))
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
values = torch.zeros(9, dtype=torch.uint8)
dist.broadcast(values, src=0, group=group)
print(values.tolist(), flush=True)
import os; os._exit(0)
"""
    address = f"{group.meeting.address}:{group.meeting.port}"
    (tmp_path / "join.py").write_text(program)
    other = Program([tmp_path / "join.py", group.meeting.name, address, tmp_path / "store"])
    values = torch.arange(9, dtype=torch.uint8)
    sender = threading.Thread(target=lambda: (group.join(), group.broadcast(values)))
    sender.start()
    joined = other.wait(120)
    sender.join(60)
    assert joined.stdout.strip() == str(list(range(9)))
    group.abort()


@KINDS
def test_a_server_returns_while_requests_run(setup: Setup) -> None:
    """It gets the newest weights and then requests, in the same phase."""
    setup.add_servers(2, delay_s=0.02)
    engine = setup.engine(replace(QUICK, revisit_s=0.05, max_requests=2), open_group=OPENERS[setup.kind])
    weights = weights_of(3)
    engine.update_weights(3, weights)
    embedding = weights.tensors["model.embed_tokens.weight"].double().numpy()
    setup.table = embedding @ embedding.T * 20
    engine.start(PARAMS, 0)
    setup.fault(0, None, "die")
    requests = setup.requests(150, prompts=40)
    engine.submit(requests)
    results = {}
    while len(results) < len(requests):
        for result in engine.poll():
            assert result.request_id not in results
            results[result.request_id] = result
        if len(results) >= 20 and setup.servers[0]._stopped:
            setup.restart(0, delay_s=0.02)
    setup.check(requests, [results[request.request_id] for request in requests])
    assert {result.policy_version for result in results.values()} == {3}
    assert setup.servers[0].bodies
    check_loaded(setup.servers[0], weights)
    assert not any(server.violations for server in setup.servers)
