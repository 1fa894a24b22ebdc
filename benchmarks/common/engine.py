"""Shared by the parts of the rollout benchmark: a model of a given shape with random weights, and an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from common.bandwidth import measured_bandwidth
from common.benchmark_model import TINY, settings_of
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.latent_attention import sizes as latent_attention
from megatron_dta.families.named_shapes import SHAPES
from megatron_dta.sampling.in_process.cache_size import state_bytes
from megatron_dta.sampling.in_process.cuda_graphs import bucket, why_not_captured
from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams

# The tiny shapes are for trying things on a laptop.
MODELS = {
    "tiny": DecoderShape(4, 256, 768, 8, 4, 32, 4096),
    "tiny-moe": DecoderShape(4, 256, 768, 8, 4, 32, 4096, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=192),
    "smollm2-135m": DecoderShape(30, 576, 1536, 9, 3, 64, 49152),
}
MODELS |= {name: replace(TINY[name], vocab_size=4096) for name in ("tiny-mamba", "tiny-latent")}
MODELS |= {name: SHAPES[f"qwen3-{name}"] for name in ("0.6b", "1.7b", "8b", "14b", "32b", "30b-a3b")}
_OTHERS = ("qwen3.5-9b", "qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b", "moonlight-16b-a3b")
MODELS |= {name: SHAPES[name] for name in _OTHERS}


@dataclass(frozen=True)
class Setup:
    """A rank's model and the lower bound on the time of its decoding passes.

    Attributes:
        weight_bytes: bytes that the rank reads in every decoding pass: all parameters except an input embedding that is
            not the output weight, and of the experts those that the rows of a pass choose on average. States of
            recurrent layers, which a pass reads and writes for each of its rows, count as well.
        token_bytes: bytes of K and V, or of the latent, of one position in the rank's layers.
        ranks: ``weight_bytes`` and ``token_bytes`` of all ranks.
        groups: groups of rows that pipeline stages run one after the other; 1 without stages.
        bandwidth: bytes per second, measured by a large copy or given.
    """

    model: Model
    device: torch.device
    weight_bytes: float
    token_bytes: int
    ranks: list[tuple[float, int]]
    groups: int
    bandwidth: float
    bandwidth_from: str

    def bound_seconds(self, cached_tokens: float) -> float:
        """Lower bound on decoding a token of each row: the rank that takes longest reads ``cached_tokens`` positions
        once, and its weights once for each group of rows."""
        longest = max(self.groups * weights + cached_tokens * of_token for weights, of_token in self.ranks)
        return longest / self.bandwidth


def add_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The common flags, except those in ``without`` (field names such as ``block_size``)."""

    def add(flag: str, **settings: Any) -> None:
        if flag.removeprefix("--").replace("-", "_") not in without:
            parser.add_argument(flag, **settings)

    add("--shape", choices=list(MODELS), default="tiny")
    add("--dtype", choices=("bf16", "fp32"), default=None, help="default: bf16 on a GPU, else fp32")
    add("--batch", type=int, default=64, help="sequences decoded at once (--inference-max-requests)")
    add("--block-size", type=int, default=16, help="tokens of a page of the cache")
    add("--buffer-size-gb", type=float, help="GiB of the K/V cache")
    add("--max-tokens", type=int, default=4096, help="tokens of a forward pass")
    add("--cuda-graphs", action=argparse.BooleanOptionalAction, help="decode in CUDA graphs (default: where possible)")
    add("--burst", type=int, default=8, help="passes that run before the host reads their tokens")
    add("--attention-impl", choices=("auto", "triton", "reference"), default="auto")
    add("--enable-fp32-lm-head", action="store_true", help="keep logits in float32, as in training")
    add("--max-position-embeddings", type=int, default=8192)
    add("--memory-bandwidth-gbs", type=float, help="of the data sheet; default: measured by copying")
    add("--runs", type=int, default=3, help="timed runs; medians are reported")
    add("--seed", type=int, default=0)
    add("--output", help="JSON file for the results")
    add("--json", action="store_true", help="print the results as JSON on the last line")


def check_arguments(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse counts below 1 of the flags that the part has."""
    common = ("batch", "block_size", "max_tokens", "burst", "max_position_embeddings", "runs")
    for name in (*common, "tensor_model_parallel_size", "pipeline_model_parallel_size", *names):
        if getattr(arguments, name, 1) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")


def build_setup(arguments: argparse.Namespace) -> Setup:
    """The model of the flags, in evaluation mode."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_model_parallel_layout")
    parallel = ParallelConfig(**{name: getattr(arguments, name) for name in sizes if hasattr(arguments, name)})
    device = initialize_parallel(arguments.seed, parallel)
    dtype = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    shape = MODELS[arguments.shape]
    config = ModelConfig(
        **settings_of(shape) | dict(untie_embeddings_and_output_weights=False),
        max_position_embeddings=arguments.max_position_embeddings,
        bf16=dtype == "bf16",
        enable_fp32_lm_head=arguments.enable_fp32_lm_head,
    )
    model = build_model(config, device, parallel).eval()
    read, groups = 1.0, min(parallel.pipeline_model_parallel_size, arguments.batch)
    if shape.num_experts is not None:
        read -= (1 - shape.moe_router_topk / shape.num_experts) ** (arguments.batch / groups)
    weight_bytes = sum(
        p.numel() * p.element_size() * (read if ".local_experts." in name else 1.0)
        for name, p in model.named_parameters()
    )
    first = model.model_chunks[0]
    if first.pre_process and not (first.post_process and first.share_embeddings_and_output_weights):
        embedding = first.embedding.word_embeddings.weight
        weight_bytes -= embedding.numel() * embedding.element_size()
    weight_bytes += 2 * arguments.batch / groups * state_bytes(model)
    width = 2 * shape.kv_width // parallel.tensor_model_parallel_size
    if isinstance(shape.mixer, latent_attention.Sizes):
        width = shape.mixer.slot
    token_bytes = len(model.attention_layers) * width * next(model.parameters()).element_size()
    ranks = current_mesh().gather_over_replica((weight_bytes, token_bytes))
    gbs = arguments.memory_bandwidth_gbs
    bandwidth = gbs * 1e9 if gbs is not None else measured_bandwidth(device)
    origin = "given" if gbs is not None else "copy"
    return Setup(model, device, weight_bytes, token_bytes, ranks, groups, bandwidth, origin)


def build_engine(
    setup: Setup,
    arguments: argparse.Namespace,
    drafting: Drafting | None = None,
    make: Callable[..., InProcessEngine] = InProcessEngine,
) -> InProcessEngine:
    """An engine with the settings of the flags."""
    reason = why_not_captured(setup.model, arguments.attention_impl)
    if arguments.cuda_graphs and reason is not None:
        raise InputError(f"--cuda-graphs {reason}; leave it out")
    settings = EngineSettings(
        arguments.batch,
        arguments.block_size,
        arguments.buffer_size_gb,
        arguments.max_tokens,
        attention_impl=arguments.attention_impl,
        static_passes=arguments.cuda_graphs is not False and reason is None,
        burst=arguments.burst,
    )
    return make(setup.model, settings, drafting)


def warm_up(setup: Setup, engine: InProcessEngine, rows: int, params: SamplingParams) -> None:
    """Compile and capture passes of up to ``rows`` decoding rows, and let the allocator reserve memory."""
    if setup.device.type == "cuda":
        # Later allocations need no memory from the driver, which would take milliseconds each.
        torch.empty(int(0.45 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=setup.device)
    for count in sorted({min(rows, bucket(n)) for n in range(1, rows + 1)}):
        # The samples of one prompt get copies of its last page.
        engine.start(params, 0)
        generate(engine, [GenerationRequest(i, np.arange(100, dtype=np.int32), 3, i) for i in range(count)])


def counts_since(before: dict[str, float], engine: InProcessEngine) -> dict[str, float]:
    """Changes of an engine's counters since ``before``."""
    return {name: count - before[name] for name, count in engine.statistics().items()}
