"""Speeds and sizes of the machines of a planned run: data-sheet peaks times the share of each that is achieved.

Peaks come from a preset or from flags. ``gemm_tflops`` is the rate of a product of large matrices; it is measured for
the H200 and estimated for the others. The achieved shares are fitted to steps of the 1.7B, 8B, 14B and 70B shapes on
one and four H200 (``benchmarks/step_*.json``, within 8%).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.gpus import LINEAR_PASSES, MEMORY_SHARE, RULE_PASSES
from megatron_dta.core.planning.costs.model import FLOOR_SECONDS_PER_LAYER, CostModel
from megatron_dta.core.shapes.decoder import DecoderShape

# Grouped products take this much longer than the layers' products, and twice as long with FEW_ROWS rows an expert. With
# 1,024 rows 456 TFLOP/s were measured on an H200, and two steps with 256 rows were fitted (``moe_h200.json`` of the
# benchmarks' results).
GROUPED_PRODUCTS, FEW_ROWS = 1.40, 105.0
# Products per row of logits: the forward, its recomputation in the backward, and the two gradients.
LOGIT_PASSES = 4.0
# The backward of attention recomputes the scores: 5 products for the 2 of the forward.
ATTENTION_PASSES = 3.5
GEMM_PASSES = 3.0
# Channels that elementwise work of a layer reads and writes per token in forward and backward, with fused norms,
# rotary embedding and activation, over the width of each part.
ELEMENTWISE_PASSES = {"hidden": 24.0, "attention": 7.0, "ffn": 9.0}


@dataclass(frozen=True)
class Cluster:
    """GPUs and links.

    Attributes:
        num_gpus, gpus_per_node: GPUs of the run, and GPUs that NVLink connects.
        gpu_memory_gib: memory of a GPU available to a process.
        gemm_tflops: 10^12 operations per second of a large bfloat16 product.
        hbm_gigabytes_per_second: bandwidth of the GPU's memory.
        nvlink_gbps, network_gbps: gigabits per second, per direction and GPU.
        host_gigabytes_per_second: rate at which the host updates offloaded states, per GPU.
        gemm_share, logit_share, attention_share, hbm_share, link_share: achieved shares of gemm_tflops (the first
            three), hbm_gigabytes_per_second and the links.
        short_segment_tokens: segment length at which products and elementwise work take twice as long per token.
        floor_seconds_per_layer: time of the host to launch a layer's forward and backward; a lower bound per segment.
        forward_floor_share: share of the forward in it.
    """

    num_gpus: int
    gpus_per_node: int = 8
    gpu_memory_gib: float = 139.0
    gemm_tflops: float = 793.0
    hbm_gigabytes_per_second: float = 4800.0
    nvlink_gbps: float = 3600.0
    network_gbps: float = 400.0
    host_gigabytes_per_second: float = 20.0
    gemm_share: float = 0.89
    logit_share: float = 0.89
    attention_share: float = 0.76
    hbm_share: float = 0.30
    link_share: float = 0.75
    short_segment_tokens: float = 500.0
    floor_seconds_per_layer: float = FLOOR_SECONDS_PER_LAYER
    forward_floor_share: float = CostModel.forward_floor_share

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("floor_seconds_per_layer", "forward_floor_share", "short_segment_tokens")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise InputError(f"--{field.name.replace('_', '-')} must be a number above 0, not {value}")
        if self.num_gpus % min(self.num_gpus, self.gpus_per_node):
            raise InputError(f"--num-gpus {self.num_gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}")

    def link(self, num_ranks: int, stride: int = 1) -> float:
        """Bytes per second between ``num_ranks`` ranks that are ``stride`` apart: NVLink if one node holds them all."""
        gigabits = self.nvlink_gbps if num_ranks * stride <= self.gpus_per_node else self.network_gbps
        return gigabits * 1e9 / 8 * self.link_share

    @property
    def hbm_rate(self) -> float:
        """Bytes per second of elementwise work."""
        return self.hbm_gigabytes_per_second * 1e9 * self.hbm_share

    @property
    def gemm_rate(self) -> float:
        """Operations per second of the layers' products."""
        return self.gemm_tflops * 1e12 * self.gemm_share

    @property
    def logit_rate(self) -> float:
        """Operations per second of products with the output matrix."""
        return self.gemm_tflops * 1e12 * self.logit_share

    @property
    def attention_rate(self) -> float:
        """Operations per second of attention."""
        return self.gemm_tflops * 1e12 * self.attention_share


def elementwise_channels(shape: DecoderShape, layer: int) -> tuple[float, float, float]:
    """Channels read and written per token: of hidden states, attention and the feed-forward layer."""
    passes = ELEMENTWISE_PASSES
    hidden = shape.hidden_size * (shape.mixes(layer) + shape.feeds_forward(layer)) / 2
    if shape.moe_layers[layer]:
        # Tokens are permuted into the order of their experts and back.
        hidden += shape.moe_router_topk * shape.hidden_size / 2
    attention = passes["attention"] * ((shape.query_width + 2 * shape.kv_width) * shape.mixes(layer))
    if shape.is_recurrent(layer):
        # The rule was measured against another share of the memory's bandwidth.
        rule = sum(RULE_PASSES) * Cluster.hbm_share / MEMORY_SHARE
        attention = (3 * LINEAR_PASSES + rule) * shape.recurrent_channels
    return passes["hidden"] * hidden, attention, passes["ffn"] * shape.layer_width(layer)


PRESETS: Mapping[str, Mapping[str, float]] = {
    "h200": {},
    "h100": {"gpu_memory_gib": 79.0, "gemm_tflops": 750.0, "hbm_gigabytes_per_second": 3350.0},
    "a100": {
        "gpu_memory_gib": 79.0,
        "gemm_tflops": 270.0,
        "hbm_gigabytes_per_second": 2000.0,
        "nvlink_gbps": 2400.0,
        "network_gbps": 200.0,
    },
}
