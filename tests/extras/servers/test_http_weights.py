"""Weight updates of servers: the calls and their order, failing servers, other weights, older versions."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from http_engine_cases import KINDS, PARAMS, QUICK, Setup, check_result, write_checkpoint
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.sampling.interface import generate
from rollout_server_forms import log_softmax

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
