"""Routed experts in the replies of servers, for every token and layer with experts."""

from __future__ import annotations

import numpy as np
import pytest

from http_engine_cases import KINDS, PARAMS, Setup
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.protocol import RoutingShape
from megatron_dta.sampling.interface import generate
from megatron_dta.sampling.prompts.load import Prompt
from megatron_dta.sampling.sources.independent import to_rollout
from rollout_server_base import experts_of

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
        rollout = to_rollout(prompt, result, 1.0, "g")
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
