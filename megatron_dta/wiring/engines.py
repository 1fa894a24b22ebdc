"""Builds rollout engines and their drafting from the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import HttpClient, HttpSettings, checked_urls
from megatron_dta.extras.servers.protocol import RoutingShape
from megatron_dta.extras.servers.sglang import SglangProtocol
from megatron_dta.extras.servers.vllm import VllmProtocol
from megatron_dta.extras.servers.weights.groups import group_opener
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.speculator import Speculator
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.rollouts import samples

_PROTOCOLS = {"vllm": VllmProtocol, "sglang": SglangProtocol}


def build_drafting(config: TrainConfig) -> SuffixDrafting | None:
    """The drafting of ``--rollout-speculation``; None for "none"."""
    settings = config.speculation
    if settings.rollout_speculation == "none":
        return None
    drafter = DrafterParams(
        depth=settings.das_depth, window=settings.das_window, draft=DraftParams(width=settings.das_draft_tokens)
    )
    speculator = Speculator(drafter, SpeculationGate(ForwardCost(), ForwardCost()), settings.das_budget)
    return SuffixDrafting(speculator, follows_clock=not config.optimization.deterministic_mode)


def build_engine(
    config: SamplingConfig,
    model: Model,
    drafting: Drafting | None = None,
    stop_degenerate: bool = False,
    attention_impl: str = "auto",
    report: Callable[[str], None] | None = None,
) -> RolloutEngine:
    """The engine that samples from ``model`` in this process.

    Args:
        attention_impl: see ``TreeConfig``.
        report: called with a line if a GPU decodes without CUDA graphs.

    Raises:
        InputError: CUDA graphs are requested but not possible.
    """
    reason = why_not_captured(model, attention_impl) if config.rollout_cuda_graphs is not False else None
    if reason is not None and config.rollout_cuda_graphs:
        raise InputError(f"rollout_cuda_graphs {reason}; leave it out")
    if reason is not None and report is not None and next(model.parameters()).is_cuda:
        report(f"decoding without CUDA graphs: it {reason}")
    settings = EngineSettings(
        config.inference_max_requests,
        buffer_size_gb=config.inference_dynamic_batching_buffer_size_gb,
        stop_degenerate=stop_degenerate,
        attention_impl=attention_impl,
        static_passes=config.rollout_cuda_graphs is not False and reason is None,
    )
    return InProcessEngine(model, settings, drafting)


def server_engine(config: TrainConfig, report: Callable[[str], None]) -> HttpEngine:
    """The engine on the servers of ``--rollout-server-url``.

    Args:
        report: called with a line when a server is left out.
    """
    sampling = config.sampling
    way, kind = sampling.rollout_weight_transfer, _PROTOCOLS[sampling.rollout_engine]
    open_group = None if way == "folder" else group_opener(way, kind.meets_by_unique_id)
    protocol = kind(_routing_shape(config), open_group)
    most = sampling.inference_max_requests
    settings = HttpSettings(
        timeout_s=sampling.rollout_timeout,
        connect_timeout_s=min(10.0, sampling.rollout_timeout),
        attempts=sampling.rollout_attempts,
        **({} if most is None else {"max_requests": most}),
        continues=sampling.rollout_max_staleness > 0,
    )
    return HttpEngine(
        protocol,
        config.sampling.rollout_server_url or [],
        settings,
        exact_logprobs=config.objective.needs_rollout_logprobs,
        vocab_size=config.model.vocab_size,
        report=report,
    )


def listed_servers(config: TrainConfig) -> list[str]:
    """The URLs of the run's servers; none if it has no servers.

    Raises:
        InputError: a URL is invalid.
    """
    if config.sampling.rollout_engine not in _PROTOCOLS or not samples(config):
        return []
    return checked_urls(config.sampling.rollout_server_url or [])


def silent_servers(config: TrainConfig, urls: Sequence[str], timeout_s: float = 3.0) -> dict[str, str]:
    """URL -> reason, of the servers that do not answer their health check within ``timeout_s``."""
    kind = _PROTOCOLS[config.sampling.rollout_engine]
    client = HttpClient(urls, kind.health_path, HttpSettings(connect_timeout_s=timeout_s))
    try:
        healthy = client.start(client.find_healthy()).result()
        return {server.url: server.problem for server in client.servers if server not in healthy}
    finally:
        client.close()


def _routing_shape(config: TrainConfig) -> RoutingShape | None:
    """The layers for which servers must return the experts of every token; None without routing replay."""
    model = config.model
    if not model.moe_routing_replay:
        return None
    return RoutingShape(tuple(model.moe_layers), model.moe_router_topk, model.num_experts)
