"""Rollout engines behind vLLM's and SGLang's servers: forms, logprobs, routing of requests and experts, failures."""

import time
from dataclasses import replace

import numpy as np
import pytest

from http_engine_cases import EOS, KINDS, PARAMS, QUICK, VOCABULARY, Setup, check_result
from megatron_dta.common.keyed_random import Domain
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.protocol import RoutingShape
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, generate
from megatron_dta.sampling.prompts.load import Prompt
from megatron_dta.sampling.sources.independent import to_rollouts
from rollout_server_base import experts_of


@KINDS
def test_many_requests_come_back_whole_with_the_trainers_logprobs(setup: Setup) -> None:
    setup.add_servers(3, delay_s=0.01)
    engine = setup.started(step=4)
    requests = setup.requests(60)
    results = generate(engine, requests)
    setup.check(requests, results)
    assert {result.finish_reason for result in results} == set(FinishReason)
    statistics = engine.statistics()
    assert statistics["decoded_tokens"] == sum(len(result.token_ids) for result in results)
    assert statistics["requests"] == 60
    contexts = sum(len(request.token_ids) for request in requests)
    assert statistics["prefilled_tokens"] + statistics["reused_tokens"] == contexts
    if setup.kind == "sglang":
        assert statistics["reused_tokens"] > 0
    assert sum(server.most_running for server in setup.servers) > 3
    # The same requests in the same iteration give the same tokens, another iteration others.
    engine.start(PARAMS, 4)
    again = generate(engine, requests)
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(results, again, strict=True))
    engine.start(PARAMS, 5)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(results, generate(engine, requests), strict=True)
    )


@KINDS
def test_a_branch_does_not_repeat_its_parents_random_numbers(setup: Setup) -> None:
    setup.table = np.zeros((VOCABULARY, VOCABULARY))  # tokens show the random numbers
    setup.table[:, EOS] = -50
    setup.add_servers(1)
    engine = setup.started()
    (first,) = generate(engine, [GenerationRequest(0, np.array([1], np.int32), 12, key=3, hold=True)])
    context = np.concatenate([[1], first.token_ids]).astype(np.int32)
    (second,) = generate(engine, [GenerationRequest(1, context, 12, key=3, parent=0)])
    assert not np.array_equal(first.token_ids, second.token_ids)
    engine.release([0])
    with pytest.raises(ValueError, match="request 0 is not held"):
        engine.release([0])


@KINDS
def test_prompts_and_their_branches_stay_on_one_server(setup: Setup) -> None:
    setup.add_servers(3, delay_s=0.005)
    engine = setup.started()
    prompts = [np.array([2 * i + 1, 3, 4], np.int32) for i in range(9)]
    roots = [GenerationRequest(i, prompts[i % 9], 4, key=i, hold=True) for i in range(36)]
    results = generate(engine, roots)
    children = []
    for root, result in zip(roots, results, strict=True):
        context = np.concatenate([root.token_ids, result.token_ids])
        parent = root.request_id if root.request_id % 2 else None
        children.append(GenerationRequest(100 + root.request_id, context, 4, key=1, parent=parent, prompt_length=3))
    setup.rng.shuffle(children)
    generate(engine, children)
    prompt_of = "prompt" if setup.kind == "vllm" else "input_ids"
    seen = [{tuple(body[prompt_of][:3]) for body in server.bodies} for server in setup.servers]
    assert [len(prompts) for prompts in seen] == [3, 3, 3]  # evenly, and none on two servers
    assert len(set.union(*seen)) == 9


@KINDS
def test_the_models_own_end_does_not_end_a_response(setup: Setup) -> None:
    """It is not the trainer's: what the server stops at is continued behind it."""
    setup.table[:, 9] += 2.0
    setup.add_servers(2, model_eos=9)
    engine = setup.started()
    requests = setup.requests(40)
    results = generate(engine, requests)
    setup.check(requests, results)
    assert any(9 in result.token_ids[:-1] for result in results)
    engine.start(replace(PARAMS, other_eos_ids=(9,)), 1)
    results = generate(engine, requests)
    assert any(result.token_ids[-1] == 9 for result in results)
    assert not any(9 in result.token_ids[:-1] for result in results)


@KINDS
def test_ids_that_the_tokenizer_lacks_are_rejected(setup: Setup) -> None:
    """What a server samples of them is replaced; all others keep their order, logprobs and length."""
    setup.add_servers(2)
    engine = setup.engine()
    engine.start(replace(PARAMS, vocab_size=15), 0)
    requests = setup.requests(30)
    results = generate(engine, requests)
    setup.check(requests, results)
    assert max(int(result.token_ids.max()) for result in results) == 14
    assert engine.statistics()["rejected_tokens"] > 10
    assert len({tuple(result.token_ids.tolist()) for result in results}) > 20
    engine.start(replace(PARAMS, vocab_size=0), 0)
    with pytest.raises(ServerError, match="sampled 51 ids that the tokenizer lacks beside 0 others"):
        generate(engine, requests[:1])


LOGPROB_CASES = [
    # kind, logprobs after the temperature (and, with vLLM, the nucleus), temperature, top_p, refused with
    ("vllm", True, 1.0, 1.0, None),
    ("vllm", True, 1.0, 0.8, "--logprobs-mode raw_logprobs"),
    ("vllm", True, 0.7, 1.0, None),
    ("vllm", False, 0.7, 1.0, "--logprobs-mode processed_logprobs"),
    ("vllm", True, 0.7, 0.8, "--old-logprobs recompute"),
    ("sglang", True, 0.7, 0.8, None),
    ("sglang", False, 1.0, 0.8, None),
    ("sglang", False, 0.7, 1.0, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
]


@pytest.mark.parametrize(("kind", "scaled", "temperature", "top_p", "refused"), LOGPROB_CASES)
def test_logprobs_are_the_trainers_or_refused(
    setup: Setup, scaled: bool, temperature: float, top_p: float, refused: str | None
) -> None:
    setup.add_servers(1, temperature_scaled=scaled)
    params = replace(PARAMS, temperature=temperature, top_p=top_p)
    engine = setup.engine()
    requests = setup.requests(20)
    if refused is None:
        engine.start(params, 0)
        for request, result in zip(requests, generate(engine, requests), strict=True):
            check_result(setup, request, result, temperature)
        return
    with pytest.raises(ServerError, match=refused) as caught:
        engine.start(params, 0)
    assert setup.servers[0].url in str(caught.value)
    assert "\n" not in str(caught.value)
    # Where nobody reads them any will do.
    engine.start(replace(params, domain=Domain.EVALUATION), 0)
    engine = setup.engine(exact_logprobs=False)
    engine.start(params, 0)
    assert len(generate(engine, requests)) == 20


FAULTS = [503, "drop", "truncate", "garbage", "short", "long", "abort"]


@KINDS
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_requests_are_sent_again(setup: Setup, fault: object) -> None:
    setup.add_servers(2)
    setup.fault(0, fault, fault)
    setup.fault(1, fault)
    engine = setup.started()
    requests = setup.requests(30)
    setup.check(requests, generate(engine, requests))
    assert engine.statistics()["retried_requests"] == 3
    assert engine.statistics()["servers"] == 2


@KINDS
def test_a_hanging_request_is_moved(setup: Setup) -> None:
    setup.add_servers(2)
    setup.fault(0, *["hang"] * 100)  # though it says that it is healthy
    setup.fault(1, "hang")
    engine = setup.engine(replace(QUICK, timeout_s=0.3))
    engine.start(PARAMS, 0)
    requests = setup.requests(8)
    begin = time.monotonic()
    assert len(generate(engine, requests)) == 8
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("kind", ["vllm"])
def test_another_process_sends_long_requests_and_may_die(setup: Setup) -> None:
    setup.add_servers(2, delay_s=0.05)
    plain, engine = setup.engine(), setup.engine(replace(QUICK, long_tokens=8))
    requests = setup.requests(40)
    for iteration in range(2):
        results = []
        for tested in (plain, engine):
            for server in range(2):
                setup.fault(server, None, 500, "drop", None, "truncate", "garbage", "short")
            tested.start(PARAMS, iteration)
            tested.submit(requests)
            if tested is engine and iteration == 1:
                while not engine._sender._open:
                    time.sleep(0.001)
                engine._sender._process.kill()
            by_request = {}
            while len(by_request) < len(requests):
                by_request |= {result.request_id: result for result in tested.poll()}
            results.append([by_request[request.request_id] for request in requests])
        setup.check(requests, results[1])
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(*results, strict=True))
    assert engine.statistics()["retried_requests"] > 0
    assert not engine._sender._open
    # What is given up is cancelled at the servers.
    setup.fault(0, *["hang"] * 9)
    setup.fault(1, *["hang"] * 9)
    engine.submit([replace(request, max_tokens=16) for request in requests[:3]])
    while not engine._sender._open:
        time.sleep(0.001)
    engine.close()
    assert not engine._sender._open
    assert engine._sender._process.poll() is not None


@KINDS
def test_a_server_that_dies_mid_step_loses_its_requests_to_the_others(setup: Setup) -> None:
    setup.add_servers(3, delay_s=0.05)
    setup.fault(1, None, None, "die")
    engine = setup.started()
    requests = setup.requests(60, prompts=12)
    setup.check(requests, generate(engine, requests))
    assert engine.statistics()["servers"] == 2
    assert engine.statistics()["servers_lost"] == 1
    assert len(setup.lines) == 1
    assert setup.servers[1].url in setup.lines[0]


@KINDS
def test_a_request_that_fails_for_good_names_itself_and_the_server(setup: Setup) -> None:
    setup.add_servers(1)
    setup.fault(0, *[500] * 4)
    engine = setup.started()
    (request,) = setup.requests(1)
    length = len(request.token_ids)
    match = rf"request 10 \({length} tokens, up to \d+ more\): failed 4 times, .* on {setup.servers[0].url}: .*500"
    with pytest.raises(ServerError, match=match):
        generate(engine, [request])
    # What the server refuses is not tried again.
    setup.servers[0].table = setup.table[:4]
    calls = len(setup.servers[0].calls)
    with pytest.raises(ServerError, match=r"refused with 400: .*out of vocabulary"):
        generate(engine, [GenerationRequest(1, np.array([20], np.int32), 2, key=0)])
    assert len(setup.servers[0].calls) == calls + 1


SHAPE = RoutingShape((False, True, True), 2, 8)


@KINDS
@pytest.mark.parametrize("layers", [2, 3])
def test_every_token_but_the_last_has_its_experts(setup: Setup, layers: int) -> None:
    """The server returns those of all three layers or of the two with experts; the end of the model itself does not
    end the response, so some of them take several requests."""
    setup.add_servers(2, model_eos=3)
    for server in setup.servers:
        server.routing = layers, 2
    engine = setup.engine(routing=SHAPE)
    engine.start(PARAMS, 0)
    requests = setup.requests(12)
    for request, result in zip(requests, generate(engine, requests), strict=True):
        context, tokens = request.token_ids.tolist(), result.token_ids.tolist()
        wanted = experts_of(context, tokens, layers, 2)[:, -2:]
        assert result.routed_experts.dtype == np.int16
        assert np.array_equal(result.routed_experts[:-1], wanted)
        assert (result.routed_experts[-1] == -1).all()
        prompt = Prompt("p", request.token_ids, {})
        (rollout,) = to_rollouts([(prompt, result, 1.0, "g")])
        assert np.array_equal(rollout.routed_experts.reshape(-1, 2, 2), result.routed_experts)
    assert all(body.get("return_routed_experts", setup.kind == "vllm") for body in setup.servers[0].bodies)


@KINDS
@pytest.mark.parametrize(
    ("routing", "shape", "message"),
    [
        (None, SHAPE, "start it with --enable-return-routed-experts"),
        ((3, 3), SHAPE, "it has another model, or returns those of a part"),
        ((3, 2), RoutingShape((False, True, True), 2, 4), "of a layer with 4: it has another model"),
    ],
)
def test_other_replies_are_refused(setup: Setup, routing, shape, message) -> None:
    setup.add_servers(1)
    setup.servers[0].routing = routing
    engine = setup.engine(routing=shape)
    engine.start(PARAMS, 0)
    with pytest.raises(ServerError, match=message):
        generate(engine, setup.requests(4))
